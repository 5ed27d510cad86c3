"""Branch and bound decides quotas and types: the bound is the hull's (by prices), or a level."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numba import types

from optsched.kernels.compile import INT, INTS, READ, entry
from optsched.problems.quota.options import multipliers
from optsched.solving.result import Result
from optsched.solving.solver import Support
from optsched_solvers._loading import load
from optsched_solvers.quota.plans import NOT_LOADED, first_answer, greedy, offer, supported

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


TABLE: Final = types.Array(types.int64, 2, "C")

DEPTH, BEST, FOUND, HIGHEST, EXACT = range(5)
"""Of `state`. Found: 1 if the search has stopped at a better answer, to be read from `path`;
highest: 1: the highest cost counts, 0: their sum; exact: 1: all GPUs must be handed out."""
KIND, SIZE, COST = range(3)
"""Of `option`."""
LEAST, NEED, ROOM = range(3)
"""Of `behind`: bound of the cost (with prices), least and most GPUs of all jobs from one on."""
AT, PAID = range(2)
"""Of `path`: option of a job, ``ptr[d] - 1`` before the first; cost of the jobs before it."""


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
    if not load(monitor, "quota.tree"):
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
        done, improved = tree.run(most)
        monitor.advance(done)
        left -= done
        if improved:
            offer(plan, monitor, *tree.quotas(), "branch_and_bound")
    if monitor.objective is None:
        return Result("infeasible", reason="all choices of sizes and types exceed the GPUs")
    monitor.bound(monitor.objective, "branch_and_bound")
    return Result("unknown")


class _Tree:
    """The search, to be run in slices: jobs with the largest choice first, cheap options first."""

    def __init__(self, plan: QuotaPlan, best: int) -> None:
        table, n = plan.table, len(plan.jobs)
        self.price, row = _prices(plan), table.rows()
        widest = np.zeros(n, np.int64)
        np.maximum.at(widest, row, table.size)
        self.order = np.argsort(-widest, kind="stable")
        place = np.empty(n, np.int64)
        place[self.order] = np.arange(n)
        reduced = table.cost + self.price[table.kind] * table.size
        first = np.lexsort((table.size, table.cost if plan.highest else reduced, place[row]))
        self.ptr = np.zeros(n + 1, np.int64)
        np.cumsum(np.diff(table.ptr)[self.order], out=self.ptr[1:])
        columns = table.kind[first], table.size[first], table.cost[first]
        self.option = np.stack(columns)
        self.behind = np.zeros((3, n + 1), np.int64)
        self.left = np.array([plan.total] if plan.hands_out_all else plan.budgets, np.int64)
        self.path = np.zeros((2, n + 1), np.int64)
        self.path[AT] = self.ptr - 1
        self.state = np.array([0, best, 0, plan.highest, plan.hands_out_all], np.int64)
        if n == 0:
            return
        _, size, cost = self.option
        begins = self.ptr[:-1]
        least = np.minimum.reduceat(cost if plan.highest else reduced[first], begins)
        self.behind[LEAST, :-1] = _from_end(least)
        self.behind[NEED, :-1] = _from_end(np.minimum.reduceat(size, begins))
        self.behind[ROOM, :-1] = _from_end(np.maximum.reduceat(size, begins))
        if plan.highest:
            self.behind[LEAST, :-1] = np.maximum.accumulate(least[::-1])[::-1]
            self.behind[LEAST, -1] = self.path[PAID, 0] = -NOTHING
            self._sharpen()

    @property
    def finished(self) -> bool:
        """Whether all has been seen."""
        return int(self.state[DEPTH]) < 0

    def run(self, most: int) -> tuple[int, bool]:
        """Go on for so many nodes, or to the next better answer; nodes, and whether it is there."""
        nodes = walk(
            most, self.state, self.ptr, self.option, self.behind, self.price, self.left, self.path
        )
        improved = int(self.state[FOUND]) == 1
        if improved and self.state[HIGHEST]:
            self._sharpen()
        return int(nodes), improved

    def _sharpen(self) -> None:
        """Levels below the best one known need larger sizes."""
        _, size, cost = self.option
        size = np.where(cost < self.state[BEST], size, 2**40)
        if len(self.order):
            self.behind[NEED, :-1] = _from_end(np.minimum.reduceat(size, self.ptr[:-1]))

    def quotas(self) -> tuple[IntArray, IntArray]:
        """Sizes and types of the better answer."""
        sizes, kinds = np.zeros((2, len(self.order)), np.int64)
        kinds[self.order], sizes[self.order], _ = self.option[:, self.path[AT, :-1]]
        return sizes, kinds


@entry(INT, INT, INTS, READ, TABLE, TABLE, READ, INTS, TABLE, counted=False)
def walk(most, state, ptr, option, behind, price, left, path):  # type: ignore[no-untyped-def]
    """Try options until a better answer, the end (depth -1) or `most` nodes; nodes tried.

    Jobs are in order of the search. left: GPUs by type.
    """
    n, nodes = len(ptr) - 1, 0
    state[FOUND] = 0
    while nodes < most and state[DEPTH] >= 0:
        d = state[DEPTH]
        if d == n:
            state[DEPTH] = d - 1
            if path[PAID, n] < state[BEST]:
                state[BEST], state[FOUND] = path[PAID, n], 1
                break
            continue
        o = path[AT, d]
        if o >= ptr[d]:
            left[option[KIND, o]] += option[SIZE, o]
        o += 1
        if o == ptr[d + 1]:
            path[AT, d] = ptr[d] - 1
            state[DEPTH] = d - 1
            continue
        path[AT, d] = o
        nodes += 1
        left[option[KIND, o]] -= option[SIZE, o]
        if left[option[KIND, o]] < 0:
            continue
        total = rest = 0
        for k in range(len(price)):
            total += left[k]
            rest += price[k] * left[k]
        if state[HIGHEST] == 1:
            path[PAID, d + 1] = max(path[PAID, d], option[COST, o])
            bound = max(path[PAID, d + 1], behind[LEAST, d + 1])
        else:
            path[PAID, d + 1] = path[PAID, d] + option[COST, o]
            bound = path[PAID, d + 1] + behind[LEAST, d + 1] - rest
        if bound >= state[BEST] or total < behind[NEED, d + 1]:
            continue
        if state[EXACT] == 0 or total <= behind[ROOM, d + 1]:
            state[DEPTH] = d + 1
    return nodes


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
    price = multipliers(plan.table, plan.budgets)[1]
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
