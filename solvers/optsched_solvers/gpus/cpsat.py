"""CP-SAT on counts of GPUs by host, with a table of the bandwidths of feasible vectors."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.solving.result import Result
from optsched_solvers._cpsat import checked_options, solve_cp
from optsched_solvers._loading import load
from optsched_solvers.gpus.counts import nothing_found, supported
from optsched_solvers.gpus.vectors import CountVectors

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from optsched.model.schedule import Problem
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor
    from optsched.solving.solver import Support

MOST_VECTORS: Final = 10_000
"""Count vectors, each a row of the table."""

_BLOCK: Final = 1024  # vectors that are evaluated at once

STEP: Final = 1e-3
"""Least improvement of the bound that is reported before the end."""


class CpSat:
    """CP-SAT on counts of GPUs per host; one iteration is 10^-6 deterministic seconds."""

    name = "cpsat"
    kinds = ("gpus",)
    options: Mapping[str, str] = MappingProxyType(
        {"parameters": "mapping of further CP-SAT parameters"}
    )

    def supports(self, problem: Problem) -> Support:
        """Up to 10,000 count vectors, and a model with tables."""
        return supported(problem, most_vectors=MOST_VECTORS)

    def solve(self, problem: Any, limits: Limits, monitor: Monitor) -> Result:
        """Search until proof or limit."""
        checked_options(limits)
        if monitor.should_stop() or not load(monitor, "ortools.sat.python.cp_model"):
            return Result("unknown")
        status = _Model(CountVectors(problem), monitor).run(limits)
        return nothing_found(problem) if status == "infeasible" else Result("unknown")


class _Model:
    """Feasible count vectors and their bandwidths as a table of a CP-SAT model."""

    def __init__(self, vectors: CountVectors, monitor: Monitor) -> None:
        from ortools.sat.python import cp_model

        self.vectors, self.monitor = vectors, monitor
        rows, every = [], vectors.every()
        for block in np.array_split(every, 1 + len(every) // _BLOCK):
            value = vectors.values(block)
            kept = (value >= 0) & (vectors.excess(block) == 0)
            rows += np.column_stack([block, value])[kept].tolist()
        self.model = model = cp_model.CpModel()
        self.count = [model.new_int_var(0, most, "") for most in vectors.most.tolist()]
        self.value = model.new_int_var(0, max((row[-1] for row in rows), default=0), "value")
        model.add_allowed_assignments([*self.count, self.value], rows)
        model.minimize(-self.value)
        if monitor.solution is not None:
            hosts = vectors.problem.cluster.host_of[list(monitor.solution)]
            for h, count in zip(vectors.hosts, self.count, strict=True):
                model.add_hint(count, int((hosts == h).sum()))

    def run(self, limits: Limits) -> str:
        """Search; returns the status of CP-SAT."""
        self.bound: int | None = None
        answer = solve_cp(self.model, limits, self.monitor, self._solution, self._bound)
        if answer.status == "optimal" and self.bound is not None:
            self.monitor.bound(self.bound, "cpsat")
        return answer.status

    def _solution(self, value: Callable[[Any], int]) -> None:
        counts = np.array([value(count) for count in self.count], np.int64)
        self.monitor.incumbent(self.vectors.gpus(counts), -value(self.value), "cpsat")

    def _bound(self, bound: int) -> None:
        """Report a bound, in steps: CP-SAT lowers it by single kB/s."""
        self.bound, known = bound, self.monitor.lower_bound
        if known is None or -known + bound > STEP * -bound:
            self.monitor.bound(bound, "cpsat")
