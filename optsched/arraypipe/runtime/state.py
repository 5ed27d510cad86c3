"""The state of a job while it is trained: stages, batches, losses, and whether it goes on."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from optsched.arraypipe.job import JobFailed, Tensors
from optsched.arraypipe.model.split import ModelStage, tied_pairs
from optsched.arraypipe.plan.types import FAILED, STOP, TOMBSTONE
from optsched.arraypipe.runtime.cuda_streams import Late
from optsched.errors import OptschedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from optsched.arraypipe.job import Job, Loss, NamedParameters
    from optsched.arraypipe.model.inputs import Inputs
    from optsched.arraypipe.runtime.data import Feed


class PeerLost(OptschedError):
    """Another process has ended or cannot be reached any more."""


class Payload(NamedTuple):
    """What a message carries: tensors (none in a tombstone), flags, and the loss if it is known.

    `absent` are the places of gradients that there are none of, in a vector of their norms.
    Activations are leaves that require a gradient or not.
    """

    tensors: tuple[Tensor | None, ...]
    flags: int = 0
    loss: float = math.nan
    absent: tuple[int, ...] = ()


class Norms(NamedTuple):
    """Norms of gradients in one vector, and the places of those that there are none of.

    The places are known on the host without reading the vector.
    """

    vector: Tensor | None = None
    absent: tuple[int, ...] = ()


@dataclass(eq=False)
class Kept:
    """What a stage keeps of one micro-batch from F to B."""

    inputs: Tensors  # hidden states
    batch: Inputs
    key: int
    end: Callable[[Any], Tensor] | None  # output -> loss, on the last stage
    roots: Tensors | None = None  # of the autograd graph; None until recomputed
    buffers: Tensors = ()  # values that F started from, for the recompute
    gradients: dict[int, Tensor] = field(default_factory=dict)  # of the inputs
    branches: list[Any] | None = None  # after a B that has left the weights to W


AUTOCAST: Final = {"amp-bf16": torch.bfloat16, "amp-fp16": torch.float16}
"""Type of the operations that autocast lowers, by precision."""


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """Return context of a forward in the precision of a job."""
    if precision not in AUTOCAST:
        return nullcontext()
    return torch.autocast(device.type, dtype=AUTOCAST[precision])


_INTERVAL: Final = 2000  # updates until a scale grows, as in `torch.amp.GradScaler`


@dataclass
class LossScale:
    """The scale of an ``"amp-fp16"`` job's losses, with the values of `torch.amp.GradScaler`."""

    scale: float = 2.0**16
    growth_tracker: int = 0  # updates since the scale has changed

    def unscale(self, gradients: Iterable[Tensor | None]) -> None:
        """Divide gradients by the scale, in place."""
        present = [g for g in gradients if g is not None]
        if present:
            torch._foreach_mul_(present, 1.0 / self.scale)

    def update(self, finite: bool) -> None:
        """Grow after many updates with finite gradients, shrink after one without."""
        self.growth_tracker += 1
        if not finite:
            self.scale, self.growth_tracker = self.scale / 2, 0
        elif self.growth_tracker == _INTERVAL:
            if math.isfinite(torch.tensor(2 * self.scale).item()):
                self.scale *= 2
            self.growth_tracker = 0


