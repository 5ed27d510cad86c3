"""`hybrid`: BandPilot's dispatcher, the better of its two searches."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from optsched_solvers.gpus.eha import Eha, checked_candidates
from optsched_solvers.gpus.pts import Pts, checked_start

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optsched.model.schedule import Problem
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor
    from optsched.solving.result import Result
    from optsched.solving.solver import Support


class Hybrid:
    """`eha`, then `pts`, which replaces the former's choice only if it is better."""

    name = "hybrid"
    kinds = ("gpus",)
    options: Mapping[str, str] = MappingProxyType({**Eha.options, **Pts.options})

    def __init__(self) -> None:
        self.parts = Eha(), Pts()

    def runs_inline(self, problem: Problem) -> bool:
        """Where both parts are."""
        return all(part.runs_inline(problem) for part in self.parts)

    def supports(self, problem: Problem) -> Support:
        """What both take."""
        first, second = (part.supports(problem) for part in self.parts)
        return second if first else first

    def solve(self, problem: Problem, limits: Limits, monitor: Monitor) -> Result:
        """One after the other; with its own options each."""
        checked_candidates(limits)
        checked_start(limits)
        for part in self.parts:
            own = {key: value for key, value in limits.options.items() if key in part.options}
            result = part.solve(problem, replace(limits, options=own), monitor)
            if monitor.should_stop():
                break
        return result
