"""Branch and bound decides quotas and types: the bound is the hull's (by prices), or a level."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.problems.quota.bounds import multipliers
from optsched.solving.result import Result
from optsched.solving.solver import Support
from optsched_solvers._loading import load
from optsched_solvers.quota.first import first_answer
from optsched_solvers.quota.ground import NOT_LOADED, offer, ready, supported
from optsched_solvers.quota.marginal import greedy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optsched.model.schedule import IntArray, Problem
    from optsched.problems.quota.problem import QuotaPlan
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor

NODES: Final = 200_000
"""Between two looks at the limits: some milliseconds."""

NOTHING: Final = 2**62
"""Cost of no answer."""


def supports(problem: Problem) -> Support:
    """Plans without localities, any types and objectives."""
    said = supported(problem)
    if said and any(job.locality != "any" for job in problem.jobs):  # type: ignore[attr-defined]
        return Support(False, "it decides no localities; cpsat does")
    return said


def solve(plan: Any, limits: Limits, monitor: Monitor) -> Result:
    """Depth first, jobs with the largest choice first; one iteration is one option tried.

    A node of a sum is bounded by its cost so far and the Lagrangian value of the other jobs at the
    root's prices of a GPU (Fisher 1981), a node of a level by what the others need to get below the
    best level known. It begins at the greedy answer.
    """
    if not load(monitor, "quota.tree_kernel") or not ready(plan, monitor):
        first_answer(plan, monitor)
        return Result("unknown", reason=NOT_LOADED)
    if monitor.objective is None and (found := greedy(plan)) is not None:
        offer(plan, monitor, *found, "branch_and_bound")
    tree = _Tree(plan, NOTHING if monitor.objective is None else monitor.objective)
    left = NOTHING if limits.iterations is None else limits.iterations
    while not tree.finished:
        most = min(NODES, left)
        if most <= 0 or monitor.should_stop():
            return Result("unknown")
        done = tree.run(most)
        monitor.advance(done)
        left -= done
        if tree.improved:
            offer(plan, monitor, *tree.quotas(), "branch_and_bound")
    if monitor.objective is None:
        return Result("infeasible", reason="all choices of sizes and types exceed the GPUs")
    monitor.bound(monitor.objective, "branch_and_bound")
    return Result("unknown")


class _Tree:
    """The search, to be run in slices."""

    def __init__(self, plan: QuotaPlan, best: int) -> None:
        from optsched_solvers.quota.tree_kernel import RULE, STATE

        self.plan, table, n = plan, plan.table, len(plan.jobs)
        price = _prices(plan)
        counts = np.diff(table.ptr)
        row = table.rows()
        widest = np.zeros(n, np.int64)
        np.maximum.at(widest, row, table.size)
        self.order = np.argsort(-widest, kind="stable")
        place = np.empty(n, np.int64)
        place[self.order] = np.arange(n)
        reduced = table.cost + price[table.kind] * table.size
        first = np.lexsort((table.size, table.cost if plan.highest else reduced, place[row]))
        self.ptr = np.zeros(n + 1, np.int64)
        np.cumsum(counts[self.order], out=self.ptr[1:])
        self.kind, self.size = table.kind[first], table.size[first]
        self.cost, self.price = table.cost[first], price
        self.need, self.room = np.zeros(n + 1, np.int64), np.zeros(n + 1, np.int64)
        self.suffix = np.zeros(n + 1, np.int64)
        if n:
            begins = self.ptr[:-1]
            self.room[:-1] = _from_end(np.maximum.reduceat(self.size, begins))
            self.need[:-1] = _from_end(np.minimum.reduceat(self.size, begins))
            if plan.highest:
                least = np.minimum.reduceat(self.cost, begins)
                self.suffix[:-1] = np.maximum.accumulate(least[::-1])[::-1]
                self.suffix[-1] = -NOTHING
            else:
                self.suffix[:-1] = _from_end(np.minimum.reduceat(reduced[first], begins))
        self.left = np.array([plan.total] if plan.hands_out_all else plan.budgets, np.int64)
        self.pos = self.ptr - 1
        self.acc = np.zeros(n + 1, np.int64)
        self.acc[0] = -NOTHING if plan.highest and n else 0
        self.state = np.zeros(STATE, np.int64)
        self.rule = np.zeros(RULE, np.int64)
        self.rule[:] = n, len(plan.kinds), plan.highest, plan.hands_out_all
        self._better_than(best)

    @property
    def finished(self) -> bool:
        """Whether all has been seen."""
        return int(self.state[0]) < 0

    @property
    def improved(self) -> bool:
        """Whether the last slice ended at a better answer."""
        return int(self.state[2]) == 1

    def run(self, most: int) -> int:
        """Go on for so many nodes, or to the next better answer."""
        from optsched_solvers.quota.tree_kernel import walk

        nodes = walk(
            most, self.rule, self.ptr, self.kind, self.size, self.cost, self.suffix, self.need,
            self.room, self.price, self.left, self.pos, self.acc, self.state,
        )  # fmt: skip
        if self.improved:
            self._better_than(int(self.state[1]))
        return int(nodes)

    def _better_than(self, best: int) -> None:
        """Look for lower costs only; levels then need larger sizes."""
        self.state[1] = best
        if self.plan.highest and len(self.order):
            size = np.where(self.cost < best, self.size, 2**40)
            self.need[:-1] = _from_end(np.minimum.reduceat(size, self.ptr[:-1]))

    def quotas(self) -> tuple[IntArray, IntArray]:
        """Sizes and types of the better answer."""
        sizes, kinds = np.zeros((2, len(self.order)), np.int64)
        sizes[self.order] = self.size[self.pos[:-1]]
        kinds[self.order] = self.kind[self.pos[:-1]]
        return sizes, kinds


def _prices(plan: QuotaPlan) -> IntArray:
    """Prices that keep all sums within 64 bits; any are valid."""
    price = np.zeros(len(plan.kinds), np.int64)
    if not plan.jobs or plan.highest:
        return price
    if plan.hands_out_all:  # what one GPU more costs where the shares are cut off
        low, rest = np.divmod(plan.share, plan.resolution)
        missing = plan.total - int(low.sum())
        if missing:
            price[0] = 2 * int(np.sort(rest)[::-1][missing - 1]) - plan.resolution
        return price
    price = multipliers(plan)[1]
    most = max(int(price.max()), 1)
    return price if most * (plan.n_gpus + 1) * (len(plan.jobs) + 1) < 2**61 else price * 0


def _from_end(values: IntArray) -> IntArray:
    """Sums of all from each on."""
    found: IntArray = np.cumsum(values[::-1])[::-1]
    return found


class BranchAndBound:
    """Branch and bound on the options of jobs; one iteration is one option tried."""

    name = "branch_and_bound"
    kinds = ("quota",)
    options: Mapping[str, str] = MappingProxyType({})

    supports = staticmethod(supports)
    solve = staticmethod(solve)
