"""The one driver of CP-SAT: threads, parameters, stops, solutions and bounds as they come."""

from __future__ import annotations

import math
import threading
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from optsched.errors import InputError
from optsched_solvers._cores import chosen_cores, confined

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor

OPTIONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "mode": "'solve' (default), or 'bound': lift the lower bound and look for nothing else",
        "symmetry": "break the symmetry of identical jobs (default true)",
        "parameters": "mapping of further CP-SAT parameters",
    }
)

STOP: Final = 0.1
"""Seconds that CP-SAT may take to hear a call to stop."""

MOST: Final = 2**53
"""Integers up to here are exact in the floats in which CP-SAT tells its bounds."""

_NEAR: Final = 1e-3  # a bound so little above an integer means this integer
_POLL: Final = 0.02  # seconds between two looks at limits and Ctrl-C


def checked_options(limits: Limits) -> bool:
    """Refuse wrong values of `OPTIONS`; whether symmetry is to be broken."""
    given = limits.options
    mode, parameters = given.get("mode", "solve"), given.get("parameters", {})
    symmetry = given.get("symmetry", True)
    if mode not in ("solve", "bound"):
        raise InputError(f"options.mode: expected 'solve' or 'bound', got {mode!r:.60}")
    if not isinstance(parameters, dict):
        raise InputError(f"options.parameters: expected a mapping, got {parameters!r:.60}")
    if not isinstance(symmetry, bool):
        raise InputError(f"options.symmetry: expected true or false, got {symmetry!r:.60}")
    return symmetry


class Call:
    """One call of CP-SAT in a thread of its own, so that limits and Ctrl-C are seen at once.

    A subclass says what to do with a solution (`_solution`). It may also say what to do with a
    bound (`_bound`; by itself the monitor hears it, rounded up), and replace the one search for the
    optimum (`_search`) by several, each with a fresh `_solver`. An exception in any of them ends
    the search, and `run` raises it. After `run`, `infeasible` and the monitor tell the end.

    Parameters
    ----------
    model
        A `CpModel`; None where `_search` makes its own.
    limits
        ``iterations`` are 10^-6 of CP-SAT's deterministic seconds, in one thread, which repeats
        exactly; ``options["parameters"]`` go before all other parameters.
    monitor
        Hears solutions and bounds, and says when to stop.
    threads, cores
        Threads, and the processor cores they are confined to; those of `limits.workers` unless
        given, one thread on each.
    reserve
        Seconds before the end of the time at which to stop: CP-SAT hears nothing meanwhile.
    """

    def __init__(
        self,
        model: Any,
        limits: Limits,
        monitor: Monitor,
        *,
        threads: int | None = None,
        cores: tuple[int, ...] | None = None,
        reserve: float = STOP,
    ) -> None:
        from ortools.sat.python import cp_model

        self.cp_model, self.model, self.limits, self.monitor = cp_model, model, limits, monitor
        self.cores = chosen_cores(limits.workers) if cores is None else cores
        self.threads = threads or (1 if limits.iterations is not None else max(1, len(self.cores)))
        self.reserve = reserve
        self.infeasible = self.invalid = self.answered = False
        self.failure: BaseException | None = None
        self.solver = self._solver()

    def run(self) -> None:
        """Solve; raises what failed meanwhile."""
        run_all([self])

    # what subclasses replace

    def _solution(self, value: Callable[[Any], int]) -> None:
        """Take a solution: `value` gives its variables."""
        raise NotImplementedError

    def _bound(self, bound: float) -> None:
        """Take a proved bound of the objective."""
        if abs(bound) <= MOST:
            self.monitor.bound(math.ceil(bound - _NEAR), "cpsat")

    def _search(self) -> None:
        """Solve, and tell what is proved."""
        if self._solved():
            self._bound(self.solver.best_objective_bound)

    def _look(self) -> None:
        """What is done now and then, by the thread that waits."""

    def _invalid(self) -> str:
        """Why CP-SAT refuses the model."""
        said = self.model.validate() or self.solver.solution_info() or "it does not say why"
        return f"options.parameters: CP-SAT refuses them ({said.strip():.200})"

    def _solver(self) -> Any:
        """A fresh solver with all parameters set, for what is left of the time."""
        solver, limits = self.cp_model.CpSolver(), self.limits
        given = solver.parameters
        given.num_workers = self.threads
        # its own handler aborts the process when the signal meets another thread than the solver's
        given.catch_sigint_signal = False
        given.random_seed = limits.seed
        if limits.iterations is not None:
            given.max_deterministic_time = limits.iterations * 1e-6
        if limits.time_limit is not None:
            given.max_time_in_seconds = max(0.0, self.monitor.remaining - self.reserve)
        self._set(solver, limits.options.get("parameters", {}))
        return solver

    # for subclasses to call

    def _set(self, solver: Any, parameters: Mapping[str, Any]) -> None:
        """Set parameters, whose names and values a user may have given."""
        for key, value in parameters.items():
            try:
                setattr(solver.parameters, key, value)
            except (AttributeError, TypeError, ValueError):
                raise InputError(
                    f"options.parameters: CP-SAT has no {key} = {value!r:.60}"
                ) from None

    def _solved(self) -> bool:
        """Call CP-SAT once; whether it proved an optimum."""
        status = self.solver.solve(self.model, self._callback())
        self.invalid = status == self.cp_model.MODEL_INVALID
        self.infeasible = status == self.cp_model.INFEASIBLE
        self.answered = status not in (self.cp_model.FEASIBLE, self.cp_model.UNKNOWN)
        return bool(status == self.cp_model.OPTIMAL)

    def _callback(self) -> Any:
        run = self

        class OnSolution(self.cp_model.CpSolverSolutionCallback):  # type: ignore[misc, name-defined]
            def on_solution_callback(self) -> None:
                run._guarded(run._solution, self.value)

        return OnSolution()

    def _guarded(self, do: Callable[..., None], *given: Any) -> None:
        """Do something in one of CP-SAT's threads, in which nobody may raise."""
        try:
            do(*given)
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self.failure = self.failure or error
        self.solver.stop_search()

    def _work(self) -> None:
        self.solver.best_bound_callback = lambda bound: self._guarded(self._bound, bound)
        with confined(self.cores):  # the search's own threads inherit it
            self._guarded(self._search)


def run_all(calls: Sequence[Call]) -> None:
    """Run calls for one answer side by side, until one has it or the first one's monitor says stop.

    CP-SAT does not tell its deterministic time while it works: the clock stands for it.
    """
    monitor, idle = calls[0].monitor, threading.Event()

    def work(call: Call) -> None:
        call._work()
        idle.set()

    threads = [
        threading.Thread(target=work, args=(call,), name="cp-sat", daemon=True) for call in calls
    ]
    for thread in threads:
        thread.start()
    try:
        while any(thread.is_alive() for thread in threads):
            idle.wait(_POLL)
            idle.clear()
            monitor.advance(round(_POLL * 1e6))
            for call in calls:
                call._look()
            # somebody else may have proved the optimum
            if monitor.should_stop() or monitor.remaining < calls[0].reserve:
                break
            if any(
                not thread.is_alive() and (call.answered or call.failure)
                for call, thread in zip(calls, threads, strict=True)
            ):
                break
    finally:
        while any(thread.is_alive() for thread in threads):  # leave no thread behind
            for call in calls:
                call.solver.stop_search()
            idle.wait(_POLL)
            idle.clear()
    for call in calls:
        if call.failure is not None:
            raise call.failure
    for call in calls:
        if call.invalid:
            raise InputError(call._invalid())
