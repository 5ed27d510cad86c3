"""`auto` for quota plans: an exact algorithm or greedy, then CP-SAT, or branch and bound."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from optsched.solving.result import Result
from optsched_solvers.quota.cpsat import CpSat
from optsched_solvers.quota.exact import GreedyQuota, QuotaExact
from optsched_solvers.quota.plans import supported
from optsched_solvers.quota.tree import BranchAndBound

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optsched.model.schedule import Problem
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor
    from optsched.solving.solver import Support

FIRST: Final = 10_000
"""Iterations of CP-SAT at least, for a first answer where localities defeat greedy placement."""


class Auto:
    """With one type the exact algorithm; else, or if a locality fails, greedy, then CP-SAT.

    Branch and bound takes the plans that are too large for CP-SAT.
    """

    name = "auto"
    kinds = ("quota",)
    options: Mapping[str, str] = MappingProxyType({})

    def supports(self, problem: Problem) -> Support:
        """Every plan: what no engine proves, the greedy answer bounds."""
        return supported(problem, None)

    def runs_inline(self, problem: Problem) -> bool:
        """Whether the special algorithm answers at once."""
        return QuotaExact().runs_inline(problem)

    def solve(self, problem: Problem, limits: Limits, monitor: Monitor) -> Result:
        """Run engine after engine until one proves."""
        given, model, tree = replace(limits, options={}), CpSat(), BranchAndBound()
        for engine in (QuotaExact(), GreedyQuota()):
            if engine.supports(problem):
                found = engine.solve(problem, given, monitor)
                if monitor.should_stop():
                    return found
                break
        support = model.supports(problem)
        if support:
            if limits.iterations is not None and monitor.objective is None:
                given = replace(given, iterations=max(limits.iterations, FIRST))
            return model.solve(problem, given, monitor)
        if tree.supports(problem):
            return tree.solve(problem, given, monitor)
        return Result("unknown", reason=support.reason)
