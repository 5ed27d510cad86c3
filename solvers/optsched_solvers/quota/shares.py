"""Shares of GPUs by weights on bare arrays: weighted max-min, Webster, largest remainders.

Step k of job j, from k to k + 1 GPUs, has the key k / w_j (max-min: the level of the job before),
(2k + 1) / w_j (Webster), or k - q_j (largest remainders, q_j the exact share); the steps with the
smallest keys are taken. The level at which they fill the budget is found by bisection; steps near
it are compared in integers. Weights are integers up to 2**32, quotas up to 2**30.

All functions share these. ``budget``: GPUs to share, at most 2**30. ``minimum``, ``maximum``: whole
GPUs a job, shape (jobs,), or one number for all. Returned are GPUs per job and a `Certificate`.
`InputError` names a value of a wrong type, shape or range, a minimum above its maximum, and minima
that exceed the budget together.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from optsched.errors import InputError
from optsched.problems.quota.answer import runs
from optsched.problems.quota.options import clipped, exact_sum, quantised, without_zeros
from optsched_solvers.quota.arguments import gpus, integers, reals, spare
from optsched_solvers.quota.certificate import Certificate, Proof, exchange, smallest

if TYPE_CHECKING:
    import numpy.typing as npt

    from optsched.problems.quota.options import Shares
    from optsched_solvers.quota.arguments import FloatArray, IntArray
    from optsched_solvers.quota.certificate import Keys

_TINY: Final = 2.0**-40
"""Below the smallest positive key, 2**-32."""


def admit(order: Any, minimum: Any, budget: int) -> npt.NDArray[np.bool_]:
    """Admit jobs by first fit: in the given order every job with a minimum that fits.

    A job that does not fit is skipped, and smaller jobs behind it may still be admitted. `order`
    holds ids, each at most once; jobs that it leaves out are not admitted. Returns booleans, shape
    (jobs,).
    """
    left, lo, ids = gpus(budget), integers("minimum", minimum), integers("order", order)
    n = len(lo)
    for j in np.flatnonzero(lo < 0)[:1]:
        raise InputError(f"job {j}: minimum {lo[j]} is negative")
    for at in np.flatnonzero((ids < 0) | (ids >= n))[:1]:
        raise InputError(f"order: job {ids[at]} at place {at} is unknown: jobs are 0..{n - 1}")
    if len(ids) and np.bincount(ids).max() > 1:
        at = int(np.setdiff1d(np.arange(len(ids)), np.unique(ids, return_index=True)[1])[0])
        raise InputError(f"order: job {ids[at]} at place {at} is named twice")
    admitted = np.zeros(n, bool)
    ids = ids[lo[ids] <= left]
    while len(ids):  # every round drops one job at least
        used = np.cumsum(lo[ids])
        fits = int(np.searchsorted(used, left, "right"))
        admitted[ids[:fits]] = True
        left -= int(used[fits - 1])
        ids = ids[fits:]
        ids = ids[lo[ids] <= left]
    return admitted


def max_min(weights: Any, budget: int, minimum: Any, maximum: Any) -> tuple[IntArray, Certificate]:
    """Return whole GPUs g with the lexicographically largest sorted vector g_j / w_j.

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
    given, lo, hi, total = _checked("weights", weights, budget, minimum, maximum)
    for j in np.flatnonzero(given == 0)[:1]:
        raise InputError(f"job {j}: weight {given[j]} is not a finite number > 0")
    w = np.maximum(quantised(given)[0], 1)
    g = _filled(w, lo, hi, total, 0)

    def check() -> Proof:
        holds = exchange(partial(_keys, w, lo, 0), g - lo, hi - lo, total - int(lo.sum()))
        level, left = g / given, g < hi
        value = float(level.min(initial=math.inf)) if len(g) else 0.0
        price = float(level[left].min()) if left.any() else None
        return Proof(value, value, price, holds, "exchange")

    return g, Certificate("lexicographic max-min of g/w", check)


