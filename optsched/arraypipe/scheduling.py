"""From a trainer to a schedule in one call: measure its blocks, solve for their order."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Final, cast

from optsched.errors import InputError, InternalError

if TYPE_CHECKING:
    from collections.abc import Callable

    from optsched.arraypipe.trainer import ArrayTrainer
    from optsched.model.schedule import Schedule
    from optsched.problems.jobarray.problem import JobArray

_PATIENCE: Final = 1800.0  # seconds that ranks wait for the measurements of the first one


def schedule_for(
    trainer: ArrayTrainer,
    devices: int | None = None,
    *,
    time_limit: float = 5.0,
    say: Callable[[str], object] = lambda line: None,
) -> Schedule:
    """A rolling schedule of a trainer's jobs by measured times.

    Of several processes (`torchrun`) all call it alike; the first one measures and solves, and the
    others get its schedule.

    Parameters
    ----------
    trainer
        Whose jobs.
    devices
        Number of them; stages next to each other share one. By default one per process, and one
        per stage if there is but one process.
    time_limit
        Seconds for the solver.
    say
        Called with a line of progress.

    Raises
    ------
    InputError
        There are more devices than stages.
    """
    import torch.distributed as dist

    grouped = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if grouped:
        from optsched.arraypipe.ranks.agreement import join, together

        join()
    n_stages = len(trainer.stages)
    count = devices or (dist.get_world_size() if grouped else n_stages)
    first = not grouped or dist.get_rank() == 0

    def found() -> Schedule | None:
        if not 1 <= count <= n_stages:
            raise InputError(
                f"devices: the model has {n_stages} stages, which cannot fill {count} devices"
            )
        return _solved(trainer, count, time_limit, say) if first else None

    if not grouped:
        return cast("Schedule", found())
    return cast("Schedule", together(found, _PATIENCE + time_limit, of_first=True))


def placed_problem(trainer: ArrayTrainer, devices: int) -> JobArray:
    """The trainer's problem with its stages on so many devices, neighbours together."""
    n_stages = len(trainer.stages)
    place = [stage * devices // n_stages for stage in range(n_stages)]
    profile = trainer.last_profile or trainer.profile()
    kind = "gpu" if profile.device.kind == "cuda" else "cpu"
    names = tuple(f"{kind}{d}" for d in range(devices))
    return trainer.problem(profile, place=place, devices=names)


def _solved(
    trainer: ArrayTrainer, devices: int, time_limit: float, say: Callable[[str], object]
) -> Schedule:
    from optsched.solving.solve import solve

    say(f"measuring {len(trainer.stages)} stages of {len(trainer.jobs)} jobs")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trainer.profile()
    if warned:
        say("times scatter, the schedule may be off; results do not depend on it")
    problem = placed_problem(trainer, devices)
    say(f"solving for the order of {problem.n_jobs} jobs, up to {time_limit:g} s")
    result = solve(problem, time_limit=time_limit)
    if result.schedule is None:
        raise InternalError("the solver found no schedule")
    gap = "" if result.gap is None else f", at most {result.gap:.1%} above the best possible"
    say(f"period {problem.describe(result.objective or 0)}{gap}")
    return result.schedule
