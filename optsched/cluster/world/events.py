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
    REMOVE,
    STALLED,
    TOO_LATE,
    WORLD,
)
from optsched.kernels.compile import INT, helper

MOST_IDLE: Final = 10_000
"""Decisions in a row while no job runs and only a wake-up of the policy is left."""


@helper(INT, WORLD, INT, INT, counted=False)
def _shift(w, i, step):  # type: ignore[no-untyped-def]
    """Remove position i (step = -1), or make place for one (1): `active` and its columns."""
    s = w.state[0]
    s.version += 1
    s.active += step
    n = s.active
    if step < 0:
        for k in range(i, n):
            w.active[k], w.assigned[k] = w.active[k + 1], w.assigned[k + 1]
    else:
        for k in range(n - 1, i, -1):
            w.active[k], w.assigned[k] = w.active[k - 1], w.assigned[k - 1]
    for row in range(w.present.shape[0]):
        if s.columns >> row & 1 == 0:
            continue
        if step < 0:
            for k in range(i, n):
                w.present[row, k] = w.present[row, k + 1]
        else:
            for k in range(n - 1, i, -1):
                w.present[row, k] = w.present[row, k - 1]
    return n


@helper(INT, WORLD, INT, counted=False)
def _arrive(w, j):  # type: ignore[no-untyped-def]
    """Job j arrives: visible and pending, or behind the hidden ones of its group."""
    job, s = w.job[j], w.state[0]
    group = w.given[j].group
    if 0 <= w.group[group].limit <= w.group[group].visible:
        job.phase = HIDDEN
        if w.group[group].head < 0:
            w.group[group].head = j
        else:
            w.job[w.group[group].tail].partner = j
        w.group[group].tail = j
        return 0
    i = position(w, j)
    _shift(w, i, 1)
    w.active[i], w.assigned[i] = j, 0
    job.phase, job.entered = PENDING, s.time
    w.group[group].visible += 1
    return show(w, i, s.columns)


@helper(INT, WORLD, INT, counted=False)
def _reached(w, j):  # type: ignore[no-untyped-def]
    """Job j is at the end of a pass, or of its work."""
    job, given, s = w.job[j], w.given[j], w.state[0]
    if sync(w, j) < given.work_total:
        job.passes = job.done // given.pass_work
        job.pass_end, job.kept = s.time, job.done
        return foresee(w, j)
    job.done = given.work_total
    job.passes = (given.work_total + given.pass_work - 1) // given.pass_work
    vacate(w, j)
    _shift(w, position(w, j), -1)
    job.phase, job.finished = ENDED, s.time
    s.unfinished -= 1
    group = given.group
    w.group[group].visible -= 1
    following = w.group[group].head
    if following >= 0:
        w.group[group].head = w.job[following].partner
        w.job[following].partner = -1
        _arrive(w, following)
    return 0


@helper(INT, WORLD, INT, INT, counted=False)
def _change(w, node, kind):  # type: ignore[no-untyped-def]
    """A node is added, drained, or removed with the open passes of its jobs."""
    s = w.state[0]
    takes = 1 if kind == ADD else 0
    s.free_gpus += (takes - w.node[node].takes) * w.node[node].free
    w.node[node].takes = takes
    if kind != REMOVE:
        return 0
    for i in range(s.active):
        j = w.active[i]
        if w.job[j].row < 0:
            continue
        stay, lost = w.log[w.job[j].row], 0
        for k in range(stay.first, stay.end_node):
            if w.log_node[k, 0] == node:
                lost = 1
        if lost == 1 or (w.job[j].gpus == 0 and w.job[j].unit == node):
            sync(w, j)
            w.job[j].done = w.job[j].kept
            release(w, j, 1)
    return 0


@helper(INT, WORLD, counted=False)
def advance(w):  # type: ignore[no-untyped-def]
    """Go to the next instant at which jobs are active, and apply its events.

    Returns `DECIDE`, `FINISHED_ALL`, `STALLED`, `LOG_FULL` (nothing was done) or `TOO_LATE`.
    ``state.wake`` is read and set to -1.
    """
    s = w.state[0]
    if w.log.shape[0] - s.log_rows <= w.heap.shape[0]:
        return LOG_FULL
    if w.log_node.shape[0] - s.log_nodes <= w.named.shape[0]:
        return LOG_FULL
    wake = s.wake
    s.wake = -1
    while s.unfinished > 0:
        event = NEVER
        if s.running_now > 0:
            event = w.heap[0, 0]
        if s.changes < w.change.shape[0]:
            event = min(event, w.change[s.changes].when)
        if s.arrivals < w.given.shape[0]:
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
        while s.running_now > 0 and w.heap[0, 0] <= time:
            _reached(w, w.heap[0, 1])
        while s.changes < w.change.shape[0] and w.change[s.changes].when <= time:
            _change(w, w.change[s.changes].which, w.change[s.changes].kind)
            s.changes += 1
        while s.arrivals < w.given.shape[0] and w.given[s.arrivals].submit <= time:
            _arrive(w, s.arrivals)
            s.arrivals += 1
        if s.active > 0:
            return DECIDE
    return FINISHED_ALL
