"""CP-SAT on the cycle of a rolling array: one period after the other, found or refuted."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.errors import CyclicOrder, InputError
from optsched.kernels.cycle_ratio import cycle_time
from optsched.problems.jobarray.cycle import orders_of
from optsched.solving.result import Result
from optsched.solving.solver import Support
from optsched_solvers._cores import confined
from optsched_solvers._cpsat import STOP, Call
from optsched_solvers._loading import load
from optsched_solvers.periodic.first import first_orders

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from optsched.model.schedule import Problem, Schedule
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor
    from optsched_solvers.periodic.cpsat_model import CycleModel

FIRST_EFFORT: Final = 0.5
"""CP-SAT's deterministic seconds for each period of the first round; each round doubles them."""

GRAIN: Final = 1024
"""Bisection ends at this part of the bound; the last step of a round is the best period less 1."""

TWO_SEARCHES: Final = """
subsolvers: "plain" subsolvers: "strong"
subsolver_params { name: "plain" linearization_level: 0 }
subsolver_params {
  name: "strong" linearization_level: 0
  use_strong_propagation_in_disjunctive: true use_dynamic_precedence_in_disjunctive: true
}
"""
"""CP-SAT's parameters on two cores: a plain search and one with strong propagation."""

START: Final = (3e-4, 3e-6)
"""Seconds to make and simplify a model, per operation and per pair of them on a resource."""


def solve(problem: Problem, limits: Limits, monitor: Monitor) -> Result:
    """Search until proof or limit; options, threads and iterations are those of `CpSat`.

    Rounds of bisection between the proved bound and the best period. A period that is refuted
    raises the bound, for what is feasible stays so for every longer period; one that remains open
    counts as infeasible for this round only.
    """
    from optsched_solvers._cpsat import checked_options

    symmetry = checked_options(limits)
    if limits.options.get("mode", "solve") != "solve":
        raise InputError('options.mode: "bound" belongs to one iteration, not to periods')
    graph = problem.graph()
    first_orders(problem, limits, monitor)
    modules = ("ortools.sat.python.cp_model", "periodic.cpsat_model", "periodic.orders")
    if monitor.should_stop() or not load(monitor, *modules):
        return Result("unknown")
    if monitor.remaining < start_seconds(graph):
        return Result("unknown")
    _Run(graph, symmetry, limits, monitor).run()
    return Result("unknown")


def start_seconds(graph: Schedule) -> float:
    """Seconds before the first search begins, and before it hears a call to stop."""
    users = np.diff(graph.users.indptr)
    return START[0] * graph.n_operations + START[1] * float((users * users).sum())


class _Run(Call):
    """One call: many searches, each for a period."""

    def __init__(self, graph: Schedule, symmetry: bool, limits: Limits, monitor: Monitor) -> None:
        from optsched_solvers.periodic.cpsat_model import far_apart
        from optsched_solvers.periodic.insertion import Circle

        self.graph, self.symmetry = graph, symmetry
        self.start = start_seconds(graph)
        self.circle = Circle.of(graph)
        self.apart = far_apart(graph)
        self.effort = FIRST_EFFORT
        self.spent = 0.0
        self.built: CycleModel | None = None
        self.found = False
        super().__init__(None, limits, monitor)

    def _search(self) -> None:
        with confined(self.cores):
            while not self._ended():
                self._round()
                self.effort *= 2

    def _ended(self) -> bool:
        most = self.limits.iterations
        used_up = most is not None and self.spent * 1e6 >= most
        return used_up or self.invalid or self.failure is not None or self.monitor.should_stop()

    def _round(self) -> None:
        """Bisect from the bound on; open periods count as infeasible, this time."""
        best, least = self._between()
        told = least - 1
        trial = least
        while not self._ended():
            if self._try(trial) == "open":
                told = max(told, trial)
            best, least = self._between()
            told = max(told, least - 1)
            if told >= best - 1:
                return
            if trial == best - 1 and told == trial:
                return
            apart = best - told > max(2, best // GRAIN)
            trial = (told + best) // 2 if apart else best - 1

    def _between(self) -> tuple[int, int]:
        objective, _ = self.monitor.best
        assert objective is not None
        return objective, max(1, self.monitor.lower_bound or 1)

    def _try(self, period: int) -> str:
        """Search for a schedule of this period: "found", "refuted" or "open"."""
        from optsched_solvers.periodic.cpsat_model import CycleModel

        built = CycleModel(self.graph, period, self.symmetry, self.apart)
        if built.refuted:
            self.spent += self.start
            self.monitor.bound(period + 1, "cpsat")
            return "refuted"
        self._hint(built)
        self.built, self.model, self.found = built, built.model, False
        self.solver = self._solver()
        self._solved()
        # CP-SAT counts next to nothing, often 0, for making and simplifying a model
        self.spent += self.solver.response_proto.deterministic_time + self.start
        if self.infeasible:
            self.infeasible = False
            self.monitor.bound(period + 1, "cpsat")
            return "refuted"
        return "found" if self.found else "open"

    def _hint(self, built: CycleModel) -> None:
        period, answer = self.monitor.best
        if answer is None or period is None:
            return
        sequences, offsets = orders_of(self.graph, answer)
        try:
            found = cycle_time(self.graph, sequences, offsets)
        except CyclicOrder:
            return
        built.hint(found.start + (offsets - found.late) * found.period, found.period)

    def _solution(self, value: Callable[[Any], int]) -> None:
        from optsched_solvers.periodic.orders import folded

        assert self.built is not None
        starts = self.built.starts(value)
        cycle = self.built.grain * self.built.period
        orders = folded(self.circle, starts, cycle, self.monitor.lower_bound or 1)
        if orders is not None and orders.period <= self.built.period:
            self.found = True
            self.monitor.incumbent(orders.answer, orders.period, "cpsat")

    def _solver(self) -> Any:
        solver = super()._solver()
        given, limits = solver.parameters, self.limits
        instant = bool((self.graph.duration == 0).any())
        chosen = limits.options.get("parameters", {})
        if "threads" not in limits.options:
            alone = limits.iterations is not None or len(self.cores) < 2
            # see `cpsat`: with zero durations strong propagation proved wrong bounds
            given.num_workers = 1 if alone or instant else 2
            if given.num_workers == 2:
                given.merge_text_format(TWO_SEARCHES)
        # linear relaxations of periods are weak, and slow single searches down many times
        if "linearization_level" not in chosen:
            given.linearization_level = 0
        if "max_deterministic_time" not in chosen:
            left = self.effort
            if limits.iterations is not None:
                left = min(left, max(1e-6, limits.iterations * 1e-6 - self.spent))
            given.max_deterministic_time = left
        if limits.time_limit is not None:
            given.max_time_in_seconds = max(0.0, self.monitor.remaining - STOP)
        return solver


__all__ = ["solve"]


class CpSat:
    """CP-SAT on the cycle; iterations as for job shops, and the making of models counts."""

    name = "cpsat"
    kinds = ("periodic",)
    options: Mapping[str, str] = MappingProxyType(
        {
            "symmetry": "break the symmetry of identical jobs (default true)",
            "parameters": "mapping of further CP-SAT parameters",
        }
    )

    def supports(self, problem: Problem) -> Support:
        """Every rolling array."""
        return Support(True)

    solve = staticmethod(solve)
