"""Preemptive walks: who is selected, preempted and started, as kernels for srtf and las.

All jobs are walked in order with a counter that starts at all GPUs; a job that fits the counter is
selected. Running jobs are a sorted array, pending ones a heap a size, so a walk looks at running
jobs, at those pending ones that are selected, and at one pending job of every size.

Between arrivals and ends the selection cannot change: all running jobs are selected, and a job
that is selected and moves ahead of one that is not leaves the counters of both as they were or
smaller. In particular nothing happens when a running job's remaining time drops below a pending
one's: the *order* changes, the selection does not (property tests compare with every tick).
"""

from __future__ import annotations

from typing import Final

from optsched.cluster.queue_twin_log import (
    END,
    GPUS,
    JOB,
    PARTS,
    RESTART,
    START,
    WIDTH,
    WORK_DONE,
)
from optsched.cluster.queue_twin_nodes import place, release
from optsched.cluster.srtf_twin_pending import (
    HEAD_KEY,
    HEAD_SEQUENCE,
    SIZE,
    first_fitting,
    insert,
    take_first,
)
from optsched.cluster.srtf_twin_running import leave_place, leave_run
from optsched.cluster.srtf_twin_state import (
    ATTAINED,
    BITS,
    CHOSEN,
    CHOSEN_AT,
    COST,
    FINISHED,
    GANG,
    JOB_WIDTH,
    KEY_NOW,
    KIND,
    LAST,
    LATE,
    LEFT,
    LOW,
    OUT,
    OUT_AT,
    OWED,
    PENDING,
    PREEMPTED,
    QUEUES,
    RATE,
    REMAINING,
    ROOM,
    ROW,
    RULE,
    RUNNING,
    SEQUENCE,
    SEQUENCE_NOW,
    SLACK,
    STAYS,
    STUCK,
    STUCK_AT,
    TOTAL,
    UNFINISHED,
    USED,
    WALK,
)
from optsched.kernels.compile import INT, helper

_SIZE_MASK: Final = (1 << BITS) - 1


# pending jobs


@helper(INT, WALK, INT, counted=False)
def next_number(w, job):  # type: ignore[no-untyped-def]
    """Order among equals: that of entering the list (Lucid), else the job's own number."""
    if w.state[LATE] == 0:
        return job
    w.state[SEQUENCE] += 1
    return w.state[SEQUENCE]


@helper(INT, WALK, INT, INT, counted=False)
def wait_in_line(w, job, key):  # type: ignore[no-untyped-def]
    """Make a job pending."""
    at, sequence = job * JOB_WIDTH, next_number(w, job)
    w.job[at + KEY_NOW], w.job[at + SEQUENCE_NOW] = key, sequence
    w.state[PENDING] += 1
    return insert(w.line, w.job[at + KIND], job, key, sequence)


@helper(INT, WALK, INT, counted=False)
def get_stuck(w, job):  # type: ignore[no-untyped-def]
    """A selected job cannot be placed: it stays pending, and keeps its part of the counter."""
    base, at = w.state[STUCK_AT], w.state[STUCK]
    key = w.job[job * JOB_WIDTH + KEY_NOW]
    # in order; among equals it is the last
    while at > 0 and w.job[w.run[base + at - 1] * JOB_WIDTH + KEY_NOW] > key:
        w.run[base + at] = w.run[base + at - 1]
        at -= 1
    w.run[base + at] = job
    w.state[STUCK] += 1
    return at


@helper(INT, WALK, INT, counted=False)
def _back_in_line(w, job):  # type: ignore[no-untyped-def]
    """A job that was stuck is selected no more."""
    at = job * JOB_WIDTH
    return insert(w.line, w.job[at + KIND], job, w.job[at + KEY_NOW], w.job[at + SEQUENCE_NOW])


@helper(INT, WALK, INT, INT, counted=False)
def _stuck_first(w, own, record):  # type: ignore[no-untyped-def]
    """1 if a job that is stuck is ahead of the first of a size."""
    key, theirs = w.job[own + KEY_NOW], w.line[record + HEAD_KEY]
    if key != theirs:
        return 1 if key < theirs else 0
    return 1 if w.job[own + SEQUENCE_NOW] < w.line[record + HEAD_SEQUENCE] else 0


# stays


@helper(INT, WALK, INT, INT, counted=False)
def open_stay(w, job, time):  # type: ignore[no-untyped-def]
    """Place a job and open its stay; 0 if it cannot be placed."""
    used, line = w.state[USED], job * JOB_WIDTH
    end = place(w.board, w.job[line + GANG], w.state[RULE], w.nodes, w.counts, used)
    if end == used:
        return 0
    row = w.state[STAYS]
    at, owed = row * WIDTH, w.job[line + OWED]
    w.rows[at + JOB], w.rows[at + START], w.rows[at + RESTART] = job, time, owed
    w.rows[at + GPUS], w.rows[at + PARTS] = w.job[line + GANG], used
    w.job[line + ROW], w.job[line + LAST] = row, time + owed + w.job[line + REMAINING]
    w.state[USED], w.state[STAYS] = end, row + 1
    return 1


@helper(INT, WALK, INT, INT, counted=False)
def _close_stay(w, job, time):  # type: ignore[no-untyped-def]
    """Close a job's stay and give its GPUs back; what it has not done yet is booked."""
    line = job * JOB_WIDTH
    row = w.job[line + ROW]
    at = row * WIDTH
    held = time - w.rows[at + START]
    served = min(held, w.rows[at + RESTART])
    progress = min(held - served, w.job[line + REMAINING])
    w.job[line + REMAINING] -= progress
    done = w.job[line + LEFT]
    if w.job[line + REMAINING] > 0:
        done = progress * w.job[line + RATE]
    w.job[line + LEFT] -= done
    w.job[line + OWED] = w.rows[at + RESTART] - served
    w.job[line + ATTAINED] += held * w.job[line + GANG]
    w.job[line + ROW] = -1
    w.rows[at + END], w.rows[at + RESTART], w.rows[at + WORK_DONE] = time, served, done
    end = w.rows[at + WIDTH + PARTS] if row + 1 < w.state[STAYS] else w.state[USED]
    return release(w.board, w.nodes, w.counts, w.rows[at + PARTS], end)


