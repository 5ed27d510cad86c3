"""CP-SAT chooses GPUs: model, parameters, and incumbents and bounds as they come."""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.model.schedule import Rows
from optsched.solving.result import Result
from optsched.solving.solver import Support
from optsched_solvers._cores import confined
from optsched_solvers._cpsat import Call
from optsched_solvers._loading import load
from optsched_solvers.gpus.counts import nothing_found, supported
from optsched_solvers.gpus.cpsat_model import Model, support
from optsched_solvers.gpus.vectors import CountVectors, claim

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from optsched.model.schedule import Problem
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor

STEP: Final = 1e-3
"""Least improvement of the bound that is reported before the end."""


def supports(problem: Problem) -> Support:
    """One request, joint allocations by counts; few count vectors, or at most eight hosts."""
    from optsched.problems.gpus.problem import SubsetChoice

    if not isinstance(problem, SubsetChoice):
        return Support(False, "it is no choice of GPUs")
    able = supported(problem)
    if not able:
        return able
    return support(CountVectors(problem, problem.requests[0]))


def solve(problem: Any, limits: Limits, monitor: Monitor) -> Result:
    """Search until proof or limit; options, threads and iterations are those of `CpSat`."""
    from optsched_solvers._cpsat import checked_options

    checked_options(limits)
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


class _Run(Call):
    """One call of CP-SAT at one level of the policy."""

    def __init__(
        self, vectors: CountVectors, level: int | None, last: bool, limits: Limits, monitor: Monitor
    ) -> None:
        self.vectors, self.last = vectors, last
        self.built = Model(vectors, level)
        if monitor.solution is not None:
            self.built.hint(monitor.solution.to_lists()[0])
        self.best = -1
        super().__init__(self.built.model, limits, monitor)
        self.solver.best_bound_callback = self._bound

    def _search(self) -> None:
        with confined(self.cores):
            solved = self._solved()
        if solved:
            self._bound(self.solver.best_objective_bound, final=True)

    def _solution(self, value: Callable[[Any], int]) -> None:
        counts = np.array([value(count) for count in self.built.count], np.int64)
        # in the model of products a value may be below what these counts give
        real = int(self.vectors.shares(counts[None]).value[0])
        self.best = max(self.best, real)
        self.monitor.incumbent(Rows.of([self.vectors.gpus(counts)]), -real, "cpsat")

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


class CpSat:
    """CP-SAT on counts of GPUs per host; one iteration is 10^-6 deterministic seconds."""

    name = "cpsat"
    kinds = ("gpus",)
    options: Mapping[str, str] = MappingProxyType(
        {
            "parameters": "mapping of further CP-SAT parameters",
        }
    )

    supports = staticmethod(supports)
    solve = staticmethod(solve)
