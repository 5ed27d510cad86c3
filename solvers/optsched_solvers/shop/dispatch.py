"""The best of all dispatching rules.

On the published ArrayPipe instances one rule (valley) meets the lower bound, a proof, on every
array of four devices with 25 jobs or more: always try rules first.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from optsched.errors import InputError
from optsched.solving.result import Result
from optsched.solving.solver import Support
from optsched_solvers.shop.rules import (
    INSERTION,
    RULES,
    run,
    supported_graph,
    supported_objective,
    try_insertion,
    try_rules,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optsched.model.schedule import Rows, Schedule
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor
    from optsched.solving.problem import Problem

__all__ = ["INSERTION", "RULES", "Dispatch", "complete", "run"]


class Dispatch:
    """The best of all rules, each non-delay and active, forward and backwards, and of insertion.

    One iteration is one list schedule, or the insertion of all operations. With ``search`` it goes
    on: a local search on the orders of jobs behind the rules, until a limit.
    """

    name = "dispatch"
    answers = ("orders", "periodic orders")
    options: Mapping[str, str] = MappingProxyType(
        {
            "rules": "list of rules to try instead of all",
            "search": "after the rules, local search on job orders until a limit (true or false)",
        }
    )

    def supports(self, problem: Problem) -> Support:
        """One iteration or a cycle of a rolling array, at most one resource per operation."""
        if problem.answers == "periodic orders":
            return Support(True)
        goal = supported_objective(problem)
        if not goal:
            return goal
        return supported_graph(problem.graph())

    def solve(self, problem: Problem, limits: Limits, monitor: Monitor) -> Result:
        """Try every rule; stop early at a limit or a proof."""
        known = (*RULES, INSERTION)
        rules = limits.options.get("rules", known)
        if isinstance(rules, str) or any(rule not in known for rule in rules):
            raise InputError(
                f"options.rules: expected a list of {', '.join(known)}, got {rules!r:.60}"
            )
        search = limits.options.get("search", False)
        if not isinstance(search, bool):
            raise InputError(f"options.search: expected true or false, got {search!r:.60}")
        graph = problem.graph()
        if problem.answers == "periodic orders":
            _roll(graph, limits, monitor, tuple(rules), search)
            return Result("unknown")
        listed = RULES if rules is known else tuple(rule for rule in rules if rule != INSERTION)
        tried = try_rules(graph, limits, monitor, listed)
        stopped = monitor.objective is not None and monitor.should_stop()
        if INSERTION in rules and tried != limits.iterations and not stopped:
            tried += try_insertion(graph, monitor)
        if search:
            from optsched_solvers.shop.late_acceptance import improve

            left = None if limits.iterations is None else limits.iterations - tried
            improve(graph, monitor, seed=limits.seed, iterations=left)
        return Result("unknown")


def _roll(
    graph: Schedule, limits: Limits, monitor: Monitor, rules: tuple[str, ...], search: bool
) -> None:
    """Orders of a cycle: rules, insertion, and if wanted the search behind them."""
    from optsched_solvers.periodic.rules import first_answers

    made = first_answers(graph, monitor, most=limits.iterations, rules=rules)
    if search and not monitor.should_stop():
        from optsched_solvers.periodic.rolling_search import improve

        left = None if limits.iterations is None else limits.iterations - made
        improve(graph, monitor, seed=limits.seed, iterations=left)


def complete(graph: Schedule, partial: Rows) -> Schedule | None:
    """Fill the operations that orders lack in (`optsched_solvers.shop.tabu.insertion.complete`)."""
    from optsched_solvers.shop.tabu import insertion

    return insertion.complete(graph, partial)
