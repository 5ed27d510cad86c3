"""To the next instant of a simulated cluster: `advance` applies all that happens at it; kernels.

The order within an instant: completions and ends of passes, changes of nodes, arrivals; then the
policy is asked once. `optsched.cluster.world.apply` applies what it answers.
"""

from __future__ import annotations

from typing import Final

from optsched.cluster.world.apply import apply
from optsched.cluster.world.heap import move
from optsched.cluster.world.layout import (
    ACTIVE,
    ADD,
    ARRIVALS,
    ARRIVED,
    ASK,
    CHANGES,
    COMPLETED,
    DONE,
    DRAIN,
    ENDED,
    ENTERED,
    EVENTS,
    FINISHED,
    FINISHED_ALL,
    FOLLOWING,
    FREE,
    FREE_GPUS,
    FREE_UNITS,
    FREE_ZERO,
    GROUP,
    HEAD,
    HELD,
    HIDDEN,
    HORIZON,
    IDLE,
    KEPT,
    KIND,
    LIMIT,
    LISTED,
    LOG_NODES,
    LOG_ROWS,
    LOST,
    NO_ROOM,
    PARTNER,
    PASS_END,
    PASS_WORK,
    PASSED,
    PASSES,
    PENDING,
    PHASE,
    ROUND,
    RUNNING_NOW,
    RUNS,
    SHOWN,
    STALLED,
    SUBMIT,
    TAIL,
    TAKES,
    TIME,
    TOO_LATE,
    UNFINISHED,
    VERSION,
    WAKE,
    WHEN,
    WHERE,
    WHICH,
    WORK_TOTAL,
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
    i = w.state[EVENTS]
    w.event[i, 0], w.event[i, 1] = kind, j
    w.state[EVENTS] += 1
    return i


@helper(INT, WORLD, counted=False)
def tidy(w):  # type: ignore[no-untyped-def]
    """Take jobs that have ended out of the list of active ones."""
    n = w.state[LISTED]
    if n == w.state[ACTIVE]:
        return 0
    kept = 0
    for i in range(n):
        j = w.active[i]
        if w.job[j, PHASE] != ENDED:
            w.active[kept] = j
            kept += 1
    w.state[LISTED] = kept
    return 1


@helper(INT, WORLD, INT, counted=False)
def _show(w, j):  # type: ignore[no-untyped-def]
    """Put job j among the active ones: pending."""
    i = w.state[LISTED]
    while i > 0 and w.active[i - 1] > j:
        w.active[i] = w.active[i - 1]
        i -= 1
    w.active[i] = j
    w.state[LISTED] += 1
    w.state[ACTIVE] += 1
    w.state[VERSION] += 1
    w.job[j, PHASE], w.job[j, ENTERED] = PENDING, w.state[TIME]
    w.group[w.given[j, GROUP], SHOWN] += 1
    return _event(w, ARRIVED, j)


@helper(INT, WORLD, INT, counted=False)
def _arrive(w, j):  # type: ignore[no-untyped-def]
    """Job j arrives: visible, or behind the hidden ones of its group."""
    group = w.given[j, GROUP]
    if w.group[group, LIMIT] < 0 or w.group[group, SHOWN] < w.group[group, LIMIT]:
        return _show(w, j)
    w.job[j, PHASE] = HIDDEN
    if w.group[group, HEAD] < 0:
        w.group[group, HEAD] = j
    else:
        w.job[w.group[group, TAIL], PARTNER] = j
    w.group[group, TAIL] = j
    return 0


@helper(INT, WORLD, INT, counted=False)
def _reached(w, j):  # type: ignore[no-untyped-def]
    """Job j has reached the end of a pass, or of its work."""
    if sync(w, j) < w.given[j, WORK_TOTAL]:
        w.job[j, PASSES] = w.job[j, DONE] // w.given[j, PASS_WORK]
        w.job[j, PASS_END], w.job[j, KEPT] = w.state[TIME], w.job[j, DONE]
        foresee(w, j)
        move(w, j)
        return _event(w, PASSED, j)
    w.job[j, DONE] = w.given[j, WORK_TOTAL]
    w.job[j, PASSES] = (w.given[j, WORK_TOTAL] + w.given[j, PASS_WORK] - 1) // w.given[j, PASS_WORK]
    vacate(w, j)
    w.job[j, PHASE], w.job[j, FINISHED] = ENDED, w.state[TIME]
    w.state[UNFINISHED] -= 1
    w.state[ACTIVE] -= 1
    w.state[VERSION] += 1
    _event(w, COMPLETED, j)
    group = w.given[j, GROUP]
    w.group[group, SHOWN] -= 1
    following = w.group[group, HEAD]
    if following >= 0:
        w.group[group, HEAD] = w.job[following, PARTNER]
        w.job[following, PARTNER] = -1
        _show(w, following)
    return 0


@helper(INT, WORLD, INT, INT, counted=False)
def _change(w, node, kind):  # type: ignore[no-untyped-def]
    """A node is added, drained, or removed with the open passes of its jobs."""
    takes = 1 if kind == ADD else 0
    step = takes - w.node[node, TAKES]
    w.node[node, TAKES] = takes
    w.state[FREE_GPUS] += step * w.node[node, FREE]
    w.state[FREE_ZERO] += step * w.node[node, FREE_UNITS]
    if kind in (ADD, DRAIN):
        return 0
    for i in range(w.state[LISTED]):
        j = w.active[i]
        if w.job[j, PHASE] != RUNS:
            continue
        row = w.job[j, HELD]
        while row >= 0 and w.held[row, WHERE] != node:
            row = w.held[row, FOLLOWING]
        if row >= 0:
            sync(w, j)
            w.job[j, DONE] = w.job[j, KEPT]
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
    ``state[WAKE]`` is read and set to -1.
    """
    s = w.state
    if w.log.shape[0] - s[LOG_ROWS] < min(w.job.shape[0], w.held.shape[0]):
        return NO_ROOM
    if w.log_node.shape[0] - s[LOG_NODES] < w.held.shape[0]:
        return NO_ROOM
    wake = s[WAKE]
    s[WAKE] = -1
    while s[UNFINISHED] > 0:
        event = NEVER
        if s[RUNNING_NOW] > 0:
            event = w.heap[0, 0]
        if s[CHANGES] < w.change.shape[0]:
            event = min(event, w.change[s[CHANGES], WHEN])
        if s[ARRIVALS] < w.given.shape[0]:
            event = min(event, w.given[s[ARRIVALS], SUBMIT])
        time = event
        if s[ACTIVE] > 0:
            if wake >= 0:
                time = min(time, wake)
            if s[ROUND] > 0:
                time = min(time, (s[TIME] // s[ROUND] + 1) * s[ROUND])
        s[IDLE] = s[IDLE] + 1 if event == NEVER and s[RUNNING_NOW] == 0 else 0
        if (time == NEVER and s[RUNNING_NOW] == 0) or s[IDLE] > MOST_IDLE:
            return STALLED
        if time > s[HORIZON]:
            return TOO_LATE
        s[TIME], s[EVENTS] = time, 0
        while s[RUNNING_NOW] > 0 and w.heap[0, 0] <= time:
            _reached(w, w.heap[0, 1])
        while s[CHANGES] < w.change.shape[0] and w.change[s[CHANGES], WHEN] <= time:
            _change(w, w.change[s[CHANGES], WHICH], w.change[s[CHANGES], KIND])
            s[CHANGES] += 1
        while s[ARRIVALS] < w.given.shape[0] and w.given[s[ARRIVALS], SUBMIT] <= time:
            _arrive(w, s[ARRIVALS])
            s[ARRIVALS] += 1
        if s[ACTIVE] > 0:
            return ASK
    return FINISHED_ALL
