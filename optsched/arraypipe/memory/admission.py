"""Whether the devices of a run have memory for another plan, or for a job that comes in."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from optsched.arraypipe.memory.budget import Limits, Room, StageBytes, budget
from optsched.arraypipe.memory.slots import layout_of
from optsched.arraypipe.memory.types import cycle_of, most_pinned
from optsched.arraypipe.plan.segments import places
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from optsched.arraypipe.memory.budget import MessageBytes
    from optsched.arraypipe.plan.segments import Change, Course, Segment
    from optsched.arraypipe.runtime.state import JobRun


class Admission:
    """Answers what a `Rescheduling` asks before it changes the plan or gives a seat away.

    At the seam of two segments every device finishes the iterations of the old one first, so that
    what their plans hold does not add up.

    Parameters
    ----------
    runs, course
        All jobs, and what is run.
    limits
        Of the memory; None: all states fit.
    settled
        Whether a state has to stay on its device: another rank cannot take it over, and neither can
        the slots of another device.
    messages
        Bytes of receive windows and outboxes of a device in a segment; None: not counted.
    """

    def __init__(
        self,
        runs: Sequence[JobRun],
        course: Course,
        limits: Limits | None,
        settled: bool,
        messages: Callable[[Segment, int], MessageBytes] | None = None,
    ) -> None:
        self.runs, self.course, self.limits = runs, course, limits
        self.settled, self.messages = settled, messages

    def refusal(self, change: Change, like: Mapping[int, int]) -> str:
        """Why a change cannot be made, as a sentence; ``""`` if it can.

        Parameters
        ----------
        change
            It may have jobs that have no seat yet.
        like
            For each of them the job whose place it takes.
        """
        segment, limits = self.course.segment(change), self.limits
        live = [seat for seat, job in enumerate(segment.seats) if not self.runs[job].over]
        if self.settled and (sentence := self._moved(segment, live)):
            return sentence
        if limits is None:
            return ""
        try:
            for job, other in like.items():
                run = self.runs[job]
                known = (job, 0) in limits.sizes
                sizes = () if known else (sum(layout_of(s, run.title).bytes) for s in run.stages)
                limits.take_in(job, sizes, other)
        except InputError as error:
            return str(error)
        found = (
            self._short(segment, live, device, room)
            for device, room in enumerate(limits.rooms)
            if room is not None
        )
        return next(filter(None, found), "")

    def _moved(self, segment: Segment, live: Sequence[int]) -> str:
        """A running job stays where its states are."""
        now = self.course.now
        if len(segment.plan.devices) != len(now.plan.devices):
            return (
                f"the new plan has {len(segment.plan.devices)} devices, the one that runs has "
                f"{len(now.plan.devices)}"
            )
        homes = {job: places(now.plan, seat) for seat, job in enumerate(now.seats)}
        for seat in live:
            job, wanted = segment.seats[seat], places(segment.plan, seat)
            if homes.get(job, wanted) != wanted:
                return (
                    f"the new plan has the stages of job {self.runs[job].title} on devices "
                    f"{wanted}; they are on {homes[job]} and cannot move while it is trained"
                )
        return ""

    def _short(self, segment: Segment, live: Sequence[int], device: int, room: Room) -> str:
        """What a device has too little of."""
        plan, seats, limits = segment.plan, segment.seats, self.limits
        assert limits is not None
        name = plan.devices[device]
        pairs, visits = cycle_of(plan, device, lambda seat: self._recomputes(seats[seat]))
        here = {k: (seats[seat], stage) for k, (seat, stage) in enumerate(pairs) if seat in live}
        if room.slots:
            fixed = [k for k, pair in here.items() if pair in room.fixed]
            need = most_pinned([v for v in visits if v.state in here], fixed)[0] + len(fixed)
            if need > room.slots:
                return (
                    f"memory: {need} states could not leave their slots on {name}, which has "
                    f"{room.slots}; use recompute=True"
                )
        needed = room.taken if room.slots else sum(limits.sizes[pair] for pair in here.values())
        as_known = tuple(limits.like.get(job, job) for job in seats)
        windows = outboxes = 0
        if self.messages is not None:
            windows, outboxes = self.messages(replace(segment, seats=as_known), device)(live)
        beside = {
            (seat, stage): limits.beside.get((as_known[seat], stage), StageBytes())._replace(
                recompute=self._recomputes(seats[seat])
            )
            for seat, stage in pairs
        }
        needed += budget(
            plan, device, [], room.limit, windows=windows, outboxes=outboxes, cuda=room.cuda,
            jobs=live, beside=beside,
        ).total  # fmt: skip
        if needed <= room.limit:
            return ""
        return f"memory: {name} would need {needed} bytes and has {room.limit}"

    def _recomputes(self, job: int) -> bool:
        return bool(self.runs[job].job.recompute)
