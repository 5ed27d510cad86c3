"""`auto`: rules and bounds first, then CP-SAT from the best rule's schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optsched.result import Result
from optsched_solvers.cpsat import CpSat
from optsched_solvers.dispatch import Dispatch

if TYPE_CHECKING:
    from optsched.limits import Limits
    from optsched.monitor import Monitor
    from optsched.problems.problem import Problem
    from optsched.registry import Support
    from optsched.schedule import Schedule


class Auto:
    """Dispatching rules, which prove long job arrays in milliseconds; CP-SAT where they do not.

    One iteration is one list schedule, what is left of them goes to CP-SAT.
    """

    name = "auto"
    options: dict[str, str] = {}  # noqa: RUF012

    def __init__(self) -> None:
        self.rules, self.exact = Dispatch(), CpSat()

    def supports(self, problem: Problem | Schedule) -> Support:
        """Whatever CP-SAT takes: one iteration of any graph."""
        return self.exact.supports(problem)

    def solve(self, problem: Problem | Schedule, limits: Limits, monitor: Monitor) -> Result:
        """Rules first; CP-SAT, warm-started, if no rule met the bound."""
        if self.rules.supports(problem):
            self.rules.solve(problem, limits, monitor)
        if monitor.objective is not None and monitor.should_stop():
            return Result("unknown")
        return self.exact.solve(problem, limits, monitor)
