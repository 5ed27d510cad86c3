"""First orders of a cycle for searches that need some to begin with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from optsched.kernels.cycle_ratio import cycle_time
from optsched.problems.jobarray.cycle import answer_rows
from optsched_solvers import _cold_start as cold_start
from optsched_solvers.periodic.rules import first_answers

if TYPE_CHECKING:
    from optsched.model.schedule import Problem
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor


def first_orders(problem: Problem, limits: Limits, monitor: Monitor) -> int:
    """Offer constructed orders if there are none; at least one job after the other, always fit.

    Returns the number of constructions, each of which is an iteration.
    """
    graph, made = problem.graph(), 0
    if monitor.objective is None and limits.iterations != 0:
        cold_start.offer_first(problem, limits, monitor)
        made = first_answers(graph, monitor, most=limits.iterations)
    if monitor.objective is None:  # operation ids are job-major and topological
        answer = answer_rows(graph.users, np.zeros(graph.n_operations, np.int64))
        monitor.incumbent(answer, cycle_time(graph, graph.users).period, "one job at a time")
    return made
