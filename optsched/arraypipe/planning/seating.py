"""Which job sits on which seat of a plan: waiting jobs take the place of those that have ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

from optsched.arraypipe.course import Change
from optsched.arraypipe.job import JobFailed
from optsched.arraypipe.stages import waits_for_all
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from optsched.arraypipe.job import Job
    from optsched.arraypipe.job_run import JobRun
    from optsched.arraypipe.plan import ExecutionPlan
    from optsched.arraypipe.planning.segments import Segment


Refusal: TypeAlias = "Callable[[Change, Mapping[int, int]], str]"
"""(change, new job -> the one whose place it takes) -> why it cannot be made, or nothing."""

UNMADE: Final = -1
"""Where a job begins that `refill` has given and that could not be made."""


class Seating:
    """Fills seats; a `Planner` of the course.

    Parameters
    ----------
    runs
        All jobs; those beyond the seats of the plan wait.
    plan
        The first plan; job j sits on seat j.
    start
        Makes the run of a new job and appends it to `runs`: ``start(job)``, or ``start(job, at)``
        if another rank has said from which iteration.
    refill
        Called with a job that has ended when none is waiting; may give another one.
    refusal
        Why the devices cannot make a change (`Admission.refusal`): a job that cannot take its seat
        therefore fails.
    strict
        Raise when a job fails.
    """

    def __init__(
        self,
        runs: Sequence[JobRun],
        plan: ExecutionPlan,
        start: Callable[..., JobRun],
        refill: Callable[[Job], Job | None] | None,
        refusal: Refusal | None = None,
        strict: bool = False,
    ) -> None:
        self.runs, self.start, self.refill = runs, start, refill
        self.refusal, self.strict = refusal, strict
        self.waiting = list(range(plan.n_jobs, len(runs)))
        self.joined: list[tuple[int, int]] = []  # by refill: after which job, from which iteration
        self.asked: set[int] = set()  # jobs that have ended and left their seat, or found no heir

    def poll(self, segment: Segment) -> Change | None:
        """Other jobs on the same plan, if a seat has become free and somebody wants it."""
        seats = list(segment.seats)
        for seat, job in enumerate(segment.seats):
            if job in self.asked or not self.runs[job].over:
                continue
            self.asked.add(job)
            heir = self._heir(self.runs[job], Change(segment.plan, tuple(seats)), seat)
            if heir is not None:
                seats[seat] = heir
        return None if tuple(seats) == segment.seats else Change(segment.plan, tuple(seats))

    def _heir(self, ended: JobRun, present: Change, seat: int) -> int | None:
        plan = present.plan
        for job in list(self.waiting):
            if fits_seat(self.runs[job].job, plan, seat):
                self.waiting.remove(job)
                if not self.runs[job].over and self.sits(present, seat, job):
                    return job
        while self.refill is not None and (following := self.refill(ended.job)) is not None:
            if not fits_seat(following, plan, seat):
                raise InputError(
                    f"refill: the job needs a seat with {following.microbatches} micro-batches"
                    f"{', and update blocks' if waits_for_all(following) else ''}; the one that "
                    f"has become free has {plan.microbatches[seat]}"
                )
            try:
                run = self.start(following)
            except Exception as error:
                if following.error is None or isinstance(error, JobFailed):  # told to raise
                    raise
                self.joined.append((ended.index, UNMADE))
                continue
            self.joined.append((ended.index, run.start))
            if not run.over and self.sits(present, seat, run.index):
                return run.index
            self.asked.add(run.index)  # its first forward has failed
            ended = run
        return None

    def sits(self, present: Change, seat: int, job: int) -> bool:
        """Whether the devices have room for a job on a seat; else it has failed."""
        seats = (*present.seats[:seat], job, *present.seats[seat + 1 :])
        like = {job: present.seats[seat]}
        why = "" if self.refusal is None else self.refusal(Change(present.plan, seats), like)
        if not why:
            return True
        run = self.runs[job]
        error = run.fail(0, run.start, why)
        if self.strict:
            raise error
        return False

    def join(self, rows: Sequence[tuple[int, int]]) -> None:
        """On another rank: take in the jobs that `refill` has given on the first one.

        Raises
        ------
        InputError
            It gives none here.
        """
        for ended, at in rows[len(self.joined) :]:
            run = self.runs[ended]
            following = self.refill(run.job) if self.refill is not None else None
            if following is None:
                raise InputError(
                    f"refill: gave a job after {run.title} on the first rank and none on this one; "
                    f"it has to give the same job on all ranks"
                )
            self.joined.append((ended, at))
            if at != UNMADE:
                self.start(following, at)


def fits_seat(job: Job, plan: ExecutionPlan, seat: int) -> bool:
    """Whether a job can take the place of another: equal micro-batches, and what updates need."""
    return job.microbatches == plan.microbatches[seat] and (
        not waits_for_all(job) or seat in plan.together
    )
