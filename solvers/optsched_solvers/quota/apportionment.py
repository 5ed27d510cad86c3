"""Shares in proportion to scores within bounds: exactly rounded, by Webster's rule, or real."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from optsched.errors import InputError
from optsched_solvers.quota.certificate import Certificate
from optsched_solvers.quota.inputs import bounds, gpus, reals
from optsched_solvers.quota.remainders import nearest, round_shares, scored
from optsched_solvers.quota.scores import natural, quantised
from optsched_solvers.quota.units import fill, smallest_taken

if TYPE_CHECKING:
    from optsched_solvers.quota.inputs import FloatArray, IntArray

    Method = Literal["largest_remainder", "webster"]


@overload
def proportional(
    scores: Any, budget: int, minimum: Any, maximum: Any, *, method: Method = ...,
    certificate: Literal[False] = ...,
) -> IntArray: ...  # fmt: skip
@overload
def proportional(
    scores: Any, budget: int, minimum: Any, maximum: Any, *, method: Method = ...,
    certificate: Literal[True],
) -> tuple[IntArray, Certificate]: ...  # fmt: skip
def proportional(
    scores: Any, budget: int, minimum: Any, maximum: Any, *, method: Method = "largest_remainder",
    certificate: bool = False,
) -> IntArray | tuple[IntArray, Certificate]:  # fmt: skip
    """Whole GPUs in proportion to scores, within bounds (Sun & Huh 2026, eq. 31, made exact).

    The real shares are q_j = clip(mu * S_j, minimum_j, maximum_j) with the mu at which they add up
    to min(budget, sum of maxima). Jobs of score 0 get their minimum, and share equally what is
    left when all others are at their maximum; if all scores are 0, all share equally.

    Parameters
    ----------
    scores
        Not negative, shape (jobs,); compared at a resolution of 2**-32 of the largest: rounding
        decides between scores closer than that, and scores below about that count as 0.
    budget
        GPUs to share, at most 2**30.
    minimum, maximum
        Whole GPUs a job, shape (jobs,), or one number for all.
    method
        ``"largest_remainder"`` minimises sum |g_j - q_j|: every share rounded down, the rest to
        the largest fractions, ties by id. One GPU more in the budget can take a GPU from a job
        (the Alabama paradox), a needless restart. ``"webster"`` gives every GPU to the largest
        S_j / (2 g_j + 1) (Balinski & Young, Fair Representation; a greedy in the sense of Fox
        1966), ties by id: no job ever loses by a larger budget. Take it when the same jobs share
        again and again.
    certificate
        Return a proof as well; its `price` is mu, or for Webster the first key not served.

    Returns
    -------
    IntArray, shape (jobs,), or a pair of it and a `Certificate`

    Raises
    ------
    InputError
        A value is of the wrong type or shape, a score negative or NaN, a minimum above its
        maximum, or the minima together above the budget.
    """
    if method not in ("largest_remainder", "webster"):
        raise InputError(f"method: expected largest_remainder or webster, got {method!r:.60}")
    budget = gpus(budget)
    s, shift = quantised("scores", scores, positive=False)
    lo, hi, _, most = bounds(minimum, maximum, budget, len(s))
    total = min(budget, most)
    sums = np.empty(2, np.int64)
    scored(s, lo, hi, total, sums)
    g, price = np.empty(len(s), np.int64), np.zeros(2)
    if method == "webster":
        fill(s, lo, hi, sums, total, 2, 1, 0, g)
        if not certificate:
            return g
        holds = smallest_taken(s, lo, hi, g, total, 2, 1, 0, price)
        worst = None if np.isinf(price[0]) else natural(float(price[0]), shift)
        return g, Certificate("Webster apportionment", total, total, worst, bool(holds), "exchange")
    share = np.zeros(2, np.int64)
    round_shares(s, lo, hi, total, share, g)
    if not certificate:
        return g
    distance = np.zeros(1)
    holds = nearest(s, lo, hi, g, total, share[0], share[1], distance)
    mu = natural(float(share[0]) / float(share[1]), shift) if share[1] else None
    reached = float(distance[0])
    return g, Certificate("sum |g - q|", reached, reached, mu, bool(holds), "exchange")


def continuous_shares(scores: Any, total: float, minimum: Any, maximum: Any) -> FloatArray:
    """Real shares clip(mu * S_j, minimum_j, maximum_j) that add up to a total.

    The rule of `proportional` without rounding, for real bounds; also for jobs of score 0.

    Parameters
    ----------
    scores
        Not negative, shape (jobs,).
    total
        What the shares add up to: between the sums of the minima and of the maxima.
    minimum, maximum
        Not negative, shape (jobs,), or one number for all.

    Returns
    -------
    FloatArray, shape (jobs,)

    Raises
    ------
    InputError
        A value is of the wrong type or shape, negative or NaN, a minimum above its maximum, or the
        total out of reach.
    """
    s = reals("scores", scores)
    lo, hi = reals("minimum", minimum, len(s)), reals("maximum", maximum, len(s))
    goal = float(reals("total", [total], 1)[0])
    for name, values in (("score", s), ("minimum", lo), ("maximum", hi)):
        for j in np.flatnonzero(~((values >= 0) & np.isfinite(values)))[:1]:
            raise InputError(f"job {j}: {name} {values[j]} is not a finite number >= 0")
    for j in np.flatnonzero(lo > hi)[:1]:
        raise InputError(f"job {j}: minimum {lo[j]} is above maximum {hi[j]}")
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
