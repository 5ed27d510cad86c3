"""Quick bounds of quota plans: multipliers (the hull), the level all can reach, exact shares."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.problems.quota.data import linear_levels

if TYPE_CHECKING:
    from optsched.model.schedule import IntArray
    from optsched.problems.quota.data import PlanData, Table

_FAR: Final = 2**61
_SWEEPS: Final = 2
"""Over the types, each with its own multiplier."""


def lower_bound(plan: PlanData) -> int:
    """No answer costs less; localities, and which node is of which type, are left out.

    ``"sum"``: the Lagrangian dual of the budgets, at integer multipliers, which is the linear
    relaxation over the upper hulls. ``"max_min"`` and ``"makespan"``: the best level at which the
    smallest sizes of all jobs fit the GPUs; ``"proportional"``: largest remainders. The last
    three are exact with one type.
    """
    if not plan.jobs:
        return 0
    if plan.hands_out_all:
        return deviation(plan)
    if plan.highest:
        return level(plan)
    return multipliers(plan)[0]


def deviation(plan: PlanData) -> int:
    """The least sum of ``|unit * g - share|`` with all GPUs handed out, whatever the bounds say."""
    low, rest = np.divmod(plan.share, plan.resolution)
    missing = plan.total - int(low.sum())
    highest = np.sort(rest)[::-1][:missing]
    return int(rest.sum()) + int((plan.resolution - 2 * highest).sum())


def level(plan: PlanData) -> int:
    """The least cost that all jobs can keep to within the GPUs of all types together."""
    if plan.is_plain:
        low, high = plan.required_bounds
        best, worst = int(plan.costs(high).max()), int(plan.costs(low).max())
    else:
        table = plan.table
        best = int(np.minimum.reduceat(table.cost, table.ptr[:-1]).max())
        worst = int(table.cost.max())
    while best < worst:
        middle = (best + worst) // 2
        if int(sizes_within(plan, middle).sum()) <= plan.n_gpus:
            worst = middle
        else:
            best = middle + 1
    return worst


def sizes_within(plan: PlanData, cost: int) -> IntArray:
    """The smallest size of each job that costs at most so much, whatever its type.

    2^40 where there is none.
    """
    if not plan.is_plain:
        table = plan.table
        size = np.where(table.cost <= cost, table.size, 2**40)
        found: IntArray = np.minimum.reduceat(size, table.ptr[:-1])
        return found
    low, high = plan.required_bounds
    wanted, weights = -cost, plan.weights
    size = np.maximum(np.ceil(wanted * weights / plan.resolution).astype(np.int64), 1)
    # floats may be off by one: the definition decides
    size -= linear_levels(plan.resolution, weights, size - 1) >= wanted
    size += linear_levels(plan.resolution, weights, size) < wanted
    size = np.maximum(size, low)
    return np.where(size > high, 2**40, size)


def multipliers(plan: PlanData) -> tuple[int, IntArray]:
    """The best bound of the sum found, and the price of a GPU of each type that gives it."""
    table = plan.table
    price = np.zeros(len(plan.kinds), np.int64)
    best, best_price = dual(plan, price)[0], price.copy()
    dear = _dearest(table)
    for _ in range(_SWEEPS if len(price) > 1 else 1):
        for k, budget in enumerate(plan.budgets):
            low, high = 0, dear
            while low < high:
                price[k] = (low + high) // 2
                bound, used = dual(plan, price)
                if bound > best:
                    best, best_price = bound, price.copy()
                if int(used[k]) <= budget:
                    high = int(price[k])
                else:
                    low = int(price[k]) + 1
            price[k] = low
            bound = dual(plan, price)[0]
            if bound > best:
                best, best_price = bound, price.copy()
    return best, best_price


def dual(plan: PlanData, price: IntArray) -> tuple[int, IntArray]:
    """The bound at these prices, and the GPUs of each type that the cheapest options take."""
    table = plan.table
    picked, least = cheapest(table, price)
    used = np.bincount(table.kind[picked], weights=table.size[picked], minlength=len(price))
    spent = sum(p * g for p, g in zip(price.tolist(), plan.budgets, strict=True))
    return _sum(least) - spent, used.astype(np.int64)


def cheapest(table: Table, price: IntArray) -> tuple[IntArray, IntArray]:
    """Of every job the option with the least cost and price (of equals the first), and both."""
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


def _dearest(table: Table) -> int:
    """A price at which every job takes its smallest size."""
    begins = table.ptr[:-1]
    counts = np.diff(table.ptr)
    smallest = np.minimum.reduceat(table.size, begins)
    at_least = table.size == np.repeat(smallest, counts)
    cost = np.where(at_least, table.cost, np.iinfo(np.int64).max)
    base = np.repeat(np.minimum.reduceat(cost, begins), counts)
    step = table.size - np.repeat(smallest, counts)
    slope = (base - table.cost) // np.maximum(step, 1)
    return max(int(slope[step > 0].max(initial=0)), 0) + 1


def _sum(values: IntArray) -> int:
    """A sum that cannot wrap round."""
    if len(values) * float(np.abs(values).max(initial=0)) < 2**62:
        return int(values.sum())
    return sum(values.tolist())