@dataclass(eq=False)
class JobStage(ModelStage):
    """The state of a job on one stage; `blocks.rehearse` notes the form of its boundary."""

    job: int
    last: bool
    scheduler: Any = None
    loss: Loss | None = None  # of the last stage; None: the model's own
    local: bool = True  # whether it has tensors in this process
    place: torch.device | None = None  # of its blocks
    away: bool = False  # its tensors are on the host, not in their place
    packed: bool = False  # whether the hidden states that it gets are a tuple
    packs: bool = False  # whether those that it sends are a tuple
    flags: tuple[bool, ...] = ()  # `requires_grad` of all that it uses
    forgotten: list[tuple[nn.Module, str]] = field(default_factory=list)  # in no checkpoint
    precision: str = "fp32"
    scaler: LossScale | None = None  # of an amp-fp16 job
    kept: dict[int, Kept] = field(default_factory=dict)
    later_norms: Norms = field(default_factory=Norms)  # of all later stages (`Job.needs_norm`)
    # tensors of several jobs: module, name, sentence
    shared: list[tuple[nn.Module, str, str]] = field(default_factory=list)

    def weight(self, name: str) -> nn.Parameter:
        """Return the parameter of this unsplit name in this stage, or the copy of a tied weight."""
        return dict([*self.parameters, *((copy.name, copy.parameter) for copy in self.tied)])[name]

    @cached_property
    def parts(self) -> list[nn.Module]:
        """All modules of the stage."""
        return [*dict.fromkeys(part for module in self.modules for part in module.modules())]

    def used(self) -> list[nn.Parameter]:
        """Return all parameters of the stage, with copies of tied weights."""
        return [*(p for _, p in self.parameters), *(entry.parameter for entry in self.tied)]

    def shared_tensors(self) -> list[Tensor]:
        """Return tensors that other jobs have, too."""
        tables = [(part._parameters, part._buffers, name) for part, name, _ in self.shared]
        return [p[name] if name in p else b[name] for p, b, name in tables]  # type: ignore[misc]

    @property
    def needs_metric(self) -> bool:
        """Whether its scheduler looks at the loss."""
        return isinstance(self.scheduler, ReduceLROnPlateau)

    @property
    def device(self) -> torch.device:
        """Where its blocks run; without a place, where its tensors are."""
        if self.place is not None:
            return self.place
        tensors = [*(p for _, p in self.parameters), *self.buffers()]
        return tensors[0].device if tensors else torch.device("cpu")

    def run(self, hidden: Tensors, batch: Inputs) -> Any:
        """The forward of the stage: hidden states for the next one, or the model's output."""
        x: Any = hidden if self.packed else hidden[0] if hidden else None
        return self.model(x, batch)

    def set_buffers(self, values: Sequence[Tensor]) -> None:
        """Point the modules at other buffers."""
        for (module, name), value in zip(self.holders, values, strict=True):
            module._buffers[name] = value


class NotFinite(ArithmeticError):
    """A loss is not a number or infinite."""


