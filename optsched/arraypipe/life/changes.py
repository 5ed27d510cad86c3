"""Who sits on which seat of a plan, and better orders for the jobs that are left."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

from optsched.arraypipe.job import JobFailed
from optsched.arraypipe.life.replanner import Replanner
from optsched.arraypipe.plan.orders import without
from optsched.arraypipe.plan.plan import compile
from optsched.arraypipe.plan.segments import Change
from optsched.arraypipe.runtime.stages import waits_for_all
from optsched.errors import InputError, OptschedError
from optsched.problems.jobarray.problem import JobArray
from optsched.solving.progress import LOGGER

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from optsched.arraypipe.job import Job
    from optsched.arraypipe.plan.plan import ExecutionPlan
    from optsched.arraypipe.plan.segments import Segment
    from optsched.arraypipe.runtime.state import JobRun
    from optsched.model.schedule import Schedule


Refusal: TypeAlias = "Callable[[Change, Mapping[int, int]], str]"
"""(change, new job -> the one whose place it takes) -> why it cannot be made, or nothing."""

UNMADE: Final = -1
"""Where a job begins that `refill` has given and that could not be made."""

TIME_LIMIT_S: Final = 5.0
"""For the solver."""


class Rescheduling:
    """Changes of plan and seats: waiting jobs take free ones, the rest may get better orders.

    ``start(job)`` makes the run of a new job and appends it to `runs`, ``start(job, at)`` if
    another rank has said from which iteration; `strict`: raise when a job fails; `problem` is what
    the plan was made for, one job per seat (None: no re-planning).
    """

    def __init__(
        self,
        runs: Sequence[JobRun],
        plan: ExecutionPlan,
        start: Callable[..., JobRun],
        refill: Callable[[Job], Job | None] | None,
        refusal: Refusal,
        strict: bool,
        problem: JobArray | None,
    ) -> None:
        seats = tuple(range(plan.n_jobs))
        self.runs, self.start, self.refill = runs, start, refill
        self.refusal, self.strict, self.problem = refusal, strict, problem
        self.waiting = list(range(plan.n_jobs, len(runs)))
        self.joined: list[tuple[int, int]] = []  # by refill: after which job, from which iteration
        self.asked: set[int] = set()  # jobs that have ended and left their seat, or found no heir
        self.solver = Replanner()
        self.rows = {plan: seats}  # job of the problem that a seat is made for
        self.given: Change | None = None  # what was answered last
        self.sought = plan, seats  # live seats that the solver was asked about, or need not be
        self.present = plan.schedule  # of these

    def poll(self, segment: Segment) -> Change | None:
        """The change that is wanted now, if any; never waits."""
        if self.given is not None and self.given != (segment.plan, segment.seats):
            return None  # the last one has not come into force yet
        change = self._seated(segment) or self._improved(segment)
        self.given = change or self.given
        return change

    def close(self) -> None:
        """End the solver."""
        self.solver.cancel()

    def _seated(self, segment: Segment) -> Change | None:
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
                if not self.runs[job].over and self._sits(present, seat, job):
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
            if not run.over and self._sits(present, seat, run.index):
                return run.index
            self.asked.add(run.index)  # its first forward has failed
            ended = run
        return None

    def _sits(self, present: Change, seat: int, job: int) -> bool:
        """Whether the devices have room for a job on a seat; else it has failed."""
        seats = (*present.seats[:seat], job, *present.seats[seat + 1 :])
        why = self.refusal(Change(present.plan, seats), {job: present.seats[seat]})
        if why:
            run = self.runs[job]
            error = run.fail(0, run.start, why)
            if self.strict:
                raise error
        return not why

    def join(self, rows: Sequence[tuple[int, int]]) -> None:
        """On another rank: take in the jobs that `refill` has given on the first one."""
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

    def _improved(self, segment: Segment) -> Change | None:
        """A better plan for the jobs that are left, as soon as there is one."""
        if self.problem is None:
            return None
        live = tuple([s for s, job in enumerate(segment.seats) if not self.runs[job].over])
        if not live:
            return None
        if self.sought != (segment.plan, live):
            self._seek(segment, live, self.problem)
            return None
        answer = self.solver.poll()
        if isinstance(answer, str):
            _warn(f"re-planning failed, the present plan stays: {answer}")
            return None
        return None if answer is None else self._adopted(segment, live, answer)

    def _seek(self, segment: Segment, live: tuple[int, ...], problem: JobArray) -> None:
        """Begin to look for a better plan, unless even the best could not pay any more."""
        plan = segment.plan
        ended = [seat for seat in range(plan.n_jobs) if seat not in live]
        self.sought = plan, live
        self.present = present = without(plan.schedule, ended) if ended else plan.schedule
        least = max(int(present.duration[row].sum()) for row in present.users.to_lists())
        self.solver.cancel()
        if self._gain(segment, live, least) > 0:
            left = problem.subset([self.rows[plan][seat] for seat in live])
            self.solver.submit(left, present, TIME_LIMIT_S)

    def _adopted(self, segment: Segment, live: tuple[int, ...], answer: Schedule) -> Change | None:
        """The solver's plan, if the time that it saves is more than changing over costs."""
        plan = segment.plan
        if self._gain(segment, live, _cycle(answer)) <= 0:
            return None
        together = [k for k, seat in enumerate(live) if seat in plan.together]
        try:
            better = compile(answer, barrier=plan.barrier, together=together)
        except OptschedError as error:
            _warn(f"the solver's plan cannot be run: {error}")
            return None
        change = Change(better, tuple(segment.seats[seat] for seat in live))
        if why := self.refusal(change, {}):
            _warn(f"the solver's plan is not adopted: {why}")
            return None
        rows = self.rows[plan]
        self.rows = {plan: rows, better: tuple(rows[seat] for seat in live)}
        self.sought = better, tuple(range(len(live)))
        return change

    def _gain(self, segment: Segment, live: tuple[int, ...], period: int) -> int:
        """Time that a plan of this period would save in the cycles that are left.

        Less what is lost while the pipeline runs empty of the old plan and fills with the new one.
        """
        left = [(segment.plan.copies[seat], self.runs[segment.seats[seat]]) for seat in live]
        cycles = max(
            -(-(run.end - run.start - run.updates // max(1, run.local)) // copies)
            for copies, run in left
        )
        present, cycle = self.present, _cycle(self.present)
        assert present.start is not None
        ends = present.start + present.duration + present.offset * cycle
        drain = max(0, int(np.max(ends, initial=0)) - cycle)
        return (cycle - period) * max(0, cycles) - drain


def check_problem(problem: JobArray, plan: ExecutionPlan) -> None:
    """Refuse a job array that is not the one of a plan."""
    if not isinstance(problem, JobArray):
        raise InputError(f"replan: expected the JobArray of the schedule, got {problem!r:.60}")
    try:
        problem.answer(plan.schedule)
    except OptschedError as error:
        raise InputError(f"replan: the schedule is not one of this JobArray ({error})") from error


def fits_seat(job: Job, plan: ExecutionPlan, seat: int) -> bool:
    """Whether a job can take the place of another: equal micro-batches, and what updates need."""
    return job.microbatches == plan.microbatches[seat] and (
        not waits_for_all(job) or seat in plan.together
    )


def _cycle(schedule: Schedule) -> int:
    return schedule.period or schedule.makespan


def _warn(sentence: str) -> None:
    logging.getLogger(LOGGER).warning("%s", sentence)
