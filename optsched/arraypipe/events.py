"""What follows from losses and updates of a run: callbacks, copies of stages, evaluations."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from optsched.arraypipe.callbacks import Callback
from optsched.arraypipe.checkpoint.files import copied
from optsched.arraypipe.job import Job
from optsched.arraypipe.model.split import shard
from optsched.arraypipe.runtime.data import (
    as_tuples,
    brought,
    cast,
    cut_batch,
    stacked,
    target_of,
)  # fmt: skip
from optsched.arraypipe.runtime.environment import global_state_kept, on_gpu
from optsched.arraypipe.runtime.losses import counts_of, loss_in, samples_of
from optsched.arraypipe.runtime.stages import fresh_model, loss_copy
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from optsched.arraypipe.checkpoint.folder import CheckpointFolder
    from optsched.arraypipe.distributed.ranks import Ranks
    from optsched.arraypipe.job import Loss
    from optsched.arraypipe.options import Request
    from optsched.arraypipe.runtime.losses import Weight
    from optsched.arraypipe.runtime.state import JobRun
    from optsched.arraypipe.trainer import ArrayTrainer

Measure: TypeAlias = "Callable[[Job, nn.Module, torch.device], float]"
_Part: TypeAlias = tuple[dict[str, Any], dict[str, Any]]  # of a stage: state dict, other buffers


class Events:
    """Calls callbacks; copies stages right after their updates for checkpoints and evaluations."""

    def __init__(
        self,
        trainer: ArrayTrainer,
        request: Request,
        folder: CheckpointFolder | None,
        ranks: Ranks | None,
    ) -> None:
        self.trainer, self.request, self.folder, self.ranks = trainer, request, folder, ranks
        self.refills = any(type(c).next_job is not Callback.next_job for c in request.callbacks)
        self.measure: Measure | None = None
        if request.evaluate is not None:
            self.measure = measure_of(request.evaluate, trainer.loss, trainer.weight)
        self.started: list[Callback] = []
        self.noted: dict[tuple[int, int], dict[int, _Part]] = {}  # by job and iteration: stages
        self.evaluated: dict[Job, int] = {}  # on ranks: newest checkpoint that was evaluated
        self.ended: set[Job] = set()

    def start(self, runs: Sequence[JobRun]) -> None:
        """Call `on_start`."""
        self.evaluated = {run.job: run.start for run in runs}
        for callback in self.request.callbacks:
            self.started.append(callback)
            callback.on_start([run.job for run in runs], self.request.steps, self.request.resume)

    def finish(self) -> None:
        """Call `on_finish` of all callbacks that were started."""
        for callback in self.started:
            callback.on_finish()
        self.ranks = None  # these refer to this object

    def on_update(self, run: JobRun, stage: int, iteration: int) -> None:
        """Copy a stage after its update, if a checkpoint or an evaluation needs it."""
        if self.folder is not None:
            self.folder.note(run, stage, iteration)
        every, done = self.trainer.config.every, iteration + 1
        due = done == run.target or (every is not None and done % every == 0)
        if self.measure is None or self.ranks is not None or not due:
            return
        parts = self.noted.setdefault((run.index, iteration), {})
        state, buffers = shard(run.model, run.stages, stage)
        parts[stage] = copied(state), copied(buffers)
        device = run.stages[stage].device
        if on_gpu(device):
            torch.cuda.current_stream(device).synchronize()
        if len(parts) < len(run.stages):
            return
        del self.noted[run.index, iteration]
        states, others = (
            {name: x for part in row for name, x in part.items()}
            for row in zip(*parts.values(), strict=True)
        )
        host = self.trainer.config.memory is not None  # the bytes of the device are counted
        place = torch.device("cpu") if host else run.stages[0].device
        value = self._evaluate(run.job, iteration, states, others, place)
        if self.folder is not None:
            self.folder.mark_best(run, done, value, self.trainer.config.mode == "max")

    def on_loss(self, run: JobRun, iteration: int, loss: float) -> None:
        """Call `on_step`."""
        ranks, callbacks = self.ranks, self.request.callbacks
        if not callbacks or not (ranks is None or ranks.reports(run)):
            return
        for callback in callbacks:
            callback.on_step(run.job, iteration, loss)
        self._evaluate_newest(run.job)

    def next_job(self, ended: Job, jobs: Sequence[Job]) -> Job | None:
        """Return the first job that a callback gives for the slot of an ended one."""
        self.on_end(ended)
        for callback in self.request.callbacks:
            following = callback.next_job(ended)
            if following is None:
                continue
            if not isinstance(following, Job) or following in jobs:
                raise InputError(f"next_job: expected a new Job or None, got {following!r:.60}")
            return following
        return None

    def on_end(self, job: Job) -> None:
        """Call `on_end`, once for every job."""
        if job not in self.ended:
            self.ended.add(job)
            for callback in self.request.callbacks:
                callback.on_end(job)

    def end_jobs(self, runs: Sequence[JobRun]) -> None:
        """After the run: evaluate what is left, and call `on_end` of the remaining jobs."""
        for run in runs:
            self._evaluate_newest(run.job)
            self.on_end(run.job)

    def _evaluate_newest(self, job: Job) -> None:
        """On the first rank: evaluate the newest checkpoint of a job on the host, once."""
        if self.ranks is None or self.measure is None or self.folder is None:
            return
        done = self.folder.newest(job.title)
        if self.ranks.is_first and done > self.evaluated.get(job, 0):
            self.evaluated[job] = done
            states, buffers = self.folder.read(job.title, done)
            value = self._evaluate(job, done - 1, states, buffers, torch.device("cpu"))
            self.folder.mark_now(job.title, done, value, self.trainer.config.mode == "max")

    def _evaluate(
        self,
        job: Job,
        iteration: int,
        states: dict[str, Any],
        buffers: dict[str, Any],
        place: torch.device,
    ) -> float:
        """Make the model of a state dict and of other buffers, and report its value."""
        assert self.measure is not None
        with global_state_kept():
            model = fresh_model(self.trainer.build_model, job)
            model.load_state_dict(states)
            for name, buffer in buffers.items():
                owner, _, last = name.rpartition(".")
                model.get_submodule(owner)._buffers[last] = buffer
            model.to(place).eval()
            with torch.no_grad():
                value = self.measure(job, model, place)
        for callback in self.request.callbacks:
            callback.on_evaluate(job, iteration, value, model)
        return value


def measure_of(given: Any, loss: Loss | None, weight: Weight = None) -> Measure:
    """Make the function of `fit(evaluate=)`: of a function, a dataset, or one with a metric."""
    if callable(given) and not hasattr(given, "__getitem__") and not isinstance(given, nn.Module):
        return lambda job, model, place: float(given(model))
    data, metric = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
    indexed = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    readable = indexed or isinstance(data, (DataLoader, IterableDataset))
    wrong = isinstance(data, (tuple, nn.Module)) or not readable
    if wrong or (data is not given and not callable(metric)):
        raise InputError(
            f"evaluate: expected a function of the model, a dataset, or (dataset, metric), got "
            f"{given!r:.60}"
        )
    if metric is None and isinstance(loss, nn.Module) and [*loss.parameters()]:
        raise InputError(
            "evaluate: the loss has parameters, which every job trains for itself; give (dataset, "
            "metric)"
        )

    def mean(job: Job, model: nn.Module, place: torch.device) -> float:
        count = counts_of(loss, weight, model) if metric is None else samples_of
        function = loss_copy(loss, job) if metric is None else metric
        if isinstance(function, nn.Module):
            function.to(place)
        batches = data
        if not isinstance(data, DataLoader):
            batches = DataLoader(data, job.batch_size, collate_fn=stacked)
        values, weights = [], []
        for batch in batches:
            (inputs,), (whole,) = cut_batch(as_tuples(batch), 1, "evaluate")
            output = brought(cast(inputs, job.precision), place).call(model)
            target = brought(target_of(whole), place)
            value = loss_in(output) if function is None else function(output, target)
            weights.append(count(whole))
            values.append(weights[-1] * float(value) if weights[-1] else 0.0)
        if not values:
            raise InputError("evaluate: the dataset is empty")
        total = math.fsum(weights)
        return math.fsum(values) / total if total else math.nan

    return mean
