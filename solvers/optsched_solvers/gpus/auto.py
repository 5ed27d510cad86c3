"""`auto` for GPU placements: the exact search that fits, else heuristics."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from optsched.bandwidth.placement.problem import GpuPlacement
from optsched.solving.result import Result
from optsched.solving.solver import Support
from optsched_solvers.gpus.bandpilot import Hybrid
from optsched_solvers.gpus.counts import Counts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optsched.model.schedule import Problem
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor

FIRST: Final = 1000
"""Least iterations of the first solver: milliseconds."""


class Auto:
    """`counts`, then `hybrid` if that proves nothing."""

    name = "auto"
    kinds = ("gpus",)
    options: Mapping[str, str] = MappingProxyType({})

    def supports(self, problem: Problem) -> Support:
        """What one of the solvers supports; else the reason of the last."""
        found = Support(False, "it only chooses GPUs (GpuPlacement)")
        for solver in (Counts(), Hybrid()):
            found = solver.supports(problem)
            if found:
                break
        return found

    def runs_inline(self, problem: Problem) -> bool:
        """Whether the exact search answers at once."""
        return bool(Counts().supports(problem)) and Counts().runs_inline(problem)

    def solve(self, problem: Problem, limits: Limits, monitor: Monitor) -> Result:
        """Run the solvers in turn until one proves its choice or a limit is reached."""
        assert isinstance(problem, GpuPlacement)
        for solver in (Counts(), Hybrid()):
            if not solver.supports(problem):
                continue
            given = limits
            if limits.iterations is not None and monitor.objective is None:
                given = replace(limits, iterations=max(limits.iterations, FIRST))
            found = solver.solve(problem, given, monitor)
            ended = found.status == "infeasible" or found.reason or monitor.should_stop()
            if ended or (limits.iterations is not None and monitor.objective is not None):
                return found
        return Result("unknown")
