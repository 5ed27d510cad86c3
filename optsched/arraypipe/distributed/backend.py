"""The process backend: every device is a process, blocks wait for messages alone."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from optsched.arraypipe.distributed.channels import MessageQueues
from optsched.arraypipe.distributed.transport import PeerLost, Stalled
from optsched.arraypipe.job import JobFailed
from optsched.arraypipe.plan.segments import cycles_for, device_stream, places
from optsched.arraypipe.runtime.cuda_streams import BlockTimes, recorded
from optsched.arraypipe.runtime.environment import on_gpu
from optsched.arraypipe.runtime.inline import Backend
from optsched.arraypipe.runtime.stages import drop, move, take_off
from optsched.arraypipe.runtime.worker import reason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.arraypipe.distributed.channels import Capacity
    from optsched.arraypipe.distributed.group import Group
    from optsched.arraypipe.distributed.transport import Links
    from optsched.arraypipe.plan.segments import Change, Segment
    from optsched.arraypipe.plan.types import Copied, Instance, Record
    from optsched.arraypipe.rescheduling import Decision
    from optsched.arraypipe.runtime.state import JobRun
    from optsched.arraypipe.runtime.types import Payload


@dataclass(eq=False)
class ProcessBackend(Backend):
    """Runs the part of a run plan that one device has; all ranks run the same run plan.

    Device d is rank d. What follows a segment the first rank decides when all have ended it.
    """

    links: Links
    group: Group
    capacity: Capacity
    copies: Sequence[Copied] = ()  # of this rank when it is over; then of all, on the first
    homes: dict[int, tuple[int, ...]] = field(default_factory=dict)  # of every stage, by job
    local: dict[int, Payload] = field(default_factory=dict)  # messages that stay on the device
    now: Instance | None = None

    def __post_init__(self) -> None:
        self.device = self.links.rank
        self.queues = MessageQueues(self.links, self.capacity)
        if on_gpu(self.links.device):
            self.times = BlockTimes(self.links.device)

    @property
    def reads_late(self) -> bool:
        """Whether losses are read, and so travel, one iteration late (`JobRun.note_loss`)."""
        return on_gpu(self.links.device)

    def unload(self, job: int) -> None:
        """On a GPU: the states of a job that has ended go to the host."""
        run = self.runs[job]
        if not on_gpu(self.links.device) or self.worker.memory.moves or not run.over:
            return
        for stage, home in zip(run.stages, self.homes.get(job, ()), strict=False):
            if home == self.device and not stage.away:
                take_off(stage)

    def run(self) -> list[Record]:
        """Train until all jobs have ended; what was executed here, in order, or the end of it."""
        lost = True
        try:
            self.run_segments()
            self.queues.flush()
            records = self.close()
            lost = False
            return records
        except (Stalled, PeerLost) as error:
            text = self.group.diagnosis(self._whereabouts(), str(error))
            raise type(error)(text) from error
        except BaseException as error:  # the others will only see that this process is gone
            self.group.abort(f"{type(error).__name__}: {error}")
            raise
        finally:
            self.queues.abandon()
            self._finish(lost)

    def _finish(self, lost: bool) -> None:
        """Wait for what was launched; an error of a run that is lost already hides the first."""
        try:
            self.worker.finish()
        except Exception as error:
            if lost:
                return
            self.group.abort(reason(error))
            raise
        self.copies = self.worker.memory.copies

    def run_segment(self, segment: Segment, number: int) -> None:
        """Run the blocks of this device; those of ended jobs pass tombstones on."""
        queues, memory, clock = self.queues, self.worker.memory, time.perf_counter_ns
        inputs, channel_of = segment.routes.inputs, segment.routes.channel_of
        runs = [self.runs[segment.slots[block.job]] for block in segment.plan.blocks]
        cycle, local = -1, [b for b in segment.plan.blocks if b.device == self.device]
        self.past.limit = max(self.past.limit, 3 * len(local))
        self._settle(segment)  # before any message: it takes memory
        queues.open(segment, number, memory.limits is None)
        for now in device_stream(segment, self.device):
            self.now, (operation, _, iteration) = now, now
            if now.cycle != cycle:
                cycle = now.cycle
                self.forget(self.past.limit // 2)
            queues.waited_ns = 0
            received = {
                k: self.local.pop(k) if channel_of[k] < 0 else queues.receive(k, iteration)
                for k in inputs[operation]
            }
            self._read_loss(segment, now, received)
            began = None if self.times is None else recorded()
            began_ns = clock()
            sent = self.worker.execute(segment, now, received)
            if iteration < runs[operation].end:
                self.note(number, now, began_ns, began, queues.waited_ns)
            for k, payload in sent.items():
                if channel_of[k] < 0:
                    self.local[k] = payload
                else:
                    queues.send(k, iteration, payload)
            if iteration >= runs[operation].end:
                self.drop_failed(runs[operation])
        self.now = None
        queues.close()

    def _settle(self, segment: Segment) -> None:
        """Free the stages of other ranks; move local stages to the device."""
        for slot, job in enumerate(segment.slots):
            if job not in self.homes:
                self.homes[job] = places(segment.plan, slot)
                self.runs[job].local = self.homes[job].count(self.device)
                for stage, home in zip(self.runs[job].stages, self.homes[job], strict=True):
                    if home != self.device:
                        drop(stage)
                    elif stage.away and not self.worker.memory.moves:
                        move(stage, stage.device)

    def _read_loss(self, segment: Segment, now: Instance, received: dict[int, Payload]) -> None:
        """On rank 0: take the loss that comes with a last gradient, and stop the job if wanted."""
        block = segment.plan.blocks[now.operation]
        if self.device or block.kind != "B":
            return
        messages, last = segment.routes.messages, segment.plan.last_backwards
        if not any(messages[k].producer in last for k in received):
            return
        run = self.runs[segment.slots[block.job]]
        iteration = now.iteration - (self.reads_late and not run.needs_metric)
        for payload in received.values():
            if not math.isnan(payload.loss) and run.reported < iteration:
                run.reported = iteration
                self.worker.on_loss(run, iteration, payload.loss)
        if self.worker.stops(run):
            run.stop_after(now.iteration)

    def following(self, segment: Segment) -> tuple[Change | None, int]:
        """Agree on how the jobs of the segment have ended, and on what the first rank decides."""
        jobs = sorted({job for job in segment.slots if self.runs[job].local})
        lives = [life_of(self.runs[job]) for job in jobs]
        rows = self.group.all((self.worker.interrupted, lives))
        for life in (life for _, row in rows for life in row):
            take_life(self.runs, life)
        self.run_plan.close()
        for job in {job for _, row in rows for job, *_, stopping in row if stopping}:
            self.runs[job].stop_after(self.runs[job].begin - 1)
        made: Decision | None = None
        if not self.group.rank:
            cycles, interrupted = cycles_for(segment, self.seconds), any(row[0] for row in rows)
            made = self.planner.decide(segment, cycles, interrupted)
        found = self._shared(made)
        return self.planner.carry_out(found), found.cycles

    def _shared(self, found: Decision | None) -> Decision:
        """The decision of the first rank; a plan that all know travels as a segment's number."""
        segments, sent = self.run_plan.segments, found
        if found is not None:
            known = [k for k, part in enumerate(segments) if part.plan is found.plan]
            sent = found._replace(plan=None, known=known[-1]) if known else found
        received: Decision = self.group.from_first(sent)  # type: ignore[assignment]
        if found is not None or received.known is None:
            return found or received
        return received._replace(plan=segments[received.known].plan, known=None)

    def _whereabouts(self) -> str:
        if self.now is None:
            return "between two segments, or at the end"
        block = self.run_plan.now.plan.blocks[self.now.operation]
        missing = self.queues.waiting_for and f", which waits for the {self.queues.waiting_for}"
        return f"in cycle {self.now.cycle} before {block}{missing}"


def life_of(run: JobRun) -> tuple[Any, ...]:
    """How a job stands on this rank."""
    error = run.job.life.error
    failure = None if error is None else (error.stage, error.iteration, str(error))
    return run.index, run.job.life.status, run.end, failure, run.job.life.stopping


def take_life(runs: Sequence[JobRun], row: tuple[Any, ...]) -> None:
    """Note how a job stands on another rank."""
    job, status, end, failure, _ = row
    run, life = runs[job], runs[job].job.life
    if status in ("failed", "stopped") and life.status != "failed":
        life.status, run.end = status, min(run.end, end)
    if failure is not None and life.error is None:
        stage, iteration, sentence = failure
        life.error = JobFailed(run.title, job, stage, iteration, "")
        life.error.args = (sentence,)
