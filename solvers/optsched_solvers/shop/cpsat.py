"""`cpsat`: OR-Tools CP-SAT on the disjunctive graph, one or two searches side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from optsched.errors import CyclicOrder
from optsched.model.objectives import MAKESPAN, TOTAL, objective_value
from optsched.model.schedule import Csr
from optsched.solving.result import Result
from optsched_solvers._cpsat import OPTIONS, Search, checked_options, solve_cp
from optsched_solvers._loading import load
from optsched_solvers._portfolio import chosen_cores
from optsched_solvers.shop.rules import supported_graph, supported_objective, try_rules

if TYPE_CHECKING:
    from collections.abc import Callable

    from optsched.model.schedule import Problem, Schedule
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor
    from optsched.solving.solver import Support
    from optsched_solvers.shop.cpsat_model import Model

STRONG_PROPAGATION_UP_TO = 400
"""Operations; above, the two switches below cost more than they bring."""

BOUND_STRONG_UP_TO = 700
"""Operations; as above, when only the bound is wanted (yn1, ta21 and ta41 gain by it)."""

START = (3e-4, 3e-6)
"""Seconds to start a search, per operation, and per pair of operations on a resource and thread:
CP-SAT simplifies the model and loads it into every thread, and cannot be stopped meanwhile."""

STOP = 0.3
"""Time from a call to stop until all threads have ended, as a share of what they took to start."""


class CpSat:
    """CP-SAT on the disjunctive graph: exact for every feature of the format.

    One iteration is 10^-6 of CP-SAT's deterministic seconds; iteration-limited runs use one thread
    and repeat exactly.
    """

    name = "cpsat"
    objectives = (MAKESPAN, TOTAL)
    options = OPTIONS

    def supports(self, problem: Problem) -> Support:
        """One iteration of any graph."""
        return supported_objective(problem, *self.objectives)

    def solve(self, problem: Problem, limits: Limits, monitor: Monitor) -> Result:
        """Search until proof or limit; starts from the monitor's incumbent, or from a rule's."""
        symmetry = checked_options(limits)
        graph = problem.graph()
        if monitor.solution is None and supported_graph(graph):
            try_rules(graph, limits, monitor)  # without a hint CP-SAT may find nothing
        if graph.n_operations == 0:
            monitor.incumbent(Csr.of([[]] * graph.n_resources), 0, self.name)
        if monitor.should_stop() or not load(
            monitor, "optsched.kernels.longest_path", "shop.cpsat_model"
        ):
            return Result("unknown")
        searches = _searches(graph, limits)
        start = _start_seconds(graph, searches)
        if monitor.objective is not None and monitor.remaining < (1 + STOP) * start:
            return Result("unknown")
        from optsched_solvers.shop.cpsat_model import Model

        built = Model(graph, monitor.lower_bound or 0, monitor.solution, symmetry)
        answer = solve_cp(
            built.model, limits, monitor, lambda solution: _report(built, solution, monitor),
            searches=searches, reserve=STOP * start,
        )  # fmt: skip
        if monitor.objective is None and answer.status == "infeasible":
            return Result("infeasible", reason="CP-SAT proved that no schedule exists")
        return Result("unknown")


def _report(built: Model, solution: Callable[[Any], int], monitor: Monitor) -> None:
    """Report the orders of a solution, with the objective of their semi-active schedule."""
    from optsched.kernels import longest_path

    try:
        sequences = built.sequences(solution)
        starts = longest_path.evaluate(built.graph, sequences).heads
    except CyclicOrder:
        return  # orders cannot express this instant: the bound stays valid, nothing is claimed
    reached = objective_value(built.graph, starts + built.graph.duration)
    monitor.incumbent(sequences, reached, "cpsat")


def _search(threads: int, cores: tuple[int, ...], strong: bool, from_below: bool = False) -> Search:
    """A search; `strong` propagates disjunctions strongly, `from_below` refutes makespans."""
    parameters = {
        "use_strong_propagation_in_disjunctive": strong,
        "use_dynamic_precedence_in_disjunctive": strong,
        "use_objective_lb_search": from_below,
    }
    return Search(parameters, threads, cores)


def _searches(graph: Schedule, limits: Limits) -> list[Search]:
    """Choose searches, never of two threads: with two CP-SAT makes no progress on the bound.

    Where `_propagates_strongly` one such thread proves fastest (with iteration limits it is also
    the one that repeats); on further cores eight threads look for better schedules and other
    bounds. Elsewhere eight threads share all cores.
    """
    if limits.options.get("mode") == "bound":
        return [_search(1, (), _propagates_strongly(graph, BOUND_STRONG_UP_TO), True)]
    strong = _propagates_strongly(graph, STRONG_PROPAGATION_UP_TO)
    cores = chosen_cores(limits.workers)
    if limits.iterations is not None or len(cores) < 2:
        return [_search(1, (), strong)]
    many = max(8, len(cores))
    if strong:
        return [_search(1, cores[:1], True), _search(many, cores[1:], False)]
    return [_search(many, cores, False)]


def _start_seconds(graph: Schedule, searches: list[Search]) -> float:
    """Seconds until all threads of all searches work, and can be stopped."""
    users = np.diff(graph.users.indptr)
    pairs = float((users * (users - 1)).sum()) / 2
    share = max((s.threads or 1) / max(1, len(s.cores or ())) for s in searches)
    return START[0] * graph.n_operations + START[1] * pairs * share


def _propagates_strongly(graph: Schedule, most: int) -> bool:
    """Whether the two switches for disjunctions are used: up to so many operations.

    Never with zero durations on a resource: there CP-SAT 9.15 with strong propagation proved bounds
    above the optimum (a test keeps the instance).
    """
    instant = (graph.duration == 0) & (np.diff(graph.op_resources.indptr) > 0)
    return graph.n_operations <= most and not instant.any()