def proportional(
    scores: Any,
    budget: int,
    minimum: Any,
    maximum: Any,
    *,
    method: Literal["largest_remainder", "webster"] = "largest_remainder",
) -> tuple[IntArray, Certificate]:
    """Return whole GPUs in proportion to scores, within bounds (Sun & Huh 2026, eq. 31, exact).

    The real shares are q_j = clip(mu * S_j, minimum_j, maximum_j) with the mu at which they add up
    to min(budget, sum of maxima). Jobs of score 0 get their minimum, and share equally what is
    left when all others are at their maximum; if all scores are 0, all share equally. The price of
    the certificate is mu, or for Webster the first key left.

    Parameters
    ----------
    scores
        Not negative, shape (jobs,); compared at a resolution of 2**-32 of the largest: rounding
        decides between scores closer than that, and scores below about that count as 0.
    budget, minimum, maximum
        See the module.
    method
        ``"largest_remainder"`` minimises sum |g_j - q_j|: every share rounded down, the others to
        the largest fractions, ties by id. One GPU more in the budget can take a GPU from a job
        (the Alabama paradox), a needless restart. ``"webster"`` gives every GPU to the largest
        S_j / (2 g_j + 1) (Balinski & Young, Fair Representation), ties by id: no job ever loses by
        a larger budget. Take it when the same jobs share again and again.
    """
    if method not in ("largest_remainder", "webster"):
        raise InputError(f"method: expected largest_remainder or webster, got {method!r:.60}")
    given, lo, hi, total = _checked("scores", scores, budget, minimum, maximum)
    w, shift = quantised(given)
    w, lo, hi = without_zeros(w, lo, hi, total)
    steps = total - int(lo.sum())
    if method == "webster":
        g = _filled(w, lo, hi, total, 1)

        def check() -> Proof:
            holds = exchange(partial(_keys, w, lo, 1), g - lo, hi - lo, steps)
            left = g < hi
            price = float(((2 * g[left] + 1) / w[left]).min()) if left.any() else math.inf
            return Proof(total, total, _natural(price, shift), holds, "exchange")

        return g, Certificate("Webster apportionment", check)
    share = clipped(w, lo, hi, total)
    g = share.whole.copy()
    g[smallest((-share.part,), total - int(g.sum()))] += 1

    def distance() -> Proof:
        holds = _adds_up(share, w, lo, hi, total)
        keys = partial(_remainder_keys, share, lo)
        holds = holds and exchange(keys, g - lo, hi - lo, steps)
        parts = max(share.weight, 1)
        value = float(np.abs((g - share.whole) - share.part / parts).sum())
        price = share.gpus / share.weight if share.weight else math.inf
        return Proof(value, value, _natural(price, shift), holds, "exchange")

    return g, Certificate("sum |g - q|", distance)


def _checked(
    name: str, scores: Any, budget: int, minimum: Any, maximum: Any
) -> tuple[FloatArray, IntArray, IntArray, int]:
    """Return scores, bounds within the budget, and the GPUs to hand out."""
    most, given = gpus(budget), reals(name, scores)
    lo, hi = integers("minimum", minimum, len(given)), integers("maximum", maximum, len(given))
    for j in np.flatnonzero((lo > hi) & (lo >= 0))[:1]:
        raise InputError(f"job {j}: minimum {lo[j]} is above maximum {hi[j]}")
    spare(lo, most)
    hi = np.minimum(hi, most)
    return given, lo, hi, min(most, int(hi.sum()))


def _filled(w: IntArray, lo: IntArray, hi: IntArray, total: int, odd: int) -> IntArray:
    """Take the steps with the smallest keys (k, or 2 k + 1 if `odd`) / w, of jobs with w > 0."""
    n = len(w)
    if total >= int(hi.sum()) or total <= int(lo.sum()):
        return (hi if total >= int(hi.sum()) else lo).copy()
    weight = w.astype(np.float64)
    least, most = lo, hi  # of the steps with keys below `low` and `high` (halved if odd)
    low, high = 0.0, (total + 2.0) / float(weight[w > 0].min())
    while int((most - least).sum()) > 2 * n:
        level = math.sqrt(max(low, _TINY) * high)
        if not low < level < high:
            break
        g = np.clip(np.ceil(level * weight - odd / 2), lo, hi).astype(np.int64)
        if int(g.sum()) <= total:
            low, least = level, g
        else:
            high, most = level, g
    # products are below 2**32, so rounding moves no count by more than one step
    least, most = np.maximum(least - 1, lo), np.minimum(most + 1, hi)
    job = np.repeat(np.arange(n), most - least)
    keys = _keys(w, 0, odd, job, runs(least, most - least))
    chosen = smallest(keys, total - int(least.sum()))
    return least + np.bincount(job[chosen], minlength=n)


def _keys(w: IntArray, lo: IntArray | int, odd: int, job: IntArray, step: IntArray) -> Keys:
    """Return exact keys of steps above `lo`: fractions of up to 32 bits as digits of 32 + 60 bits.

    Different fractions differ by 2**-64 at least. Max-min: from equal levels the lighter job first.
    """
    k = step + (lo if isinstance(lo, int) else lo[job])
    weight = w[job]
    whole, part = np.divmod((2 * k + 1 if odd else k) << 32, weight)
    fine, part = np.divmod(part << 30, weight)
    digits = (fine << 30) + (part << 30) // weight
    return (whole, digits) if odd else (whole, digits, weight)


def _remainder_keys(share: Shares, lo: IntArray, job: IntArray, step: IntArray) -> Keys:
    """Return keys k - q as a whole number less a fraction."""
    return step + lo[job] - share.whole[job], -share.part[job]


def _adds_up(share: Shares, w: IntArray, lo: IntArray, hi: IntArray, total: int) -> bool:
    """Return whether the shares are clip(gpus / weight * w, lo, hi) and add up to the total."""
    parts = max(share.weight, 1)
    whole, part = np.divmod(share.gpus * w, parts)
    inside = (lo <= whole) & (whole < hi)
    right = np.array_equal(share.whole, np.clip(whole, lo, hi))
    right &= np.array_equal(share.part, np.where(inside, part, 0))
    held = int(share.whole.sum()) * parts + exact_sum(share.part)
    return (right or share.weight == 0) and held == total * parts


def _natural(value: float, shift: int) -> float | None:
    """Return a number per quantised score as a number per given score; None if infinite."""
    with np.errstate(over="ignore"):
        found = float(np.ldexp(value, shift))
    return found if math.isfinite(found) else None


__all__ = ["admit", "max_min", "proportional"]
