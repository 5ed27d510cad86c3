"""Options of the jobs of a quota plan as arrays: integer costs, bounds, exact shares."""

from __future__ import annotations

import math
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np

from optsched.errors import InputError
from optsched.io.strict_json import MAX_INTEGER
from optsched.problems.quota.job import of_kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from optsched.model.schedule import IntArray
    from optsched.problems.quota.job import QuotaJob

    FloatArray: TypeAlias = npt.NDArray[np.float64]

MOST_OPTIONS: Final = 2 * 10**7
"""Largest table of options; plans by bounds alone need none."""

_FAR: Final = 2**61
_STEPS: Final = 60
"""Of the search for prices, times the number of types squared."""
_TIGHT: Final = 1e-8
"""Part of the bound that the search for prices may miss."""


class Table(NamedTuple):
    """Options of all jobs (CSR by job), ascending by type, then size; size 0 first if allowed."""

    ptr: IntArray
    kind: IntArray
    size: IntArray
    cost: IntArray
    """Minimised: the sum, or the maximum over the jobs."""

    def rows(self) -> IntArray:
        """The job of every option."""
        return np.repeat(np.arange(len(self.ptr) - 1), np.diff(self.ptr))


Span: TypeAlias = "tuple[int, Sequence[int]]"
"""A type, and the sizes on it within the budget, ascending: a range or a tuple, never empty."""


def table_of(
    jobs: Sequence[QuotaJob],
    spans: Sequence[Sequence[Span]],
    kinds: Sequence[str],
    objective: str,
    resolution: int,
    share: IntArray | None = None,
) -> Table:
    """Return the options of a plan (`share`: of a proportional one); refuse costs beyond 2^53."""
    sizes: list[Sequence[int]] = []
    rows: list[tuple[int, int, int]] = []  # job, type, how many sizes
    numbers: list[Sequence[float]] = []
    field = {"sum": "utility", "max_min": "utility", "makespan": "rates"}.get(objective)
    for j, (job, span) in enumerate(zip(jobs, spans, strict=True)):
        if not job.must_run:
            sizes.append((0,))
            rows.append((j, 0, 1))
            numbers.append((job.idle,))
        for k, some in span:
            given = None if field is None else of_kind(getattr(job, field), kinds[k])
            sizes.append(some)
            rows.append((j, k, len(some)))
            numbers.append(some if given is None else given[: len(some)])
    of, kind, count = np.array(rows, np.int64).reshape(-1, 3).T
    row, n = np.repeat(of, count), int(count.sum())
    size = np.fromiter(chain.from_iterable(sizes), np.int64, n)
    number = np.fromiter(chain.from_iterable(numbers), np.float64, n)
    cost = _costs(jobs, objective, resolution, share, row, size, number)
    ptr = np.zeros(len(jobs) + 1, np.int64)
    np.cumsum(np.bincount(row, minlength=len(jobs)), out=ptr[1:])
    found = Table(ptr, np.repeat(kind, count), size, cost)
    for array in found:
        array.flags.writeable = False
    return found


def linear_levels(resolution: int, weights: FloatArray, sizes: IntArray) -> IntArray:
    """Return levels ``floor(resolution * g / w)`` of jobs without utilities."""
    found: IntArray = np.floor(resolution * sizes / weights).astype(np.int64)
    return found


