"""What is timed: chains of stages on real data, and updates; and the clock that times them."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median, quantiles
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from optsched.arraypipe import blocks
from optsched.arraypipe.devices import on_gpu
from optsched.arraypipe.profiling.bytes_kept import boundary_bytes, saved_bytes
from optsched.arraypipe.profiling.entries import NOISY, BoundaryEntry, SavedEntry

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from optsched.arraypipe.job import JobStage, Tensors

T = TypeVar("T")


@dataclass(eq=False)
class Case:
    """One block that is timed: what it is, and its times in nanoseconds."""

    kind: str
    stage: int
    times: list[int] = field(default_factory=list)
    launches: list[int] = field(default_factory=list)  # of the host, on a GPU

    @property
    def noisy(self) -> bool:
        """Whether its median is doubtful."""
        return iqr(self.times) > NOISY * median(self.times)


class Clock:
    """Times calls: on a GPU between two events of its stream, else on the host."""

    def __init__(self, device: torch.device) -> None:
        self.gpu = on_gpu(device)
        self.pending: list[tuple[Case, Any, Any]] = []

    def timed(self, case: Case, call: Callable[..., T], *given: Any) -> T:
        """Call a function and note what it took."""
        began = perf_counter_ns()
        if self.gpu:
            start, end = (
                torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                for _ in range(2)
            )
            start.record()
            made = call(*given)
            end.record()
            case.launches.append(perf_counter_ns() - began)
            self.pending.append((case, start, end))
            return made
        made = call(*given)
        case.times.append(perf_counter_ns() - began)
        return made

    def settle(self) -> None:
        """Wait for the device and read the events."""
        if self.pending:
            torch.cuda.synchronize()
        for case, start, end in self.pending:
            case.times.append(round(1e6 * start.elapsed_time(end)))
        self.pending.clear()


@dataclass(eq=False)
class Chain:
    """All stages at one micro-batch size and precision, on real data."""

    stages: list[JobStage]
    batch: int
    dtype: str
    x: Tensors
    end: blocks.Criterion
    accumulates: bool  # whether a job with several micro-batches has this size
    boundaries: list[BoundaryEntry] = field(default_factory=list)
    saved: list[SavedEntry] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cases = {(k, s.index): Case(k, s.index) for k in "FRB" for s in self.stages}

    def run(self, clock: Clock) -> None:
        """Forward, recompute and backward of all stages once."""
        xs = [self.x]
        for stage in self.stages:
            case = self.cases["F", stage.index]
            xs.append(
                clock.timed(case, blocks.forward, stage, 0, xs[-1], 1, self._end(stage), False)
            )
        self._recompute(clock, xs)
        gradients: Any = None
        for stage in reversed(self.stages):
            self._prepare(stage)
            case = self.cases["B", stage.index]
            gradients = clock.timed(case, blocks.backward, stage, 0, gradients)

    def weigh(self) -> None:
        """Bytes of boundaries and of what is kept; nothing is timed."""
        x, outputs = self.x, []
        for stage in self.stages:
            kept, inputs, output = saved_bytes(stage, x, self._end(stage))
            outputs.append(boundary_bytes(() if stage.last else output))
            self.saved.append(
                SavedEntry(
                    stage=stage.index, batch=self.batch, dtype=self.dtype,  # type: ignore[arg-type]
                    bytes=kept, input_bytes=inputs,
                )
            )  # fmt: skip
            x = output
        gradients: Any = None
        for stage in reversed(self.stages):
            back = 0 if gradients is None else boundary_bytes(gradients)
            self.boundaries.append(
                BoundaryEntry(
                    stage=stage.index, batch=self.batch, dtype=self.dtype,  # type: ignore[arg-type]
                    bytes=outputs[stage.index], gradient_bytes=back,
                )
            )  # fmt: skip
            gradients = blocks.backward(stage, 0, gradients)
        self.boundaries.reverse()

    def _recompute(self, clock: Clock, xs: Sequence[Tensors]) -> None:
        """Time the recompute of every stage; its backward then uses that graph, an equal one."""
        for stage, x in zip(self.stages, xs, strict=False):
            blocks.forward(stage, 0, x, 1, self._end(stage), True)
            clock.timed(self.cases["R", stage.index], blocks.recompute, stage, 0)

    def _end(self, stage: JobStage) -> blocks.Criterion | None:
        return self.end if stage.last else None

    def _prepare(self, stage: JobStage) -> None:
        """Let the backward find gradients to add to, or none, as in training."""
        for _, parameter in stage.parameters:
            if not self.accumulates:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


@dataclass(eq=False)
class Updater:
    """The update of every stage by one optimizer."""

    stages: list[JobStage]
    job: int
    dtype: str
    clip_norm: float | None

    def __post_init__(self) -> None:
        self.cases = {("U", s.index): Case("U", s.index) for s in self.stages}
        self.norm = torch.ones((), device=self.stages[0].device)

    def run(self, clock: Clock) -> None:
        """One step of every stage."""
        for stage in self.stages:
            for _, parameter in stage.parameters:
                if parameter.grad is None and parameter.requires_grad:
                    parameter.grad = torch.full_like(parameter, 1e-3)
            case = self.cases["U", stage.index]
            clock.timed(case, blocks.update, stage, self.clip_norm, self.norm, 1.0)


def iqr(times: Sequence[int]) -> float:
    """Interquartile range."""
    low, _, high = quantiles(times, n=4, method="inclusive")
    return high - low
