"""Branch and bound: failure-directed search."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from optsched.model.objectives import MAKESPAN
from optsched.solving.result import Result
from optsched_solvers._loading import load
from optsched_solvers.shop.rules import supported_graph, supported_objective, try_rules

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optsched.model.schedule import Problem
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor
    from optsched.solving.solver import Support

PROOF = (
    "optsched.kernels.longest_path",
    "shop.proof.failure_directed",
    "shop.proof.tree_search:run",
)
"""What failure-directed search loads."""


class BranchAndBound:
    """Exact search over the orders on the machines; one iteration is one node of the tree.

    Failure-directed search (Vilím, Laborie & Shaw 2015) with edge finding and shaving.
    """

    name = "branch_and_bound"
    options: Mapping[str, str] = MappingProxyType({})

    def supports(self, problem: Problem) -> Support:
        """One iteration (makespan) of any graph."""
        return supported_objective(problem, MAKESPAN)

    def solve(self, problem: Problem, limits: Limits, monitor: Monitor) -> Result:
        """Search until a proof or a limit, from the monitor's schedule or from the rules'."""
        graph = problem.graph()
        if not load(monitor, *PROOF):
            if monitor.solution is None and supported_graph(graph):
                try_rules(graph, limits, monitor)  # a first answer needs no kernels
            return Result("unknown")
        from optsched_solvers.shop.proof import failure_directed

        return failure_directed.search(graph, limits, monitor)
