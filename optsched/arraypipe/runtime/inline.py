"""The inline backend: one host thread launches all blocks of all devices in a topological order."""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from optsched.arraypipe.plan.segments import Walk, cycles_for
from optsched.arraypipe.plan.types import Record
from optsched.arraypipe.runtime.cuda_streams import AHEAD, BlockTimes, recorded
from optsched.arraypipe.runtime.environment import on_gpu
from optsched.arraypipe.runtime.stages import move, take_off

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from optsched.arraypipe.plan.segments import Change, RunPlan, Segment
    from optsched.arraypipe.plan.types import Copied, Instance
    from optsched.arraypipe.rescheduling import Rescheduling
    from optsched.arraypipe.runtime.state import JobRun
    from optsched.arraypipe.runtime.worker import Worker


MOST: Final = 200_000
"""Blocks that a process remembers at most, unless three cycles have more; they take 100 MB."""

Moment = tuple[int, int]
"""Segment and cycle."""


@dataclass(eq=False)
class Past:
    """The last blocks that were run here, in their order, as values of `Record`.

    Of those that are dropped `cut` is the first segment and cycle that has none.
    """

    limit: int = field(default_factory=lambda: MOST)
    rows: deque[list[int]] = field(default_factory=deque)
    cut: Moment = (0, 0)
    left_out: int = 0  # blocks

    def note(self, row: list[int]) -> None:
        """Add a block; drop the oldest one if there are too many."""
        self.rows.append(row)
        if len(self.rows) > self.limit:
            segment, _, cycle, *_ = self.rows.popleft()
            self.cut = max(self.cut, (segment, cycle + 1))
            self.left_out += 1

    def close(self) -> list[Record]:
        """Drop what is left of cycles that are not whole; the records of the others."""
        found = since(self.cut, [Record(*row) for row in self.rows])
        self.left_out += len(self.rows) - len(found)
        self.rows.clear()
        return found


def since(cut: Moment, records: Sequence[Record]) -> list[Record]:
    """Those from a cycle on."""
    return [r for r in records if (r.segment, r.cycle) >= cut]


