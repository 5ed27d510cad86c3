"""Which plan a sweep runs by, and whether the job of a trial can take a seat of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from optsched.arraypipe.plan import compile
from optsched.arraypipe.planning.repair import without
from optsched.arraypipe.planning.seating import fits_seat
from optsched.arraypipe.stages import waits_for_all
from optsched.errors import InputError
from optsched.model.schedule import Schedule
from optsched.solving.solve import solve

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.arraypipe.job import Job
    from optsched.arraypipe.plan import ExecutionPlan
    from optsched.arraypipe.trainer import ArrayTrainer

FORWARD: Final = 2
BACKWARD: Final = 4
UPDATE: Final = 1


def even_schedule(jobs: Sequence[Job], n_stages: int) -> Schedule:
    """A rolling schedule for stages and jobs that take equally long, one device per stage.

    Trials come and go, so the times of the first ones say little about the later ones. Updates are
    blocks of their own if one of these jobs clips its gradients.
    """
    from optsched.problems.jobarray.problem import JobArray

    waits = any(waits_for_all(job) for job in jobs)
    shape = (len(jobs), n_stages)
    problem = JobArray(
        [[FORWARD] * shape[1]] * shape[0],
        [[BACKWARD] * shape[1]] * shape[0],
        update=UPDATE if waits else 0,
        update_mode="global" if waits else "fused",
        update_blocks_gradient=True,
        micro_batches=[job.microbatches for job in jobs],
        objective="period",
        name=f"sweep of width {len(jobs)}",
    )
    found = solve(problem, "dispatch").schedule
    assert found is not None
    return found


def plan_of(trainer: ArrayTrainer, schedule: Schedule | None, width: int) -> ExecutionPlan:
    """The plan for the first jobs, which may be fewer than the seats of the schedule."""
    jobs = trainer.jobs
    if schedule is None:
        schedule = even_schedule(jobs, len(trainer.stages))
    elif len(jobs) < width:
        schedule = without(schedule, range(len(jobs), width))
    if not any(waits_for_all(job) for job in jobs):
        return trainer.plan(schedule)
    # whoever takes the seat later may clip its gradients too
    seats = sorted(set(schedule.job[schedule.kind == "U"].tolist()))
    return compile(schedule, together=seats, exact=trainer.exact)


class Seats:
    """Who sits where, by who sat there before."""

    def __init__(self, plan: ExecutionPlan, jobs: Sequence[Job]) -> None:
        self.plan = plan
        self._of = {job: seat for seat, job in enumerate(jobs)}

    def take(self, job: Job, after: Job, number: int) -> None:
        """Give the seat of a job that has ended to another.

        Raises
        ------
        InputError
            It does not fit.
        """
        seat = self._of[job] = self._of[after]
        if fits_seat(job, self.plan, seat):
            return
        wanted = self.plan.microbatches[seat]
        if job.microbatches != wanted:
            raise InputError(
                f"suggest: trial {number} has {job.microbatches} micro-batches, and the seat that "
                f"is free has {wanted}; all jobs of a sweep must have equally many"
            )
        raise InputError(
            f"suggest: trial {number} clips its gradients or adapts its learning rate to the loss, "
            f"and the seat that is free has no update blocks that wait for all stages; let the "
            f"first {self.plan.n_jobs} trials do so too, or give a schedule of a JobArray with "
            f'update_mode="global" and clip by a large norm instead of not at all'
        )


def check_schedule(schedule: Schedule | None, width: int) -> None:
    """Refuse what is no schedule for so many jobs."""
    if schedule is None:
        return
    if not isinstance(schedule, Schedule):
        raise InputError(f"schedule: expected a Schedule, got {schedule!r:.60}")
    n_jobs = int(schedule.job.max(initial=-1)) + 1
    if n_jobs != width:
        raise InputError(f"schedule: has {n_jobs} jobs, expected as many as the width, {width}")
