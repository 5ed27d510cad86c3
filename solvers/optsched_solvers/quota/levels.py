"""Weighted max-min shares: nobody can gain but at the cost of somebody worse off."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from optsched.errors import InputError
from optsched_solvers.quota.certificate import Certificate
from optsched_solvers.quota.climbing import EXACT, LEVEL, REST, climb, falls, unbeaten
from optsched_solvers.quota.inputs import bounds, gpus, tables
from optsched_solvers.quota.lexicographic import best_rest
from optsched_solvers.quota.scores import natural, quantised
from optsched_solvers.quota.units import fill, smallest_taken

if TYPE_CHECKING:
    from optsched_solvers.quota.inputs import IntArray


@overload
def max_min(
    weights: Any, budget: int, minimum: Any, maximum: Any, *, certificate: Literal[False] = ...
) -> IntArray: ...
@overload
def max_min(
    weights: Any, budget: int, minimum: Any, maximum: Any, *, certificate: Literal[True]
) -> tuple[IntArray, Certificate]: ...
def max_min(
    weights: Any, budget: int, minimum: Any, maximum: Any, *, certificate: bool = False
) -> IntArray | tuple[IntArray, Certificate]:
    """Whole GPUs g whose sorted vector g_j / w_j is lexicographically largest.

    Progressive filling in integers: every GPU goes to a job of the lowest level g/w, among those
    to the one that it lifts highest (the lightest), then to the lowest id. The level is searched
    instead, so the time does not depend on the budget.

    Parameters
    ----------
    weights
        Positive, shape (jobs,); compared at a resolution of 2**-32 of the largest: rounding
        decides between weights closer than that, and smaller weights count as that part.
    budget
        GPUs to share, at most 2**30; what exceeds the sum of the maxima stays unused.
    minimum, maximum
        Whole GPUs a job, shape (jobs,), or one number for all.
    certificate
        Return a proof as well: its `price` is the lowest level that could still be raised.

    Returns
    -------
    IntArray, shape (jobs,), or a pair of it and a `Certificate`

    Raises
    ------
    InputError
        A value is of the wrong type or shape, a weight not positive, a minimum above its maximum,
        or the minima together above the budget.
    """
    budget = gpus(budget)
    w, shift = quantised("weights", weights, positive=True)
    lo, hi, least, most = bounds(minimum, maximum, budget, len(w))
    total = min(budget, most)
    g = np.empty(len(w), np.int64)
    fill(w, lo, hi, np.array([least, most]), total, 1, 0, 1, g)
    if not certificate:
        return g
    found = np.empty(2)
    holds = bool(smallest_taken(w, lo, hi, g, total, 1, 0, 1, found))
    raised, level = (natural(float(x), shift) for x in found)
    price = None if np.isinf(found[0]) else raised
    return g, Certificate("lexicographic max-min of g/w", level, level, price, holds, "exchange")


@overload
def max_min_table(
    ptr: Any, value: Any, minimum: Any, budget: int, *, certificate: Literal[False] = ...
) -> IntArray: ...
@overload
def max_min_table(
    ptr: Any, value: Any, minimum: Any, budget: int, *, certificate: Literal[True]
) -> tuple[IntArray, Certificate]: ...
def max_min_table(
    ptr: Any, value: Any, minimum: Any, budget: int, *, certificate: bool = False
) -> IntArray | tuple[IntArray, Certificate]:
    """Whole GPUs whose sorted vector of tabulated levels is lexicographically largest.

    GPUs that lift nobody stay unused. Where a table stands still and jumps (allowed sizes), lifting
    several jobs is a knapsack; its rest is settled by a dynamic programme of bounded work, beyond
    which the cheapest steps are taken and the certificate does not hold.

    Parameters
    ----------
    ptr
        Offsets of the rows, shape (jobs + 1,), from 0 to the number of values.
    value
        Row j holds the integer level of job j at minimum[j], minimum[j] + 1, ... GPUs, never
        falling, within 2**61.
    minimum
        Whole GPUs, shape (jobs,), or one number for all.
    budget
        GPUs to share, at most 2**30.
    certificate
        Return a proof as well: by exchange if all tables rise at every GPU, else of the lowest
        level and of the number of jobs on it, the rest as the search found it.

    Returns
    -------
    IntArray, shape (jobs,), or a pair of it and a `Certificate`

    Raises
    ------
    InputError
        A value is of the wrong type or shape, a row is empty or falls, or the minima exceed the
        budget.
    """
    budget = gpus(budget)
    rows, values, lo = tables(ptr, value, minimum, budget)
    facts = np.zeros(3, np.int64)
    wrong = falls(rows, values, facts)
    if wrong >= 0:
        row = values[rows[wrong] : rows[wrong + 1]]
        k = int(np.argmax(np.diff(row) < 0))
        raise InputError(
            f"job {wrong}: level {row[k + 1]} at {lo[wrong] + k + 1} GPUs is below {row[k]} at "
            f"{lo[wrong] + k}"
        )
    if len(values) and max(int(facts[0]), -int(facts[1])) > 2**61:
        raise InputError("value: expected levels within 2**61; divide them by a common factor")
    strict, spare = int(facts[2]), budget - int(lo.sum())
    taken, exact = climbed(rows, values, spare, facts)
    if not certificate:
        return lo + taken
    holds = exact and bool(unbeaten(rows, values, spare, taken, strict))
    level = int(facts[LEVEL])
    proof = "exchange" if strict else "bottleneck exchange and search"
    what = "lexicographic max-min of levels"
    return lo + taken, Certificate(what, level, level, level, holds, proof)


def climbed(
    rows: IntArray, values: IntArray, spare: int, facts: IntArray, *, most_work: int | None = None
) -> tuple[IntArray, bool]:
    """Entries per row, and whether they are the lexicographic optimum for certain.

    Parameters
    ----------
    most_work
        Doubts are settled by the dynamic programme within that limit; else by the cheapest steps.
    """
    n = len(rows) - 1
    taken, active, base = (np.zeros(n, np.int64) for _ in range(3))
    climb(rows, values, spare, taken, active, base, facts)
    if facts[EXACT] == 1:
        return taken, True
    settled = best_rest(rows, values, base, active, int(facts[REST]), most_work)
    return (taken, False) if settled is None else (settled, True)
