"""The state of a job while it is trained: stages, batches, losses, and whether it goes on."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from optsched.arraypipe.job import JobFailed, Tensors
from optsched.arraypipe.model.split import ModelStage, tied_pairs
from optsched.arraypipe.plan.types import FAILED, STOP, TOMBSTONE
from optsched.arraypipe.runtime.cuda_streams import Late
from optsched.arraypipe.runtime.types import Kept, Norms

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.arraypipe.job import Job, Loss, NamedParameters
    from optsched.arraypipe.model.inputs import Inputs
    from optsched.arraypipe.runtime.data import Feed
    from optsched.arraypipe.runtime.types import LossScale


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
    forgotten: list[tuple[nn.Module, str]] = field(default_factory=list)  # in no checkpoint
    precision: str = "fp32"
    scaler: LossScale | None = None  # of an amp-fp16 job
    kept: dict[int, Kept] = field(default_factory=dict)
    later_norms: Norms = field(default_factory=Norms)  # of all later stages (`Job.needs_norm`)
    # tensors of several jobs: module, name, sentence
    shared: list[tuple[nn.Module, str, str]] = field(default_factory=list)

    def weight(self, name: str) -> nn.Parameter:
        """The parameter of this unsplit name in this stage, or the copy of a tied weight."""
        for entry in self.tied:
            if entry.name == name:
                return entry.parameter
        return dict(self.parameters)[name]

    @cached_property
    def parts(self) -> list[nn.Module]:
        """All modules of the stage."""
        return [*dict.fromkeys(part for module in self.modules for part in module.modules())]

    def used(self) -> list[nn.Parameter]:
        """All parameters of the stage, with copies of tied weights."""
        return [*(p for _, p in self.parameters), *(entry.parameter for entry in self.tied)]

    def shared_tensors(self) -> list[Tensor]:
        """Tensors that other jobs have, too."""
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
        for _, parameter in self.parameters:
            return parameter.device
        for buffer in self.buffers():
            return buffer.device
        return torch.device("cpu")

    @property
    def needs_batch(self) -> bool:
        """Whether its blocks need the batch: for the model, or for the loss."""
        return self.last or self.model.needs_inputs

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
    feed: Feed | None  # its batches
    begin: int = -1  # first iteration that no segment has run yet
    end: int = -1  # first iteration that will not be run
    losses: list[float] = field(default_factory=list)
    unread: list[Tensor | Late] = field(default_factory=list)  # parts of the loss on the device
    factors: list[float] = field(default_factory=list)  # of the losses of micro-batches
    weighed: int = -1  # iteration that these are of
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
    def loss_module(self) -> nn.Module | None:
        """The job's loss if it is a module."""
        loss = self.stages[-1].loss
        return loss if isinstance(loss, nn.Module) else None

    def named_parameters(self) -> NamedParameters:
        """Parameters of the unsplit model, and those of the loss behind them."""
        rows = list(self.model.named_parameters())
        if self.loss_module is not None:
            rows += [(f"loss.{name}", p) for name, p in self.loss_module.named_parameters()]
        return rows

    def named_buffers(self) -> dict[str, Tensor]:
        """Buffers of the unsplit model, and those of the loss."""
        rows = dict(self.model.named_buffers())
        if self.loss_module is not None:
            rows |= {f"loss.{name}": b for name, b in self.loss_module.named_buffers()}
        return rows

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
        if value.is_cuda and not self.needs_metric:
            if len(self.unread) == self.job.microbatches:
                self.read_loss()
            self.unread.append(Late(value))
            return
        self.unread.append(value)
        if not math.isfinite(value.item()):
            raise NotFinite(f"the loss is {value.item()}")
        if len(self.unread) == self.job.microbatches:
            self.read_loss()

    def read_loss(self) -> None:
        """Add up the parts of an iteration's loss; `NotFinite` if that is no number."""
        total = 0.0
        for value in self.unread:
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
        """Flags of a message of this iteration that has a payload."""
        if iteration + 1 >= self.end and self.job.life.status == "stopped":
            return STOP
        return 0

    def final_flags(self) -> int:
        """Flags of a message that has none."""
        failed = self.job.life.status == "failed"
        return TOMBSTONE | (FAILED if failed else STOP)

    def release(self) -> None:
        """It has ended: its batches are let go, and with them the processes that may load them."""
        self.feed = None

    def drop_kept(self) -> None:
        """Forget activations of blocks that will never run, and gradients that no update needs."""
        for stage in self.stages:
            stage.kept.clear()
        if self.updates < self.local * (self.end - self.start):  # stages behind have one to make
            return
        self.total_norm = None
        for stage in self.stages:
            stage.later_norms = Norms()
            tied = [b.parameter for b in stage.tied]
            for p in (*tied, *(p for _, p in (*stage.parameters, *stage.trained))):
                p.grad = None
