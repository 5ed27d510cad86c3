"""The reference that a job array must match to the bit: one job trained alone, model unsplit."""

from __future__ import annotations

import math
import warnings
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from optsched.errors import MissingExtra, OptschedError

try:
    import torch

    from optsched.arraypipe.checkpoint.plain import python_numbers, python_settings
except ModuleNotFoundError:
    raise MissingExtra("train_alone", "torch") from None

from optsched.arraypipe.model.build import Builder
from optsched.arraypipe.model.calls import cut_alone
from optsched.arraypipe.model.inputs import mapped, tensors_in, unchanged
from optsched.arraypipe.runtime.data import cut_batch, target_of
from optsched.arraypipe.runtime.losses import (
    Criterion,
    NotMean,
    check_trained,
    difference,
    factors_of,
)
from optsched.arraypipe.runtime.state import autocast

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from optsched.arraypipe.job import Data, Job, Loss
    from optsched.arraypipe.model.inputs import Inputs
    from optsched.arraypipe.runtime.losses import Weight


class NotIdentical(OptschedError):
    """Error of a job array that differs from training alone; the message names the tensors.

    Examples
    --------
    >>> from optsched.testing import NotIdentical
    >>> issubclass(NotIdentical, optsched.OptschedError)
    True
    """


@dataclass(frozen=True, eq=False)
class Trained:
    """Parameters, buffers, optimizer states and losses of a job, by the names of its unsplit model.

    `optimizer` maps a parameter to its optimizer state (``exp_avg``, ``step``, ...); `losses` has
    one value per iteration.

    Examples
    --------
    >>> from optsched.testing import Trained
    >>> Trained(parameters={}, buffers={}, optimizer={}, losses=(0.5, 0.25)).losses[-1]
    0.25
    """

    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    optimizer: dict[str, dict[str, Any]]
    losses: tuple[float, ...]


def train_alone(
    build_model: Callable[..., torch.nn.Module],
    job: Job,
    cuts: Sequence[str | int],
    loss: Loss | None,
    data: Data,
    steps: int,
    device: str | torch.device = "cpu",
    weight: Weight = None,
) -> Trained:
    """Train one job by itself: plain PyTorch, one optimizer over all parameters.

    Micro-batches run forward and backward one after the other, with the same weights as in an
    array; the first batch is also computed whole, and `NotMean` is raised unless loss and gradients
    are equal except for rounding. Numbers of NumPy in settings and schedules are taken as Python's.
    The random numbers of a stage are seeded with ``job.key(iteration, microbatch, stage)`` in front
    of its first block; its input is made contiguous.

    Parameters
    ----------
    cuts
        Names of the blocks at which stages 1, 2, ... begin (`ArrayTrainer.cuts`), or their indices
        in an `nn.Sequential`.
    steps
        Number of iterations, from the initial weights.
    weight
        Weight of a micro-batch, as `ArrayTrainer` takes it.

    Examples
    --------
    >>> import torch
    >>> from optsched.testing import train_alone
    >>> model = lambda: torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    >>> job = optsched.Job(seed=0, batch_size=4, optimizer=torch.optim.Adam)
    >>> data = lambda job, start: iter([(torch.ones(4, 4), torch.zeros(4, 1))] * 2)
    >>> one = train_alone(model, job, [1], torch.nn.functional.mse_loss, data, steps=2)
    >>> sorted(one.parameters), len(one.losses)
    (['0.bias', '0.weight', '1.bias', '1.weight'], 2)
    """
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
        torch.manual_seed(job.seed)
        model = build_model(**job.model)
        if isinstance(model, (list, tuple, torch.nn.ModuleList)):
            model = torch.nn.Sequential(*model)
        if job.init is not None:
            model = Builder(build_model, share=False).whole(replace(job, precision="fp32"))
        alone = _Alone(model, job, loss, weight, torch.device(device))
        children = list(model._modules)
        names = [children[cut] if isinstance(cut, int) else cut for cut in cuts]
        cut_alone(model, names, alone.reseed)
        batches = iter(data(job, 0))
        losses = [alone.step(iteration, next(batches)) for iteration in range(steps)]
    optimizer = alone.optimizer
    return Trained(
        {name: p.detach() for name, p in alone.named},
        {key + name: b for key, part in alone.parts for name, b in part.named_buffers()},
        {n: dict(optimizer.state[p]) if p in optimizer.state else {} for n, p in alone.masters},
        tuple(losses),
    )