@dataclass(eq=False)
class Backend:
    """What runs a run plan: all of it here, or one device."""

    run_plan: RunPlan
    runs: Sequence[JobRun]  # all jobs, in the order of the trainer's
    worker: Worker
    planner: Rescheduling  # may change plan and slots between segments
    strict: bool  # raise when a job fails
    past: Past = field(default_factory=Past, kw_only=True)
    seconds: float = field(default=0.0, kw_only=True)  # of the last segment
    times: BlockTimes | None = field(default=None, init=False)  # on a GPU
    forgotten: int = field(default=0, init=False)  # blocks, by `forget`
    exposed_ns: int = field(default=0, init=False)  # of all blocks that are noted

    def interrupt(self) -> None:
        """Let every job end with the iteration that it is in; `run` returns then."""
        self.worker.interrupted = True

    def note(self, number: int, now: Instance, began_ns: int, began: Any, waited_ns: int) -> None:
        """Note a block that is over; waiting for its state, batches and callbacks is not its time.

        On a GPU its times are those of its events, which are read when they are over.
        """
        ended_ns, memory, worker = time.perf_counter_ns(), self.worker.memory, self.worker
        exposed_ns = 0
        if memory.moves:
            exposed_ns, self.exposed_ns = memory.exposed_ns - self.exposed_ns, memory.exposed_ns
        began_ns = min(began_ns + exposed_ns + worker.excluded_ns, ended_ns)
        worker.excluded_ns = 0
        row = [number, *now, began_ns, ended_ns, waited_ns, exposed_ns]
        self.past.note(row)
        if self.times is not None:
            self.times.add(row, began, recorded(), memory.pauses())
            self.times.read(AHEAD)

    def forget(self, most: int = 1) -> None:
        """Forget segments and copies of states from before the blocks that are remembered."""
        if self.past.left_out - self.forgotten >= most:
            self.forgotten = self.past.left_out
            self.worker.memory.forget(min((row[4] for row in self.past.rows), default=0))
            self.run_plan.forget(self.past.cut[0])

    def close(self) -> list[Record]:
        """The records of the blocks that are remembered, all of them over."""
        if self.times is not None:
            self.times.read()
        self.forget()
        return self.past.close()

    def run_segments(self) -> None:
        """Run segments until all jobs have ended."""
        while True:
            segment, number = self.run_plan.now, len(self.run_plan.segments) - 1
            self.exposed_ns = self.worker.memory.exposed_ns
            began = time.monotonic()
            self.run_segment(segment, number)
            self.seconds = time.monotonic() - began
            change, cycles = self.following(segment)
            if change is None:
                for run in self.runs:  # after Ctrl-C
                    run.stop_after(run.begin - 1)
                return
            for job in set(segment.slots).difference(change.slots):
                self.unload(job)
            self.run_plan.follow(change, cycles, self.planner.waits)

    def run_segment(self, segment: Segment, number: int) -> None:
        """Run all blocks of a segment that this process has."""
        raise NotImplementedError

    def following(self, segment: Segment) -> tuple[Change | None, int]:
        """Close a segment; what follows, None at the end of the run, and for how many cycles."""
        raise NotImplementedError

    def unload(self, job: int) -> None:
        """On a GPU: the states of a job that has ended go to the host."""
        run = self.runs[job]
        if self.times is not None and not self.worker.memory.moves and run.over:
            for stage in run.stages:
                if stage.local and not stage.away:
                    take_off(stage)

    def settle(self, segment: Segment) -> None:
        """On a GPU: the states of jobs that come in now are put there."""
        for slot, job in enumerate(() if self.worker.memory.moves else segment.slots):
            for stage in self.runs[job].stages if segment.count[slot] else ():
                if stage.local and stage.away:
                    move(stage, stage.device)

    def drop_failed(self, run: JobRun) -> None:
        """Forget what a failed job has kept; raise its error if the run is strict."""
        if run.job.error is not None and self.strict:
            raise run.job.error
        if run.job.life.status == "failed":
            run.drop_kept()


@dataclass(eq=False)
class InlineBackend(Backend):
    """Runs a run plan on the one device of this process; those of the plan are logical."""

    device: torch.device

    def __post_init__(self) -> None:
        if on_gpu(self.device):
            self.times = BlockTimes(self.device)

    @property
    def copies(self) -> Sequence[Copied]:
        """Copies of states."""
        return self.worker.memory.copies

    def run(self) -> list[Record]:
        """Train until all jobs have ended; what was executed, in order, or the end of it."""
        try:
            self.run_segments()
            records = self.close()
        except BaseException:
            with suppress(Exception):  # a device that is lost raises again, and says less
                self.worker.finish()
            raise
        self.worker.finish()
        return records

    def following(self, segment: Segment) -> tuple[Change | None, int]:
        """As the planner decides."""
        self.run_plan.close()
        cycles = cycles_for(segment, self.seconds)
        found = self.planner.decide(segment, cycles, self.worker.interrupted)
        return self.planner.carry_out(found), cycles

    def run_segment(self, segment: Segment, number: int) -> None:
        """Run all blocks in a topological order; those of ended jobs pass tombstones on."""
        messages: dict[int, Any] = {}
        inputs = segment.routes.inputs
        runs = [self.runs[segment.slots[block.job]] for block in segment.plan.blocks]
        self.settle(segment)
        self.past.limit = max(self.past.limit, 3 * len(runs))
        execute, clock, latest = partial(self.worker.execute, segment), time.perf_counter_ns, -1
        for now in Walk(segment):
            operation, cycle, iteration = now
            if cycle > latest:
                latest = cycle
                self.forget(self.past.limit // 2)
            received = {k: messages.pop(k) for k in inputs[operation]}
            began = None if self.times is None else recorded()
            began_ns = clock()
            messages.update(execute(now, received))
            if iteration < runs[operation].end:
                self.note(number, now, began_ns, began, 0)
            else:
                self.drop_failed(runs[operation])
