"""To the next instant of a simulated cluster: `advance` applies all that happens at it; kernels.

The order within an instant: completions and ends of passes, changes of nodes, arrivals; then the
policy decides once, and `optsched.cluster.world.apply` applies its decision.
"""

from __future__ import annotations

from typing import Final

from optsched.cluster.world.jobs import NEVER, foresee, position, release, show, sync, vacate
from optsched.cluster.world.layout import (
    ADD,
    DECIDE,
    ENDED,
    FINISHED_ALL,
    HIDDEN,
    LOG_FULL,
    PENDING,
    PRESENT,
    REMOVE,
    STALLED,
    TOO_LATE,
)
from optsched.cluster.world.pointers import WORLD
from optsched.kernels.compile import INT, helper

MOST_IDLE: Final = 10_000
"""Decisions in a row while no job runs and only a wake-up of the policy is left."""
_ROWS: Final = len(PRESENT)


@helper(INT, WORLD, INT, INT, counted=False)
def _shift(w, i, step):  # type: ignore[no-untyped-def]
    """Remove position i (step = -1), or make place for one (1): `active` and its columns."""
    s = w.state
    s.version += 1
    s.active += step
    to, last = (i, s.active) if step < 0 else (s.active - 1, i)
    while to != last:
        w.active[to], w.assigned[to] = w.active[to - step], w.assigned[to - step]
        to -= step
    for row in range(_ROWS):
        if s.columns >> row & 1:
            first = row * len(w.job)
            to, last = (i, s.active) if step < 0 else (s.active - 1, i)
            while to != last:
                w.present[first + to] = w.present[first + to - step]
                to -= step
    return s.active


@helper(INT, WORLD, INT, counted=False)
def _arrive(w, j):  # type: ignore[no-untyped-def]
    """Job j arrives: visible and pending, or behind the hidden jobs of its group."""
    job, s, group = w.job[j], w.state, w.group[w.given[j].group]
    if 0 <= group.limit <= group.visible:
        job.phase = HIDDEN
        if group.head < 0:
            group.head = j
        else:
            w.job[group.tail].partner = j
        group.tail = j
        return 0
    i = position(w, j)
    _shift(w, i, 1)
    w.active[i], w.assigned[i] = j, 0
    job.phase, job.entered = PENDING, s.time
    group.visible += 1
    return show(w, i, s.columns)


@helper(INT, WORLD, INT, counted=False)
def _reached(w, j):  # type: ignore[no-untyped-def]
    """Job j is at the end of a pass, or of its work."""
    job, given, s = w.job[j], w.given[j], w.state
    if sync(w, j) < given.work_total:
        job.passes = job.done // given.pass_work
        job.pass_end, job.kept = s.time, job.done
        return foresee(w, j)
    job.done = given.work_total
    job.passes = (given.work_total + given.pass_work - 1) // given.pass_work
    vacate(w, j)
    _shift(w, position(w, j), -1)
    job.phase, w.finished[j] = ENDED, s.time
    s.unfinished -= 1
    group = w.group[given.group]
    group.visible -= 1
    following = group.head
    if following >= 0:
        group.head = w.job[following].partner
        w.job[following].partner = -1
        _arrive(w, following)
    return 0


@helper(INT, WORLD, INT, INT, counted=False)
def _change(w, n, kind):  # type: ignore[no-untyped-def]
    """A node is added, drained, or removed with the open passes of its jobs."""
    s, node, takes = w.state, w.node[n], 1 if kind == ADD else 0
    s.free_gpus += (takes - node.takes) * node.free
    node.takes = takes
    for i in range(s.active if kind == REMOVE else 0):
        j = w.active[i]
        job = w.job[j]
        if job.row < 0:
            continue
        stay, lost = w.log[job.row], job.gpus == 0 and job.unit == n
        for k in range(stay.first, stay.end_node):
            lost = lost or w.log_node[k].node == n
        if lost:
            sync(w, j)
            job.done = job.kept
            release(w, j, 1)
    return 0


@helper(INT, WORLD, counted=False)
def advance(w):  # type: ignore[no-untyped-def]
    """Go to the next instant at which jobs are active, and apply its events.

    Returns `DECIDE`, `FINISHED_ALL`, `STALLED`, `LOG_FULL` (nothing was done) or `TOO_LATE`.
    ``state.wake`` is read and set to -1.
    """
    s = w.state
    if len(w.log) - s.log_rows <= len(w.heap) or len(w.log_node) - s.log_nodes <= len(w.named):
        return LOG_FULL
    wake = s.wake
    s.wake = -1
    while s.unfinished > 0:
        event = NEVER
        if s.running_now > 0:
            event = w.heap[0].time
        if s.changes < len(w.change):
            event = min(event, w.change[s.changes].when)
        if s.arrivals < len(w.given):
            event = min(event, w.given[s.arrivals].submit)
        time = event
        if s.active > 0:
            if wake >= 0:
                time = min(time, wake)
            if s.round > 0:
                time = min(time, (s.time // s.round + 1) * s.round)
        s.idle = s.idle + 1 if event == NEVER and s.running_now == 0 else 0
        if (time == NEVER and s.running_now == 0) or s.idle > MOST_IDLE:
            return STALLED
        if time > s.horizon:
            return TOO_LATE
        s.time = time
        while s.running_now > 0 and w.heap[0].time <= time:
            _reached(w, w.heap[0].job)
        while s.changes < len(w.change) and w.change[s.changes].when <= time:
            _change(w, w.change[s.changes].which, w.change[s.changes].kind)
            s.changes += 1
        while s.arrivals < len(w.given) and w.given[s.arrivals].submit <= time:
            _arrive(w, s.arrivals)
            s.arrivals += 1
        if s.active > 0:
            return DECIDE
    return FINISHED_ALL
