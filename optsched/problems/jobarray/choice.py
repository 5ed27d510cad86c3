"""Which jobs of an array recompute, where the solver chooses: solutions, schedules, bounds.

A solution says it in `recompute`; a schedule is always of one choice, and its
``provenance["recompute"]`` says which.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from optsched.errors import InputError
from optsched.problems.jobarray.bounds import tradeoff
from optsched.problems.jobarray.graph import overflows
from optsched.solving.solution import Orders, PeriodicOrders

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.model.schedule import Csr, Schedule
    from optsched.problems.jobarray.bounds import Flags
    from optsched.problems.jobarray.problem import JobArray


def with_choice(
    solution: Csr | PeriodicOrders, recompute: Sequence[bool]
) -> Orders | PeriodicOrders:
    """The solution of the array with this choice as one of the array that leaves it open."""
    chosen = tuple(map(bool, recompute))
    if isinstance(solution, PeriodicOrders):
        return replace(solution, recompute=chosen)
    return Orders(solution, chosen)


def choosing(array: JobArray, recompute: Sequence[bool]) -> JobArray:
    """The array with a choice, one bool per job."""
    return array.replace(recompute_mode=list(recompute))


def choice_of(array: JobArray, schedule: Schedule) -> list[bool]:
    """Which jobs recompute in a schedule, by its provenance.

    Raises
    ------
    InputError
        It does not say.
    """
    said: Any = schedule.provenance.get("recompute")
    right = isinstance(said, (list, tuple)) and all(isinstance(r, bool) for r in said)
    if not right or len(said) != array.n_jobs:
        raise InputError(
            f"does not say which jobs recompute: expected {array.n_jobs} times true or false as "
            "provenance.recompute"
        )
    return list(said)


def scheduled(array: JobArray, solution: Orders | PeriodicOrders) -> Schedule:
    """The schedule of a solution, with its choice in the provenance.

    Raises
    ------
    InputError
        It holds no choice, or one for another number of jobs.
    """
    chosen = getattr(solution, "recompute", None)
    if chosen is None or len(chosen) != array.n_jobs:
        raise InputError(f"recompute: expected {array.n_jobs} times true or false, got {chosen}")
    rolls = isinstance(solution, PeriodicOrders)
    orders = replace(solution, recompute=None) if rolls else solution.sequences
    schedule = choosing(array, chosen).scheduled(orders)
    assert schedule.sequences is not None
    assert schedule.start is not None
    provenance = {**schedule.provenance, "recompute": list(map(bool, chosen))}
    return schedule.with_orders(schedule.sequences, schedule.start, schedule.objective, provenance)


def bounds(array: JobArray) -> dict[str, int]:
    """Bounds that hold for every choice.

    Of one job the bounds of the better way. Of several those of the array in which recomputation
    takes neither time nor room where it is not `settled`: any schedule of any choice, with its
    blocks cut shorter, is one of that. And ``tradeoff``: no shares of jobs that recompute keep both
    the load and the bytes x time of every device lower (`Tradeoff.relaxed`).
    """
    must, never = settled(array)
    if array.n_jobs == 1:
        ways = [way for way in (False, True) if not (never if way else must).any()]
        found = [choosing(array, [way]).bounds() for way in ways or [False]]
        return min(found, key=lambda bounds: max(bounds.values()))
    free = ~(must | never)[:, None]
    least = np.where(free, np.minimum(array.activation, array.checkpoint), array.activation)
    relaxed = array.replace(recompute_mode=must.tolist(), activation=least).bounds()
    if array.memory.any():
        relaxed["tradeoff"] = int(np.ceil(tradeoff(array, must, never).relaxed()[0]))
    return relaxed


def settled(array: JobArray) -> tuple[Flags, Flags]:
    """Jobs that must recompute to fit even alone, and jobs that must not; bools of shape (K,)."""
    must, never = np.zeros((2, array.n_jobs), bool)
    if array.memory.any():
        must[list(overflows(array, [False] * array.n_jobs))] = True
        never[list(overflows(array, [True] * array.n_jobs))] = True
    return must, never
