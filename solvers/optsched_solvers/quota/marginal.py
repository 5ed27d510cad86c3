"""Greedy quotas at the prices of the hull, in plain NumPy: every backend's first idea."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from optsched.problems.quota.bounds import cheapest, level, multipliers, sizes_within
from optsched_solvers.quota.ground import fill

if TYPE_CHECKING:
    from optsched.model.schedule import IntArray
    from optsched.problems.quota.problem import QuotaPlan


def greedy(plan: QuotaPlan) -> tuple[IntArray, IntArray] | None:
    """Quotas and types within the budgets; None if jobs that must run did not all fit."""
    zeros = np.zeros(len(plan.jobs), np.int64)
    if not plan.jobs:
        return zeros, zeros
    if plan.hands_out_all:
        return remainders(plan), zeros
    if plan.highest:
        best = level(plan)
        if len(plan.kinds) == 1:
            return fill(plan, sizes_within(plan, best), zeros)
        return _lowest_level(plan, best)
    return _by_price(plan)


def remainders(plan: QuotaPlan) -> IntArray:
    """Largest remainder on the shares, ties by id."""
    sizes, rest = np.divmod(plan.share, plan.resolution)
    missing = plan.total - int(sizes.sum())
    rest[
        sizes >= plan.required_bounds[1]
    ] = -1  # a coarse resolution does not tell them from others
    sizes[np.argsort(-rest, kind="stable")[:missing]] += 1
    return sizes


def _by_price(plan: QuotaPlan) -> tuple[IntArray, IntArray] | None:
    table = plan.table
    start = packed(plan, int(table.cost.max()))
    if start is None:
        return None
    sizes, kinds = start
    _, price = multipliers(plan)
    picked, _ = cheapest(table, price)
    left = np.array(plan.budgets, np.int64)
    left -= np.bincount(kinds, weights=sizes, minlength=len(left)).astype(np.int64)
    gain = plan.costs(sizes, kinds) - table.cost[picked]
    worth = gain / np.maximum(table.size[picked] - sizes, 0.5)
    for j in np.argsort(-worth, kind="stable").tolist():
        if gain[j] <= 0:
            continue
        size, kind = int(table.size[picked[j]]), int(table.kind[picked[j]])
        freed = int(sizes[j]) if kinds[j] == kind else 0
        if size - freed <= left[kind]:
            left[kinds[j]] += sizes[j]
            left[kind] -= size
            sizes[j], kinds[j] = size, kind
    return fill(plan, sizes, kinds)


def _lowest_level(plan: QuotaPlan, best: int) -> tuple[IntArray, IntArray] | None:
    """Bisection on the level, each packed greedily over the types."""
    worst = int(plan.table.cost.max())
    found = packed(plan, worst)
    while found is not None and best < worst:
        middle = (best + worst) // 2
        better = packed(plan, middle)
        if better is None:
            best = middle + 1
        else:
            found, worst = better, middle
    return None if found is None else fill(plan, *found)


def packed(plan: QuotaPlan, cost: int) -> tuple[IntArray, IntArray] | None:
    """The smallest sizes that cost at most so much, the least flexible jobs first."""
    table = plan.table
    n, k = len(plan.jobs), len(plan.kinds)
    smallest = np.full(n * k, 2**40, np.int64)
    good = table.cost <= cost
    at = (table.rows() * k + table.kind)[good]
    np.minimum.at(smallest, at, table.size[good])
    wanted = smallest.reshape(n, k)
    if k == 1:
        fits = int(np.minimum(wanted, 2**40).sum()) <= plan.n_gpus
        return (wanted[:, 0].copy(), np.zeros(n, np.int64)) if fits else None
    sizes, kinds = np.zeros(n, np.int64), np.zeros(n, np.int64)
    left = np.array(plan.budgets, np.int64)
    choices = (wanted < 2**40).sum(axis=1)
    idle = wanted[:, 0] == 0
    for j in np.lexsort((-wanted.min(axis=1), choices)).tolist():
        if idle[j]:
            continue
        able = wanted[j] <= left
        if not able.any():
            return None
        share = np.where(able, wanted[j] / np.maximum(left, 1), np.inf)
        kind = int(np.argmin(share))
        sizes[j], kinds[j] = wanted[j, kind], kind
        left[kind] -= sizes[j]
    return sizes, kinds


__all__ = ["greedy", "packed", "remainders"]
