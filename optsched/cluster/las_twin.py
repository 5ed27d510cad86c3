"""Least attained service (Tiresias, 2D-LAS): whole simulations in compiled code.

Jobs are ordered by queue (how many thresholds their GPU-time has passed), then by arrival. Arrivals
and ends happen when they happen; selection happens only at rounds, and only at rounds before which
something arrived, ended, or changed its queue: see `srtf_twin_walk` why no other can matter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numba import types

from optsched.cluster.queue_twin_heap import pop, push
from optsched.cluster.queue_twin_log import JOB, START, WIDTH
from optsched.cluster.srtf_twin_running import enter_run, leave_run
from optsched.cluster.srtf_twin_state import (
    ARRIVED,
    ATTAINED,
    CHOSEN,
    CHOSEN_AT,
    CROSSINGS,
    DUE,
    ENDS,
    GANG,
    JOB_WIDTH,
    JOBS,
    KEY_NOW,
    LAST,
    LATE,
    NEVER,
    PENDING,
    QUEUES,
    ROW,
    SEQUENCE_NOW,
    STAYS,
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
)
from optsched.kernels.compile import INT, INTS, entry, helper

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.cluster.log import Log
    from optsched.cluster.nodes import Nodes
    from optsched.cluster.settings import Settings
    from optsched.cluster.workload import Workload
    from optsched.model.schedule import IntArray

_QUEUE: Final = 1 << 54
"""Between the keys of two queues; more than any time."""


class Queues(NamedTuple):
    """What las knows beside the walk."""

    every: IntArray
    """The round's length, shape (1,)."""
    thresholds: IntArray
    """Ascending, then `NEVER`."""
    end: IntArray
    """Heap of ends of stays, some of them preempted since."""
    end_row: IntArray
    crossing: IntArray
    """Heap of rounds at which a stay's job will be in a later queue."""
    crossing_row: IntArray


QUEUE_TYPE: Final[Any] = types.NamedUniTuple(INTS, len(Queues._fields), Queues)


def las_twin(
    workload: Workload, nodes: Nodes, settings: Settings, *, thresholds: Sequence[int],
    every: int, gang: int | None,
) -> Log | None:  # fmt: skip
    """Simulate `Las`; None if only the generic engine can.

    Parameters
    ----------
    thresholds
        GPU-time beyond which a job is in the next queue, ascending.
    every
        Decisions are at multiples of this time.
    """
    cols = preemptive_columns(workload, nodes, settings, gang)
    if cols is None or len(thresholds) > 100:
        return None
    w = walk_of(cols, workload.work, workload.restart_cost, nodes, settings)
    w.state[QUEUES], w.state[DUE] = 1, NEVER
    room = len(w.rows) // WIDTH + 1
    q = Queues(
        np.array([every], np.int64), np.array([*thresholds, NEVER], np.int64),
        *np.empty((4, room), np.int64),
    )  # fmt: skip
    while not _advance(w, q):
        w = longer(w)
        q = Queues(*q[:2], *(np.concatenate((a, np.empty(len(a), np.int64))) for a in q[2:]))
    return log_of(w)