@dataclass(eq=False)
class JobRun:
    """One job of a run."""

    job: Job
    index: int
    title: str
    model: nn.Module
    stages: list[JobStage]  # all; in a run on ranks those of other devices have no tensors
    start: int  # iterations that it had at the beginning
    target: int  # and is to have at the end
    feed: Feed | None  # its batches; None when it has ended
    begin: int = -1  # first iteration that no segment has run yet
    end: int = -1  # first iteration that will not be run
    losses: list[float] = field(default_factory=list)
    unread: list[Tensor | Late] = field(default_factory=list)  # parts of the loss on the device
    reported: int = -1  # last iteration with a reported loss
    updates: int = 0  # of stages, in this process
    # by stage: bytes kept of a micro-batch, without and with recomputation
    saved: dict[int, tuple[int, int]] = field(default_factory=dict)
    total_norm: Tensor | None = None  # of all gradients of the iteration
    metric: float = math.nan  # the loss, for schedulers that need it

    def __post_init__(self) -> None:
        self.local = sum(stage.local for stage in self.stages)  # stages in this process
        self.begin_at(self.start)
        self.tied_pairs = tied_pairs(self.stages)
        by_stage = [name for stage in self.stages for name, _ in stage.parameters]
        place = {name: k for k, name in enumerate(by_stage)}
        # positions of the unsplit model's parameters in the rows of norms of the stages
        self.unsplit_order = [place[n] for n, _ in self.named_parameters() if n in place]

    @property
    def modules(self) -> list[tuple[str, nn.Module]]:
        """The unsplit model, and the loss if it is a module, with what their names begin with."""
        loss = self.stages[-1].loss
        return [("", self.model), *([("loss.", loss)] if isinstance(loss, nn.Module) else [])]

    def named_parameters(self) -> NamedParameters:
        """Return parameters of the unsplit model, and those of the loss behind them."""
        return [(key + name, p) for key, m in self.modules for name, p in m.named_parameters()]

    def named_buffers(self) -> dict[str, Tensor]:
        """Return buffers of the unsplit model, and those of the loss."""
        return {key + name: b for key, m in self.modules for name, b in m.named_buffers()}

    def begin_at(self, iteration: int) -> None:
        """Go on from an iteration that a checkpoint has."""
        self.start = self.begin = iteration
        self.end, self.reported = self.target, iteration - 1
        if iteration < self.target:
            self.job.life.status = "running"

    def conclude(self, iterations: int) -> None:
        """The run is over; it has done so many iterations, counted from its seed."""
        if self.job.life.status in ("ready", "running"):
            self.job.life.status = "done" if iterations >= self.target else "stopped"

    @property
    def over(self) -> bool:
        """Whether it has done all its iterations in segments that are over, or failed."""
        return self.job.life.status == "failed" or self.begin >= self.end

    @property
    def needs_metric(self) -> bool:
        """Whether its learning-rate scheduler looks at the loss."""
        return any(stage.needs_metric for stage in self.stages)

    def note_loss(self, value: Tensor) -> None:
        """Take the loss of a micro-batch; they come in the order in which they are run.

        A GPU's is read when the next iteration has its loss, so that the host need not wait for
        the device; unless a scheduler needs it at once.
        """
        whole, late = self.job.microbatches, value.is_cuda and not self.needs_metric
        if late and len(self.unread) == whole:
            self.read_loss()
        self.unread.append(Late(value) if late else value)
        if not late and (len(self.unread) == whole or not math.isfinite(value.item())):
            self.read_loss()

    def read_loss(self) -> None:
        """Add up the parts of an iteration's loss; `NotFinite` if that is no number."""
        total = 0.0
        for value in self.unread:  # `sum` would round in another way than a loop
            total += value.item()
        self.unread.clear()
        if not math.isfinite(total):
            raise NotFinite(f"the loss is {total}")
        self.losses.append(total)

    def fail(self, stage: int, iteration: int, reason: str) -> JobFailed:
        """Mark it as failed: nothing of this iteration or a later one is run any more."""
        error = JobFailed(self.title, self.index, stage, iteration, reason)
        if self.job.life.error is None:
            self.job.life.error = error
        self.job.life.status = "failed"
        self.end = min(self.end, iteration)
        return error

    def stop_after(self, iteration: int) -> None:
        """Let this be its last iteration."""
        if iteration + 1 < self.end:
            self.end = iteration + 1
            if self.job.life.status == "running":
                self.job.life.status = "stopped"

    def receive_flags(self, flags: int, iteration: int) -> None:
        """Note what another device says about the job."""
        if flags & FAILED:
            self.job.life.status = "failed"
            self.end = min(self.end, iteration)
        elif flags & STOP:
            self.stop_after(iteration - 1 if flags & TOMBSTONE else iteration)

    def flags(self, iteration: int) -> int:
        """Return flags of a message of this iteration that has a payload."""
        return STOP if iteration + 1 >= self.end and self.job.life.status == "stopped" else 0

    def final_flags(self) -> int:
        """Return flags of a message that has none."""
        return TOMBSTONE | (FAILED if self.job.life.status == "failed" else STOP)

    def drop_kept(self) -> None:
        """Forget activations of blocks that will never run, and gradients that no update needs."""
        for stage in self.stages:
            stage.kept.clear()
        if self.updates < self.local * (self.end - self.start):  # stages behind have one to make
            return
        self.total_norm = None
        for stage in self.stages:
            stage.later_norms = Norms()
            for p in (*stage.used(), *(p for _, p in stage.trained)):
                p.grad = None
