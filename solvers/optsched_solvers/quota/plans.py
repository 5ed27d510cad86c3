"""What solvers of quota plans share: greedy quotas, placement, repair, filling up, reporting."""

from __future__ import annotations

from bisect import bisect_left
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Final

import numpy as np

from optsched.kernels.plain_python import in_python
from optsched.problems.quota.answer import Quotas
from optsched.problems.quota.options import cheapest, multipliers
from optsched.problems.quota.problem import QuotaPlan
from optsched.solving.solver import Support
from optsched_solvers._loading import load

if TYPE_CHECKING:
    from optsched.model.schedule import IntArray, Problem
    from optsched.solving.monitor import Monitor

LOCALITY: Final = {"any": 0, "single": 1, "whole": 2}

PLACEMENT: Final = "optsched_solvers.quota.placement"

NOT_LOADED: Final = "the limit came before compiled code was loaded (see `optsched warmup`)"

MOST_OPTIONS: Final = 200_000
"""Of a plan that is searched option by option."""

FEW_JOBS: Final = 50
FEW_NODES: Final = 64
FEW_OPTIONS: Final = 2000
"""Jobs, nodes and allowed sizes (or GPUs) up to which plain Python takes a tenth of a second."""

FIRST: Final = 20_000
"""Allowed sizes, or GPUs, up to which plain Python takes a fraction of a second."""


def supported(problem: Problem, most: int | None = MOST_OPTIONS) -> Support:
    """Whether it is a quota plan with at most so many options."""
    if not isinstance(problem, QuotaPlan):
        return Support(False, "it only decides quotas (QuotaPlan)")
    if most is not None and problem.n_options > most:
        return Support(
            False, f"it takes up to {most} allowed sizes, this plan has {problem.n_options}"
        )
    return Support(True)


def is_few(plan: QuotaPlan) -> bool:
    """Whether plain Python can do what is not compiled yet."""
    some = 0 if plan.is_plain else plan.n_options
    small = len(plan.jobs) <= FEW_JOBS and len(plan.nodes) <= FEW_NODES
    return small and max(some, plan.n_gpus) <= FEW_OPTIONS


def ready(plan: QuotaPlan, monitor: Monitor) -> bool:
    """Load what placing needs; False if told to stop first."""
    return not plan.nodes or is_few(plan) or load(monitor, PLACEMENT)


def first_answer(plan: QuotaPlan, monitor: Monitor) -> None:
    """Report greedy quotas, placed best-fit, when a limit came before kernels were loaded.

    Nothing if there is an answer already, where a locality stands in the way, or for large plans.
    """
    some = 0 if plan.is_plain else plan.n_options
    if monitor.solution is not None or max(some, plan.n_gpus) > FIRST:
        return
    found = greedy(plan)
    if found is None:
        return
    sizes, kinds = found
    kind, gpus, _ = plan.pools
    free, rows = gpus.tolist(), []
    for j in np.argsort(-sizes, kind="stable").tolist():
        missing = int(sizes[j])
        nodes = [n for n in range(len(free)) if kind[n] == kinds[j]]
        while missing:
            fitting = [n for n in nodes if free[n] >= missing]
            node = min(fitting or nodes, key=lambda n: (free[n] if fitting else -free[n], n))
            taken = min(missing, free[node])
            rows.append((j, node, taken))
            free[node] -= taken
            missing -= taken
    quotas = Quotas.of(len(sizes), *np.array(rows, np.int64).reshape(-1, 3).T)
    if not plan.faults(quotas):
        monitor.incumbent(quotas, plan.worth(sizes, kinds), "first")


# placement


def place(plan: QuotaPlan, sizes: IntArray, kinds: IntArray) -> tuple[Quotas, int]:
    """Nodes for quotas that fit the budgets, and the first job that found no place, or -1."""
    jobs = np.flatnonzero(sizes)
    if not plan.nodes:
        return Quotas.of(len(sizes), jobs, kinds[jobs], sizes[jobs]), -1
    from optsched_solvers.quota.placement import place_quotas

    locality = np.array([LOCALITY[job.locality] for job in plan.jobs], np.int64)
    kind, gpus, _ = plan.pools
    held = plan.held
    parts, failed = [], -1
    with in_python(is_few(plan)):
        for k in range(len(plan.kinds)):
            here = np.flatnonzero(kind == k)
            some = kind[held.node] == k
            now = Quotas.of(
                len(sizes), held.rows[some], np.searchsorted(here, held.node[some]),
                held.count[some],
            )  # fmt: skip
            found, lost = place_quotas(np.where(kinds == k, sizes, 0), gpus[here], now, locality)
            parts.append((found.rows, here[found.node], found.count))
            failed = lost if lost >= 0 else failed
    return Quotas.of(len(sizes), *map(np.concatenate, zip(*parts, strict=True))), failed


