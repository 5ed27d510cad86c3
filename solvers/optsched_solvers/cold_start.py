"""First answers in plain Python, for the seconds in which kernels are compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optsched_solvers import hand_made, rolling_rules, rules
from optsched_solvers.loading import loaded

if TYPE_CHECKING:
    from optsched.limits import Limits
    from optsched.monitor import Monitor
    from optsched.problem import Problem


def offer_first(problem: Problem, limits: Limits, monitor: Monitor) -> None:
    """Offer the first rule's schedule and every hand-made order, if kernels have to be compiled.

    With an iteration limit nothing is done: then answers never depend on what is compiled.

    Parameters
    ----------
    problem
        Makespan or period; operations hold at most one resource each.
    limits, monitor
        As of any solver.
    """
    periodic = problem.objective_name == "period"
    kernels = rolling_rules.MODULES if periodic else rules.KERNELS
    if limits.iterations is not None or loaded(*kernels):
        return
    if periodic:
        rolling_rules.offer_quick(problem.graph(), monitor)
    else:
        rules.offer_quick(problem.graph(), limits, monitor)
    hand_made.offer(problem, monitor, of_many=True)
