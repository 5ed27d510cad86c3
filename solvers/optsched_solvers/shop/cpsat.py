"""OR-Tools CP-SAT as a backend: model, hint, parameters, and incumbents and bounds as they come."""

from __future__ import annotations

import threading
import time
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from optsched.errors import CyclicOrder, InputError
from optsched.solving.result import Result
from optsched_solvers._cores import chosen_cores, confined
from optsched_solvers._loading import load
from optsched_solvers.shop.rules import supported_objective

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from optsched.model.schedule import Problem, Schedule
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor
    from optsched.solving.solver import Support

STRONG_PROPAGATION_UP_TO = 400
"""Operations; above, the two switches below cost more than they bring."""

BOUND_STRONG_UP_TO = 700
"""Operations; as above, when only the bound is wanted (yn1, ta21 and ta41 gain by it)."""

START = (3e-4, 3e-6)
"""Seconds to start a search, per operation, and per pair of operations on a resource and thread:
CP-SAT simplifies the model, loads it into every thread, and hears no call to stop meanwhile."""

STOP = 0.3
"""Time from a call to stop until all threads have ended, as a share of what they took to start."""

_POLL = 0.02  # seconds between two looks at limits and Ctrl-C


class CpSat:
    """CP-SAT on the disjunctive graph: exact for every feature of the format.

    One iteration is 10^-6 of CP-SAT's deterministic seconds (every period that is tried also counts
    as the making of its model takes); iteration-limited runs use one thread and repeat exactly.
    """

    name = "cpsat"
    options: Mapping[str, str] = MappingProxyType(
        {
            "mode": "'solve' (default), or 'bound': lift the lower bound and look for nothing else",
            "threads": "CP-SAT workers instead of the measured choice",
            "symmetry": "break the symmetry of identical jobs (default true)",
            "parameters": "mapping of further CP-SAT parameters",
        }
    )

    def supports(self, problem: Problem) -> Support:
        """One iteration (makespan) of any graph."""
        return supported_objective(problem)

    def solve(self, problem: Problem, limits: Limits, monitor: Monitor) -> Result:
        """Search until proof or limit; starts from the monitor's incumbent, or from a rule's."""
        symmetry = _checked_symmetry(limits)
        graph = problem.graph()
        if monitor.solution is None:
            _first_schedule(graph, limits, monitor)
        if graph.n_operations == 0:
            from optsched.model.schedule import Rows

            monitor.incumbent(Rows.of([[]] * graph.n_resources), 0, self.name)
        if monitor.should_stop() or not load(
            monitor, "optsched.kernels.longest_path", "shop.cpsat_model"
        ):
            return Result("unknown")
        lanes = _lanes(graph, limits)
        start = _start_seconds(graph, lanes)
        if monitor.objective is not None and monitor.remaining < (1 + STOP) * start:
            return Result("unknown")
        return _Run(graph, limits, monitor, symmetry, lanes, STOP * start).run()


class _Lane(NamedTuple):
    """One CP-SAT search and the cores it may use."""

    threads: int
    strong: bool  # propagate disjunctions strongly
    cores: tuple[int, ...] = ()
    from_below: bool = False  # refute one makespan after the other instead of improving schedules


