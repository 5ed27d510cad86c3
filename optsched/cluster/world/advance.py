"""To the next instant of a simulated cluster: `advance` applies all that happens at it; kernels.

The order within an instant: completions and ends of passes, changes of nodes, arrivals; then the
policy is asked once. `optsched.cluster.world.apply` applies what it answers.
"""

from __future__ import annotations

from typing import Final

from optsched.cluster.world.apply import apply
from optsched.cluster.world.heap import move
from optsched.cluster.world.layout import (
    ADD,
    ARRIVED,
    ASK,
    COMPLETED,
    DRAIN,
    ENDED,
    FINISHED_ALL,
    HIDDEN,
    LOST,
    NO_ROOM,
    PASSED,
    PENDING,
    RUNS,
    STALLED,
    TOO_LATE,
    WORLD,
)
from optsched.cluster.world.stays import (
    NEVER,
    at_pass_end,
    attained_now,
    done_now,
    foresee,
    is_size,
    rate_of,
    release,
    remaining_now,
    set_rate,
    start,
    sync,
    vacate,
)
from optsched.kernels.compile import INT, entry, helper

__all__ = [
    "MOST_IDLE", "NEVER", "advance", "apply", "at_pass_end", "attained_now", "done_now", "is_size",
    "rate_of", "release", "remaining_now", "set_rate", "start", "step", "tidy",
]  # fmt: skip

MOST_IDLE: Final = 10_000
"""So often in a row a policy may wake up for nothing while no job runs and no event is left."""


@helper(INT, WORLD, INT, INT, counted=False)
def _event(w, kind, j):  # type: ignore[no-untyped-def]
    """Note what happened."""
    i = w.state[0].events
    w.event[i, 0], w.event[i, 1] = kind, j
    w.state[0].events += 1
    return i


@helper(INT, WORLD, counted=False)
def tidy(w):  # type: ignore[no-untyped-def]
    """Take jobs that have ended out of the list of active ones."""
    n = w.state[0].listed
    if n == w.state[0].active:
        return 0
    kept = 0
    for i in range(n):
        j = w.active[i]
        if w.job[j].phase != ENDED:
            w.active[kept] = j
            kept += 1
    w.state[0].listed = kept
    return 1


@helper(INT, WORLD, INT, counted=False)
def _show(w, j):  # type: ignore[no-untyped-def]
    """Put job j among the active ones: pending."""
    i = w.state[0].listed
    while i > 0 and w.active[i - 1] > j:
        w.active[i] = w.active[i - 1]
        i -= 1
    w.active[i] = j
    w.state[0].listed += 1
    w.state[0].active += 1
    w.state[0].version += 1
    w.job[j].phase, w.job[j].entered = PENDING, w.state[0].time
    w.group[w.given[j].group].shown += 1
    return _event(w, ARRIVED, j)


@helper(INT, WORLD, INT, counted=False)
def _arrive(w, j):  # type: ignore[no-untyped-def]
    """Job j arrives: visible, or behind the hidden ones of its group."""
    group = w.given[j].group
    if w.group[group].limit < 0 or w.group[group].shown < w.group[group].limit:
        return _show(w, j)
    w.job[j].phase = HIDDEN
    if w.group[group].head < 0:
        w.group[group].head = j
    else:
        w.job[w.group[group].tail].partner = j
    w.group[group].tail = j
    return 0


@helper(INT, WORLD, INT, counted=False)
def _reached(w, j):  # type: ignore[no-untyped-def]
    """Job j has reached the end of a pass, or of its work."""
    if sync(w, j) < w.given[j].work_total:
        w.job[j].passes = w.job[j].done // w.given[j].pass_work
        w.job[j].pass_end, w.job[j].kept = w.state[0].time, w.job[j].done
        foresee(w, j)
        move(w, j)
        return _event(w, PASSED, j)
    w.job[j].done = w.given[j].work_total
    w.job[j].passes = (w.given[j].work_total + w.given[j].pass_work - 1) // w.given[j].pass_work
    vacate(w, j)
    w.job[j].phase, w.job[j].finished = ENDED, w.state[0].time
    w.state[0].unfinished -= 1
    w.state[0].active -= 1
    w.state[0].version += 1
    _event(w, COMPLETED, j)
    group = w.given[j].group
    w.group[group].shown -= 1
    following = w.group[group].head
    if following >= 0:
        w.group[group].head = w.job[following].partner
        w.job[following].partner = -1
        _show(w, following)
    return 0


@helper(INT, WORLD, INT, INT, counted=False)
def _change(w, node, kind):  # type: ignore[no-untyped-def]
    """A node is added, drained, or removed with the open passes of its jobs."""
    takes = 1 if kind == ADD else 0
    step = takes - w.node[node].takes
    w.node[node].takes = takes
    w.state[0].free_gpus += step * w.node[node].free
    w.state[0].free_zero += step * w.node[node].free_units
    if kind in (ADD, DRAIN):
        return 0
    for i in range(w.state[0].listed):
        j = w.active[i]
        if w.job[j].phase != RUNS:
            continue
        row = w.job[j].held
        while row >= 0 and w.held[row].where != node:
            row = w.held[row].following
        if row >= 0:
            sync(w, j)
            w.job[j].done = w.job[j].kept
            release(w, j, 0)
            _event(w, LOST, j)
    return 0


@entry(INT, WORLD, counted=False)
def advance(w):  # type: ignore[no-untyped-def]
    """`step`, with `World.active` in order."""
    status = step(w)
    tidy(w)
    return status


@helper(INT, WORLD, counted=False)
def step(w):  # type: ignore[no-untyped-def]
    """Go to the next instant at which jobs are active, and apply its events.

    Jobs that have ended may still stand in `World.active`.

    Answers `ASK`, `FINISHED_ALL`, `STALLED`, `NO_ROOM` (nothing was done) or `TOO_LATE`.
    ``state.wake`` is read and set to -1.
    """
    s = w.state[0]
    if w.log.shape[0] - s.log_rows < min(w.job.shape[0], w.held.shape[0]):
        return NO_ROOM
    if w.log_node.shape[0] - s.log_nodes < w.held.shape[0]:
        return NO_ROOM
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
        s.time, s.events = time, 0
        while s.running_now > 0 and w.heap[0, 0] <= time:
            _reached(w, w.heap[0, 1])
        while s.changes < w.change.shape[0] and w.change[s.changes].when <= time:
            _change(w, w.change[s.changes].which, w.change[s.changes].kind)
            s.changes += 1
        while s.arrivals < w.given.shape[0] and w.given[s.arrivals].submit <= time:
            _arrive(w, s.arrivals)
            s.arrivals += 1
        if s.active > 0:
            return ASK
    return FINISHED_ALL
