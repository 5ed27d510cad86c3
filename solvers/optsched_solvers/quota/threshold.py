"""Shares of GPUs by threshold search, on bare arrays: exact in microseconds, with certificates.

Every further GPU of every job has a key: the level that the job has without it, what it adds, or a
divisor. The GPUs with the smallest keys are handed out; the threshold is searched, so the time does
not depend on the budget.

All functions share these. ``budget``: GPUs to share, at most 2**30; what nobody may take or gains
by stays unused. ``minimum``, ``maximum``: whole GPUs a job, shape (jobs,), or one number for all.
``ptr``: offsets of the rows of a table, shape (jobs + 1,), from 0 to the number of entries; row j
holds the integers of job j at minimum[j], minimum[j] + 1, ... GPUs, and is not empty. Found are
whole GPUs, shape (jobs,), and a `Certificate`. `InputError` names a value of the wrong type, shape
or range, a minimum above its maximum, and minima that exceed the budget together.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from optsched.errors import InputError
from optsched_solvers.quota import threshold_shares as by_weight
from optsched_solvers.quota import threshold_tables as by_table
from optsched_solvers.quota.arrays import (
    Certificate,
    Proof,
    gpus,
    integers,
    reals,
    row_pointers,
    too_much,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from optsched_solvers.quota.arrays import FloatArray, IntArray

    Method = Literal["largest_remainder", "webster"]

REST_WORK: Final = 5 * 10**6
"""Limit of the programme for the rest of levels, about half a second: additions, each as dear as 32
words of a number."""
MAKESPAN_WORK: Final = 2 * 10**5
"""The same for makespans, which no rest matters to."""


def admit(order: Any, minimum: Any, budget: int) -> npt.NDArray[np.bool_]:
    """First fit: in the given order every job whose minimum fits what is left is admitted.

    A job that does not fit is passed over, and smaller ones behind it may still be admitted. Jobs
    that `order`, of ids that are each named at most once, leaves out are not admitted. Returns
    booleans, shape (jobs,).
    """
    left, lo, ids = gpus(budget), integers("minimum", minimum), integers("order", order)
    n = len(lo)
    for j in np.flatnonzero(lo < 0)[:1]:
        raise InputError(f"job {j}: minimum {lo[j]} is negative")
    for at in np.flatnonzero((ids < 0) | (ids >= n))[:1]:
        known = f"there are jobs 0..{n - 1}"
        raise InputError(f"order: job {ids[at]} at place {at} is unknown: {known}")
    if len(ids) and np.bincount(ids).max() > 1:
        at = int(np.setdiff1d(np.arange(len(ids)), np.unique(ids, return_index=True)[1])[0])
        raise InputError(f"order: job {ids[at]} at place {at} is named twice")
    admitted = np.zeros(n, bool)
    ids = ids[lo[ids] <= left]
    while len(ids):  # each turn passes over one size at least
        used = np.cumsum(lo[ids])
        fits = int(np.searchsorted(used, left, "right"))
        admitted[ids[:fits]] = True
        left -= int(used[fits - 1])
        ids = ids[fits:]
        ids = ids[lo[ids] <= left]
    return admitted


# by weights


def max_min(weights: Any, budget: int, minimum: Any, maximum: Any) -> tuple[IntArray, Certificate]:
    """Whole GPUs g whose sorted vector g_j / w_j is lexicographically largest.

    Progressive filling in integers: every GPU goes to a job of the lowest level g/w, among those
    to the one that it lifts highest (the lightest), then to the lowest id. The price of the
    certificate is the lowest level that could still be raised.

    Parameters
    ----------
    weights
        Positive, shape (jobs,); compared at a resolution of 2**-32 of the largest: rounding
        decides between weights closer than that, and smaller weights count as that part.
    budget, minimum, maximum
        See the module.
    """
    return _shared(by_weight.MAX_MIN, "weights", weights, budget, minimum, maximum)


def proportional(
    scores: Any, budget: int, minimum: Any, maximum: Any, *, method: Method = "largest_remainder"
) -> tuple[IntArray, Certificate]:
    """Whole GPUs in proportion to scores, within bounds (Sun & Huh 2026, eq. 31, made exact).

    The real shares are q_j = clip(mu * S_j, minimum_j, maximum_j) with the mu at which they add up
    to min(budget, sum of maxima). Jobs of score 0 get their minimum, and share equally what is
    left when all others are at their maximum; if all scores are 0, all share equally. The price of
    the certificate is mu, or for Webster the first key not served.

    Parameters
    ----------
    scores
        Not negative, shape (jobs,); compared at a resolution of 2**-32 of the largest: rounding
        decides between scores closer than that, and scores below about that count as 0.
    budget, minimum, maximum
        See the module.
    method
        ``"largest_remainder"`` minimises sum |g_j - q_j|: every share rounded down, the rest to
        the largest fractions, ties by id. One GPU more in the budget can take a GPU from a job
        (the Alabama paradox), a needless restart. ``"webster"`` gives every GPU to the largest
        S_j / (2 g_j + 1) (Balinski & Young, Fair Representation; a greedy in the sense of Fox
        1966), ties by id: no job ever loses by a larger budget. Take it when the same jobs share
        again and again.
    """
    if method not in ("largest_remainder", "webster"):
        raise InputError(f"method: expected largest_remainder or webster, got {method!r:.60}")
    rule = by_weight.WEBSTER if method == "webster" else by_weight.REMAINDER
    return _shared(rule, "scores", scores, budget, minimum, maximum)


def _shared(
    rule: int, name: str, scores: Any, budget: int, minimum: Any, maximum: Any
) -> tuple[IntArray, Certificate]:
    most = gpus(budget)
    given = reals(name, scores)
    n = len(given)
    lo, hi = integers("minimum", minimum, n), integers("maximum", maximum, n)
    jobs, g = np.empty((3, n), np.int64), np.empty(n, np.int64)
    facts, values = np.full(by_weight.FACTS, -1, np.int64), np.zeros(2)
    # there is no -0.0 in a sum
    arguments = rule, given + 0.0, lo, hi, most, jobs, g, facts, values
    if wrong := by_weight.share(*arguments):
        j = int(facts[by_weight.FAULT])
        if wrong == 1:
            sign = "> 0" if rule == by_weight.MAX_MIN else ">= 0"
            raise InputError(f"job {j}: {name[:-1]} {given[j]} is not a finite number {sign}")
        if wrong == 2:
            raise InputError(f"job {j}: minimum {lo[j]} is {_bad(lo[j], hi[j])}")
        raise InputError(too_much(lo, most))

    def check() -> Proof:
        by_weight.share(*arguments)
        shift = int(facts[by_weight.SHIFT])
        value, price = values.tolist()
        value = _natural(value, shift) if rule == by_weight.MAX_MIN else value
        worst = None if math.isinf(price) else _natural(price, shift)
        return Proof(value, value, worst, bool(facts[by_weight.HOLDS]), "exchange")

    return g, Certificate(_SHARED[rule], check)


_SHARED: Final = ("lexicographic max-min of g/w", "Webster apportionment", "sum |g - q|")


def _natural(value: float, shift: int) -> float:
    """A number per quantised score as a number per given score; infinite if too large."""
    try:
        return math.ldexp(value, shift)
    except OverflowError:
        return math.inf


def _bad(low: Any, high: Any) -> str:
    """What is wrong with a minimum."""
    return "negative" if low < 0 else f"above maximum {high}"


def continuous_shares(scores: Any, total: float, minimum: Any, maximum: Any) -> FloatArray:
    """Real shares clip(mu * S_j, minimum_j, maximum_j) that add up to a total.

    The rule of `proportional` without rounding, for real bounds; also for jobs of score 0. The
    total must lie between the sums of the minima and of the maxima.
    """
    s = reals("scores", scores)
    lo, hi = reals("minimum", minimum, len(s)), reals("maximum", maximum, len(s))
    goal = float(reals("total", [total], 1)[0])
    for name, values in (("score", s), ("minimum", lo), ("maximum", hi)):
        for j in np.flatnonzero(~((values >= 0) & np.isfinite(values)))[:1]:
            raise InputError(f"job {j}: {name} {values[j]} is not a finite number >= 0")
    for j in np.flatnonzero(lo > hi)[:1]:
        raise InputError(f"job {j}: minimum {lo[j]} is {_bad(lo[j], hi[j])}")
    slack = 1e-12 * max(1.0, float(hi.sum()))
    if not lo.sum() - slack <= goal <= hi.sum() + slack:
        raise InputError(
            f"total: expected {float(lo.sum()):g} (all minima) to {float(hi.sum()):g} (all maxima),"
            f" got {goal:g}"
        )
    if len(s) and s.max() > 0:
        s = s / s.max()
        if hi[s > 0].sum() + lo[s == 0].sum() <= goal:
            lo, s = np.where(s > 0, hi, lo), np.where(s > 0, 0.0, 1.0)
    else:
        s = np.ones(len(s))
    fixed = np.where(s > 0, np.nan, lo)
    while True:  # fix whichever side is larger; every turn fixes a job
        free = np.isnan(fixed)
        left, weight = goal - fixed[~free].sum(), s[free].sum()
        if not free.any():
            return fixed
        q = left * (s / weight)
        over, under = free & (q > hi), free & (q < lo)
        if not (over.any() or under.any()):
            return np.where(free, q, fixed)
        if (q - hi)[over].sum() >= (lo - q)[under].sum():
            fixed[over] = hi[over]
        else:
            fixed[under] = lo[under]


# by tables


def concave_sum(ptr: Any, value: Any, minimum: Any, budget: int) -> tuple[IntArray, Certificate]:
    """Whole GPUs that maximise the sum of concave utilities; every job gets at least its minimum.

    A GPU goes where it adds most (Fox 1966), ties by id, as long as it adds something. The price at
    which the wanted GPUs meet the budget is searched (Galil & Megiddo 1979; Frederickson & Johnson
    1982). The certificate is the Lagrangian dual bound at that price, over all entries and without
    use of concavity.

    Parameters
    ----------
    value
        Integer utilities, by increments that never grow.
    ptr, minimum, budget
        See the module.
    """
    given = integers("value", value)
    ptr, lo, spare = _rows(ptr, given, minimum, budget)
    n, spare = len(lo), min(spare, len(given) - len(lo))
    (taken, top, active), facts = np.zeros((3, n), np.int64), np.zeros(by_table.FACTS, np.int64)
    by_table.hand_out(by_table.SUM, ptr, given, spare, taken, top, active, facts)
    largest = max(int(facts[by_table.TOP]), -int(facts[by_table.BOTTOM]))
    if largest * (max(n, spare, len(given)) + 1) >= 2**61:
        raise InputError(
            f"value: utilities up to {largest} of {n} jobs and {spare} GPUs could overflow 63 "
            "bits; divide them all by a common factor"
        )
    if facts[by_table.FALLS]:
        owner = np.repeat(np.arange(n), np.diff(ptr))
        at = int(np.argmax((np.diff(given, 2) > 0) & (owner[2:] == owner[:-2])))
        j = int(owner[at])
        g, (a, b, c) = int(lo[j] + at - ptr[j]), given[at : at + 3]
        raise InputError(
            f"job {j}: utilities {a}, {b}, {c} at {g}, {g + 1}, {g + 2} GPUs are not concave; "
            "use `choice`"
        )

    def check() -> Proof:
        by_table.hand_out(by_table.PROVE_SUM, ptr, given, spare, taken, top, active, facts)
        total, holds, _, bound, price = facts[by_table.VALUE :].tolist()
        return Proof(total, bound, float(price), bool(holds), "dual bound")

    return lo + taken, Certificate("sum of utilities", check)


def max_min_table(ptr: Any, value: Any, minimum: Any, budget: int) -> tuple[IntArray, Certificate]:
    """Whole GPUs whose sorted vector of tabulated levels is lexicographically largest.

    Where a table stands still and jumps (allowed sizes), lifting several jobs is a knapsack; its
    rest is settled by a dynamic programme of bounded work, beyond which the cheapest steps are
    taken and the certificate does not hold. The certificate is by exchange if all tables rise at
    every GPU, else of the lowest level and of the number of jobs on it, the rest as the search
    found it.

    Parameters
    ----------
    value
        Integer levels, never falling, within 2**61.
    ptr, minimum, budget
        See the module.
    """
    g, look = _climbed("level", ptr, integers("value", value), minimum, budget)

    def check() -> Proof:
        level, strict, holds, _ = look()
        proof = "exchange" if strict else "bottleneck exchange and search"
        return Proof(level, level, level, holds, proof)

    return g, Certificate("lexicographic max-min of levels", check)


def makespan(ptr: Any, time: Any, minimum: Any, budget: int) -> tuple[IntArray, Certificate]:
    """Whole GPUs that minimise the largest remaining time of the jobs, all running at once.

    `max_min_table` of the negative times: the GPUs that no makespan depends on shorten the longest
    of the other jobs, then the next; its programme ends after some 10 ms here. The certificate says
    that no shorter makespan is within the budget.

    Parameters
    ----------
    time
        Integer times, never growing, 0 to 2**61.
    ptr, minimum, budget
        See the module.
    """
    g, look = _climbed("time", ptr, integers("time", time), minimum, budget)

    def check() -> Proof:
        level, _, _, lowest = look()
        return Proof(-level, -level, None, lowest, "fewest GPUs")

    return g, Certificate("makespan", check)


def _climbed(
    what: str, ptr: Any, given: IntArray, minimum: Any, budget: int
) -> tuple[IntArray, Callable[[], tuple[int, bool, bool, bool]]]:
    """GPUs a job by levels, or negative times, and what proves them.

    That gives the lowest level, whether all rows rise at every GPU, whether the answer is proved,
    and whether its lowest level is.
    """
    ptr, lo, spare = _rows(ptr, given, minimum, budget)
    n, times = len(lo), what == "time"
    value = np.negative(given) if times else given
    taken, base, active = (np.zeros(n, np.int64) for _ in range(3))
    facts = np.zeros(by_table.FACTS, np.int64)
    by_table.hand_out(by_table.CLIMB, ptr, value, spare, taken, base, active, facts)
    _check_levels(what, ptr, given, lo, facts)
    rest, settled = int(facts[by_table.REST]), True
    if rest >= 0:
        best = best_rest(ptr, value, base, active, rest, MAKESPAN_WORK if times else REST_WORK)
        settled = best is not None
        taken = taken if best is None else best

    def look() -> tuple[int, bool, bool, bool]:
        by_table.hand_out(by_table.PROVE, ptr, value, spare, taken, base, active, facts)
        _, _, _, strict, _, level, holds, lowest, _, _ = facts.tolist()
        return level, bool(strict), settled and bool(holds), bool(lowest)

    return lo + taken, look


def _rows(ptr: Any, given: IntArray, minimum: Any, budget: int) -> tuple[IntArray, IntArray, int]:
    """Checked offsets and minima, and the GPUs above all minima."""
    most, ptr = gpus(budget), row_pointers("ptr", ptr, len(given))
    lo = integers("minimum", minimum, len(ptr) - 1)
    if len(lo) and lo.min() < 0:
        j = int(np.argmin(lo))
        raise InputError(f"job {j}: minimum {lo[j]} is negative")
    # each at most the budget before they are added: the sum cannot overflow
    spare = most - int(lo.sum()) if len(lo) == 0 or lo.max() <= most else -1
    if spare < 0:
        raise InputError(too_much(lo, most))
    return ptr, lo, spare


def _check_levels(what: str, ptr: IntArray, given: IntArray, lo: IntArray, facts: IntArray) -> None:
    """Refuse levels that fall, times that rise, and both where they are out of range."""
    times, large = what == "time", by_table.LARGEST
    if facts[by_table.BOTTOM] < -large or facts[by_table.TOP] > (0 if times else large):
        least = 0 if times else -large
        at = int(np.argmax((given < least) | (given > large)))
        j = int(np.searchsorted(ptr, at, "right")) - 1
        raise InputError(
            f"job {j}: {what} {given[at]} is not in {'0' if times else '-2**61'}..2**61"
        )
    if facts[by_table.FALLS]:
        wrong = np.diff(given) * (-1 if times else 1) < 0
        wrong[ptr[1:-1] - 1] = False
        at = int(np.argmax(wrong))
        j = int(np.searchsorted(ptr, at, "right")) - 1
        g, side = int(lo[j] + at - ptr[j]), "above" if times else "below"
        raise InputError(
            f"job {j}: {what} {given[at + 1]} with {g + 1} GPUs is {side} {given[at]} with {g}"
        )


def best_rest(
    ptr: IntArray, value: IntArray, base: IntArray, active: IntArray, rest: int, most_work: int
) -> IntArray | None:
    """Entries per row whose sorted levels are lexicographically largest; None if too much work.

    A dynamic programme over GPUs. A vector of levels is one integer in base n + 1, whose digits
    count the jobs on every level, the lowest level first: the smallest integer is the best vector.

    Parameters
    ----------
    ptr, value
        Tables, as in `max_min_table`.
    base, active
        Entries reached, and 1 for every job that may still rise.
    rest
        GPUs to share among them.
    most_work
        Limit of the programme.
    """
    jobs = np.flatnonzero(active == 1)
    if len(jobs) * (rest + 1) > most_work:  # without even looking at the rows
        return None
    options: list[list[tuple[int, int]]] = []
    for j in jobs:
        row = value[ptr[j] + base[j] : ptr[j + 1]]
        rises = np.flatnonzero(np.diff(row) > 0) + 1
        sizes = [0, *rises[rises <= rest].tolist()]
        options.append([(k, int(row[k])) for k in sizes])
    levels = sorted({level for steps in options for _, level in steps})
    size = len(jobs) + 1
    words = 1 + len(levels) * size.bit_length() // 64
    additions = sum(len(steps) for steps in options) * (rest + 1)
    if additions * (1 + words // 32) > most_work:
        return None
    digit = {level: size ** (len(levels) - 1 - at) for at, level in enumerate(levels)}
    best = np.zeros(rest + 1, object)
    chosen = []
    for steps in options:
        better, pick = best + digit[steps[0][1]], np.zeros(rest + 1, np.int64)
        for k, level in steps[1:]:
            lifted = best[: rest + 1 - k] + digit[level]
            smaller = np.flatnonzero(lifted < better[k:])
            better[k + smaller] = lifted[smaller]
            pick[k + smaller] = k
        best = better
        chosen.append(pick)
    taken = base.copy()
    left = min(range(rest + 1), key=lambda b: best[b])
    for j, pick in zip(jobs[::-1], chosen[::-1], strict=True):
        taken[j] += pick[left]
        left -= int(pick[left])
    return taken


__all__ = [
    "admit", "concave_sum", "continuous_shares", "makespan", "max_min", "max_min_table",
    "proportional",
]  # fmt: skip
