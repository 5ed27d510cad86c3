"""What solvers of quota plans share: greedy quotas, placement, repair, filling up, reporting."""

from __future__ import annotations

from bisect import bisect_left
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Final

import numpy as np

from optsched.problems.quota.answer import Quotas
from optsched.problems.quota.options import cheapest, multipliers
from optsched.problems.quota.problem import NO_SIZE, QuotaPlan
from optsched.solving.solver import Support
from optsched_solvers.quota.placement import place_quotas

if TYPE_CHECKING:
    from optsched.model.schedule import IntArray, Problem
    from optsched.solving.monitor import Monitor

LOCALITY: Final = {"any": 0, "single": 1, "whole": 2}
NOT_LOADED: Final = "the limit came before the engine was loaded (see `optsched warmup`)"
MOST_OPTIONS: Final = 200_000
"""Of a plan that is searched option by option."""


def supported(problem: Problem, most: int | None = MOST_OPTIONS) -> Support:
    """Return whether it is a quota plan with at most so many options."""
    if not isinstance(problem, QuotaPlan):
        return Support(False, "it only decides quotas (QuotaPlan)")
    if most is not None and problem.n_options > most:
        return Support(
            False, f"it takes up to {most} allowed sizes, this plan has {problem.n_options}"
        )
    return Support(True)


def first_answer(plan: QuotaPlan, monitor: Monitor) -> None:
    """Report the greedy answer if there is no answer yet."""
    if monitor.solution is None and (found := greedy(plan)) is not None:
        offer(plan, monitor, *found, "greedy_quota")


# placement


def place(plan: QuotaPlan, sizes: IntArray, kinds: IntArray) -> tuple[Quotas, int]:
    """Return nodes for quotas that fit the budgets, and the first job not placed, or -1."""
    jobs = np.flatnonzero(sizes)
    if not plan.nodes:
        return Quotas.of(len(sizes), jobs, kinds[jobs], sizes[jobs]), -1
    locality = np.array([LOCALITY[job.locality] for job in plan.jobs], np.int64)
    kind, gpus, _ = plan.pools
    held = plan.held
    parts, failed = [], -1
    for k in range(len(plan.kinds)):
        here = np.flatnonzero(kind == k)
        some = kind[held.node] == k
        now = Quotas.of(
            len(sizes), held.rows[some], np.searchsorted(here, held.node[some]), held.count[some]
        )
        found, lost = place_quotas(np.where(kinds == k, sizes, 0), gpus[here], now, locality)
        parts.append((found.rows, here[found.node], found.count))
        failed = lost if lost >= 0 else failed
    return Quotas.of(len(sizes), *map(np.concatenate, zip(*parts, strict=True))), failed


def offer(plan: QuotaPlan, monitor: Monitor, sizes: IntArray, kinds: IntArray, source: str) -> bool:
    """Place quotas and report them; False if localities stand in the way.

    A job that is not placed gets its next smaller size, again and again.
    """
    sizes = sizes.copy()
    quotas, failed = place(plan, sizes, kinds)
    while failed >= 0:
        smaller = -1 if plan.jobs[failed].must_run else 0
        for k, some in plan.spans[failed]:
            if k == kinds[failed] and (below := bisect_left(some, int(sizes[failed]))):
                smaller = some[below - 1]
        if plan.hands_out_all or smaller < 0 or monitor.should_stop():
            return False
        sizes[failed] = smaller
        quotas, failed = place(plan, sizes, kinds)
    monitor.incumbent(quotas, plan.worth(sizes, kinds), source)
    return True


# greedy quotas: the first answer of every solver


def greedy(plan: QuotaPlan) -> tuple[IntArray, IntArray] | None:
    """Return quotas and types within the budgets; None if jobs that must run did not all fit."""
    zeros = np.zeros(len(plan.jobs), np.int64)
    if not plan.jobs:
        return zeros, zeros
    if plan.hands_out_all:
        return remainders(plan), zeros
    if not plan.highest:
        return _by_price(plan)
    best = plan.level
    if len(plan.kinds) == 1:
        return fill(plan, plan.sizes_within(best), zeros)
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


def remainders(plan: QuotaPlan) -> IntArray:
    """Return largest remainders on the shares, ties by id."""
    sizes, part = np.divmod(plan.share, plan.resolution)
    missing = plan.total - int(sizes.sum())
    part[sizes >= plan.required_bounds[1]] = -1  # at a coarse resolution they look like others
    sizes[np.argsort(-part, kind="stable")[:missing]] += 1
    return sizes


