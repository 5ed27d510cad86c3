"""First answers in plain Python, for the seconds in which kernels are compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optsched_solvers._loading import loaded
from optsched_solvers.periodic import rules as rolling_rules
from optsched_solvers.shop import hand_made, rules

if TYPE_CHECKING:
    from optsched.model.schedule import Problem
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor


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