def offer(plan: QuotaPlan, monitor: Monitor, sizes: IntArray, kinds: IntArray, source: str) -> bool:
    """Place quotas and report them; False if localities stand in the way.

    Who finds no place is given its next smaller size, again and again.
    """
    sizes, kinds = sizes.copy(), kinds.copy()
    quotas, failed = place(plan, sizes, kinds)
    while failed >= 0:
        smaller = _smaller(plan, failed, int(sizes[failed]), int(kinds[failed]))
        if plan.hands_out_all or smaller < 0 or monitor.should_stop():
            return False
        sizes[failed] = smaller
        quotas, failed = place(plan, sizes, kinds)
    monitor.incumbent(quotas, plan.worth(sizes, kinds), source)
    return True


def _smaller(plan: QuotaPlan, job: int, size: int, kind: int) -> int:
    """The next smaller allowed size on the same type, 0 if it need not run, else -1."""
    found = -1 if plan.jobs[job].must_run else 0
    for k, sizes in plan.spans[job]:
        if k == kind and (below := bisect_left(sizes, size)):
            found = sizes[below - 1]
    return found


# greedy quotas, in plain NumPy: every solver's first idea


def greedy(plan: QuotaPlan) -> tuple[IntArray, IntArray] | None:
    """Quotas and types within the budgets; None if jobs that must run did not all fit."""
    zeros = np.zeros(len(plan.jobs), np.int64)
    if not plan.jobs:
        return zeros, zeros
    if plan.hands_out_all:
        return remainders(plan), zeros
    if plan.highest:
        best = plan.level
        if len(plan.kinds) == 1:
            return fill(plan, plan.sizes_within(best), zeros)
        return _lowest_level(plan, best)
    return _by_price(plan)


def remainders(plan: QuotaPlan) -> IntArray:
    """Largest remainder on the shares, ties by id."""
    sizes, rest = np.divmod(plan.share, plan.resolution)
    missing = plan.total - int(sizes.sum())
    # a coarse resolution does not tell full ones from others
    rest[sizes >= plan.required_bounds[1]] = -1
    sizes[np.argsort(-rest, kind="stable")[:missing]] += 1
    return sizes


def _by_price(plan: QuotaPlan) -> tuple[IntArray, IntArray] | None:
    """What is best at the prices of the Lagrangian dual, the best bargains first."""
    table = plan.table
    start = packed(plan, int(table.cost.max()))
    if start is None:
        return None
    sizes, kinds = start
    _, price = multipliers(table, plan.budgets)
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
    sizes, kinds = np.zeros(n, np.int64), np.zeros(n, np.int64)
    if k == 1:
        return (wanted[:, 0].copy(), kinds) if int(wanted.sum()) <= plan.n_gpus else None
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


def fill(plan: QuotaPlan, sizes: IntArray, kinds: IntArray) -> tuple[IntArray, IntArray]:
    """Use GPUs that are left: best gain per GPU first, or for the job that is worst off.

    Nobody gets a worse size than before; the arrays are not modified.
    """
    sizes, kinds = sizes.copy(), kinds.copy()
    if plan.hands_out_all or plan.is_plain:
        return sizes, kinds
    left = list(plan.budgets)
    for k in range(len(left)):
        left[k] -= int(sizes[kinds == k].sum())
    table = plan.table
    ptr = table.ptr.tolist()
    cost = plan.costs(sizes, kinds).tolist()

    def best(j: int) -> tuple[float, int, int] | None:
        """How urgent it is, the job, and its best option that fits; None if there is none."""
        some = slice(ptr[j], ptr[j + 1])
        gain = cost[j] - table.cost[some]
        room = np.array(left)[table.kind[some]]
        more = table.size[some] - sizes[j]
        room = np.where(table.kind[some] == kinds[j], room + sizes[j], room)
        good = (gain > 0) & (table.size[some] <= room)
        if not good.any():
            return None
        rate = np.where(good, gain / np.maximum(more, 0.5), -1.0)
        pick = int(np.argmax(rate))
        urgency = -float(cost[j]) if plan.highest else -float(rate[pick])
        return urgency, j, ptr[j] + pick

    heap = [found for j in range(len(sizes)) if (found := best(j)) is not None]
    heapify(heap)
    while heap and max(left) > 0:
        _, j, at = heappop(heap)
        now = best(j)
        if now is None:
            continue
        if now[2] == at:  # else what it wanted does not fit any more
            left[kinds[j]] += int(sizes[j])
            sizes[j], kinds[j] = table.size[at], table.kind[at]
            left[kinds[j]] -= int(sizes[j])
            cost[j] = int(table.cost[at])
            now = best(j)
        if now is not None:
            heappush(heap, now)
    return sizes, kinds
