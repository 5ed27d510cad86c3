"""First orders of a cycle for searches that need some to begin with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optsched.cycle_ratio import cycle_time
from optsched.schedule import Rows
from optsched_solvers.rolling_rules import first_answers

if TYPE_CHECKING:
    from optsched.limits import Limits
    from optsched.monitor import Monitor
    from optsched.schedule import Schedule


def first_orders(graph: Schedule, limits: Limits, monitor: Monitor) -> None:
    """Offer constructed orders if there are none; at least one job after the other, always fit."""
    if monitor.objective is None and limits.iterations != 0:
        first_answers(graph, monitor, most=limits.iterations)
    if monitor.objective is None:
        rows = graph.users.to_lists()  # ids are job-major and topological
        period = cycle_time(graph, Rows.of(rows)).period
        answer = Rows.of([*rows, [0] * graph.n_operations])
        monitor.incumbent(answer, period, "one job at a time")
