"""What a plan promises: the period of its orders, and the bounds that no order can beat."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from optsched.kernels.cycle_ratio import cycle_time
from optsched.model.schedule import Arcs

if TYPE_CHECKING:
    from optsched.arraypipe.plan import ExecutionPlan
    from optsched.model.schedule import Schedule


class Prediction(NamedTuple):
    """Times of one cycle, in the unit of the plan's schedule."""

    period: int
    """Least period of the plan's orders: what a long run needs per cycle by these durations."""
    load: tuple[int, ...]
    """Durations of the blocks of every device."""
    chain: int
    """What the job with the longest iterations needs per cycle if it never waits for a device."""
    chain_job: int
    """That job; -1 if no job takes any time."""

    @property
    def bound(self) -> int:
        """No order of these blocks has a shorter period."""
        return max(*self.load, self.chain)


def predict(plan: ExecutionPlan) -> Prediction:
    """Period and bounds of a plan when it is repeated for ever.

    The period is the maximum cycle ratio of the plan's arcs and device orders
    (`optsched.kernels.cycle_ratio`). With a barrier its arcs count in both.
    """
    schedule = plan.schedule
    graph = _recurrent(plan)
    found = cycle_time(graph, schedule.sequences, schedule.offset)
    free = cycle_time(graph, None, schedule.offset)
    duration = schedule.duration.tolist()
    jobs = [plan.blocks[i].job for i in free.critical]
    return Prediction(
        period=found.period,
        load=tuple(sum(duration[i] for i in row) for row in plan.sequences),
        chain=free.period if jobs else 0,
        chain_job=jobs[0] if jobs else -1,
    )


def _recurrent(plan: ExecutionPlan) -> Schedule:
    """The graph of the schedule with all arcs of the plan, those between iterations included."""
    offset = plan.schedule.offset.tolist()
    rows = [(a.tail, a.head, a.lag, a.tokens - offset[a.head] + offset[a.tail]) for a in plan.arcs]
    period = plan.schedule.period or plan.cycle_time  # distances are for periodic graphs
    return replace(
        plan.schedule.graph(), arcs=Arcs.of(rows), period=period, offset=plan.schedule.offset
    )