def _by_price(plan: QuotaPlan) -> tuple[IntArray, IntArray] | None:
    """Take what is best at the prices of the Lagrangian dual, the largest gain per GPU first."""
    table = plan.table
    start = packed(plan, int(table.cost.max()))
    if start is None:
        return None
    sizes, kinds = start
    picked, _ = cheapest(table, multipliers(table, plan.budgets)[1])
    left = np.array(plan.budgets, np.int64)
    left -= np.bincount(kinds, weights=sizes, minlength=len(left)).astype(np.int64)
    gain = plan.costs(sizes, kinds) - table.cost[picked]
    rate = gain / np.maximum(table.size[picked] - sizes, 0.5)
    for j in np.argsort(-rate, kind="stable").tolist():
        size, kind = int(table.size[picked[j]]), int(table.kind[picked[j]])
        freed = int(sizes[j]) if kinds[j] == kind else 0
        if gain[j] > 0 and size - freed <= left[kind]:
            left[kinds[j]] += sizes[j]
            left[kind] -= size
            sizes[j], kinds[j] = size, kind
    return fill(plan, sizes, kinds)


def packed(plan: QuotaPlan, cost: int) -> tuple[IntArray, IntArray] | None:
    """Return the smallest sizes that cost at most so much, the least flexible jobs first."""
    table = plan.table
    n, k = len(plan.jobs), len(plan.kinds)
    flat = np.full(n * k, NO_SIZE, np.int64)
    good = table.cost <= cost
    np.minimum.at(flat, (table.rows() * k + table.kind)[good], table.size[good])
    needed = flat.reshape(n, k)
    sizes, kinds = np.zeros(n, np.int64), np.zeros(n, np.int64)
    if k == 1:
        return (needed[:, 0].copy(), kinds) if int(needed.sum()) <= plan.n_gpus else None
    left = np.array(plan.budgets, np.int64)
    choices = (needed < NO_SIZE).sum(axis=1)
    for j in np.lexsort((-needed.min(axis=1), choices)).tolist():
        if needed[j, 0] == 0:
            continue
        able = needed[j] <= left
        if not able.any():
            return None
        kind = int(np.argmin(np.where(able, needed[j] / np.maximum(left, 1), np.inf)))
        sizes[j], kinds[j] = needed[j, kind], kind
        left[kind] -= sizes[j]
    return sizes, kinds


def fill(plan: QuotaPlan, sizes: IntArray, kinds: IntArray) -> tuple[IntArray, IntArray]:
    """Use GPUs that are left: best gain per GPU first, or the job of the highest cost first.

    No job gets a worse size than before; the arrays are not modified.
    """
    sizes, kinds = sizes.copy(), kinds.copy()
    if plan.is_plain:
        return sizes, kinds
    table = plan.table
    left = np.array(plan.budgets, np.int64)
    left -= np.bincount(kinds, weights=sizes, minlength=len(left)).astype(np.int64)
    ptr, cost = table.ptr.tolist(), plan.costs(sizes, kinds).tolist()

    def best(j: int) -> tuple[float, int, int] | None:
        """Return urgency, job, and its best option that fits; None if there is none."""
        some = slice(ptr[j], ptr[j + 1])
        gain, size, kind = cost[j] - table.cost[some], table.size[some], table.kind[some]
        good = (gain > 0) & (size <= left[kind] + np.where(kind == kinds[j], sizes[j], 0))
        if not good.any():
            return None
        rate = np.where(good, gain / np.maximum(size - sizes[j], 0.5), -1.0)
        pick = int(np.argmax(rate))
        return -float(cost[j] if plan.highest else rate[pick]), j, ptr[j] + pick

    heap = [found for j in range(len(sizes)) if (found := best(j)) is not None]
    heapify(heap)
    while heap and left.max() > 0:
        _, j, at = heappop(heap)
        now = best(j)
        if now is not None and now[2] == at:  # else that option does not fit any more
            left[kinds[j]] += sizes[j]
            sizes[j], kinds[j], cost[j] = table.size[at], table.kind[at], int(table.cost[at])
            left[kinds[j]] -= sizes[j]
            now = best(j)
        if now is not None:
            heappush(heap, now)
    return sizes, kinds
