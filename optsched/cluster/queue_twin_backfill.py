"""FIFO and SJF with backfilling: whole simulations in compiled code.

The order of pending jobs is known beforehand, so they stand in a tournament tree by their place in
it, which finds the next that fits the free GPUs (and, for EASY, the reservation) in a few steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numba import types

from optsched.cluster.queue_twin_heap import pop, push
from optsched.cluster.queue_twin_log import (
    END,
    GPUS,
    JOB,
    PARTS,
    RESTART,
    START,
    WIDTH,
    WORK_DONE,
    Record,
    log,
    record,
)
from optsched.cluster.queue_twin_nodes import ANYWHERE, FREE_TOTAL, board, place, release
from optsched.kernels.compile import INT, INTS, entry, helper

if TYPE_CHECKING:
    from optsched.cluster.log import Log
    from optsched.cluster.nodes import Nodes
    from optsched.cluster.queue_twin_input import Columns
    from optsched.cluster.settings import Settings
    from optsched.cluster.workload import Workload
    from optsched.model.schedule import IntArray

NEVER: Final = 1 << 62

# `Backfilling.state`
_NEXT: Final = 0
_RUNNING: Final = 1
_STAYS: Final = 2
_USED: Final = 3
_TOTAL: Final = 4
_EASY: Final = 5
_LEAVES: Final = 6
"""Leaves of the tree."""
_STATE: Final = 7

# `Backfilling.job`
_SUBMIT: Final = 0
_GANG: Final = 1
_DURATION: Final = 2
_ESTIMATE: Final = 3
_WORK: Final = 4
_PLACE: Final = 5
"""Place in the order."""
_FINISHED: Final = 6
_JOB: Final = 8

# a node of the tree: least gang and least estimated duration of the pending jobs below
_PAIR: Final = 2


class Backfilling(NamedTuple):
    """A simulation under way."""

    state: IntArray
    job: IntArray
    at: IntArray
    """Job at every place in the order."""
    tree: IntArray
    board: IntArray
    keys: IntArray
    """Heap of ends, with the rows of their stays."""
    values: IntArray
    believed: IntArray
    """Running jobs by the ends that are believed, then their sizes (EASY)."""
    rows: IntArray
    nodes: IntArray
    counts: IntArray


BACKFILLING: Final[Any] = types.NamedUniTuple(INTS, len(Backfilling._fields), Backfilling)


def backfill_twin(
    workload: Workload, nodes: Nodes, settings: Settings, cols: Columns, shortest: bool, easy: bool
) -> Log | None:
    """Simulate FIFO or SJF with first-fit or EASY backfilling; None if it would differ."""
    n, total = len(cols.gang), sum(nodes.gpus)
    asked_more = settings.round > 0 or bool((workload.passes > 1).any())
    if easy and asked_more and (cols.estimate != cols.duration).any():
        # reservations move while jobs outlive their estimates, so it matters who is asked when
        return None
    at = np.argsort(cols.estimate, kind="stable") if shortest else np.arange(n)
    where = np.empty(n, np.int64)
    where[at] = np.arange(n)
    job = np.zeros((n, _JOB), np.int64)
    job[:, _SUBMIT], job[:, _GANG], job[:, _DURATION] = cols.submit, cols.gang, cols.duration
    job[:, _ESTIMATE], job[:, _WORK], job[:, _PLACE] = cols.estimate, workload.work, where
    job[:, _FINISHED] = -1
    leaves = 1 << max(n - 1, 1).bit_length()
    state, once = np.zeros(_STATE, np.int64), min(n, total) + 1
    state[_TOTAL], state[_EASY], state[_LEAVES] = total, int(easy), leaves
    kept = record(n, 2 * max(n, total))
    keys, values = np.empty((2, once), np.int64)
    b = Backfilling(
        state=state, job=job.reshape(-1), at=at, tree=np.full(2 * leaves * _PAIR, NEVER),
        board=board(nodes.gpus), keys=keys, values=values, believed=np.empty(2 * once, np.int64),
        rows=kept.rows, nodes=kept.nodes, counts=kept.counts,
    )  # fmt: skip
    while not _advance(b):
        b = b._replace(nodes=_doubled(b.nodes), counts=_doubled(b.counts))
    kept = Record(b.rows, b.nodes, b.counts)
    finished = b.job.reshape(-1, _JOB)[:, _FINISHED].copy()
    return log(kept, n, int(state[_USED]), finished, np.zeros(n, np.int64))


def _doubled(old: IntArray) -> IntArray:
    """The same with twice the room."""
    return np.concatenate((old, np.empty(len(old), np.int64)))


@helper(INT, BACKFILLING, INT, INT, INT, counted=False)
def _set(b, place, gang, estimate):  # type: ignore[no-untyped-def]
    """Write the leaf of a place in the order, and what is above it."""
    node = b.state[_LEAVES] + place
    b.tree[node * _PAIR], b.tree[node * _PAIR + 1] = gang, estimate
    node >>= 1
    while node > 0:
        left = 2 * node * _PAIR
        gang = min(b.tree[left], b.tree[left + _PAIR])
        estimate = min(b.tree[left + 1], b.tree[left + _PAIR + 1])
        at = node * _PAIR
        if b.tree[at] == gang and b.tree[at + 1] == estimate:
            break
        b.tree[at], b.tree[at + 1] = gang, estimate
        node >>= 1
    return node


@helper(INT, BACKFILLING, INT, INT, INT, INT, counted=False)
def _next(b, place, free, time, extra):  # type: ignore[no-untyped-def]
    """First place from this on whose job fits `free` and is done in `time` or fits `extra`; -1."""
    leaves = b.state[_LEAVES]
    if place >= leaves:
        return -1
    node = leaves + place
    while True:
        at = node * _PAIR
        if b.tree[at] <= free and (b.tree[at + 1] <= time or b.tree[at] <= extra):
            if node >= leaves:
                return node - leaves
            node *= 2
            continue
        while node & 1:
            node >>= 1
        if node == 0:
            return -1
        node += 1


@helper(INT, BACKFILLING, INT, INT, counted=False)
def _try_start(b, place_in_order, time):  # type: ignore[no-untyped-def]
    """Start the job at a place of the order if it fits."""
    used, stays = b.state[_USED], b.state[_STAYS]
    job = b.at[place_in_order]
    line, at = job * _JOB, stays * WIDTH
    end = place(b.board, b.job[line + _GANG], ANYWHERE, b.nodes, b.counts, used)
    if end == used:
        return 0
    last = time + b.job[line + _DURATION]
    b.rows[at + JOB], b.rows[at + START], b.rows[at + END] = job, time, last
    b.rows[at + RESTART], b.rows[at + GPUS], b.rows[at + PARTS] = 0, b.job[line + _GANG], used
    b.rows[at + WORK_DONE] = b.job[line + _WORK]
    b.state[_USED], b.state[_STAYS] = end, stays + 1
    n, half = b.state[_RUNNING], len(b.believed) >> 1
    b.state[_RUNNING] = push(b.keys, b.values, n, last, stays)
    if b.state[_EASY] == 1:
        key = time + b.job[line + _ESTIMATE]
        while n > 0 and b.believed[n - 1] > key:
            b.believed[n], b.believed[half + n] = b.believed[n - 1], b.believed[half + n - 1]
            n -= 1
        b.believed[n], b.believed[half + n] = key, b.job[line + _GANG]
    return _set(b, place_in_order, NEVER, NEVER) + 1


@helper(INT, BACKFILLING, INT, counted=False)
def _forget(b, row):  # type: ignore[no-untyped-def]
    """Take a job that ended out of the believed ends."""
    line, half = b.rows[row * WIDTH + JOB] * _JOB, len(b.believed) >> 1
    key = b.rows[row * WIDTH + START] + b.job[line + _ESTIMATE]
    low, high = 0, b.state[_RUNNING]
    while low < high:
        middle = (low + high) >> 1
        if b.believed[middle] < key:
            low = middle + 1
        else:
            high = middle
    while b.believed[half + low] != b.job[line + _GANG]:
        low += 1
    for i in range(low, b.state[_RUNNING] - 1):
        b.believed[i], b.believed[half + i] = b.believed[i + 1], b.believed[half + i + 1]
    return low


@helper(INT, BACKFILLING, INT, INT, counted=False)
def _backfill(b, first, time):  # type: ignore[no-untyped-def]
    """Start jobs behind the first that does not fit."""
    shadow, extra = NEVER, NEVER
    if b.state[_EASY] == 1:
        need = b.job[b.at[first] * _JOB + _GANG]
        there, half = b.board[FREE_TOTAL], len(b.believed) >> 1
        for i in range(b.state[_RUNNING]):
            # a job that outlives its estimate is believed to end at once
            end = max(b.believed[i], time + 1)
            if there >= need and end > shadow:
                break
            there += b.believed[half + i]
            if there >= need:
                shadow = end
        extra = there - need
    place_in_order = first
    while b.board[FREE_TOTAL] > 0:
        free = b.board[FREE_TOTAL]
        place_in_order = _next(b, place_in_order + 1, free, shadow - time, extra)
        if place_in_order < 0:
            break
        line = b.at[place_in_order] * _JOB
        if b.job[line + _ESTIMATE] > shadow - time:
            extra -= b.job[line + _GANG]
        _try_start(b, place_in_order, time)
    return 0


@entry(INT, BACKFILLING, counted=False)
def _advance(b):  # type: ignore[no-untyped-def]
    """Simulate to the end (1), or until an instant's starts may lack room (0)."""
    n, total = len(b.at), b.state[_TOTAL]
    arrived = b.state[_NEXT]
    while b.state[_STAYS] < n or b.state[_RUNNING] > 0:
        if b.state[_USED] + total > len(b.nodes):
            b.state[_NEXT] = arrived
            return 0
        time = b.job[arrived * _JOB + _SUBMIT] if arrived < n else NEVER
        if b.state[_RUNNING] > 0:
            time = min(time, b.keys[0])
        while b.state[_RUNNING] > 0 and b.keys[0] == time:
            row = b.values[0]
            if b.state[_EASY] == 1:
                _forget(b, row)
            b.state[_RUNNING] = pop(b.keys, b.values, b.state[_RUNNING])
            at = row * WIDTH
            end = b.rows[at + WIDTH + PARTS] if row + 1 < b.state[_STAYS] else b.state[_USED]
            release(b.board, b.nodes, b.counts, b.rows[at + PARTS], end)
            b.job[b.rows[at + JOB] * _JOB + _FINISHED] = time
        while arrived < n and b.job[arrived * _JOB + _SUBMIT] == time:
            line = arrived * _JOB
            _set(b, b.job[line + _PLACE], b.job[line + _GANG], b.job[line + _ESTIMATE])
            arrived += 1
        first = _next(b, 0, NEVER - 1, NEVER, NEVER)
        while first >= 0 and _try_start(b, first, time) > 0:
            first = _next(b, first + 1, NEVER - 1, NEVER, NEVER)
        if first >= 0:
            _backfill(b, first, time)
    return 1
