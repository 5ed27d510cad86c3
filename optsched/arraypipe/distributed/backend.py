"""The process backend: every device is a process of its own, blocks wait for messages alone."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from optsched.arraypipe.distributed.mailbox import Post
from optsched.arraypipe.distributed.protocol import Swap, first_cycle, is_heard, shorten
from optsched.arraypipe.distributed.transport import PeerLost, Stalled
from optsched.arraypipe.plan.segments import Change, device_stream, places
from optsched.arraypipe.runtime.cuda_streams import AHEAD, BlockTimes, recorded
from optsched.arraypipe.runtime.environment import on_gpu
from optsched.arraypipe.runtime.inline import Backend
from optsched.arraypipe.runtime.stages import drop, move, take_off
from optsched.arraypipe.runtime.worker import reason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.arraypipe.distributed.group import Group
    from optsched.arraypipe.distributed.mailbox import Capacity
    from optsched.arraypipe.distributed.transport import GlooLinks
    from optsched.arraypipe.plan.segments import Segment
    from optsched.arraypipe.plan.types import Copied, Instance, Record
    from optsched.arraypipe.runtime.types import Parcel


class Announcement(NamedTuple):
    """What rank 0 says to the others: the next segment, or the end of the run.

    The change is None at the end of the run, else it has another plan or other seats. A job that
    has ended by then takes no part in the next segment.
    """

    change: Any  # a `Change`; as it is sent it may have the number of a segment instead of a plan
    ends: list[int]  # of all jobs as rank 0 knows them
    halts: bool  # the run is over
    joined: Sequence[tuple[int, int]]  # `Planner.joined`
    sizes: Sequence[Sequence[Sequence[int]]]  # `Capacity.rows` of all jobs on the seats


@dataclass(eq=False)
class ProcessBackend(Backend):
    """Runs the part of a course that one device has; all ranks run the same course.

    Device d is rank d. Only the planner of rank 0 is asked, the others are told.
    """

    links: GlooLinks
    group: Group
    capacity: Capacity
    copies: Sequence[Copied] = ()  # of this rank when it is over; then of all, on the first
    homes: dict[int, tuple[int, ...]] = field(default_factory=dict)  # of every stage, by job
    mail: dict[int, Parcel] = field(default_factory=dict)
    announced: Announcement | None = None  # by this rank, the first
    wish: Change | None = None  # what cannot be announced any more waits for the end
    now: Instance | None = None

    def __post_init__(self) -> None:
        self.device = self.links.rank
        self.post = Post(self.links, self.capacity.of, self._hear)
        if on_gpu(self.links.device):
            self.times = BlockTimes(self.links.device)

    @property
    def reads_late(self) -> bool:
        """Whether losses are read, and so travel, one iteration late (`JobRun.note_loss`)."""
        return on_gpu(self.links.device)

    def unseat(self, job: int) -> None:
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
            while True:
                number = len(self.course.segments) - 1
                self._run_segment(self.course.now, number)
                self.course.close()
                following = self._following(number + 1)
                if following is None:
                    self.group.assemble()
                    self.post.flush()
                    self.read_times()
                    self.forget(self.past.close())
                    lost = False
                    return self.past.records
                self._begin(following)
        except (Stalled, PeerLost) as error:
            self.links.abort()
            text = self.group.diagnosis(self._whereabouts(), str(error))
            raise type(error)(text) from error
        except BaseException as error:  # the others will only see that this process is gone
            self.links.abort()
            self.group.abort(f"{type(error).__name__}: {error}")
            raise
        finally:
            self.post.abandon()
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

    def _run_segment(self, segment: Segment, number: int) -> None:
        worker, post, clock = self.worker, self.post, time.perf_counter_ns
        execute = worker.execute
        inputs, channel_of = segment.routes.inputs, segment.routes.channel_of
        outer = [[k for k in row if channel_of[k] >= 0] for row in segment.routes.outputs]
        note, note_exposed = self.past.rows.append, self.past.exposed_ns.append
        memory, times, timed = worker.memory, self.times, worker.memory.moves
        exposed_ns = memory.exposed_ns
        self._seat(segment)  # before any message: it takes memory
        roomy = not self.links.apart and memory.limits is None
        capacity = self.capacity
        windows = capacity.windows(segment, self.device) if roomy else capacity.window
        post.open(segment, number, windows)
        cycle = -1
        for now in device_stream(segment, self.device):
            self.now = now
            if now.cycle != cycle:
                cycle = now.cycle
                self._steer(segment, number, cycle)
                self.forget(self.past.trim())
                post.post(cycle)  # later ones of this cycle are posted when a block has ended
            post.waited_ns = 0
            received = {
                k: self.mail.pop(k) if channel_of[k] < 0 else post.receive(k, now.iteration)
                for k in inputs[now.operation]
            }
            self._listen(segment, now, received)
            began = None if times is None else recorded()
            began_ns = clock()
            sent = execute(segment, now, received)
            ended_ns = clock()
            self.group.beat(ended_ns)
            if timed:  # what it waited for its state is not the block's time
                waited_ns, exposed_ns = memory.exposed_ns - exposed_ns, memory.exposed_ns
                began_ns = min(began_ns + waited_ns, ended_ns)
                note_exposed(waited_ns)  # on a GPU it is known when the block is over
            if worker.aside_ns:  # batches and callbacks are not the block's time
                began_ns, worker.aside_ns = min(began_ns + worker.aside_ns, ended_ns), 0
            note(
                (
                    number,
                    now.operation,
                    now.cycle,
                    now.iteration,
                    began_ns,
                    ended_ns,
                    post.waited_ns,
                )
            )
            if times is not None and began is not None:
                times.add(len(self.past.rows) - 1, began, recorded(), memory.pauses())
                self.read_times(AHEAD)
            away = {k: sent.pop(k) for k in outer[now.operation]}
            self.mail.update(sent)
            post.ended(now, away)
            run = self.runs[segment.seats[segment.plan.blocks[now.operation].job]]
            if run.job.life.status == "failed":
                if self.strict and run.job.error is not None:
                    raise run.job.error
                run.drop_kept()
        self.now = None
        post.port.close()

    def _seat(self, segment: Segment) -> None:
        """Drop the states of jobs that are new here and live elsewhere, bring the others in."""
        for seat, job in enumerate(segment.seats):
            if job not in self.homes:
                self.homes[job] = places(segment.plan, seat)
                self.runs[job].local = self.homes[job].count(self.device)
                for stage, home in zip(self.runs[job].stages, self.homes[job], strict=True):
                    if home != self.device:
                        drop(stage)
                    elif stage.away and not self.worker.memory.moves:
                        move(stage, stage.device)

    def _steer(self, segment: Segment, number: int, cycle: int) -> None:
        """Rank 0, once a cycle: announce the next segment if a change is wanted and possible."""
        if self.device or self.post.swap.number > number:
            return
        self.wish = self.wish or self.planner.poll(segment)
        change = self.wish
        if change is None and self._has_deletions(segment, cycle):
            change = Change(segment.plan, segment.seats)
        if (change is None and not self.interrupted) or not is_heard(segment, cycle):
            return  # what cannot be heard any more is said at the end
        swap = Swap(number + 1, first_cycle(segment, cycle))
        self._announce(change)
        self._hear(swap)

    def _has_deletions(self, segment: Segment, cycle: int) -> bool:
        """Whether a job has ended and would send tombstones beyond the next possible swap."""
        swap = first_cycle(segment, cycle)
        for seat, job in enumerate(segment.seats):
            kept = max(self.runs[job].end - segment.first[seat], swap * segment.plan.copies[seat])
            if kept < segment.count[seat]:
                return True
        return False

    def _announce(self, change: Change | None) -> None:
        ends = [run.end for run in self.runs]
        sizes = self.capacity.rows(() if change is None else change.seats)
        found = Announcement(change, ends, self.interrupted, self.planner.joined, sizes)
        self.announced, self.wish = found, None
        if change is not None:
            # the newest: older segments may have been forgotten, here or there
            same = [k for k, part in enumerate(self.course.segments) if part.plan is change.plan]
            plan: Any = same[-1] if same else change.plan
            found = found._replace(change=change._replace(plan=plan))
        self.group.broadcast(found)

    def _told(self) -> Announcement:
        """What rank 0 has announced."""
        found: Announcement = self.group.hear()
        plan = None if found.change is None else found.change.plan
        if isinstance(plan, int):
            known = self.course.segments[plan].plan
            found = found._replace(change=found.change._replace(plan=known))
        return found

    def _hear(self, swap: Swap) -> None:
        """The segment ends early, with all iterations that begin before the swap."""
        if swap.number <= self.post.swap.number:
            return
        self.post.swap = swap
        shorten(self.course.now, swap.first_cycle)

    def _listen(self, segment: Segment, now: Instance, received: dict[int, Parcel]) -> None:
        """Rank 0 hears the loss of an iteration on its way back; what is decided on it holds."""
        block = segment.plan.blocks[now.operation]
        if self.device or block.kind != "B":
            return
        messages, last = segment.routes.messages, segment.plan.last_backwards
        if not any(messages[k].producer in last for k in received):
            return
        run = self.runs[segment.seats[block.job]]
        iteration = now.iteration - (self.reads_late and not run.needs_metric)
        for parcel in received.values():
            if not math.isnan(parcel.loss) and run.reported < iteration:
                run.reported = iteration
                self.worker.on_loss(run, iteration, parcel.loss)
        if run.job.life.stopping:
            run.stop_after(now.iteration)

    def _following(self, number: int) -> Announcement | None:
        """What comes after the segment that is over; None at the end of the run."""
        for job in self.course.now.seats:
            run = self.runs[job]
            if not run.local:  # nothing of it is here to count
                run.updates = run.begin - run.start
        if self.device == 0 and self.post.swap.number < number:
            self._announce(self.wish or self.planner.poll(self.course.now))
        found = self.announced or self._told()
        self.announced = None
        if found.halts:
            for run in self.runs:
                run.stop_after(run.begin - 1)
        return None if found.halts or found.change is None else found

    def _begin(self, found: Announcement) -> None:
        """Append the next segment; counts follow from what rank 0 knew, not from what this does."""
        if self.device:
            self.planner.join(found.joined)
            self.capacity.take(found.sizes)  # a first forward may have failed here alone
        for job in set(self.course.now.seats).difference(found.change.seats):
            self.unseat(job)
        segment = self.course.follow(found.change)
        for seat, job in enumerate(segment.seats):
            segment.count[seat] = max(0, found.ends[job] - segment.first[seat])

    def _whereabouts(self) -> str:
        if self.now is None:
            return "between two segments, or at the end"
        block = self.course.now.plan.blocks[self.now.operation]
        slot = self.post.waiting_for
        missing = "" if slot is None else f", which waits for the {slot}"
        return f"in cycle {self.now.cycle} before {block}{missing}"
