"""One call of CP-SAT on a model of quotas or counts: thread, parameters, stops and failures."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final

from optsched.errors import InputError
from optsched_solvers._cores import chosen_cores

if TYPE_CHECKING:
    from collections.abc import Callable

    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor

STOP: Final = 0.1
"""Seconds that CP-SAT may take to hear a call to stop."""

_POLL: Final = 0.02  # seconds between two looks at limits and Ctrl-C


class Call:
    """Runs in a thread of its own, so that limits and Ctrl-C are seen at once.

    Subclasses say what is searched for (`_search`, in that thread) and what is done with solutions
    and bounds; an exception there goes to `_fail`, and `run` raises it.
    """

    def __init__(self, model: Any, limits: Limits, monitor: Monitor) -> None:
        from ortools.sat.python import cp_model

        self.cp_model, self.model, self.limits, self.monitor = cp_model, model, limits, monitor
        self.infeasible = self.invalid = False
        self.failure: BaseException | None = None
        self.cores = chosen_cores(limits.workers)
        self.solver = self._solver()

    def _solver(self) -> Any:
        limits, monitor = self.limits, self.monitor
        threads = limits.options.get("threads")
        if threads is None:
            threads = 1 if limits.iterations is not None else max(1, len(self.cores))
        solver = self.cp_model.CpSolver()
        given = solver.parameters
        given.num_workers = threads
        given.catch_sigint_signal = False  # see `optsched_solvers.shop.cpsat`
        given.random_seed = limits.seed
        if limits.iterations is not None:
            given.max_deterministic_time = limits.iterations * 1e-6
        if limits.time_limit is not None:
            given.max_time_in_seconds = max(0.0, monitor.remaining - STOP)
        for key, value in limits.options.get("parameters", {}).items():
            try:
                setattr(given, key, value)
            except (AttributeError, TypeError, ValueError):
                raise InputError(
                    f"options.parameters: CP-SAT has no {key} = {value!r:.60}"
                ) from None
        return solver

    def run(self) -> None:
        """Solve; then `infeasible` and what the monitor holds tell the end."""
        thread = threading.Thread(target=self._work, name="cp-sat", daemon=True)
        thread.start()
        try:
            while thread.is_alive():
                thread.join(_POLL)
                self.monitor.advance(round(_POLL * 1e6))
                self._look()
                if self.monitor.should_stop():
                    break
        finally:
            while thread.is_alive():
                self.solver.stop_search()
                thread.join(_POLL)
        if self.failure is not None:
            raise self.failure
        if self.invalid:
            said = self.model.validate() or self.solver.solution_info()
            raise InputError(f"options.parameters: CP-SAT refuses them ({said.strip():.200})")

    def _look(self) -> None:
        """What is done now and then while the thread works."""

    def _work(self) -> None:
        try:
            self._search()
        except BaseException as error:
            self._fail(error)

    def _search(self) -> None:
        """Solve, and tell what is proved."""
        raise NotImplementedError

    def _solved(self) -> bool:
        """Call CP-SAT once; whether it proved an optimum."""
        status = self.solver.solve(self.model, self._callback())
        self.invalid = status == self.cp_model.MODEL_INVALID
        self.infeasible = status == self.cp_model.INFEASIBLE
        return bool(status == self.cp_model.OPTIMAL)

    def _callback(self) -> Any:
        run = self

        class OnSolution(self.cp_model.CpSolverSolutionCallback):  # type: ignore[misc, name-defined]
            def on_solution_callback(self) -> None:
                try:
                    run._solution(self.value)
                except BaseException as error:
                    run._fail(error)

        return OnSolution()

    def _solution(self, value: Callable[[Any], int]) -> None:
        """Take a solution: `value` gives its variables."""
        raise NotImplementedError

    def _fail(self, error: BaseException) -> None:
        self.failure = self.failure or error
        self.solver.stop_search()
