"""The inline backend: one host thread runs all blocks of all devices in a topological order."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from optsched.arraypipe import blocks
from optsched.arraypipe.job import JobFailed
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from optsched.arraypipe.feed import Feed
    from optsched.arraypipe.job import Job, JobStage, Loss, Tensors
    from optsched.arraypipe.plan import ExecutionPlan
    from optsched.arraypipe.plan_checks import Block


@dataclass(eq=False)
class JobRun:
    """A job while it is trained: everything is resident, a switch is an index into a list."""

    job: Job
    index: int
    title: str
    model: nn.Module
    stages: list[JobStage]
    start: int  # iterations that it had at the beginning
    feed: Feed | None
    losses: list[float] = field(default_factory=list)
    loss: float = 0.0  # of the iteration on its way
    updated: int = 0  # stages that have finished that iteration

    def fail(self, stage: int, iteration: int, reason: str) -> JobFailed:
        """The error that names where it happened."""
        return JobFailed(self.title, self.index, stage, iteration, reason)


class Record(NamedTuple):
    """One executed block; times in nanoseconds of a monotonic clock."""

    operation: int
    cycle: int
    iteration: int
    start: int
    end: int


class InlineBackend:
    """Runs a plan on the CPU; devices are logical, time is serial.

    Parameters
    ----------
    plan
        What to run.
    runs
        The jobs, in the order of the plan's.
    loss
        ``loss(output, target)``.
    on_update
        Called with ``(run, stage, iteration)`` after every update of a stage.
    on_iteration
        Called with ``(run, iteration, loss)`` when all stages have finished an iteration.
    """

    def __init__(
        self,
        plan: ExecutionPlan,
        runs: list[JobRun],
        loss: Loss,
        on_update: Callable[[JobRun, int, int], None],
        on_iteration: Callable[[JobRun, int, float], None],
    ) -> None:
        self.plan, self.runs, self.loss = plan, runs, loss
        self.on_update, self.on_iteration = on_update, on_iteration
        self.activations: dict[tuple[int, int, int], Tensors] = {}
        self.gradients: dict[tuple[int, int, int], tuple[Tensor | None, ...]] = {}
        self.records: list[Record] = []

    def rehearse(self) -> None:
        """One forward of every job that changes nothing: boundaries are looked at, and refused."""
        for run in self.runs:
            if run.feed is None:
                continue
            run.feed.draw(run.start)
            x, needs = run.feed.inputs[0], (False,) * len(blocks.tensors_of(run.feed.inputs[0], ""))
            for stage in run.stages:
                try:
                    x = blocks.rehearse(stage, x, needs, self._criterion(run, stage, 0))
                except InputError:
                    raise
                except Exception as error:
                    raise run.fail(stage.index, run.start, _reason(error)) from error
                row = x if isinstance(x, tuple) else (x,)
                needs = tuple(t.requires_grad for t in row)

    def run(self, lengths: list[int]) -> list[Record]:
        """Train job j for ``lengths[j]`` iterations; what was executed, in order."""
        for operation, cycle, turn in self.plan.unroll(lengths):
            block = self.plan.blocks[operation]
            run = self.runs[block.job]
            iteration = run.start + turn
            if block.kind == "F" and block.stage == block.microbatch == 0:
                assert run.feed is not None
                run.feed.draw(iteration)
            began = time.perf_counter_ns()
            try:
                updated = self._execute(run, block, iteration)
            except (InputError, JobFailed):
                raise
            except Exception as error:
                raise run.fail(block.stage, iteration, _reason(error)) from error
            ended = time.perf_counter_ns()
            self.records.append(Record(operation, cycle, iteration, began, ended))
            if updated:
                self._after_update(run, block.stage, iteration)
        return self.records

    def _execute(self, run: JobRun, block: Block, iteration: int) -> bool:
        """Run one block; whether it ended with an update of its stage."""
        j, s, m = block.job, block.stage, block.microbatch
        stage = run.stages[s]
        if block.kind == "F":
            self._forward(run, stage, m, iteration)
            return False
        if block.kind == "R":
            blocks.recompute(stage, m)
            return False
        if block.kind == "B":
            if stage.kept[m].roots is None:
                blocks.recompute(stage, m)
            sent = None if stage.last else self.gradients.pop((j, s, m))
            gradients = blocks.backward(stage, m, sent)
            if s > 0:
                self.gradients[j, s - 1, m] = gradients
            if m + 1 < run.job.microbatches or j in self.plan.updated:
                return False
        blocks.update(stage)
        return True

    def _forward(self, run: JobRun, stage: JobStage, m: int, iteration: int) -> None:
        j, s = run.index, stage.index
        if s == 0:
            assert run.feed is not None
            x = blocks.tensors_of(run.feed.inputs[m], "data: the input")
        else:
            x = self.activations.pop((j, s, m))
        key = run.job.key(iteration, m, s)
        recompute = run.job.recompute or (j, s) in self.plan.recomputed
        output = blocks.forward(stage, m, x, key, self._criterion(run, stage, m), recompute)
        if not stage.last:
            self.activations[j, s + 1, m] = output
            return
        value = float(output[0].item())
        if not math.isfinite(value):
            raise run.fail(s, iteration, f"the loss is {value}")
        run.loss += value

    def _criterion(self, run: JobRun, stage: JobStage, m: int) -> blocks.Criterion | None:
        if not stage.last:
            return None
        assert run.feed is not None
        return blocks.Criterion(self.loss, run.feed.targets[m], run.feed.shares[m])

    def _after_update(self, run: JobRun, stage: int, iteration: int) -> None:
        self.on_update(run, stage, iteration)
        run.updated += 1
        if run.updated == len(run.stages):
            loss, run.loss, run.updated = run.loss, 0.0, 0
            run.losses.append(loss)
            self.on_iteration(run, iteration, loss)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
