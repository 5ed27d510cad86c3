"""A run replayed on a virtual clock: its orders and arcs, devices in parallel, any durations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from optsched.arraypipe.reporting.executed import executed
from optsched.arraypipe.trace import document
from optsched.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from optsched.arraypipe.course import Course, Record
    from optsched.arraypipe.reporting.executed import Executed
    from optsched.model.schedule import IntArray, Schedule

CLOCK = "virtual: measured durations, devices in parallel, lags and setups of the plan"


def replayed(course: Course, records: Sequence[Record], provenance: Mapping[str, Any]) -> Schedule:
    """The run as parallel devices would have done it: measured durations on a virtual clock.

    Lags and setups are those of the plans, orders those of the run. Every device goes on to the
    next segment when it is done with its own part of the one before, as in the run.

    Parameters
    ----------
    course, records
        What was run; the records of one device in its own order.
    provenance
        Put into the document.

    Returns
    -------
    Schedule
        In nanoseconds; every block starts as early as it can.
    """
    run = executed(course, records)
    duration = run.duration
    columns = {"setup_in": run.setup_in, "setup_out": run.setup_out, "family": run.family}
    return document(
        run,
        course.name,
        virtual_starts(run, duration),
        duration,
        np.maximum(run.waits.lag, -duration[run.waits.tail]),
        {**provenance, "clock": CLOCK},
        columns if run.setup_in.any() or run.setup_out.any() else {},
    )


def virtual_starts(run: Executed, duration: IntArray) -> IntArray:
    """Earliest starts of all records if their blocks take so long, in nanoseconds.

    Longest paths over the arcs of the plans, with their lags, and over the orders of the devices,
    with their setups.
    """
    before, after = run.neighbours
    tail = np.concatenate((run.waits.tail, before))
    head = np.concatenate((run.waits.head, after))
    lag = np.maximum(run.waits.lag, -duration[run.waits.tail])
    weight = np.concatenate((lag, run.setup(before, after))) + duration[tail]
    by_tail = np.argsort(tail, kind="stable")
    heads, weights = head[by_tail].tolist(), weight[by_tail].tolist()
    bounds = np.searchsorted(tail[by_tail], np.arange(len(run) + 1)).tolist()
    waiting = np.bincount(head, minlength=len(run)).tolist()
    start = [0] * len(run)
    order = [k for k, n in enumerate(waiting) if not n]
    for k in order:  # grows while it is walked: Kahn's algorithm
        here = start[k]
        for e in range(bounds[k], bounds[k + 1]):
            j = heads[e]
            if here + weights[e] > start[j]:
                start[j] = here + weights[e]
            waiting[j] -= 1
            if not waiting[j]:
                order.append(j)
    if len(order) < len(start):
        raise InternalError("blocks that were run are said to wait for each other")
    return np.array(start, np.int64)


def makespan(start: IntArray, duration: IntArray) -> int:
    """When the last block ends; 0 without blocks."""
    return int((start + duration).max(initial=0))
