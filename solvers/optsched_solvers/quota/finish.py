"""Smallest makespan: the last of all jobs ends as early as possible."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal, overload

import numpy as np

from optsched.errors import InputError
from optsched.kernels.compile import INT, READ, entry
from optsched_solvers.quota.certificate import Certificate
from optsched_solvers.quota.climbing import falls
from optsched_solvers.quota.inputs import gpus, tables
from optsched_solvers.quota.levels import climbed

if TYPE_CHECKING:
    from optsched_solvers.quota.inputs import IntArray

REST_WORK: Final = 2 * 10**5
"""Limit of the programme for the rest, which no makespan depends on; see `lexicographic`."""


@overload
def makespan(
    ptr: Any, time: Any, minimum: Any, budget: int, *, certificate: Literal[False] = ...
) -> IntArray: ...
@overload
def makespan(
    ptr: Any, time: Any, minimum: Any, budget: int, *, certificate: Literal[True]
) -> tuple[IntArray, Certificate]: ...
def makespan(
    ptr: Any, time: Any, minimum: Any, budget: int, *, certificate: bool = False
) -> IntArray | tuple[IntArray, Certificate]:
    """Whole GPUs that minimise the largest remaining time of the jobs, all running at once.

    Bisection on the makespan T, with the fewest GPUs of every job that end it by T. The GPUs that
    are left do not matter for T: they shorten the longest of the other jobs, then the next, so that
    the times in falling order are lexicographically smallest; GPUs that shorten nothing stay
    unused. Where tables stand still and then fall (allowed sizes) that rest is settled by a dynamic
    programme of bounded work (some 10 ms), beyond which the cheapest steps are taken.

    Parameters
    ----------
    ptr
        Offsets of the rows, shape (jobs + 1,), from 0 to the number of times.
    time
        Row j holds the integer time of job j with minimum[j], minimum[j] + 1, ... GPUs, not
        negative, never growing, at most 2**61.
    minimum
        Whole GPUs, shape (jobs,), or one number for all.
    budget
        GPUs to share, at most 2**30.
    certificate
        Return a proof as well: no shorter makespan is within the budget.

    Returns
    -------
    IntArray, shape (jobs,), or a pair of it and a `Certificate`

    Raises
    ------
    InputError
        A value is of the wrong type or shape, a row is empty or grows, a time negative, or the
        minima exceed the budget.
    """
    budget = gpus(budget)
    rows, times, lo = tables(ptr, time, minimum, budget, name="time")
    if len(times) and not 0 <= int(times.min()) <= int(times.max()) <= 2**61:
        at = int(np.argmin(times) if times.min() < 0 else np.argmax(times))
        j = int(np.searchsorted(rows, at, "right")) - 1
        raise InputError(f"job {j}: time {times[at]} is not in 0..2**61")
    levels, facts = -times, np.zeros(3, np.int64)
    wrong = falls(rows, levels, facts)
    if wrong >= 0:
        row = times[rows[wrong] : rows[wrong + 1]]
        k = int(np.argmax(np.diff(row) > 0))
        raise InputError(
            f"job {wrong}: time {row[k + 1]} with {lo[wrong] + k + 1} GPUs is above {row[k]} with "
            f"{lo[wrong] + k}"
        )
    spare = budget - int(lo.sum())
    taken, _ = climbed(rows, levels, spare, facts, most_work=REST_WORK)
    if not certificate:
        return lo + taken
    longest = int(times[rows[:-1] + taken].max(initial=0))
    holds = bool(_shortest(rows, times, spare, taken, longest))
    return lo + taken, Certificate("makespan", longest, longest, None, holds, "fewest GPUs")


@entry(INT, READ, READ, INT, READ, INT)
def _shortest(ptr, time, spare, taken, longest):  # type: ignore[no-untyped-def]
    """Whether all jobs end by `longest` within `spare` GPUs, and do not within less time."""
    need = spent = np.int64(0)
    stuck = False
    for j in range(len(taken)):
        i = ptr[j] + taken[j]
        if taken[j] < 0 or i >= ptr[j + 1] or time[i] > longest:
            return 0
        spent += taken[j]
        k = ptr[j]
        while k < ptr[j + 1] and time[k] >= longest:
            k += 1
        stuck = stuck or k == ptr[j + 1]
        need += k - ptr[j]
    return 1 if spent <= spare and (len(taken) == 0 or stuck or need > spare) else 0
