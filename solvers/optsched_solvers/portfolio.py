"""`auto`: rules and bounds first, a search on job orders, then CP-SAT from the best of them."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from optsched.result import Result
from optsched_solvers.cpsat import STRONG_PROPAGATION_UP_TO, CpSat
from optsched_solvers.job_order_search import improve
from optsched_solvers.rules import supported_graph, try_rules

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optsched.limits import Limits
    from optsched.monitor import Monitor
    from optsched.problem import Problem
    from optsched.registry import Support


SEARCH_SHARE = 0.3
"""Of the time limit for the search on job orders, where CP-SAT is weak: above
`STRONG_PROPAGATION_UP_TO` operations. Below, a sixth of it."""
PATIENCE = 3000  # list schedules without a better one


class Auto:
    """Dispatching rules, which prove long job arrays in milliseconds; CP-SAT where they do not.

    With an iteration limit each of the three parts (rules, search on job orders, CP-SAT) gets so
    many of its own iterations.
    """

    name = "auto"
    options: Mapping[str, str] = MappingProxyType({})

    def __init__(self) -> None:
        self.exact = CpSat()

    def supports(self, problem: Problem) -> Support:
        """Whatever CP-SAT takes: one iteration of any graph."""
        return self.exact.supports(problem)

    def solve(self, problem: Problem, limits: Limits, monitor: Monitor) -> Result:
        """Rules first; if none met the bound, the search, then CP-SAT from the best schedule."""
        graph = problem.graph()
        if supported_graph(graph):
            try_rules(graph, limits, monitor)
            if not monitor.should_stop():
                weak = graph.n_operations > STRONG_PROPAGATION_UP_TO
                share = SEARCH_SHARE if weak else SEARCH_SHARE / 6
                improve(
                    graph, monitor, seed=limits.seed, iterations=limits.iterations,
                    seconds=share * monitor.remaining,
                    patience=PATIENCE,
                )  # fmt: skip
        if monitor.objective is not None and monitor.should_stop():
            return Result("unknown")
        return self.exact.solve(problem, limits, monitor)
