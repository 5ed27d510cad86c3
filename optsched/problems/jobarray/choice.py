"""Which jobs of an array recompute, where the solver chooses: answers, schedules, bounds.

An answer is that of the array with this choice, and one more row: 1 for every job that recomputes.
A schedule is always of one choice; its ``provenance["recompute"]`` says which.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from optsched.errors import InputError
from optsched.model.schedule import Rows
from optsched.problems.jobarray.graph import overflows
from optsched.problems.jobarray.tradeoff import tradeoff

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.model.schedule import Schedule
    from optsched.problems.jobarray.problem import JobArray
    from optsched.problems.jobarray.tradeoff import Flags


def with_choice(answer: Rows, recompute: Sequence[bool]) -> Rows:
    """The answer to the array with this choice as an answer to the array that leaves it open."""
    row = np.array(recompute, np.int64)
    indptr = np.append(answer.indptr, answer.indptr[-1] + len(row))
    return Rows(indptr, np.concatenate([answer.ids, row]))


def without_choice(array: JobArray, answer: Rows) -> tuple[JobArray, Rows]:
    """The array with the choice of an answer, and the answer to it.

    Raises
    ------
    InputError
        The last row is no choice.
    """
    if len(answer.indptr) < 2:
        raise InputError("answer: has no last row that says which jobs recompute")
    row = answer[len(answer.indptr) - 2]
    if len(row) != array.n_jobs or not np.isin(row, (0, 1)).all():
        raise InputError(f"answer: expected {array.n_jobs} values 0 or 1 in its last row")
    indptr = answer.indptr[:-1]
    return choosing(array, row.astype(bool).tolist()), Rows(indptr, answer.ids[: indptr[-1]])


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


def scheduled(array: JobArray, answer: Rows) -> Schedule:
    """The schedule of an answer, with its choice in the provenance."""
    chosen, orders = without_choice(array, answer)
    schedule = chosen.scheduled(orders)
    assert schedule.sequences is not None
    assert schedule.start is not None
    provenance = {**schedule.provenance, "recompute": list(chosen.recomputes)}
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
