"""`auto` for choices of GPUs: the exact search that fits, else the best of the searches."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from optsched.bandwidth.placement.problem import GpuPlacement
from optsched.solving.result import Result
from optsched.solving.solver import Support
from optsched_solvers.gpus.counts import Counts
from optsched_solvers.gpus.hybrid import Hybrid
from optsched_solvers.gpus.one_by_one import OneByOne
from optsched_solvers.gpus.tree import BranchAndBound

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optsched.model.schedule import Problem
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor
    from optsched.solving.solver import Solver

ENGINES: tuple[Solver, ...] = (Counts(), BranchAndBound(), Hybrid())
"""In the order in which they are preferred: exact ones first."""

SEVERAL: tuple[Solver, ...] = (OneByOne(),)
"""The same for several requests."""

FIRST: Final = 1000
"""Iterations that an engine has at least where there is no choice yet: milliseconds."""


class Auto:
    """The first of `ENGINES` that takes the problem; if that proves nothing, the next ones too."""

    name = "auto"
    kinds = ("gpus",)
    options: Mapping[str, str] = MappingProxyType({})

    def supports(self, problem: Problem) -> Support:
        """Whether any of the searches takes it; else why the last does not."""
        said = Support(False, "it is no choice of GPUs")
        for engine in _engines(problem):
            said = engine.supports(problem)
            if said:
                return said
        return said

    def runs_inline(self, problem: Problem) -> bool:
        """Whether the first search answers at once."""
        first = Counts()
        return bool(first.supports(problem)) and first.runs_inline(problem)

    def solve(self, problem: Problem, limits: Limits, monitor: Monitor) -> Result:
        """The first that takes the problem; if that proves nothing, the next ones too."""
        assert isinstance(problem, GpuPlacement)
        for engine in _engines(problem):
            if not engine.supports(problem):
                continue
            given = limits
            if limits.iterations is not None and monitor.objective is None:
                given = replace(limits, iterations=max(limits.iterations, FIRST))
            found = engine.solve(problem, given, monitor)
            if found.status == "infeasible" or found.reason or monitor.should_stop():
                return found
            if problem.tolerance and isinstance(engine, Counts) and monitor.objective is not None:
                return found  # it gave bandwidth for a better rest: others would take that back
            if limits.iterations is not None and monitor.objective is not None:
                return found
        return Result("unknown")


def _engines(problem: Problem) -> tuple[Solver, ...]:
    several = isinstance(problem, GpuPlacement) and len(problem.requests) > 1
    return SEVERAL if several else ENGINES
