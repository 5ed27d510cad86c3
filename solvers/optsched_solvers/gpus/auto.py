"""`auto` for GPU placements: the exact search that fits, else heuristics."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from optsched_solvers.gpus.bandpilot import Hybrid
from optsched_solvers.gpus.counts import Counts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optsched.model.schedule import Problem
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor
    from optsched.solving.result import Result
    from optsched.solving.solver import Support

LEAST: Final = 1000
"""Least iterations: milliseconds."""


class Auto:
    """`counts`; `hybrid` for models that it does not take (elsewhere `hybrid` is never better)."""

    name = "auto"
    kinds = ("gpus",)
    options: Mapping[str, str] = MappingProxyType({})

    def supports(self, problem: Problem) -> Support:
        """What one of the solvers supports; else the reason of the last."""
        return Counts().supports(problem) or Hybrid().supports(problem)

    def runs_inline(self, problem: Problem) -> bool:
        """Whether the exact search answers at once."""
        return bool(Counts().supports(problem)) and Counts().runs_inline(problem)

    def solve(self, problem: Problem, limits: Limits, monitor: Monitor) -> Result:
        """Run the solver that takes the problem."""
        if limits.iterations is not None:
            limits = replace(limits, iterations=max(limits.iterations, LEAST))
        solver = Counts() if Counts().supports(problem) else Hybrid()
        return solver.solve(problem, limits, monitor)
