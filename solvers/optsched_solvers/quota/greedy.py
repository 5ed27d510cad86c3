"""`greedy_quota`: marginal greedy at the prices of the hull, for any quota plan, with its bound."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from optsched.problems.quota.problem import QuotaPlan
from optsched.problems.quota.table import MOST_OPTIONS
from optsched.solving.result import Result
from optsched_solvers.quota.first import first_answer
from optsched_solvers.quota.ground import NOT_LOADED, offer, ready, supported
from optsched_solvers.quota.marginal import greedy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optsched.model.schedule import Problem
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor
    from optsched.solving.solver import Support


class GreedyQuota:
    """A good answer to any quota plan at once; what it proves is the plan's own bound.

    Sums: every job takes what is best at the prices of the Lagrangian dual, the best bargains
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
        if not ready(problem, monitor):
            first_answer(problem, monitor)
            return Result("unknown", reason=NOT_LOADED)
        found = greedy(problem)
        if found is None:
            return Result("unknown", reason="the jobs that must run found no place together")
        if not offer(problem, monitor, *found, self.name):
            return Result("unknown", reason="no placement was found that keeps the localities")
        return Result("unknown")


__all__ = ["GreedyQuota"]
