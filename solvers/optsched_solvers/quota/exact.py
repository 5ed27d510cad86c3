"""`quota`: the special exact algorithm that fits a plan, then placement; and `greedy_quota`."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.errors import InputError
from optsched.problems.quota.options import MOST_OPTIONS
from optsched.problems.quota.problem import QuotaPlan
from optsched.solving.result import Result
from optsched.solving.solver import Support
from optsched_solvers import quota
from optsched_solvers.quota.multiple_choice import options, solve
from optsched_solvers.quota.plans import fill, greedy, offer, supported

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optsched.model.schedule import IntArray, Problem
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor
    from optsched_solvers.quota import Certificate

INSTANT: Final = 50_000
"""Allowed sizes, GPUs, or jobs times nodes (and 100) up to which an answer takes milliseconds."""
NOT_PLACED: Final = "no placement was found that keeps the localities"


class QuotaExact:
    """Exact in milliseconds for one type of GPU, for every objective.

    Apportionment (largest remainder), lexicographic max-min, makespan, and multiple choice for
    sums. Placement on nodes comes afterwards: it never costs utility unless a locality cannot be
    kept; then the quotas are shrunk, and only the bound is proved.
    """

    name = "quota"
    kinds = ("quota",)
    options: Mapping[str, str] = MappingProxyType({})

    def runs_inline(self, problem: Problem) -> bool:
        """Small plans."""
        if not isinstance(problem, QuotaPlan) or len(problem.kinds) != 1:
            return False
        some = 0 if problem.is_plain else problem.n_options
        work = len(problem.jobs) * (len(problem.nodes) + 100)
        return max(some, problem.n_gpus, work) <= INSTANT

    def supports(self, problem: Problem) -> Support:
        """Plans with one type of GPU."""
        support = supported(problem, None)
        if support and len(problem.kinds) > 1:  # type: ignore[attr-defined]
            return Support(
                False, "it takes one type of GPU; cpsat decides types and quotas jointly"
            )
        return support

    def solve(self, problem: Problem, limits: Limits, monitor: Monitor) -> Result:
        """Decide once; iterations are not counted."""
        assert isinstance(problem, QuotaPlan)
        monitor.advance(1)
        sizes, bound = allocate(problem)
        monitor.bound(bound, self.name)
        if not offer(problem, monitor, sizes, np.zeros(len(sizes), np.int64), self.name):
            return Result("unknown", reason=NOT_PLACED)
        return Result("unknown")


class GreedyQuota:
    """A good answer to any quota plan at once; it proves no more than the plan's bound.

    Sums: every job takes what is best at the prices of the Lagrangian dual, the largest gains
    first, then the best gain per GPU while any fits. Levels: the smallest sizes at the lowest
    level that packs. Shares: largest remainders, which are optimal.
    """

    name = "greedy_quota"
    kinds = ("quota",)
    options: Mapping[str, str] = MappingProxyType({})

    def runs_inline(self, problem: Problem) -> bool:
        """Small plans."""
        return isinstance(problem, QuotaPlan) and not problem.nodes and len(problem.jobs) <= 200

    def supports(self, problem: Problem) -> Support:
        """Every plan."""
        most = None if isinstance(problem, QuotaPlan) and problem.is_plain else MOST_OPTIONS
        return supported(problem, most)

    def solve(self, problem: Problem, limits: Limits, monitor: Monitor) -> Result:
        """Decide once; iterations are not counted."""
        assert isinstance(problem, QuotaPlan)
        monitor.advance(1)
        found = greedy(problem)
        if found is not None and offer(problem, monitor, *found, self.name):
            return Result("unknown")
        return Result("unknown", reason=NOT_PLACED)


def algorithm(plan: QuotaPlan) -> str:
    """Return the function of `optsched_solvers.quota` that solves a plan with one type.

    ``"bisect"`` for levels of sizes with gaps, or that more GPUs make worse.
    """
    if plan.objective == "proportional":
        return "proportional"
    if plan.objective == "max_min" and plan.is_plain:
        return "max_min"
    if plan.objective == "sum":
        return "choice"
    if plan.bounds is not None and _is_monotone(plan):
        return "max_min_table" if plan.objective == "max_min" else "makespan"
    return "bisect"


def _is_monotone(plan: QuotaPlan) -> bool:
    """Return whether no job is worse off with more GPUs."""
    table = plan.table
    return not bool(((np.diff(table.rows()) == 0) & (np.diff(table.cost) > 0)).any())


def allocate(plan: QuotaPlan) -> tuple[IntArray, int]:
    """Return optimal quotas of a feasible plan with one type, and a bound of the cost."""
    if not plan.jobs:
        return np.zeros(0, np.int64), 0
    name = algorithm(plan)
    if name == "choice":
        given = options(*_arguments(plan, name))
        solved = solve(given)
        return given.first_size + given.size[solved.position], -solved.bound
    if name == "bisect":
        return _smallest(plan), plan.lower_bound()
    found: IntArray = getattr(quota, name)(*_arguments(plan, name))[0]
    best = plan.lower_bound()
    if plan.highest and plan.worth(found) > best:  # weights far apart are rounded
        found = _smallest(plan)
    return found, best


def certificate(plan: QuotaPlan) -> Certificate | None:
    """Return a proof that the quotas of `allocate` are optimal, checked on the answer alone.

    None without jobs, and for sizes with gaps under ``"max_min"`` and ``"makespan"`` (there the
    plan's own bound is exact). `InputError` for plans without an answer or with several types.
    """
    if len(plan.kinds) != 1:
        raise InputError(f"plan: expected one type of GPU, got {len(plan.kinds)}")
    if reason := plan.infeasibility():
        raise InputError(f"plan: {reason}")
    name = algorithm(plan)
    if name == "bisect" or not plan.jobs:
        return None
    proof: Certificate = getattr(quota, name)(*_arguments(plan, name))[1]
    return proof


def _arguments(plan: QuotaPlan, name: str) -> tuple[Any, ...]:
    if name in ("proportional", "max_min"):
        first = plan.scores if name == "proportional" else plan.weights
        return first, plan.n_gpus, *plan.required_bounds
    table = plan.table
    value = table.cost if name == "makespan" else -table.cost
    if name == "choice":
        return table.ptr, table.size, value, plan.n_gpus
    return table.ptr, value, plan.required_bounds[0], plan.n_gpus


def _smallest(plan: QuotaPlan) -> IntArray:
    """Return the smallest sizes that reach the best level, then fill up from the lowest level."""
    smallest = plan.sizes_within(plan.level)
    return fill(plan, smallest, np.zeros(len(smallest), np.int64))[0]