@helper(INT, WALK, INT, INT, INT, counted=False)
def finish(w, job, time, first):  # type: ignore[no-untyped-def]
    """End a running job; `first` = 1: it is known to be the first in order."""
    if first == 1:
        w.state[RUNNING] -= 1
    else:
        leave_run(w, job)
    _close_stay(w, job, time)
    w.job[job * JOB_WIDTH + FINISHED] = time
    w.state[UNFINISHED] -= 1
    w.state[SLACK] += w.job[job * JOB_WIDTH + GANG]
    return 0


# the walk


@helper(INT, WALK, INT, INT, INT, INT, counted=False)
def _walk_on(w, shift, tie, counter, at):  # type: ignore[no-untyped-def]
    """Select the running jobs at `at` and behind, and pending ones, that fit the counter."""
    low, sizes = w.state[LOW], w.state[ROOM]
    chosen, out = w.state[CHOSEN_AT] + w.state[CHOSEN], w.state[OUT_AT] + w.state[OUT]
    stuck, stuck_end = w.state[STUCK_AT], w.state[STUCK_AT] + w.state[STUCK]
    while True:
        record = first_fitting(w.line, counter)
        # the first that is stuck, unless it fits no more
        own = -1
        while stuck < stuck_end and own < 0:
            own = w.run[stuck] * JOB_WIDTH
            if w.job[own + GANG] > counter:
                _back_in_line(w, w.run[stuck])
                stuck += 1
                own = -1
        if record == 0 and own < 0:
            break
        if own >= 0 and (record == 0 or _stuck_first(w, own, record) == 1):
            need, before = w.job[own + GANG], w.job[own + KEY_NOW]
        else:
            need, before, own = w.line[record + SIZE], w.line[record + HEAD_KEY], -1
        before += tie + shift
        while at >= low and counter >= need and w.run[at] < before:
            gpus = w.run[sizes + at] & _SIZE_MASK
            if gpus <= counter:
                counter -= gpus
            else:
                w.run[out] = at
                out += 1
            at -= 1
        if counter >= need:
            if own >= 0:
                w.run[chosen] = w.run[stuck]
                stuck += 1
            else:
                w.run[chosen] = take_first(w.line, record)
            chosen += 1
            counter -= need
    while at >= low:
        gpus = w.run[sizes + at] & _SIZE_MASK
        if gpus <= counter:
            counter -= gpus
        else:
            w.run[out] = at
            out += 1
        at -= 1
    w.state[CHOSEN], w.state[OUT] = chosen - w.state[CHOSEN_AT], out - w.state[OUT_AT]
    w.state[SLACK], w.state[STUCK] = counter, 0
    return 0


@helper(INT, WALK, INT, INT, counted=False)
def walk(w, shift, tie):  # type: ignore[no-untyped-def]
    """Select jobs: fills the lists of `CHOSEN` and `OUT`.

    A running job is ahead of a pending one if its key minus `shift` is below the other's + `tie`.
    """
    w.state[CHOSEN] = w.state[OUT] = 0
    last = w.state[LOW] + w.state[RUNNING] - 1
    return _walk_on(w, shift, tie, w.state[TOTAL], last)


@helper(INT, WALK, INT, INT, INT, counted=False)
def walk_from(w, shift, counter, at):  # type: ignore[no-untyped-def]
    """Select jobs behind one that has been chosen; nobody is stuck.

    Parameters
    ----------
    counter
        What it leaves.
    at
        Place of the first running job behind it.
    """
    w.state[OUT] = 0
    # what the job took, and nobody has given up for it yet
    short = w.job[w.run[w.state[CHOSEN_AT]] * JOB_WIDTH + GANG]
    low, sizes = w.state[LOW], w.state[ROOM]
    while at >= low and short > 0:
        gpus = w.run[sizes + at] & _SIZE_MASK
        if gpus <= counter:
            counter -= gpus
        else:
            w.run[w.state[OUT_AT] + w.state[OUT]] = at
            w.state[OUT] += 1
            short -= gpus
        at -= 1
    if short > 0:
        w.state[SLACK] = counter
    elif short == 0:
        return 0
    else:
        # more was given up than needed: others may fit now
        _walk_on(w, shift, 0, counter, at)
    return 0


@helper(INT, WALK, INT, counted=False)
def preempt(w, time):  # type: ignore[no-untyped-def]
    """Take the jobs to be preempted off their GPUs and make them pending again."""
    out, moved = w.state[OUT_AT], 0
    for i in range(w.state[OUT]):
        # places fall; taking one out by the lower side moves all below it up
        at = w.run[out + i]
        low = w.state[LOW]
        at += moved
        job = w.run[w.state[ROOM] + at] >> BITS
        leave_place(w, at)
        moved += w.state[LOW] - low
        _close_stay(w, job, time)
        line = job * JOB_WIDTH
        owed = w.job[line + OWED] if w.state[LATE] == 1 else 0
        w.job[line + OWED] = owed + w.job[line + COST]
        w.job[line + PREEMPTED] += 1
        key = w.job[line + KEY_NOW]
        if w.state[QUEUES] == 0:
            key = w.job[line + REMAINING] + w.job[line + OWED]
        wait_in_line(w, job, key)
    return 0
