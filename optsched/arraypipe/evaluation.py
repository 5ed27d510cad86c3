"""Values of the merged model while it is trained, on copies: no bit of the training changes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from optsched.arraypipe.checkpoint.files import copied
from optsched.arraypipe.model.tied_weights import shard
from optsched.arraypipe.runtime.data import as_tuples, brought, cast, cut_batch, target_of
from optsched.arraypipe.runtime.environment import global_state_kept, on_gpu
from optsched.arraypipe.runtime.losses import counts_of, loss_in, samples_of
from optsched.arraypipe.runtime.stages import fresh_model, loss_copy
from optsched.errors import InputError
from optsched.io.values import format_value

if TYPE_CHECKING:
    from collections.abc import Callable

    from optsched.arraypipe.job import BuildModel, Job, Loss
    from optsched.arraypipe.options import Request, Trainer
    from optsched.arraypipe.runtime.losses import Weight
    from optsched.arraypipe.runtime.state import JobRun

Measure: TypeAlias = "Callable[[Job, nn.Module, torch.device], float]"
_Part: TypeAlias = tuple[dict[str, Any], dict[str, Any]]  # of a stage: state dict, other buffers


@dataclass(eq=False)
class Evaluation:
    """Copies every stage right after its update, and evaluates when it has all of a job."""

    build_model: BuildModel
    measure: Measure
    due: Callable[[int], bool]  # after so many iterations; the last one always is
    notify: Callable[[Job, int, float, nn.Module], object]
    on_host: bool = False  # the memory of the devices is counted
    noted: dict[tuple[int, int], dict[int, _Part]] = field(default_factory=dict)

    def note(self, run: JobRun, stage: int, iteration: int) -> float | None:
        """A stage has just finished an iteration; the value of the job if it was the last one.

        What evaluating raises ends the run.
        """
        done = iteration + 1
        if done != run.target and not self.due(done):
            return None
        device = run.stages[stage].device
        parts = self.noted.setdefault((run.index, iteration), {})
        state, buffers = shard(run.model, run.stages, stage)
        parts[stage] = copied(state), copied(buffers)
        if on_gpu(device):
            torch.cuda.current_stream(device).synchronize()
        if len(parts) < len(run.stages):
            return None
        del self.noted[run.index, iteration]
        states, buffers = (
            {name: x for part in row for name, x in part.items()}
            for row in zip(*parts.values(), strict=True)
        )
        place = torch.device("cpu") if self.on_host else run.stages[0].device
        return self.evaluate(run.job, iteration, states, buffers, place)

    def evaluate(
        self,
        job: Job,
        iteration: int,
        states: dict[str, Any],
        buffers: dict[str, Any],
        place: torch.device,
    ) -> float:
        """Make the model of a state dict and of other buffers, and report its value."""
        with global_state_kept():
            model = fresh_model(self.build_model, job)
            model.load_state_dict(states)
            for name, value in buffers.items():
                owner, _, last = name.rpartition(".")
                model.get_submodule(owner)._buffers[last] = value
            model.to(place).eval()
            with torch.no_grad():
                value = float(self.measure(job, model, place))
        self.notify(job, iteration, value, model)
        return value


def evaluation_of(
    trainer: Trainer,
    request: Request,
    notify: Callable[[Job, int, float, nn.Module], object],
) -> Evaluation | None:
    """Return the evaluation that a request contains; `notify` gets job, iteration, value, model."""
    if request.evaluate is None:
        return None
    config = request.config
    return Evaluation(
        trainer.build_model, measure_of(request.evaluate, trainer.loss, trainer.weight),
        lambda done: config.every is not None and done % config.every == 0, notify,
        on_host=config.memory is not None,
    )  # fmt: skip


def measure_of(given: Any, loss: Loss | None, weight: Weight = None) -> Measure:
    """What `fit` takes as `evaluate`: a function of the model, a data set, or one with a metric.

    Losses of batches are weighted as those of micro-batches are, values of a metric by samples.
    """
    data, metric = given if isinstance(given, tuple) and len(given) == 2 else (given, loss)
    if isinstance(data, nn.Module):
        raise InputError("evaluate: expected a function of the model, got a model")
    if data is given and callable(data) and not hasattr(data, "__getitem__"):
        return lambda job, model, place: _number(given(model), "the function")
    indexed = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    readable = indexed or isinstance(data, (DataLoader, IterableDataset))
    if isinstance(data, tuple) or not readable or not (metric is None or callable(metric)):
        raise InputError(
            f"evaluate: expected a function of the model, a dataset, or (dataset, metric), got "
            f"{given!r:.60}"
        )

    if metric is loss and isinstance(loss, nn.Module) and [*loss.parameters()]:
        raise InputError(
            "evaluate: the loss has parameters, which every job trains for itself; give (dataset, "
            "metric)"
        )

    def mean(job: Job, model: nn.Module, place: torch.device) -> float:
        values, weights = [], []
        measured = metric is loss
        count = counts_of(loss, weight, model) if measured else samples_of
        function = loss_copy(loss, job) if measured else metric
        if measured and isinstance(function, nn.Module):
            function.to(place)
        batches = data
        if not isinstance(data, DataLoader):
            batches = DataLoader(data, batch_size=job.batch_size)
        for batch in batches:
            (inputs,), (whole,) = cut_batch(as_tuples(batch), 1, "evaluate")
            weights.append(count(whole))
            inputs = brought(cast(inputs, job.precision), place)
            output, target = inputs.call(model), brought(target_of(whole), place)
            value = loss_in(output) if function is None else function(output, target)
            values.append(_number(value, "the metric") if weights[-1] else 0.0)
        if not values:
            raise InputError("evaluate: the dataset is empty")
        total = math.fsum(weights)
        rows = zip(weights, values, strict=True)
        return math.fsum(n * x for n, x in rows) / total if total else math.nan

    return mean


def _number(value: Any, source: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        text = format_value(value)
        raise InputError(f"evaluate: expected a number of {source}, got {text}") from None