class _Run:
    """One call of CP-SAT, in threads of its own, so that Ctrl-C and limits are seen at once."""

    def __init__(
        self, graph: Schedule, limits: Limits, monitor: Monitor, symmetry: bool,
        lanes: list[_Lane], stop_seconds: float,
    ) -> None:  # fmt: skip
        from ortools.sat.python import cp_model

        from optsched_solvers.shop.cpsat_model import Model

        self.cp_model = cp_model
        self.graph, self.limits, self.monitor = graph, limits, monitor
        self.model = Model(graph, monitor.lower_bound or 0, monitor.solution, symmetry)
        self.stop_seconds = stop_seconds
        self.failure: BaseException | None = None
        self.answered = self.infeasible = self.invalid = False
        self.lanes = [(lane, self._solver(lane)) for lane in lanes]

    def run(self) -> Result:
        threads = [
            threading.Thread(target=self._work, args=pair, name="cp-sat", daemon=True)
            for pair in self.lanes
        ]
        for thread in threads:
            thread.start()
        try:
            while not self.answered and any(thread.is_alive() for thread in threads):
                time.sleep(_POLL)
                # it does not tell its deterministic time while it works: the clock stands for it
                self.monitor.advance(round(_POLL * 1e6))
                # also when somebody else has proved the optimum
                if self.monitor.should_stop() or self.monitor.remaining < self.stop_seconds:
                    break
        finally:
            while any(thread.is_alive() for thread in threads):  # leave no thread behind
                self._stop()
                time.sleep(_POLL)
        if self.failure is not None:
            raise self.failure
        if self.invalid:
            raise InputError(self._why_invalid())
        if self.infeasible and self.monitor.objective is None:
            return Result("infeasible", reason="CP-SAT proved that no schedule exists")
        return Result("unknown")

    def _why_invalid(self) -> str:
        if self.model.model.validate():
            return "cpsat: times are beyond CP-SAT's integer range; scale them down"
        said = next((text for _, solver in self.lanes if (text := solver.solution_info())), "")
        return f"options.parameters: CP-SAT refuses them ({said or 'it does not say why'})"

    def _work(self, lane: _Lane, solver: Any) -> None:
        try:
            with confined(lane.cores):  # the search's own threads inherit it
                status = solver.solve(self.model.model, self._callback())
            self.invalid |= status == self.cp_model.MODEL_INVALID
            self.infeasible |= status == self.cp_model.INFEASIBLE
            if status == self.cp_model.OPTIMAL:
                self._bound(solver.best_objective_bound)
            self.answered |= status not in (self.cp_model.FEASIBLE, self.cp_model.UNKNOWN)
        except BaseException as error:
            self._fail(error)

    def _callback(self) -> Any:
        run = self

        class OnSolution(self.cp_model.CpSolverSolutionCallback):  # type: ignore[misc, name-defined]
            def on_solution_callback(self) -> None:
                run._found([self.value(start) for start in run.model.start], self.value)

        return OnSolution()

    def _found(self, starts: list[int], value: Callable[[Any], int]) -> None:
        from optsched.kernels import longest_path

        try:
            sequences = self.model.sequences(starts, value)
            makespan = longest_path.evaluate(self.graph, sequences).makespan
            self.monitor.incumbent(sequences, makespan, "cpsat")
        except CyclicOrder:
            return  # orders cannot express this instant: the bound stays valid, nothing is claimed
        except BaseException as error:
            self._fail(error)

    def _bound(self, bound: float) -> None:
        try:
            self.monitor.bound(int(bound), "cpsat")  # integers up to 2^53 are exact in a float
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self.failure = self.failure or error
        self.answered = True
        self._stop()

    def _stop(self) -> None:
        for _, solver in self.lanes:
            solver.stop_search()

    def _solver(self, lane: _Lane) -> Any:
        solver = self.cp_model.CpSolver()
        solver.best_bound_callback = self._bound
        given, limits = solver.parameters, self.limits
        given.num_workers = lane.threads
        # its own handler aborts the process when the signal meets another thread than the solver's
        given.catch_sigint_signal = False
        given.random_seed = limits.seed
        given.use_strong_propagation_in_disjunctive = lane.strong
        given.use_dynamic_precedence_in_disjunctive = lane.strong
        given.use_objective_lb_search = lane.from_below
        if limits.iterations is not None:
            given.max_deterministic_time = limits.iterations * 1e-6
        if limits.time_limit is not None:
            given.max_time_in_seconds = max(0.0, self.monitor.remaining - self.stop_seconds)
        for key, value in limits.options.get("parameters", {}).items():
            try:
                setattr(given, key, value)
            except (AttributeError, TypeError, ValueError):
                raise InputError(
                    f"options.parameters: CP-SAT has no {key} = {value!r:.60}"
                ) from None
        return solver


def _lanes(graph: Schedule, limits: Limits) -> list[_Lane]:
    """Who searches: never two threads, with which CP-SAT makes no progress on the bound.

    Where `_propagates_strongly` one such thread proves fastest (with iteration limits it is also
    the one that repeats); on further cores eight threads look for better schedules and other
    bounds. Elsewhere eight threads share all cores.
    """
    strong = _propagates_strongly(graph, STRONG_PROPAGATION_UP_TO)
    threads = limits.options.get("threads")
    if limits.options.get("mode") == "bound":
        return [_Lane(threads or 1, _propagates_strongly(graph, BOUND_STRONG_UP_TO), (), True)]
    if threads is not None:
        return [_Lane(threads, strong)]
    cores = chosen_cores(limits.workers)
    if limits.iterations is not None or len(cores) < 2:
        return [_Lane(1, strong)]
    if strong:
        return [_Lane(1, True, cores[:1]), _Lane(max(8, len(cores)), False, cores[1:])]
    return [_Lane(max(8, len(cores)), False, cores)]


def _start_seconds(graph: Schedule, lanes: list[_Lane]) -> float:
    """Seconds until all threads of all lanes search, and can be stopped."""
    users = np.diff(graph.users.indptr)
    pairs = float((users * (users - 1)).sum()) / 2
    share = max(lane.threads / max(1, len(lane.cores)) for lane in lanes)
    return START[0] * graph.n_operations + START[1] * pairs * share


def _propagates_strongly(graph: Schedule, most: int) -> bool:
    """Whether the two switches for disjunctions are used: up to so many operations.

    Never with zero durations on a resource: there CP-SAT 9.15 with strong propagation proved bounds
    above the optimum (a test keeps the instance).
    """
    instant = (graph.duration == 0) & (np.diff(graph.op_resources.indptr) > 0)
    return graph.n_operations <= most and not instant.any()


def _first_schedule(graph: Schedule, limits: Limits, monitor: Monitor) -> None:
    """The rules' best schedule as a hint: without one CP-SAT may find nothing on large graphs."""
    from optsched_solvers.shop.rules import supported_graph, try_rules

    if supported_graph(graph):
        try_rules(graph, limits, monitor)


def _checked_symmetry(limits: Limits) -> bool:
    """The option `symmetry`; wrong values of all options are refused, whether needed or not."""
    mode = limits.options.get("mode", "solve")
    if mode not in ("solve", "bound"):
        raise InputError(f"options.mode: expected 'solve' or 'bound', got {mode!r:.60}")
    threads = limits.options.get("threads", 1)
    if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= 256:
        raise InputError(f"options.threads: expected an integer in 1..256, got {threads!r:.60}")
    parameters = limits.options.get("parameters", {})
    if not isinstance(parameters, dict):
        raise InputError(f"options.parameters: expected a mapping, got {parameters!r:.60}")
    symmetry = limits.options.get("symmetry", True)
    if not isinstance(symmetry, bool):
        raise InputError(f"options.symmetry: expected true or false, got {symmetry!r:.60}")
    return symmetry
