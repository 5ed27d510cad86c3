"""OR-Tools CP-SAT as a backend: model, hint, parameters, and incumbents and bounds as they come."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

from optsched.errors import CyclicOrder, InputError
from optsched.registry import Support
from optsched.result import Result
from optsched_solvers.rules import supported_objective

if TYPE_CHECKING:
    from collections.abc import Callable

    from optsched.limits import Limits
    from optsched.monitor import Monitor
    from optsched.problems.problem import Problem
    from optsched.schedule import Schedule

STRONG_PROPAGATION_UP_TO = 400
"""Operations; above, the two switches below cost more than they bring."""

_POLL = 0.02  # seconds between two looks at limits and Ctrl-C


class CpSat:
    """CP-SAT on the disjunctive graph: exact for every feature of the format but periods.

    One iteration is 10^-6 of CP-SAT's deterministic seconds; iteration-limited runs repeat exactly.
    """

    name = "cpsat"
    options = {
        "threads": "CP-SAT workers instead of the measured choice",
        "symmetry": "break the symmetry of identical jobs (default true)",
        "parameters": "mapping of further CP-SAT parameters",
    }  # noqa: RUF012

    def supports(self, problem: Problem | Schedule) -> Support:
        """One iteration (makespan) of any graph."""
        if getattr(problem, "objective_name", "makespan") != "makespan":
            return Support(False, "only the makespan of one iteration is supported, not the period")
        return supported_objective(problem.graph())

    def solve(self, problem: Problem | Schedule, limits: Limits, monitor: Monitor) -> Result:
        """Search until proof or limit; starts from the monitor's incumbent, or from a rule's."""
        symmetry = _flag(limits, "symmetry", True)
        graph = problem.graph()
        if monitor.sequences is None:
            _first_schedule(graph, limits, monitor)
        if graph.n_operations == 0:
            from optsched.schedule import Rows

            monitor.incumbent(Rows.of([[]] * graph.n_resources), 0, self.name)
        if monitor.should_stop():
            return Result("unknown")
        return _Run(graph, limits, monitor, symmetry).run()


class _Run:
    """One call of CP-SAT in its own thread, so that Ctrl-C and limits are seen at once."""

    def __init__(self, graph: Schedule, limits: Limits, monitor: Monitor, symmetry: bool) -> None:
        from ortools.sat.python import cp_model

        from optsched_solvers.cpsat_model import Model

        self.cp_model = cp_model
        self.graph, self.limits, self.monitor = graph, limits, monitor
        self.model = Model(graph, monitor.lower_bound or 0, monitor.sequences, symmetry)
        self.solver = cp_model.CpSolver()
        self.solver.best_bound_callback = self._bound
        self.failure: BaseException | None = None
        self.status: Any = cp_model.UNKNOWN
        self._parameters()

    def run(self) -> Result:
        thread = threading.Thread(target=self._work, name="cp-sat", daemon=True)
        thread.start()
        try:
            while thread.is_alive():
                thread.join(_POLL)
                if self.monitor.should_stop() and not self.monitor.proved:
                    self.solver.stop_search()
        finally:
            while thread.is_alive():  # Ctrl-C or a failing callback: leave no thread behind
                self.solver.stop_search()
                thread.join(_POLL)
        if self.failure is not None:
            raise self.failure
        cp_model = self.cp_model
        if self.status == cp_model.MODEL_INVALID:
            raise InputError("cpsat: the model is beyond CP-SAT's integer range; scale the times down")
        if self.status == cp_model.INFEASIBLE and self.monitor.objective is None:
            return Result("infeasible", reason="CP-SAT proved that no schedule exists")
        if self.status == cp_model.OPTIMAL:
            self._bound(self.solver.best_objective_bound)
        return Result("unknown")

    def _work(self) -> None:
        try:
            cores = _pin(self.limits.workers) if self.threads > 1 else None
            try:
                self.status = self.solver.solve(self.model.model, self._callback())
            finally:
                if cores:
                    os.sched_setaffinity(0, cores)
        except BaseException as error:
            self.failure = error

    def _callback(self) -> Any:
        run = self

        class OnSolution(self.cp_model.CpSolverSolutionCallback):  # type: ignore[misc, name-defined]
            def on_solution_callback(self) -> None:
                run._found([self.value(start) for start in run.model.start], self.value)

        return OnSolution()

    def _found(self, starts: list[int], value: Callable[[Any], int]) -> None:
        from optsched_solvers import longest_path

        try:
            sequences = self.model.sequences(starts, value)
            makespan = longest_path.evaluate(self.graph, sequences).makespan
            self.monitor.incumbent(sequences, makespan, "cpsat")
        except CyclicOrder:
            return  # an instant that orders cannot express: the bound stays valid, nothing is claimed
        except BaseException as error:
            self._fail(error)

    def _bound(self, bound: float) -> None:
        try:
            # integers up to 2^53 are exact in a float
            value = int(bound)
            if self.monitor.objective is None or value <= self.monitor.objective:
                self.monitor.bound(value, "cpsat")
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self.failure = self.failure or error
        self.solver.stop_search()

    def _parameters(self) -> None:
        """As measured: a strong single worker, or eight threads on the cores that may be used."""
        given = self.solver.parameters
        limits = self.limits
        self.threads = _threads(limits)
        given.num_workers = self.threads
        given.random_seed = limits.seed
        if self.graph.n_operations <= STRONG_PROPAGATION_UP_TO:
            given.use_strong_propagation_in_disjunctive = True
            given.use_dynamic_precedence_in_disjunctive = True
        if limits.iterations is not None:
            given.max_deterministic_time = limits.iterations * 1e-6
            given.interleave_search = self.threads > 1
        if limits.time_limit is not None:
            given.max_time_in_seconds = max(0.0, self.monitor.remaining)
        extra = limits.options.get("parameters", {})
        if not isinstance(extra, dict):
            raise InputError(f"options.parameters: expected a mapping, got {extra!r}")
        for key, value in extra.items():
            try:
                setattr(given, key, value)
            except (AttributeError, TypeError, ValueError):
                raise InputError(f"options.parameters: CP-SAT has no {key} = {value!r}") from None


def _threads(limits: Limits) -> int:
    """CP-SAT threads: never two, with which it makes no progress on the bound."""
    given = limits.options.get("threads")
    if given is not None:
        if isinstance(given, bool) or not isinstance(given, int) or not 1 <= given <= 256:
            raise InputError(f"options.threads: expected an integer in 1..256, got {given!r}")
        return given
    if limits.workers == 1 or not hasattr(os, "sched_setaffinity"):
        return 1
    return max(8, limits.workers)


def _pin(workers: int) -> set[int]:
    """Let this thread, and those it starts, use only so many cores; returns what it had."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, set(sorted(before)[:workers]))
    return set(before)


def _first_schedule(graph: Schedule, limits: Limits, monitor: Monitor) -> None:
    """The rules' best schedule as a hint: without one CP-SAT may find nothing on large graphs."""
    from optsched_solvers.rules import supported_graph, try_rules

    if supported_graph(graph):
        try_rules(graph, limits, monitor)


def _flag(limits: Limits, key: str, default: bool) -> bool:
    value = limits.options.get(key, default)
    if not isinstance(value, bool):
        raise InputError(f"options.{key}: expected true or false, got {value!r}")
    return value
