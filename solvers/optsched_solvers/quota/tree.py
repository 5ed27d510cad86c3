"""Branch and bound decides quotas and types: the bound is the hull's (by prices), or a level."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import numpy as np
from numba import types

from optsched.kernels.compile import INT, INTS, READ, entry
from optsched.problems.quota.options import multipliers
from optsched.problems.quota.problem import NO_SIZE, QuotaPlan
from optsched.solving.result import Result
from optsched.solving.solver import Support
from optsched_solvers._loading import load
from optsched_solvers.quota.plans import NOT_LOADED, first_answer, offer, supported

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optsched.model.schedule import IntArray, Problem
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor

NODES: Final = 200_000
"""Between two checks of the limits: some milliseconds."""
NOTHING: Final = 2**62
"""Cost of no answer."""
TABLE: Final = types.Array(types.int64, 2, "C")

DEPTH, BEST, FOUND, HIGHEST = range(4)
"""Of `state`. Found: 1 at a better answer, in `path`; highest: 1: the highest cost counts, 0: their
sum."""
KIND, SIZE, COST = range(3)
"""Of `option`."""
LEAST, NEED = range(2)
"""Of `behind`: bound of the cost (with prices) and least GPUs of all jobs from one on."""
AT, PAID = range(2)
"""Of `path`: option of a job, ``ptr[d] - 1`` before the first; cost of the jobs before it."""


class BranchAndBound:
    """Branch and bound on the options of jobs; one iteration is one option tried.

    Depth first, jobs with the largest choice first. A node of a sum is bounded by its cost so far
    and the Lagrangian value of the other jobs at the root's prices of a GPU (Fisher 1981), a node
    of a level by what the others need to get below the best level known.
    """

    name = "branch_and_bound"
    kinds = ("quota",)
    options: Mapping[str, str] = MappingProxyType({})

    def supports(self, problem: Problem) -> Support:
        """Plans without localities, any types, any objective but shares."""
        support = supported(problem)
        if support and problem.hands_out_all:  # type: ignore[attr-defined]
            return Support(False, "it hands out no shares by scores; quota and cpsat do, exactly")
        if support and any(job.locality != "any" for job in problem.jobs):  # type: ignore[attr-defined]
            return Support(False, "it decides no localities; cpsat does")
        return support

    def solve(self, problem: Problem, limits: Limits, monitor: Monitor) -> Result:
        """Search from the greedy answer until the proof or a limit."""
        assert isinstance(problem, QuotaPlan)
        first_answer(problem, monitor)
        if not load(monitor, "quota.tree"):
            return Result("unknown", reason=NOT_LOADED)
        tree = _Tree(problem, NOTHING if monitor.objective is None else monitor.objective)
        left = NOTHING if limits.iterations is None else limits.iterations
        while tree.state[DEPTH] >= 0:
            if left <= 0 or monitor.should_stop():
                return Result("unknown")
            done = tree.run(min(NODES, left))
            monitor.advance(done)
            left -= done
            if tree.state[FOUND]:
                offer(problem, monitor, *tree.quotas(), self.name)
        if monitor.objective is None:
            return Result("infeasible", reason="all choices of sizes and types exceed the GPUs")
        monitor.bound(monitor.objective, self.name)
        return Result("unknown")


class _Tree:
    """The search, run in slices: jobs with the largest choice first, cheap options first."""

    def __init__(self, plan: QuotaPlan, best: int) -> None:
        table, n = plan.table, len(plan.jobs)
        row, begins = table.rows(), table.ptr[:-1]
        self.price = _prices(plan)
        self.order = (
            np.argsort(-np.maximum.reduceat(table.size, begins), kind="stable") if n else row
        )
        place = np.empty(n, np.int64)
        place[self.order] = np.arange(n)
        reduced = table.cost if plan.highest else table.cost + self.price[table.kind] * table.size
        first = np.lexsort((table.size, reduced, place[row]))
        self.ptr = np.zeros(n + 1, np.int64)
        np.cumsum(np.diff(table.ptr)[self.order], out=self.ptr[1:])
        self.option = np.stack((table.kind[first], table.size[first], table.cost[first]))
        self.left = np.array(plan.budgets, np.int64)
        self.path = np.zeros((2, n + 1), np.int64)
        self.path[AT] = self.ptr - 1
        self.state = np.array([0, best, 0, plan.highest], np.int64)
        self.behind = np.zeros((2, n + 1), np.int64)
        if n:
            least = np.minimum.reduceat(reduced[first], self.ptr[:-1])
            self.behind[LEAST, :-1] = np.cumsum(least[::-1])[::-1]
            self._need(self.option[SIZE])
        if n and plan.highest:
            self.behind[LEAST, :-1] = np.maximum.accumulate(least[::-1])[::-1]
            self.behind[LEAST, -1] = self.path[PAID, 0] = -NOTHING
            self._sharpen()

    def run(self, most: int) -> int:
        """Try so many options, or up to the next better answer; options tried."""
        nodes = walk(
            most, self.state, self.ptr, self.option, self.behind, self.price, self.left, self.path
        )
        if self.state[FOUND] and self.state[HIGHEST]:
            self._sharpen()
        return int(nodes)

    def _sharpen(self) -> None:
        """Raise what the jobs need: levels below the best one need larger sizes."""
        self._need(np.where(self.option[COST] < self.state[BEST], self.option[SIZE], NO_SIZE))

    def _need(self, size: IntArray) -> None:
        least = np.minimum.reduceat(size, self.ptr[:-1])
        self.behind[NEED, :-1] = np.cumsum(least[::-1])[::-1]

    def quotas(self) -> tuple[IntArray, IntArray]:
        """Return sizes and types of the better answer."""
        sizes, kinds = np.zeros((2, len(self.order)), np.int64)
        kinds[self.order], sizes[self.order], _ = self.option[:, self.path[AT, :-1]]
        return sizes, kinds


@entry(INT, INT, INTS, READ, TABLE, TABLE, READ, INTS, TABLE, counted=False)
def walk(most, state, ptr, option, behind, price, left, path):  # type: ignore[no-untyped-def]
    """Try options until a better answer, the end (depth -1) or `most` of them; how many.

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
        total = spare = 0
        for k in range(len(price)):
            total += left[k]
            spare += price[k] * left[k]
        if state[HIGHEST] == 1:
            path[PAID, d + 1] = max(path[PAID, d], option[COST, o])
            bound = max(path[PAID, d + 1], behind[LEAST, d + 1])
        else:
            path[PAID, d + 1] = path[PAID, d] + option[COST, o]
            bound = path[PAID, d + 1] + behind[LEAST, d + 1] - spare
        if bound < state[BEST] and total >= behind[NEED, d + 1]:
            state[DEPTH] = d + 1
    return nodes


def _prices(plan: QuotaPlan) -> IntArray:
    """Return prices that keep all sums within 64 bits; all prices are valid."""
    price = np.zeros(len(plan.kinds), np.int64)
    if not plan.jobs or plan.highest:
        return price
    price = multipliers(plan.table, plan.budgets)[1]
    most = max(int(price.max()), 1)
    return price if most * (plan.n_gpus + 1) * (len(plan.jobs) + 1) < 2**61 else price * 0
