"""Stretches of a segment in which the same jobs ran: each has a period of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optsched.arraypipe.planning.repair import without
from optsched.arraypipe.reporting.executed import unit

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optsched.arraypipe.course import Course
    from optsched.arraypipe.plan import ExecutionPlan
    from optsched.arraypipe.planning.segments import Segment
    from optsched.arraypipe.reporting.executed import Executed
    from optsched.model.schedule import IntArray


class Stretch(NamedTuple):
    """Cycles of a segment, from one end of a job to the next.

    `seats` are those that ran, and `cycles` the ones in which every block of theirs was run, and no
    other block.
    """

    segment: int
    seats: tuple[int, ...]
    cycles: IntArray


def stretches(course: Course, run: Executed) -> list[Stretch]:
    """Stretches of all segments, in their order.

    Every segment has the one with which it begins; later ones are left out if they have fewer than
    two whole cycles, which give no period.
    """
    found = []
    for number in range(course.forgotten, len(course.segments)):
        segment = course.segments[number]
        here = np.flatnonzero(run.segment == number)
        for k, (seats, begin, end) in enumerate(_spans(segment)):
            cycles = _whole(segment.plan, seats, run.operation[here], run.cycle[here])
            cycles = cycles[(cycles >= begin) & (cycles < end)]
            if not k or len(cycles) >= 2:
                found.append(Stretch(number, seats, cycles))
    return found


def planned_period(plan: ExecutionPlan, seats: tuple[int, ...]) -> int | None:
    """Nanoseconds a cycle by the document, for these jobs alone; None if it has no period."""
    schedule = plan.schedule
    if schedule.period is None:
        return None
    gone = set(range(plan.n_jobs)) - set(seats)
    left = without(schedule, gone) if gone and seats else schedule
    return None if left.period is None else left.period * unit(plan)


def _spans(segment: Segment) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """Which seats run, and in which cycles all blocks of theirs may be, and none of the others."""
    plan = segment.plan
    rows = zip(segment.count, plan.copies, strict=True)
    ends = [-(-count // copies) for count, copies in rows]  # in cycles of the seat itself
    earliest = [min(b.offset for b in plan.blocks if b.job == seat) for seat in range(plan.n_jobs)]
    every = range(plan.n_jobs)
    for end in sorted({e for e in ends if e}) or [0]:
        seats = tuple(seat for seat in every if ends[seat] >= end)
        over = [ends[seat] + segment.latest[seat] for seat in every if 0 < ends[seat] < end]
        begin = max([*over, *(segment.latest[seat] for seat in seats)], default=0)
        yield seats, begin, min((end + earliest[seat] for seat in seats), default=0)


def _whole(
    plan: ExecutionPlan, seats: tuple[int, ...], operation: IntArray, cycle: IntArray
) -> IntArray:
    """Cycles in which all blocks of these seats were run, and no other."""
    if not len(cycle):
        return np.zeros(0, np.int64)
    base = int(cycle.min())
    own = np.array([b.device >= 0 and b.job in seats for b in plan.blocks])
    n = np.bincount(cycle - base)
    n_own = np.bincount(cycle - base, weights=own[operation])
    return np.flatnonzero((n == own.sum()) & (n_own == n)) + base
