"""The best of all dispatching rules.

On the published ArrayPipe instances one rule (valley) meets the lower bound, a proof, on every
array of four devices with 25 jobs or more: always try rules first.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from optsched.errors import InputError
from optsched.model.objectives import MAKESPAN, TOTAL
from optsched.solving.result import Result
from optsched_solvers._loading import load
from optsched_solvers.shop.rules import RULES, supported_graph, supported_objective, try_rules

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optsched.model.schedule import Problem
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor
    from optsched.solving.solver import Support


class Dispatch:
    """The best of all rules, each non-delay and active, forward and backwards.

    One iteration is one list schedule. With ``search`` a local search on the orders of jobs follows
    the rules, until a limit.
    """

    name = "dispatch"
    objectives = (MAKESPAN, TOTAL)
    options: Mapping[str, str] = MappingProxyType(
        {
            "rules": "list of rules to try instead of all",
            "search": "after the rules, local search on job orders until a limit (true or false)",
        }
    )

    def supports(self, problem: Problem) -> Support:
        """One iteration, at most one resource per operation."""
        goal = supported_objective(problem, *self.objectives)
        return supported_graph(problem.graph()) if goal else goal

    def solve(self, problem: Problem, limits: Limits, monitor: Monitor) -> Result:
        """Try every rule; stop early at a limit or a proof."""
        rules, search = checked_options(limits.options)
        graph = problem.graph()
        if search and graph.goal is not None:
            raise InputError(f"options.search: not for the {graph.goal.objective}; use tabu")
        tried = try_rules(graph, limits, monitor, rules)
        if search:
            if not load(monitor, "shop.job_orders"):
                return Result("unknown")
            from optsched_solvers.shop.job_orders import improve

            remaining = None if limits.iterations is None else limits.iterations - tried
            improve(graph, monitor, seed=limits.seed, iterations=remaining)
        return Result("unknown")


def checked_options(options: Mapping[str, Any]) -> tuple[tuple[str, ...], bool]:
    """Return the options `rules` and `search`."""
    rules = options.get("rules", RULES)
    if not isinstance(rules, (list, tuple)) or any(rule not in RULES for rule in rules):
        raise InputError(f"options.rules: expected a list of {', '.join(RULES)}, got {rules!r:.60}")
    search = options.get("search", False)
    if not isinstance(search, bool):
        raise InputError(f"options.search: expected true or false, got {search!r:.60}")
    return tuple(rules), search
