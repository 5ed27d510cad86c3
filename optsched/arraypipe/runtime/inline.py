"""What runs a run plan; inline: one host thread launches all blocks in a topological order."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from optsched.arraypipe.memory.state import measured
from optsched.arraypipe.model.inputs import tensors_in
from optsched.arraypipe.plan.segments import Walk, cycles_for
from optsched.arraypipe.plan.types import Record
from optsched.arraypipe.runtime import blocks
from optsched.arraypipe.runtime.cuda_streams import AHEAD, BlockTimes, recorded
from optsched.arraypipe.runtime.data import DataEnded, brought
from optsched.arraypipe.runtime.environment import on_gpu
from optsched.arraypipe.runtime.losses import check_trained
from optsched.arraypipe.runtime.stages import in_place, move, take_off
from optsched.arraypipe.runtime.worker import reason
from optsched.errors import OptschedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

    from optsched.arraypipe.plan.segments import Change, RunPlan, Segment
    from optsched.arraypipe.plan.types import Copied, Instance
    from optsched.arraypipe.rescheduling import Rescheduling
    from optsched.arraypipe.runtime.state import JobRun, JobStage
    from optsched.arraypipe.runtime.worker import Worker


MOST: Final = 200_000
"""Blocks that a process remembers beside those of the last segment; they take 100 MB."""

Moment = tuple[int, int]
"""Segment and cycle."""


@dataclass(eq=False)
class Past:
    """The blocks of the last segments that were run here, as values of `Record`."""

    rows: deque[list[int]] = field(default_factory=deque)
    cut: Moment = (0, 0)  # the first that none is dropped of
    left_out: int = 0  # blocks

    def forget(self) -> bool:
        """Drop the oldest segments if there are too many blocks; whether there were."""
        before = self.left_out
        while len(self.rows) > MOST and self.rows[0][0] < self.rows[-1][0]:
            self.cut = (self.rows[0][0] + 1, 0)
            while self.rows[0][0] < self.cut[0]:
                self.rows.popleft()
                self.left_out += 1
        return self.left_out > before


def since(cut: Moment, records: Sequence[Record]) -> list[Record]:
    """Those from a cycle on."""
    return [r for r in records if (r.segment, r.cycle) >= cut]


@dataclass(eq=False)
class Backend(ABC):
    """What runs a run plan: all of it here, or one device."""

    run_plan: RunPlan
    runs: Sequence[JobRun]  # all jobs, in the order of the trainer's
    worker: Worker
    planner: Rescheduling  # may change plan and slots between segments
    strict: bool  # raise when a job fails
    past: Past = field(default_factory=Past, kw_only=True)
    seconds: float = field(default=0.0, kw_only=True)  # of the last segment
    times: BlockTimes | None = field(default=None, init=False)  # on a GPU
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
        self.past.rows.append(row)
        if self.times is not None:
            self.times.add(row, began, recorded(), memory.pauses())
            self.times.read(AHEAD)

    def close(self) -> list[Record]:
        """Return the records of the blocks that are remembered, all of them over."""
        if self.times is not None:
            self.times.read()
        records = [Record(*row) for row in self.past.rows]
        self.past.rows.clear()
        return records

    def run_segments(self) -> None:
        """Run segments until all jobs have ended."""
        while True:
            segment, number = self.run_plan.now, len(self.run_plan.segments) - 1
            self.exposed_ns = self.worker.memory.exposed_ns
            began = time.monotonic()
            self.run_segment(segment, number)
            self.seconds = time.monotonic() - began
            if self.past.forget():
                self.worker.memory.forget(self.past.rows[0][4])
            change, cycles = self.following(segment)
            if change is None:
                for run in self.runs:  # after Ctrl-C
                    run.stop_after(run.begin - 1)
                return
            for job in set(segment.slots).difference(change.slots):
                self.unload(job)
            self.run_plan.follow(change, cycles, self.planner.waits)

    @abstractmethod
    def run_segment(self, segment: Segment, number: int) -> None:
        """Run all blocks of a segment that this process has."""

    @abstractmethod
    def following(self, segment: Segment) -> tuple[Change | None, int]:
        """Close a segment; what follows, None at the end of the run, and for how many cycles."""

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
        execute, clock = self.worker.execute, time.perf_counter_ns
        for now in Walk(segment):
            operation, _, iteration = now
            received = {k: messages.pop(k) for k in inputs[operation]}
            began = None if self.times is None else recorded()
            began_ns = clock()
            messages.update(execute(segment, now, received))
            if iteration < runs[operation].end:
                self.note(number, now, began_ns, began, 0)
            else:
                self.drop_failed(runs[operation])


class FirstForward:
    """How the first forward of a job passes on; here all stages are in this process."""

    def is_local(self, stage: int) -> bool:
        """Return whether a stage is trained here."""
        return True

    def receive(self, stage: int) -> Any:
        """Return the output of a stage of another rank; None if it has failed."""

    def send(self, stage: int, output: Any) -> None:
        """Send the output of a local stage to the next one, if that is on another rank."""


def rehearse(run: JobRun, worker: Worker, chain: FirstForward) -> None:
    """Run the first micro-batch through the local stages.

    `InputError`: a boundary is not a tensor or a tuple of tensors, or there is not even a first
    batch. `JobFailed`: alone the job would have failed there too.
    """
    if run.feed is None:
        return
    here, x = 0, None
    try:
        run.feed.draw(run.start)
        failed = False  # on the rank of an earlier stage
        for stage in run.stages:
            here = stage.index
            if not chain.is_local(here):
                continue
            if here and not chain.is_local(here - 1):
                x = chain.receive(here - 1)
                failed = x is None
            if not failed:
                x = _rehearsed(run, worker, stage, x)
            chain.send(here, None if failed else x)
    except Exception as error:
        pass_over(run, chain, here)
        if isinstance(error, OptschedError) and not (isinstance(error, DataEnded) and run.start):
            raise
        raise run.fail(here, run.start, reason(error)) from error


def _rehearsed(run: JobRun, worker: Worker, stage: JobStage, x: Any) -> Any:
    """Return the output of a stage on the first micro-batch, cut off its graph."""
    assert run.feed is not None
    x = brought(x, stage.device)
    with in_place(stage):
        batch, target = run.feed.microbatch(0, stage.device)
        end = worker.criterion(run, stage, 0, target)

        def loss(output: Any) -> Tensor:
            assert end is not None
            value = end(output)
            check_trained(value, tensors_in(output), stage.used())
            return value

        given = () if x is None else x if isinstance(x, tuple) else (x,)
        x = blocks.rehearse(stage, x, batch, end and loss)
        if worker.limited:
            run.saved[stage.index] = measured(stage, given, batch, end)
    return tuple(map(blocks.leaf, x)) if isinstance(x, tuple) else blocks.leaf(x)


def pass_over(run: JobRun, chain: FirstForward, failed: int = -1) -> None:
    """Send later ranks an empty first forward of a job after a stage has failed."""
    for stage in run.stages[max(0, failed) :]:
        here = stage.index
        if chain.is_local(here):
            if here > max(0, failed) and not chain.is_local(here - 1):
                chain.receive(here - 1)
            chain.send(here, None)