@helper(INT, INT, INT, counted=False)
def _round_from(time, every):  # type: ignore[no-untyped-def]
    """The first round at or after a time."""
    return -(-time // every) * every


@helper(INT, WALK, QUEUE_TYPE, INT, INT, counted=False)
def _expect_crossing(w, q, job, queue):  # type: ignore[no-untyped-def]
    """Note the round at which a running job of a queue will be in the next one."""
    line, threshold = job * JOB_WIDTH, q.thresholds[queue]
    if threshold == NEVER:
        return 0
    row = w.job[line + ROW]
    gap = (threshold - w.job[line + ATTAINED]) // w.job[line + GANG] + 1
    begin = w.rows[row * WIDTH + START]
    if gap > w.job[line + LAST] - begin:
        return 0
    at = _round_from(begin + gap, q.every[0])
    w.state[CROSSINGS] = push(q.crossing, q.crossing_row, w.state[CROSSINGS], at, row)
    return 1


@helper(INT, WALK, INT, INT, counted=False)
def _key(w, job, queue):  # type: ignore[no-untyped-def]
    """Order of a job: its queue, then arrival (Lucid: its second; else its number)."""
    if w.state[LATE] == 1:
        return queue * _QUEUE + w.job[job * JOB_WIDTH + SUBMIT]
    return queue * _QUEUE + job


@helper(INT, WALK, QUEUE_TYPE, INT, INT, counted=False)
def _cross(w, q, job, time):  # type: ignore[no-untyped-def]
    """Put a running job into the queue of its GPU-time."""
    line = job * JOB_WIDTH
    begin = w.rows[w.job[line + ROW] * WIDTH + START]
    held = min(time, w.job[line + LAST]) - begin
    attained = w.job[line + ATTAINED] + w.job[line + GANG] * held
    queue = w.job[line + KEY_NOW] // _QUEUE
    while attained > q.thresholds[queue]:
        queue += 1
    leave_run(w, job)
    enter_run(w, job, _key(w, job, queue), w.job[line + SEQUENCE_NOW])
    return _expect_crossing(w, q, job, queue)


@helper(INT, WALK, QUEUE_TYPE, INT, counted=False)
def _select(w, q, time):  # type: ignore[no-untyped-def]
    """Walk all jobs, preempt and start."""
    # running jobs go first among those of one second
    walk(w, 0, 1)
    preempt(w, time)
    for i in range(w.state[CHOSEN]):
        job = w.run[w.state[CHOSEN_AT] + i]
        if open_stay(w, job, time) == 0:
            get_stuck(w, job)
            continue
        line = job * JOB_WIDTH
        key = w.job[line + KEY_NOW]
        w.state[PENDING] -= 1
        enter_run(w, job, key, next_number(w, job))
        end = w.job[line + LAST] + w.state[LATE]
        w.state[ENDS] = push(q.end, q.end_row, w.state[ENDS], end, w.job[line + ROW])
        _expect_crossing(w, q, job, key // _QUEUE)
    return 0


@entry(INT, WALK, QUEUE_TYPE, counted=False)
def _advance(w, q):  # type: ignore[no-untyped-def]
    """Simulate to the end (1), or until an instant's starts may lack room (0)."""
    n, total, every = w.state[JOBS], w.state[TOTAL], q.every[0]
    rows = len(w.rows) // WIDTH
    while w.state[UNFINISHED] > 0:
        if w.state[STAYS] + total >= rows or w.state[USED] + total > len(w.nodes):
            return 0
        arrived, time = w.state[ARRIVED], w.state[DUE]
        if arrived < n:
            time = min(time, w.job[arrived * JOB_WIDTH + SUBMIT])
        if w.state[ENDS] > 0:
            time = min(time, q.end[0])
        if w.state[CROSSINGS] > 0:
            time = min(time, q.crossing[0])
        while w.state[ENDS] > 0 and q.end[0] == time:
            row = q.end_row[0]
            w.state[ENDS] = pop(q.end, q.end_row, w.state[ENDS])
            job = w.rows[row * WIDTH + JOB]
            if w.job[job * JOB_WIDTH + ROW] == row:
                finish(w, job, time, 0)
                w.state[DUE] = min(w.state[DUE], _round_from(time, every))
        while arrived < n and w.job[arrived * JOB_WIDTH + SUBMIT] == time:
            wait_in_line(w, arrived, _key(w, arrived, 0))
            arrived += 1
            w.state[DUE] = min(w.state[DUE], _round_from(time, every))
        w.state[ARRIVED] = arrived
        while w.state[CROSSINGS] > 0 and q.crossing[0] == time:
            row = q.crossing_row[0]
            w.state[CROSSINGS] = pop(q.crossing, q.crossing_row, w.state[CROSSINGS])
            job = w.rows[row * WIDTH + JOB]
            if w.job[job * JOB_WIDTH + ROW] == row:
                _cross(w, q, job, time)
                w.state[DUE] = time
        if w.state[DUE] == time:
            w.state[DUE] = NEVER
            if w.state[PENDING] > 0:
                _select(w, q, time)
    return 1