def times_of(resolution: int, work: IntArray, rates: Sequence[float] | FloatArray) -> IntArray:
    """Return ``ceil(work / rate)`` with rates rounded to parts of `resolution`."""
    rate: IntArray = np.rint(resolution * np.asarray(rates)).astype(np.int64)
    return -((-work * resolution) // rate)


def _costs(
    jobs: Sequence[QuotaJob], objective: str, unit: int, share: IntArray | None, row: IntArray,
    size: IntArray, number: FloatArray,
) -> IntArray:  # fmt: skip
    if share is not None:
        off: IntArray = np.abs(unit * size - share[row])
        return off
    if objective == "makespan":
        work = np.array([job.work for job in jobs], np.int64)
        return times_of(unit, work[row], number)
    weight = np.array([job.weight for job in jobs])
    with np.errstate(over="ignore", invalid="ignore"):
        if objective == "sum":
            exact = -np.rint(number * (weight * unit)[row])
        else:
            exact = -np.floor(unit * number / weight[row])

    def where(at: int) -> str:
        job = jobs[int(row[at])]
        field = "idle" if size[at] == 0 else "weight" if job.utility is None else "utility"
        what = f"{number[at]:g}{' GPUs' * (field == 'weight')}"
        done = "times" if objective == "sum" else "divided by"
        return f"job {job.name!r}.{field}: {what} {done} the weight {job.weight:g}"

    fits = np.abs(exact) <= MAX_INTEGER
    if not fits.all():
        raise InputError(
            f"{where(int(np.argmin(fits)))} is beyond 2^53 at resolution {unit}; lower the "
            "resolution or the scale"
        )
    # a job that is worth something must not count as worth nothing
    worth = number != 0 if objective == "sum" else number > 0
    lost = np.bincount(row, worth, len(jobs)) > 0
    lost &= np.bincount(row, exact != 0, len(jobs)) == 0
    for j in np.flatnonzero(lost)[:1]:
        at = int(np.argmax(np.where(row == j, np.abs(number), -1.0)))
        raise InputError(
            f"{where(at)} counts as 0 at resolution {unit}; raise the resolution or the scale"
        )
    whole: IntArray = exact.astype(np.int64)
    return whole


# multipliers: the Lagrangian dual of the budgets


def multipliers(table: Table, budgets: Sequence[int]) -> tuple[int, IntArray]:
    """Return the best bound of the sum found, and the price of a GPU of each type that gives it.

    At integer prices, the bound is the linear relaxation over the upper hulls; localities, and
    which node is of which type, are left out. One price is found by cutting planes, several by the
    ellipsoid method with deep cuts (Bland, Goldfarb & Todd, Oper. Res. 29(6), 1981, section 4).
    """
    price = np.zeros(len(budgets), np.int64)
    best, used = _dual(table, budgets, price)
    best_price = price.copy()
    high = int(table.cost.max()) - int(table.cost.min()) + 1  # all take their smallest sizes
    if len(price) == 1:
        return _one_price(table, budgets, (0, best, int(used[0])), high)
    n = len(price)
    centre, shape = np.full(n, high / 2), np.eye(n) * math.sqrt(n) * high / 2
    for _ in range(_STEPS * n * n):
        price = np.maximum(np.rint(centre), 0).astype(np.int64)
        bound, used = _dual(table, budgets, price)
        if bound > best:
            best, best_price = bound, price
        slope = (used - np.asarray(budgets)).astype(np.float64)
        lack = best - bound + float((slope * (price - centre)).sum())
        if centre.min() < 0:  # no price is negative
            slope, lack = (centre == centre.min()).astype(np.float64), -float(centre.min())
        turned = (shape * slope[:, None]).sum(axis=0)
        reach = math.sqrt(float((turned * turned).sum()))
        if reach - lack <= max(1.0, _TIGHT * abs(best)):
            break  # no price is better by more
        depth, turned = max(lack / reach, -1 / n), turned / reach
        step = (shape * turned).sum(axis=1)
        centre = centre + (1 + n * depth) / (n + 1) * step
        thinner = math.sqrt((n - 1) * (1 - depth) / ((n + 1) * (1 + depth)))
        shape -= (1 - thinner) * step[:, None] * turned
        shape *= math.sqrt(n * n / (n * n - 1) * (1 - depth * depth))
    return best, best_price


def _one_price(
    table: Table, budgets: Sequence[int], low: tuple[int, int, int], dearest: int
) -> tuple[int, IntArray]:
    """Meet the tangents of the concave dual at a price too low and one too high, or bisect.

    Of every price: the price, its bound, and the GPUs that the cheapest options take.
    """
    budget, turn = budgets[0], 0
    if low[2] <= budget:
        return low[1], np.zeros(1, np.int64)
    bound, used = _dual(table, budgets, np.array([dearest]))
    high = dearest, bound, int(used[0])
    while high[0] - low[0] > 1:
        up, down = low[2] - budget, high[2] - budget
        price = (low[0] + high[0]) // 2
        if up > down and turn % 3 < 2:
            price = (high[1] - low[1] + up * low[0] - down * high[0]) // (up - down)
        price, turn = min(max(price, low[0] + 1), high[0] - 1), turn + 1
        bound, used = _dual(table, budgets, np.array([price]))
        if used[0] > budget:
            low = price, bound, int(used[0])
        else:
            high = price, bound, int(used[0])
    best = high if high[1] >= low[1] else low
    return best[1], np.array([best[0]])


def _dual(table: Table, budgets: Sequence[int], price: IntArray) -> tuple[int, IntArray]:
    """Bound at these prices, and GPUs of each type that the cheapest options take."""
    picked, least = cheapest(table, price)
    used = np.bincount(table.kind[picked], weights=table.size[picked], minlength=len(price))
    spent = sum(p * g for p, g in zip(price.tolist(), budgets, strict=True))
    return exact_sum(least) - spent, used.astype(np.int64)


def cheapest(table: Table, price: IntArray) -> tuple[IntArray, IntArray]:
    """Return the first option of every job with the least cost plus price, and that sum."""
    begins = table.ptr[:-1]
    if len(price) == 1:  # the cap keeps within 64 bits; it only lowers the bound
        rate = int(price[0])
        paid: Any = np.minimum(table.size, _FAR // max(rate, 1)) * rate
    else:
        rates = price[table.kind]
        paid = np.minimum(table.size, _FAR // np.maximum(rates, 1)) * rates
    reduced = table.cost + paid
    least = np.minimum.reduceat(reduced, begins)
    best = np.flatnonzero(reduced == np.repeat(least, np.diff(table.ptr)))
    return best[np.searchsorted(best, begins)], least


def exact_sum(values: IntArray) -> int:
    """Sum exactly, without overflow."""
    if len(values) * float(np.abs(values).max(initial=0)) < 2**62:
        return int(values.sum())
    return sum(values.tolist())


# shares of the proportional rule: q = clip(mu S, low, high) with a given sum


class Shares(NamedTuple):
    """Exact shares ``whole + part / weight``; without clipping ``gpus * w / weight``."""

    whole: IntArray
    part: IntArray
    gpus: int
    """GPUs that the jobs strictly between their bounds share."""
    weight: int
    """Sum of their weights; 0 if all jobs are at a bound."""


def quantised(scores: Sequence[float] | FloatArray) -> tuple[IntArray, int]:
    """Return scores times a power of two, rounded, the largest in 2^31 + 1..2^32; its exponent.

    A power of two keeps the ratios of whole numbers exact.
    """
    given = np.asarray(scores, np.float64)
    most = float(given.max(initial=0.0))
    if most == 0.0:
        return np.zeros(len(given), np.int64), 0
    mantissa, exponent = math.frexp(most)
    shift = 32 - exponent + (mantissa == 0.5)
    return np.floor(np.ldexp(given, shift) + 0.5).astype(np.int64), shift


def without_zeros(
    weights: IntArray, low: IntArray, high: IntArray, total: int
) -> tuple[IntArray, IntArray, IntArray]:
    """Apply the rule of zero weights: jobs with a decided share get weight 0 and equal bounds.

    These are the jobs of weight 0, or, if the others cannot use the total, the others at their
    maxima; then the jobs of weight 0 share equally what is left.
    """
    scored = weights > 0
    if int(np.where(scored, high, low).sum()) <= total:
        low, weights = np.where(scored, high, low), np.where(scored, 0, 1)
    return weights, low, np.where(weights > 0, high, low)


def clipped(weights: IntArray, low: IntArray, high: IntArray, total: int) -> Shares:
    """Return the exact shares clip(mu * weights, low, high) that add up to the total.

    Clip and recompute: fix the jobs of the side that is farther off, and repeat. Weights are at
    most 2^32 and the total 2^30, so that products fit into 63 bits.
    """
    whole, part = low.copy(), np.zeros(len(low), np.int64)
    free = np.flatnonzero(weights > 0)
    gpus = total - (int(low.sum()) - int(low[free].sum()))
    while len(free):
        weight = int(weights[free].sum())
        share, remainder = np.divmod(gpus * weights[free], weight)
        over = (share > high[free]) | ((share == high[free]) & (remainder > 0))
        under = share < low[free]
        off = over | under
        if not off.any():
            whole[free], part[free] = share, remainder
            return Shares(whole, part, gpus, weight)
        bound = np.where(over, high[free], low[free])
        excess = int((share - bound)[off].sum()) * weight + exact_sum(remainder[off])
        side = over if excess >= 0 else under
        whole[free[side]] = bound[side]
        gpus -= int(bound[side].sum())
        free = free[~side]
    return Shares(whole, part, gpus, 0)


def shares(scores: IntArray, low: IntArray, high: IntArray, total: int, unit: int) -> IntArray:
    """Return ``floor(unit * q)`` of the shares q of quantised scores, in parts of a GPU.

    Bounds must have ``sum(low) <= total <= sum(high)``.
    """
    found = clipped(*without_zeros(scores, low, high, total), total)
    fraction = found.part.astype(object) * unit // max(found.weight, 1)
    return unit * found.whole + fraction.astype(np.int64)
