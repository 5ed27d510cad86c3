"""Jobs for free slots of a plan, and better orders for the jobs that remain."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np

from optsched.arraypipe.plan.plan import compile_plan, without
from optsched.arraypipe.plan.segments import Change
from optsched.arraypipe.runtime.stages import waits_for_all
from optsched.errors import InputError, OptschedError
from optsched.solving.progress import LOGGER

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from optsched.arraypipe.job import Job
    from optsched.arraypipe.plan.plan import ExecutionPlan
    from optsched.arraypipe.plan.segments import Segment
    from optsched.arraypipe.runtime.state import JobRun
    from optsched.model.schedule import Problem, Schedule
    from optsched.problems.jobarray.problem import JobArray


Refusal: TypeAlias = "Callable[[Change], str]"
"""Why a change cannot be made, or an empty string."""

TIME_LIMIT_S: Final = 5.0
"""For the solver."""


class Decision(NamedTuple):
    """What follows a segment, decided on the first rank.

    `plan` is None at the end of the run. `successors` are pairs (slot, ended job) of the jobs that
    `refill` gives: every rank calls it with that job, and makes what it returns. `refused` are
    waiting jobs that no slot can take, and why.
    """

    plan: ExecutionPlan | None
    slots: tuple[int, ...] = ()
    successors: tuple[tuple[int, int], ...] = ()
    cycles: int = 0
    refused: tuple[tuple[int, str], ...] = ()
    known: int | None = None  # on its way to other ranks: number of a segment with that plan


class Rescheduling:
    """Changes of plan and slots between segments: waiting jobs take free slots.

    ``start(job)`` makes the run of a new job on all ranks, appends it to `runs`, and returns None
    if it cannot be made; `strict`: raise when a job fails; `problem` is what the plan was made for,
    one job per slot (None: no re-planning).
    """

    def __init__(
        self,
        runs: Sequence[JobRun],
        plan: ExecutionPlan,
        start: Callable[[Job], JobRun | None],
        refill: Callable[[Job], Job | None] | None,
        refusal: Refusal,
        strict: bool,
        problem: JobArray | None,
    ) -> None:
        self.runs, self.start, self.refill = runs, start, refill
        self.refusal, self.strict, self.problem = refusal, strict, problem
        self.waiting = list(range(plan.n_jobs, len(runs)))
        self.replaced: set[int] = set()  # ended jobs; their slot has been given away, or stays free
        self.given: dict[int, Job] = {}  # by ended job: what `refill` has returned
        self.solver = Replanner()
        self.rows = {plan: tuple(range(plan.n_jobs))}  # job of the problem that a slot is made for
        self.sought = plan, self.rows[plan]  # live slots that the solver got, or need not get
        self.present = plan.schedule  # of these

    @property
    def waits(self) -> bool:
        """Whether a job is waiting, or may come, for a slot."""
        return bool(self.waiting) or self.refill is not None

    def decide(self, segment: Segment, cycles: int, interrupted: bool) -> Decision:
        """Return what follows a segment that is over; on the first rank alone."""
        if interrupted:
            return Decision(None)
        plan, slots, successors = segment.plan, list(segment.slots), []
        refused: dict[int, str] = {}
        for slot, job in enumerate(segment.slots):
            if job in self.replaced or not self.runs[job].over:
                continue
            self.replaced.add(job)
            waiting = self._waiting(plan, slot, tuple(slots), refused)
            if waiting is not None:
                slots[slot] = waiting
            elif self._refills(job, plan, slot):
                successors.append((slot, job))
        if tuple(slots) == segment.slots and not successors:
            better = self._improved(segment)
            if better is not None:
                plan, slots = better.plan, list(better.slots)
        if not successors and all(self.runs[job].over for job in slots):
            return Decision(None, refused=(*refused.items(),))
        return Decision(plan, tuple(slots), tuple(successors), cycles, (*refused.items(),))

    def carry_out(self, decision: Decision) -> Change | None:
        """Make the jobs that join, on every rank alike; return the change, None at the end."""
        for job, why in decision.refused:
            error = self.runs[job].fail(0, self.runs[job].start, why)
            if self.strict:
                raise error
        if decision.plan is None:
            return None
        slots = list(decision.slots)
        self.waiting = [job for job in self.waiting if job not in slots]
        for slot, ended in decision.successors:
            following = self.given.pop(ended, None)
            if following is None and self.refill is not None:
                following = self.refill(self.runs[ended].job)
            if following is None:
                raise InputError(
                    f"next_job: gave a job after {self.runs[ended].title} on the first rank and "
                    f"none on this one; it has to give the same job on all ranks"
                )
            made = self.start(following)
            if made is None:  # the next decision calls `refill` again
                self.replaced.discard(ended)
                continue
            change = Change(decision.plan, (*slots[:slot], made.index, *slots[slot + 1 :]))
            if not made.over and (why := self.refusal(change)):
                made.fail(0, made.start, why)
            if self.strict and made.job.error is not None:
                raise made.job.error
            slots[slot] = made.index
        return Change(decision.plan, tuple(slots))

    def close(self) -> None:
        """End the solver; let go of the run, which refers to this object."""
        self.solver.cancel()
        del self.start, self.refill, self.refusal

    def _waiting(
        self, plan: ExecutionPlan, slot: int, slots: tuple[int, ...], refused: dict[int, str]
    ) -> int | None:
        """The first job in the queue that fits a slot and its devices; notes those that do not."""
        for job in list(self.waiting):
            run = self.runs[job]
            if misfit(run.job, plan, slot):
                continue
            self.waiting.remove(job)
            if run.over:
                continue
            change = Change(plan, (*slots[:slot], job, *slots[slot + 1 :]))
            why = self.refusal(change)
            if not why:
                return job
            refused[job] = why
        return None

    def _refills(self, ended: int, plan: ExecutionPlan, slot: int) -> bool:
        """Return whether `refill` has a job for the slot of an ended one."""
        following = None if self.refill is None else self.refill(self.runs[ended].job)
        if following is None:
            return False
        if why := misfit(following, plan, slot):
            raise InputError(f"next_job: the job does not fit the slot that is free: {why}")
        self.given[ended] = following
        return True

    def _improved(self, segment: Segment) -> Change | None:
        """Return a better plan for the jobs that are left, as soon as there is one."""
        plan = segment.plan
        live = tuple([s for s, job in enumerate(segment.slots) if not self.runs[job].over])
        if self.problem is None or not live:
            return None
        if self.sought != (plan, live):  # begin to look for one
            ended = [slot for slot in range(plan.n_jobs) if slot not in live]
            self.sought = plan, live
            self.present = without(plan.schedule, ended) if ended else plan.schedule
            left = self.problem.subset([self.rows[plan][slot] for slot in live])
            self.solver.submit(left, self.present, TIME_LIMIT_S)
            return None
        answer = self.solver.poll()
        if answer is None:
            return None
        if isinstance(answer, str):
            _warn(f"re-planning failed, the present plan stays: {answer}")
            return None
        if self._gain(segment, live, _cycle(answer)) <= 0:
            return None
        together = [k for k, slot in enumerate(live) if slot in plan.together]
        try:
            change = Change(
                compile_plan(answer, together=together),
                tuple(segment.slots[slot] for slot in live),
            )
            why = self.refusal(change)
        except OptschedError as error:
            why = str(error)
        if why:
            _warn(f"the solver's plan is not adopted: {why}")
            return None
        rows = self.rows[plan]
        self.rows = {plan: rows, change.plan: tuple(rows[slot] for slot in live)}
        self.sought = change.plan, tuple(range(len(live)))
        return change

    def _gain(self, segment: Segment, live: tuple[int, ...], period: int) -> int:
        """Return time that a plan of this period would save in the cycles that are left.

        Less what is lost while the pipeline runs empty of the old plan and fills with the new one.
        """
        left = [(segment.plan.copies[slot], self.runs[segment.slots[slot]]) for slot in live]
        cycles = max(-(-(run.end - run.begin) // copies) for copies, run in left)
        present, cycle = self.present, _cycle(self.present)
        assert present.start is not None
        ends = present.start + present.duration + present.offset * cycle
        drain = max(0, int(np.max(ends, initial=0)) - cycle)
        return (cycle - period) * max(0, cycles) - drain


def misfit(job: Job, plan: ExecutionPlan, slot: int) -> str:
    """Return why a job cannot take a slot; an empty string if it can."""
    count = plan.microbatches[slot]
    if count != job.microbatches:
        return f"the schedule has {count} micro-batches, the job {job.microbatches}"
    if waits_for_all(job) and slot not in plan.together:
        return (
            f"it clips its gradients or adapts its learning rate to the loss: compile the plan "
            f"with together=[{slot}], or by trainer.plan()"
        )
    return ""


def _cycle(schedule: Schedule) -> int:
    return schedule.period or schedule.makespan


def _warn(sentence: str) -> None:
    logging.getLogger(LOGGER).warning("%s", sentence)


class Replanner:
    """Solves one problem at a time in a daemon thread; an error becomes a sentence."""

    def __init__(self) -> None:
        self._answer: list[Schedule | str] = []  # of the problem submitted last
        self._stop = threading.Event()

    def submit(self, problem: Problem, start: Schedule, time_limit: float) -> None:
        """Begin to solve a problem, instead of the one before if that is not done.

        The answer is never worse than the orders of `start`, a schedule of the same blocks.
        """
        self.cancel()
        given = (self._answer, self._stop, problem, start, time_limit)
        threading.Thread(target=_solve, args=given, name="re-planning", daemon=True).start()

    def poll(self) -> Schedule | str | None:
        """Return once the schedule that was found, or why there is none; never wait."""
        return self._answer.pop() if self._answer else None

    def cancel(self) -> None:
        """Stop the solver and forget its answer."""
        self._stop.set()
        self._answer, self._stop = [], threading.Event()


def _solve(
    answer: list[Any], stop: threading.Event, problem: Any, start: Schedule, time_limit: float
) -> None:
    try:
        from optsched.solving.result import PeriodicOrders
        from optsched.solving.solve import solve

        if not getattr(problem, "chooses", False):  # its arcs may be listed in another order
            orders = start.sequences
            assert orders is not None
            start = problem.scheduled(
                orders if start.period is None else PeriodicOrders(orders, start.offset)
            )
        result = solve(
            problem, time_limit=time_limit, workers=1, warm_start=start,
            stop=lambda _: stop.is_set(),
        )  # fmt: skip
        nothing = f"no schedule was found in {time_limit:g} s ({result.status})"
        answer.append(result.schedule or result.reason or nothing)
    except Exception as error:  # the training goes on without a better plan
        answer.append(f"{type(error).__name__}: {error}")