class _Alone:
    """A model with its optimizer; `step` trains one iteration."""

    def __init__(
        self,
        model: torch.nn.Module,
        job: Job,
        loss: Loss | None,
        weight: Weight,
        place: torch.device,
    ) -> None:
        self.model, self.job, self.place = model, job, place
        self.loss = deepcopy(loss) if isinstance(loss, torch.nn.Module) else loss
        self.parts = [("", model)]
        if isinstance(self.loss, torch.nn.Module):
            self.parts.append(("loss.", self.loss))
        self.dtype = {"fp64": torch.float64, "bf16": torch.bfloat16}.get(job.precision)
        for _, part in self.parts:
            part.to(place, self.dtype)
        self.named = [(key + n, p) for key, part in self.parts for n, p in part.named_parameters()]
        self.masters = self.named
        if job.precision == "bf16":  # the optimizer works on a float32 copy
            self.masters = [
                (n, torch.nn.Parameter(p.detach().float(), p.requires_grad)) for n, p in self.named
            ]
        self.optimizer = python_settings(job.optimizer(list(self.masters)))
        self.scheduler = None if job.scheduler is None else job.scheduler(self.optimizer)
        python_numbers(self.optimizer, self.scheduler)
        self.scaler = torch.amp.GradScaler(place.type, enabled=job.precision == "amp-fp16")
        self.factors = factors_of(loss, weight, model)
        self.now = 0, 0  # iteration, micro-batch

    def reseed(self, stage: int) -> None:
        """Seed the random numbers of a stage."""
        key = self.job.key(*self.now, stage)
        torch.default_generator.manual_seed(key)
        if self.place.type == "cuda":
            torch.cuda.default_generators[self.place.index or 0].manual_seed(key)

    def output(self, part: Inputs) -> Any:
        """The forward of the model on a micro-batch."""
        x = mapped(part, lambda t: t.to(self.place, self.dtype if t.is_floating_point() else None))
        self.reseed(0)
        return x.copied().call(self.model)

    def loss_of(self, output: Any, part: Any, factor: float) -> torch.Tensor:
        """The loss of a micro-batch, times its factor."""
        target = target_of(part)
        if tensors_in(target):
            target = mapped(target, lambda t: t.to(self.place))
        return Criterion(self.loss, target, factor)(output)

    def step(self, iteration: int, batch: Any) -> float:
        """Train one iteration; its loss."""
        inputs, parts = cut_batch(batch, self.job.microbatches)
        factors = self.factors(parts)
        rows = list(zip(inputs, parts, strict=True))
        if not iteration and len(parts) > 1:
            self._compare(batch, rows, factors)
        value = 0.0
        for m, ((x, part), factor) in enumerate(zip(rows, factors, strict=True)):
            self.now = iteration, m
            with autocast(self.job.precision, self.place):
                output = self.output(x)
                weighted = self.loss_of(output, part, factor)
            if not iteration and not m:
                check_trained(weighted, tensors_in(output), [p for _, p in self.named])
            torch.autograd.backward(self.scaler.scale(weighted))
            value += weighted.item()
        self._update(value)
        return value

    def _update(self, value: float) -> None:
        copies = list(zip(self.masters, self.named, strict=True))
        if self.masters is self.named:
            copies = []
        for (_, master), (_, p) in copies:
            master.grad = None if p.grad is None else p.grad.float()
        self.scaler.unscale_(self.optimizer)
        if self.job.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_([p for _, p in self.masters], self.job.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            self.scheduler.step(value)
        elif self.scheduler is not None:
            self.scheduler.step()
        python_numbers(self.optimizer, self.scheduler)
        with torch.no_grad():
            for (_, master), (_, p) in copies:
                p.copy_(master)
        for _, part in self.parts:
            part.zero_grad(set_to_none=True)

    def _compare(self, batch: Any, rows: Sequence[Any], factors: Sequence[float]) -> None:
        """Refuse weights with which micro-batches do not add up to the batch.

        Not if the outputs themselves depend on how the batch is cut, or change from call to call.
        """

        def value(x: Inputs, part: Any) -> torch.Tensor:
            return self.loss_of(self.output(x), part, 1.0)

        def size(x: Inputs) -> float:
            tensors = [t for t in tensors_in(self.output(x)) if t.is_floating_point() and t.dim()]
            return math.fsum(float(t.detach().double().square().sum()) for t in tensors)

        calls = [partial(value, *row) for row in rows]
        (x,), (whole,) = cut_batch(batch, 1)
        modules = [part for _, part in self.parts]
        try:
            with unchanged(modules):  # attributes such as `training`, too
                for part in modules:
                    part.eval()
                once = value(x, whole).item()
                trained = [p for _, p in self.named if p.requires_grad]
                sentence = difference(partial(value, x, whole), calls, factors, trained)
                if not sentence or once != value(x, whole).item():
                    return
                of_whole, of_parts = size(x), math.fsum(size(part) for part, _ in rows)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            warnings.warn(f"loss: the batch cannot be computed whole ({reason:.300})", stacklevel=4)
            return
        if abs(of_whole - of_parts) <= 1e-3 * of_whole:
            raise NotMean(sentence)
        warnings.warn(
            f"model: its outputs for a batch depend on the other samples, so that {len(rows)} "
            f"micro-batches do not train as the whole batch does; microbatches=1 does",
            stacklevel=4,
        )


def differences(got: Trained, alone: Trained) -> list[str]:
    """List every tensor and number in which two trainings differ by a bit, one sentence each.

    Examples
    --------
    >>> from optsched.testing import Trained, differences
    >>> differences(Trained({}, {}, {}, (0.5,)), Trained({}, {}, {}, (0.25,)))
    ['loss of iteration 0: 0.5, alone 0.25']
    """
    found = []
    for what in ("parameters", "buffers"):
        found += _compared(what[:-1], getattr(got, what), getattr(alone, what))
    for name in sorted(got.optimizer.keys() | alone.optimizer.keys()):
        found += _compared(
            f"optimizer state of {name},",
            got.optimizer.get(name, {}),
            alone.optimizer.get(name, {}),
        )
    for step, (a, b) in enumerate(zip(got.losses, alone.losses, strict=False)):
        if a != b:
            found.append(f"loss of iteration {step}: {a!r}, alone {b!r}")
    if len(got.losses) != len(alone.losses):
        found.append(f"{len(got.losses)} iterations, alone {len(alone.losses)}")
    return found


def _compared(what: str, got: dict[str, Any], alone: dict[str, Any]) -> list[str]:
    found = [f"{what} {name}: only on one side" for name in sorted(got.keys() ^ alone.keys())]
    for name in sorted(got.keys() & alone.keys()):
        a, b = got[name], alone[name]
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
            if a != b:
                found.append(f"{what} {name}: {a!r}, alone {b!r}")
        elif a.device != b.device:
            found += _compared(what, {name: a.cpu()}, {name: b.cpu()})
        elif a.shape != b.shape or a.dtype != b.dtype:
            found.append(
                f"{what} {name}: {a.dtype} {tuple(a.shape)}, alone {b.dtype} {tuple(b.shape)}"
            )
        elif not torch.equal(a, b):
            count = int((a != b).sum())
            found.append(f"{what} {name}: {count} of {a.numel()} values differ")
    return found
