"""GPUs by tables on bare arrays: lexicographic levels and makespans.

All functions share these. ``ptr``: offsets of the rows of a table, shape (jobs + 1,), from 0 to the
number of entries; row j holds the integers of job j at minimum[j], minimum[j] + 1, ... GPUs, and is
not empty. ``minimum``: whole GPUs a job, shape (jobs,), or one number for all. ``budget``: GPUs to
share, at most 2**30; what no job may take or gains by stays unused. Returned are GPUs per job and a
`Certificate`. `InputError` names a value of a wrong type, shape or range, and minima that exceed
the budget together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from optsched.errors import InputError
from optsched.problems.quota.answer import runs
from optsched_solvers.quota.arguments import gpus, integers, row_pointers, spare
from optsched_solvers.quota.certificate import Certificate, Proof, exchange, ranked

if TYPE_CHECKING:
    from optsched_solvers.quota.arguments import IntArray
    from optsched_solvers.quota.certificate import Keys

LARGEST: Final = 2**61
"""Differences of larger levels could overflow."""


class Rows(NamedTuple):
    """Checked rows of a table."""

    ptr: IntArray
    value: IntArray
    minimum: IntArray
    spare: int
    """GPUs above all minima."""

    @property
    def lengths(self) -> IntArray:
        """GPUs of every job above its minimum, at most."""
        return np.diff(self.ptr) - 1

    def gains(self, between: int) -> IntArray:
        """Return what a GPU more adds at every entry; `between` at the last entries of rows."""
        gain = np.empty_like(self.value)
        np.subtract(self.value[1:], self.value[:-1], out=gain[:-1])
        gain[self.ptr[1:] - 1] = between
        return gain

    def job(self, at: int) -> int:
        """Return the row of an entry."""
        return int(np.searchsorted(self.ptr, at, "right")) - 1

    def reached(self, taken: IntArray) -> IntArray:
        """Return the value of every job with so many GPUs above its minimum."""
        values: IntArray = self.value[self.ptr[:-1] + taken]
        return values


def max_min_table(ptr: Any, value: Any, minimum: Any, budget: int) -> tuple[IntArray, Certificate]:
    """Return whole GPUs with the lexicographically largest sorted vector of tabulated levels.

    Where a table stands still and jumps (allowed sizes), lifting several jobs is a knapsack: the
    cheapest steps are taken, and where others might leave a better rest the certificate does not
    hold. The certificate is by exchange if all tables rise at every GPU, else of the lowest level
    and of the number of jobs on it.

    Parameters
    ----------
    value
        Integer levels, never falling, within 2**61.
    ptr, minimum, budget
        See the module.
    """
    rows = _rows(ptr, integers("value", value), minimum, budget)
    _check_monotone("level", rows, rows.value)
    taken, settled = _climbed(rows)
    quotas = rows.minimum + taken

    def check() -> Proof:
        proof = _levels(rows, quotas - rows.minimum)
        return proof._replace(holds=proof.holds and settled)

    return quotas, Certificate("lexicographic max-min of levels", check)


def makespan(ptr: Any, time: Any, minimum: Any, budget: int) -> tuple[IntArray, Certificate]:
    """Return whole GPUs that minimise the largest remaining time of the jobs, all running at once.

    `max_min_table` of the negative times: GPUs beyond those that the makespan needs shorten the
    longest of the other jobs, then the next. The certificate shows that no
    shorter makespan is within the budget.

    Parameters
    ----------
    time
        Integer times, never growing, 0 to 2**61.
    ptr, minimum, budget
        See the module.
    """
    given = integers("time", time)
    rows = _rows(ptr, given, minimum, budget)
    _check_monotone("time", rows, given)
    rows = rows._replace(value=-given)
    quotas = rows.minimum + _climbed(rows)[0]

    def check() -> Proof:
        level, lifted, stuck, spent = _lowest(rows, quotas - rows.minimum)
        return Proof(-level, -level, None, spent and (stuck > 0 or lifted >= 0), "fewest GPUs")

    return quotas, Certificate("makespan", check)


def _rows(ptr: Any, given: IntArray, minimum: Any, budget: int) -> Rows:
    """Check offsets, minima and budget."""
    most, ptr = gpus(budget), row_pointers(ptr, len(given))
    lo = integers("minimum", minimum, len(ptr) - 1)
    return Rows(ptr, given, lo, spare(lo, most))


def _check_monotone(what: str, rows: Rows, given: IntArray) -> None:
    """Refuse levels that fall, times that rise, and both out of range."""
    least, sign = (0, -1) if what == "time" else (-LARGEST, 1)
    for at in np.flatnonzero((given < least) | (given > LARGEST))[:1].tolist():
        low = "0" if what == "time" else "-2**61"
        raise InputError(f"job {rows.job(at)}: {what} {given[at]} is not in {low}..2**61")
    for at in np.flatnonzero(sign * rows.gains(0) < 0)[:1]:
        j = rows.job(at)
        g, side = int(rows.minimum[j] + at - rows.ptr[j]), "above" if sign < 0 else "below"
        raise InputError(
            f"job {j}: {what} {given[at + 1]} with {g + 1} GPUs is {side} {given[at]} with {g}"
        )


def _climbed(rows: Rows) -> tuple[IntArray, bool]:
    """Raise the levels lexicographically; GPUs above the minima, and whether no choice was open.

    The GPUs of all jobs with levels below a threshold are handed out, the highest that fits; of the
    jobs on it as many as possible are lifted, the cheapest first; the rest goes to jobs above it.
    """
    ptr, value, _, left = rows
    first = ptr[:-1]
    rises = np.flatnonzero(rows.gains(0))  # the last entries of plateaus
    ends = np.searchsorted(rises, ptr[1:]) - 1
    top = np.zeros(len(first), np.int64)
    some = (ends >= 0) & (rises[ends] >= first) if len(rises) else np.zeros(len(first), np.bool_)
    top[some] = rises[ends[some]] + 1 - first[some]
    taken = np.zeros(len(first), np.int64)
    active, settled = top > 0, True
    while left > 0 and active.any():
        jobs = np.flatnonzero(active)
        length = np.minimum(top[jobs] - taken[jobs], left + 1)
        if int(length.sum()) <= left:
            taken[jobs] = top[jobs]
            break
        keys = value[runs(first[jobs] + taken[jobs], length)]
        level = ranked(keys, left)
        lifts = np.add.reduceat(keys < level, np.cumsum(length) - length, dtype=np.int64)
        taken[jobs] += lifts
        left -= int(lifts.sum())
        active &= taken < top
        on = jobs[active[jobs] & (value[first[jobs] + taken[jobs]] == level)]
        at = first[on] + taken[on]
        above = rises[np.searchsorted(rises, at)] + 1
        order = np.lexsort((-value[above], above - at))
        costs = (above - at)[order]
        lifted = int(np.searchsorted(np.cumsum(costs), left, "right"))
        after = left - int(costs[:lifted].sum())
        if 0 < lifted < len(on) and 0 < after >= costs[lifted] - costs[lifted - 1]:
            settled = False
        taken[on[order[:lifted]]] += costs[:lifted]
        active[on[order[lifted:]]] = False
        active &= taken < top
        left = after
    return taken, settled


def _levels(rows: Rows, taken: IntArray) -> Proof:
    """Check levels by exchange if all rows rise at every GPU, else their lowest one.

    The order of exchange is level before, level after (higher first), job.
    """
    strict = bool((rows.gains(1) > 0).all())
    level, surplus, stuck, spent = _lowest(rows, taken)
    if not spent:
        return Proof(level, level, level, False, "exchange")
    if strict:

        def keys(job: IntArray, k: IntArray) -> Keys:
            at = rows.ptr[job] + k
            return rows.value[at], -rows.value[at + 1]

        total = min(rows.spare, int(rows.lengths.sum()))
        return Proof(level, level, level, exchange(keys, taken, rows.lengths, total), "exchange")
    kept = int((rows.reached(taken) == level).sum())
    holds = not len(taken) or 0 < kept == stuck + surplus
    return Proof(level, level, level, holds, "bottleneck exchange")


def _lowest(rows: Rows, taken: IntArray) -> tuple[int, int, int, bool]:
    """Return the lowest level, how many jobs must stay on it, and whether the GPUs are there.

    Of the jobs that must stay: those that the GPUs left cannot lift if the cheapest are lifted (-1
    if they lift all, so that the level itself could be higher), and those at their top.
    """
    lengths = rows.lengths
    inside = bool(((taken >= 0) & (taken <= lengths)).all())
    if not inside or int(taken.sum()) > rows.spare or not len(taken):
        return 0, 0, 0, inside and not len(taken)
    level = int(rows.reached(taken).min())
    first = rows.ptr[:-1]
    below = np.minimum(np.add.reduceat(rows.value < level, first, dtype=np.int64), lengths)
    within = np.add.reduceat(rows.value <= level, first, dtype=np.int64)
    on = rows.reached(below) == level
    stuck = int((on & (within > lengths)).sum())
    costs = np.sort((within - below)[on & (within <= lengths)])
    left = rows.spare - int(below.sum())
    remaining = len(costs) - int(np.searchsorted(np.cumsum(costs), left, "right"))
    return level, remaining if remaining or stuck else -1, stuck, True


__all__ = ["makespan", "max_min_table"]
