"""Jobs for the free slots of a plan: those that are queued, and those that callbacks give."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from optsched.arraypipe.runtime.stages import waits_for_all
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from optsched.arraypipe.job import Job
    from optsched.arraypipe.plan.plan import ExecutionPlan
    from optsched.arraypipe.plan.segments import Segment
    from optsched.arraypipe.runtime.state import JobRun


Refusal: TypeAlias = "Callable[[tuple[int, ...]], str]"
"""Why jobs cannot take the slots of the plan, or an empty string."""


class Decision(NamedTuple):
    """What follows a segment, decided on the first rank.

    `slots` is None at the end of the run. `successors` are pairs (slot, ended job) of the jobs that
    `refill` gives: every rank calls it with that job, and makes what it returns. `refused` are
    waiting jobs that no slot can take, and why.
    """

    slots: tuple[int, ...] | None
    successors: tuple[tuple[int, int], ...] = ()
    cycles: int = 0
    refused: tuple[tuple[int, str], ...] = ()


class WaitingJobs:
    """Jobs that take free slots between segments.

    ``start(job)`` makes the run of a new job on all ranks, appends it to `runs`, and returns None
    if it cannot be made; `strict`: raise when a job fails.
    """

    def __init__(
        self,
        runs: Sequence[JobRun],
        plan: ExecutionPlan,
        start: Callable[[Job], JobRun | None],
        refill: Callable[[Job], Job | None] | None,
        refusal: Refusal,
        strict: bool,
    ) -> None:
        self.runs, self.plan, self.start, self.refill = runs, plan, start, refill
        self.refusal, self.strict = refusal, strict
        self.queue = list(range(plan.n_jobs, len(runs)))
        self.replaced: set[int] = set()  # ended jobs; their slot has been given away, or stays free
        self.given: dict[int, Job] = {}  # by ended job: what `refill` has returned

    @property
    def expected(self) -> bool:
        """Whether a job is queued, or may come, for a slot."""
        return bool(self.queue) or self.refill is not None

    def decide(self, segment: Segment, cycles: int, interrupted: bool) -> Decision:
        """What follows a segment that is over; on the first rank alone."""
        if interrupted:
            return Decision(None)
        slots, successors = list(segment.slots), []
        refused: dict[int, str] = {}
        for slot, job in enumerate(segment.slots):
            if job in self.replaced or not self.runs[job].over:
                continue
            self.replaced.add(job)
            queued = self._queued(slot, tuple(slots), refused)
            if queued is not None:
                slots[slot] = queued
            elif self._refills(job, slot):
                successors.append((slot, job))
        if not successors and all(self.runs[job].over for job in slots):
            return Decision(None, refused=(*refused.items(),))
        return Decision(tuple(slots), tuple(successors), cycles, (*refused.items(),))

    def carry_out(self, decision: Decision) -> tuple[int, ...] | None:
        """Make the jobs that join, on every rank alike; the jobs in the slots, None at the end."""
        for job, why in decision.refused:
            error = self.runs[job].fail(0, self.runs[job].start, why)
            if self.strict:
                raise error
        if decision.slots is None:
            return None
        slots = list(decision.slots)
        self.queue = [job for job in self.queue if job not in slots]
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
            slots[slot] = made.index
            if not made.over and (why := self.refusal(tuple(slots))):
                made.fail(0, made.start, why)
            if self.strict and made.job.error is not None:
                raise made.job.error
        return tuple(slots)

    def close(self) -> None:
        """Let go of the run, which refers to this object."""
        del self.start, self.refill, self.refusal

    def _queued(self, slot: int, slots: tuple[int, ...], refused: dict[int, str]) -> int | None:
        """The first job in the queue that fits a slot and its devices; notes those that do not."""
        for job in list(self.queue):
            run = self.runs[job]
            if misfit(run.job, self.plan, slot):
                continue
            self.queue.remove(job)
            if run.over:
                continue
            why = self.refusal((*slots[:slot], job, *slots[slot + 1 :]))
            if not why:
                return job
            refused[job] = why
        return None

    def _refills(self, ended: int, slot: int) -> bool:
        """Whether `refill` has a job for the slot of an ended one."""
        following = None if self.refill is None else self.refill(self.runs[ended].job)
        if following is None:
            return False
        if why := misfit(following, self.plan, slot):
            raise InputError(f"next_job: the job does not fit the slot that is free: {why}")
        self.given[ended] = following
        return True


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
