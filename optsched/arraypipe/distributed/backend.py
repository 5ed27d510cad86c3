"""The process backend: every device is a process, blocks wait for messages alone."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from optsched.arraypipe.distributed.messages import MessageQueues
from optsched.arraypipe.job import JobFailed
from optsched.arraypipe.plan.segments import cycles_for, device_stream
from optsched.arraypipe.runtime.cuda_streams import BlockTimes, recorded
from optsched.arraypipe.runtime.environment import on_gpu
from optsched.arraypipe.runtime.inline import Backend

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.arraypipe.distributed.group import Group
    from optsched.arraypipe.distributed.messages import Capacity, Links
    from optsched.arraypipe.plan.segments import Change, Segment
    from optsched.arraypipe.plan.types import Copied, Instance, Record
    from optsched.arraypipe.rescheduling import Decision
    from optsched.arraypipe.runtime.state import JobRun, Payload


@dataclass(eq=False)
class ProcessBackend(Backend):
    """Runs the part of a run plan that one device has; all ranks run the same run plan."""

    links: Links
    group: Group
    capacity: Capacity
    copies: Sequence[Copied] = ()  # of this rank when it is over; then of all, on the first
    local: dict[int, Payload] = field(default_factory=dict)  # messages that stay on the device
    now: Instance | None = None

    def __post_init__(self) -> None:
        self.device = self.links.rank
        self.queues = MessageQueues(self.links, self.capacity)
        if on_gpu(self.links.device):
            self.times = BlockTimes(self.links.device)

    def run(self) -> list[Record]:
        """Train until all jobs have ended; what was executed here, in order, or the end of it."""
        finished = False
        with self.group.explained(self._whereabouts):
            try:
                self.run_segments()
                self.queues.flush()
                records = self.close()
                finished = True
            finally:
                self.queues.abandon()
                try:
                    self.worker.finish()  # what was launched
                except Exception:
                    if finished:  # else the first error says more
                        raise
            self.copies = self.worker.memory.copies
            return records

    def run_segment(self, segment: Segment, number: int) -> None:
        """Run the blocks of this device; those of ended jobs pass tombstones on."""
        queues, clock = self.queues, time.perf_counter_ns
        inputs, channel_of = segment.routes.inputs, segment.routes.channel_of
        runs = [self.runs[segment.slots[block.job]] for block in segment.plan.blocks]
        self.settle(segment)  # before any message: it takes memory
        queues.open(segment, number, self.worker.memory.limits is not None)
        for now in device_stream(segment, self.device):
            self.now, (operation, _, iteration) = now, now
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

    def _read_loss(self, segment: Segment, now: Instance, received: dict[int, Payload]) -> None:
        """On rank 0: take the loss that comes with a last gradient, and stop the job if wanted."""
        block = segment.plan.blocks[now.operation]
        if self.device or block.kind != "B":
            return
        messages, last = segment.routes.messages, segment.plan.last_backwards
        if not any(messages[k].producer in last for k in received):
            return
        run = self.runs[segment.slots[block.job]]
        iteration = now.iteration - (self.times is not None and not run.needs_metric)
        for payload in received.values():
            if not math.isnan(payload.loss) and run.reported < iteration:
                run.reported = iteration
                self.worker.on_loss(run, iteration, payload.loss)
        if self.worker.stops(run):
            run.stop_after(now.iteration)

    def following(self, segment: Segment) -> tuple[Change | None, int]:
        """Agree on how the jobs of the segment have ended, and on what the first rank decides."""
        interrupted = any(self.group.all(self.worker.interrupted))
        stopping = share_lives(self.group, [self.runs[job] for job in segment.slots])
        self.run_plan.close()
        for run in stopping:
            run.stop_after(run.begin - 1)
        made: Decision | None = None
        segments = self.run_plan.segments
        if not self.group.rank:
            cycles = cycles_for(segment, self.seconds)
            made = self.planner.decide(segment, cycles, interrupted)
        sent = made
        if made is not None:  # a plan that all know travels as the number of a segment
            known = {part.plan: k for k, part in enumerate(segments)}
            if made.plan in known:
                sent = made._replace(plan=None, known=known[made.plan])
        received = self.group.from_first(sent)
        assert received is not None
        if received.known is not None:
            received = received._replace(plan=segments[received.known].plan)
        decision = made or received
        return self.planner.carry_out(decision), decision.cycles

    def _whereabouts(self) -> str:
        if self.now is None:
            return "between two segments, or at the end"
        block = self.run_plan.now.plan.blocks[self.now.operation]
        missing = self.queues.waiting_for and f", which waits for the {self.queues.waiting_for}"
        return f"in cycle {self.now.cycle} before {block}{missing}"


def share_lives(group: Group, runs: Sequence[JobRun]) -> list[JobRun]:
    """Agree on how jobs stand: one that has failed or stopped on a rank has on all (collective)."""
    by_index = {run.index: run for run in runs}
    stopping = []
    for rank, row in enumerate(group.all([_life(run) for run in by_index.values()])):
        for job, status, end, failure, stops in row:
            run, life = by_index[job], by_index[job].job.life
            if status in ("failed", "stopped") and life.status != "failed":
                life.status, run.end = status, min(run.end, end)
            if failure is not None and life.error is None:
                stage, iteration, sentence = failure
                life.error = JobFailed(run.title, job, stage, iteration, "")
                life.error.args = (f"{sentence} (rank {rank})",)
            if stops:
                stopping.append(run)
    return stopping


def _life(run: JobRun) -> tuple[Any, ...]:
    life, failure = run.job.life, None
    if life.error is not None:
        failure = life.error.stage, life.error.iteration, str(life.error)
    return run.index, life.status, run.end, failure, life.stopping
