"""CP-SAT chooses GPUs: model, parameters, and incumbents and bounds as they come."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.errors import InputError
from optsched.registry import Support
from optsched.result import Result
from optsched.schedule import Rows
from optsched_solvers.cores import chosen_cores, confined
from optsched_solvers.loading import load
from optsched_solvers.subset_counts import nothing_found, supported
from optsched_solvers.subset_cpsat_model import Model, support
from optsched_solvers.subset_vectors import CountVectors, claim

if TYPE_CHECKING:
    from collections.abc import Callable

    from optsched.limits import Limits
    from optsched.monitor import Monitor
    from optsched.problem import Problem
    from optsched.problems.subset import SubsetChoice

STEP: Final = 1e-3
"""Least improvement of the bound that is reported before the end."""

_POLL: Final = 0.02  # seconds between two looks at limits and Ctrl-C
_STOP: Final = 0.1  # seconds that CP-SAT may take to hear a call to stop


def supports(problem: Problem) -> Support:
    """One request, joint allocations by counts; few count vectors, or at most eight hosts."""
    from optsched.problems.subset import SubsetChoice

    if not isinstance(problem, SubsetChoice):
        return Support(False, "it is no choice of GPUs")
    able = supported(problem)
    if not able:
        return able
    return support(CountVectors(problem, problem.requests[0]))


def solve(problem: SubsetChoice, limits: Limits, monitor: Monitor) -> Result:
    """Search until proof or limit; options, threads and iterations are those of `CpSat`."""
    from optsched_solvers.cpsat import _checked_symmetry

    _checked_symmetry(limits)
    if monitor.should_stop() or not load(monitor, "ortools.sat.python.cp_model"):
        return Result("unknown")
    vectors = CountVectors(problem, problem.requests[0])
    levels = vectors.levels()
    for level in levels:
        run = _Run(vectors, level, level == levels[-1], limits, monitor)
        run.run()
        if run.infeasible:
            continue
        return Result("unknown")
    return nothing_found(problem) if levels else Result("unknown")


class _Run:
    """One call of CP-SAT in a thread of its own, so that limits and Ctrl-C are seen at once."""

    def __init__(
        self, vectors: CountVectors, level: int | None, last: bool, limits: Limits, monitor: Monitor
    ) -> None:
        from ortools.sat.python import cp_model

        self.cp_model, self.vectors, self.monitor, self.last = cp_model, vectors, monitor, last
        self.built = Model(vectors, level)
        if monitor.sequences is not None:
            self.built.hint(monitor.sequences.to_lists()[0])
        self.infeasible = self.invalid = False
        self.best = -1
        self.failure: BaseException | None = None
        threads = limits.options.get("threads")
        self.cores = chosen_cores(limits.workers)
        if threads is None:
            threads = 1 if limits.iterations is not None else max(1, len(self.cores))
        self.solver = solver = cp_model.CpSolver()
        solver.best_bound_callback = self._bound
        given = solver.parameters
        given.num_workers = threads
        given.catch_sigint_signal = False  # see `optsched_solvers.cpsat`
        given.random_seed = limits.seed
        if limits.iterations is not None:
            given.max_deterministic_time = limits.iterations * 1e-6
        if limits.time_limit is not None:
            given.max_time_in_seconds = max(0.0, monitor.remaining - _STOP)
        for key, value in limits.options.get("parameters", {}).items():
            try:
                setattr(given, key, value)
            except (AttributeError, TypeError, ValueError):
                raise InputError(f"options.parameters: CP-SAT has no {key} = {value!r}") from None

    def run(self) -> None:
        """Solve; then `infeasible` and what the monitor holds tell the end."""
        thread = threading.Thread(target=self._work, name="cp-sat", daemon=True)
        thread.start()
        try:
            while thread.is_alive():
                thread.join(_POLL)
                self.monitor.advance(round(_POLL * 1e6))
                if self.monitor.should_stop():
                    break
        finally:
            while thread.is_alive():
                self.solver.stop_search()
                thread.join(_POLL)
        if self.failure is not None:
            raise self.failure
        if self.invalid:
            said = self.built.model.validate() or self.solver.solution_info()
            raise InputError(f"options.parameters: CP-SAT refuses them ({said.strip():.200})")

    def _work(self) -> None:
        try:
            with confined(self.cores):
                status = self.solver.solve(self.built.model, self._callback())
            self.invalid = status == self.cp_model.MODEL_INVALID
            self.infeasible = status == self.cp_model.INFEASIBLE
            if status == self.cp_model.OPTIMAL:
                self._bound(self.solver.best_objective_bound, final=True)
        except BaseException as error:
            self._fail(error)

    def _callback(self) -> Any:
        run = self

        class OnSolution(self.cp_model.CpSolverSolutionCallback):  # type: ignore[misc, name-defined]
            def on_solution_callback(self) -> None:
                run._solution(self.value)

        return OnSolution()

    def _solution(self, value: Callable[[Any], int]) -> None:
        try:
            counts = np.array([value(count) for count in self.built.count], np.int64)
            # in the model of products a value may be below what these counts give
            real = int(self.vectors.shares(counts[None]).value[0])
            self.best = max(self.best, real)
            self.monitor.incumbent(Rows.of([self.vectors.gpus(counts)]), -real, "cpsat")
        except BaseException as error:
            self._fail(error)

    def _bound(self, bound: float, final: bool = False) -> None:
        try:
            # of a preferred level it counts only once there is a choice
            if (self.last or self.best >= 0) and abs(bound) <= 2**53:
                upper = -math.ceil(bound - 1e-3)  # floats near an integer mean that integer
                told = self.monitor.lower_bound
                # it lowers its bound by single kB/s: only steps worth telling are told
                if final or told is None or -told - upper > STEP * upper:
                    claim(self.vectors.problem, self.monitor, upper, "cpsat", self.best)
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self.failure = self.failure or error
        self.solver.stop_search()
