"""The inline backend: one host thread launches all blocks of all devices in a topological order."""

from __future__ import annotations

import time
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

    from optsched.arraypipe.life.changes import Rescheduling
    from optsched.arraypipe.plan.segments import Change, RunPlan, Segment
    from optsched.arraypipe.plan.types import Copied
    from optsched.arraypipe.runtime.state import JobRun
    from optsched.arraypipe.runtime.worker import Worker


MOST: Final = 200_000
"""Blocks that a process remembers at most, unless half a cycle has more.

They take some 100 MB; thousands of cycles are enough for medians and slopes.
"""

Moment = tuple[int, int]
"""Segment and cycle."""

Row = tuple[int, int, int, int, int, int, int]
"""A block as in `Record`; plain, because there are many."""


@dataclass(eq=False)
class Past:
    """Blocks from a cycle on, in the order in which they were run here.

    When there are too many, the older half is left out, whole cycles of all devices, so that a
    block costs the same however long the run is.
    """

    rows: list[Row] = field(default_factory=list)
    exposed_ns: list[int] = field(default_factory=list)  # of every row: waited for copies before
    cut: Moment = (0, 0)  # everything before it has been left out
    left_out: int = 0  # blocks
    limit: int = field(default_factory=lambda: MOST)

    def trim(self) -> list[int] | None:
        """Forget the older half if there are too many; which rows stay, None if all do."""
        if len(self.rows) < self.limit:
            return None
        segment, _, cycle, *_ = self.rows[-(MOST // 2)]
        self.cut = max(self.cut, (segment, cycle))
        kept = self.close()
        self.limit = max(MOST, 2 * len(self.rows))
        return kept

    def close(self) -> list[int] | None:
        """Forget also blocks that came after others of later cycles, and now begin before all."""
        if self.cut == (0, 0):
            return None
        kept = [k for k, row in enumerate(self.rows) if (row[0], row[2]) >= self.cut]
        self.left_out += len(self.rows) - len(kept)
        # in place: whoever notes blocks holds these lists
        self.rows[:] = [self.rows[k] for k in kept]
        if self.exposed_ns:
            self.exposed_ns[:] = [self.exposed_ns[k] for k in kept]
        return kept

    @property
    def records(self) -> list[Record]:
        """The blocks that are remembered."""
        return [*map(Record._make, self.rows)]


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

    def interrupt(self) -> None:
        """Let every job end with the iteration that it is in; `run` returns then."""
        self.worker.interrupted = True

    def forget(self, kept: Sequence[int] | None) -> None:
        """If blocks are no longer remembered: what else there is of their time goes too."""
        if kept is None:
            return
        if self.times is not None:
            self.times.keep({old: new for new, old in enumerate(kept)})
        self.worker.memory.forget(min((row[4] for row in self.past.rows), default=0))
        self.run_plan.forget(self.past.cut[0])

    def read_times(self, pending: int = 0) -> None:
        """On a GPU: note the times of its blocks instead of the host's, but for the last few."""
        while self.times is not None and len(self.times) > pending:
            if found := self.times.read():
                k, start_ns, end_ns, waited_ns = found
                self.past.rows[k] = (*self.past.rows[k][:4], start_ns, end_ns, self.past.rows[k][6])
                if self.worker.memory.moves:
                    self.past.exposed_ns[k] = waited_ns

    def run_segments(self) -> None:
        """Run segments until all jobs have ended."""
        while True:
            segment, number = self.run_plan.now, len(self.run_plan.segments) - 1
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
        """Take the states of a job that has ended off its devices."""
        raise NotImplementedError

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
            self.read_times()
            self.forget(self.past.close())
            records = self.past.records
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
        return (None if found.plan is None else self.planner.carry_out(found)), cycles

    def unload(self, job: int) -> None:
        """On a GPU: the states of a job that has ended go to the host."""
        run = self.runs[job]
        if self.times is None or self.worker.memory.moves or not run.over:
            return
        for stage in run.stages:
            if not stage.away:
                take_off(stage)

    def run_segment(self, segment: Segment, number: int) -> None:
        """Run all blocks in a topological order; those of ended jobs pass tombstones on."""
        messages: dict[int, Any] = {}
        inputs = segment.routes.inputs
        runs = [self.runs[segment.slots[block.job]] for block in segment.plan.blocks]
        self._settle(segment)
        execute, clock = partial(self.worker.execute, segment), time.perf_counter_ns
        note, note_exposed = self.past.rows.append, self.past.exposed_ns.append
        latest, worker, memory, times = -1, self.worker, self.worker.memory, self.times
        exposed_ns = memory.exposed_ns
        for now in Walk(segment):
            operation, cycle, iteration = now
            if cycle > latest:
                latest = cycle
                self.forget(self.past.trim())
            received = {k: messages.pop(k) for k in inputs[operation]}
            began = None if times is None else recorded()
            began_ns = clock()
            messages.update(execute(now, received))
            ended_ns = clock()
            if iteration >= runs[operation].end:
                self.drop_failed(runs[operation])
                continue
            if memory.moves:  # what it waited for its state is not the block's time
                waited_ns, exposed_ns = memory.exposed_ns - exposed_ns, memory.exposed_ns
                began_ns = min(began_ns + waited_ns, ended_ns)
                note_exposed(waited_ns)
            if worker.excluded_ns:
                began_ns, worker.excluded_ns = min(began_ns + worker.excluded_ns, ended_ns), 0
            note((number, operation, cycle, iteration, began_ns, ended_ns, 0))
            if times is not None and began is not None:
                times.add(len(self.past.rows) - 1, began, recorded(), memory.pauses())
                self.read_times(AHEAD)

    def _settle(self, segment: Segment) -> None:
        """On a GPU: the states of jobs that come in now are put there."""
        for slot, job in enumerate(() if self.worker.memory.moves else segment.slots):
            for stage in self.runs[job].stages if segment.count[slot] else ():
                if stage.away:
                    move(stage, stage.device)
