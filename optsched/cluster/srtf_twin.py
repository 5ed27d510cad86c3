"""Shortest remaining time first: whole simulations in compiled code.

Events are arrivals and ends. An arrival that does not fit the counter at its place in the order, or
fits what is left at the end, changes nothing for any other job: no walk then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from optsched.cluster.queue_twin_log import WIDTH
from optsched.cluster.srtf_twin_running import enter_run
from optsched.cluster.srtf_twin_state import (
    ARRIVED,
    BITS,
    CHOSEN,
    CHOSEN_AT,
    GANG,
    JOB_WIDTH,
    JOBS,
    KEY_NOW,
    LAST,
    LATE,
    LOW,
    NEVER,
    OUT,
    PENDING,
    REMAINING,
    ROOM,
    RUNNING,
    SEQUENCE_NOW,
    SLACK,
    STAYS,
    STUCK,
    STUCK_AT,
    SUBMIT,
    TOTAL,
    UNFINISHED,
    USED,
    WALK,
    log_of,
    longer,
    preemptive_columns,
    walk_of,
)
from optsched.cluster.srtf_twin_walk import (
    finish,
    get_stuck,
    next_number,
    open_stay,
    preempt,
    wait_in_line,
    walk,
    walk_from,
)
from optsched.kernels.compile import INT, entry, helper

if TYPE_CHECKING:
    from optsched.cluster.log import Log
    from optsched.cluster.nodes import Nodes
    from optsched.cluster.settings import Settings
    from optsched.cluster.workload import Workload


def srtf_twin(
    workload: Workload, nodes: Nodes, settings: Settings, *, gang: int | None
) -> Log | None:
    """Simulate `Srtf`; None if only the generic engine can."""
    cols = preemptive_columns(workload, nodes, settings, gang)
    if cols is None:
        return None
    w = walk_of(cols, workload.work, workload.restart_cost, nodes, settings)
    while not _advance(w):
        w = longer(w)
    return log_of(w)


@helper(INT, WALK, INT, INT, counted=False)
def _try_start(w, job, time):  # type: ignore[no-untyped-def]
    """Start a selected job if it can be placed."""
    if open_stay(w, job, time) == 0:
        return 0
    enter_run(w, job, w.job[job * JOB_WIDTH + LAST], next_number(w, job))
    return 1


@helper(INT, WALK, INT, counted=False)
def _carry_out(w, time):  # type: ignore[no-untyped-def]
    """Preempt and start what a walk has found."""
    preempt(w, time)
    for i in range(w.state[CHOSEN]):
        job = w.run[w.state[CHOSEN_AT] + i]
        if _try_start(w, job, time) == 1:
            w.state[PENDING] -= 1
        else:
            get_stuck(w, job)
    return 0


@helper(INT, WALK, INT, INT, counted=False)
def _arrive_alone(w, job, time):  # type: ignore[no-untyped-def]
    """Settle an arrival, all others being settled; 0 if all have to be walked."""
    line = job * JOB_WIDTH
    gpus, key = w.job[line + GANG], w.job[line + REMAINING]
    counter, low, sizes = w.state[TOTAL], w.state[LOW], w.state[ROOM]
    at = low + w.state[RUNNING] - 1
    slack = w.state[SLACK]
    if gpus > slack:
        while at >= low and w.run[at] - time < key and counter >= gpus:
            counter -= w.run[sizes + at] & ((1 << BITS) - 1)
            at -= 1
        for i in range(w.state[STUCK]):
            other = w.run[w.state[STUCK_AT] + i] * JOB_WIDTH
            if w.job[other + KEY_NOW] <= key:
                counter -= w.job[other + GANG]
        if counter < gpus:
            wait_in_line(w, job, key)
            return 1
        if w.state[STUCK] > 0:
            return 0
    w.job[line + KEY_NOW], w.job[line + SEQUENCE_NOW] = key, next_number(w, job)
    w.state[PENDING] += 1
    w.run[w.state[CHOSEN_AT]] = job
    w.state[CHOSEN] = 1
    if gpus > slack:
        walk_from(w, time, counter - gpus, at)
    else:
        w.state[OUT], w.state[SLACK] = 0, slack - gpus
    _carry_out(w, time)
    return 1


@entry(INT, WALK, counted=False)
def _advance(w):  # type: ignore[no-untyped-def]
    """Simulate to the end (1), or until an instant's starts may lack room (0)."""
    n, late, total, room = w.state[JOBS], w.state[LATE], w.state[TOTAL], w.state[ROOM]
    rows = len(w.rows) // WIDTH
    while w.state[UNFINISHED] > 0:
        if w.state[STAYS] + total >= rows or w.state[USED] + total > len(w.nodes):
            return 0
        arrived = w.state[ARRIVED]
        time = w.job[arrived * JOB_WIDTH + SUBMIT] if arrived < n else NEVER
        if w.state[RUNNING] > 0:
            time = min(time, w.run[w.state[LOW] + w.state[RUNNING] - 1] + late)
        ended = 0
        while w.state[RUNNING] > 0:
            at = w.state[LOW] + w.state[RUNNING] - 1
            if w.run[at] + late > time:
                break
            finish(w, w.run[room + at] >> BITS, time, 1)
            ended = 1
        first = arrived
        while arrived < n and w.job[arrived * JOB_WIDTH + SUBMIT] == time:
            arrived += 1
        w.state[ARRIVED] = arrived
        if arrived == first and w.state[PENDING] == 0:
            continue
        if (
            arrived == first + 1
            and (ended == 0 or w.state[PENDING] == 0)
            and _arrive_alone(w, first, time) == 1
        ):
            continue
        for job in range(first, arrived):
            wait_in_line(w, job, w.job[job * JOB_WIDTH + REMAINING])
        walk(w, time, 0)
        _carry_out(w, time)
    return 1
