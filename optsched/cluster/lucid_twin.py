"""Lucid's packing with the timing of its simulator: whole simulations in compiled code.

A job's work is counted in millionths of a second alone; shared GPUs give it ``speed`` millionths a
tick. Its simulator looks at every second; here only ends, arrivals, and the second after a job
started on GPUs of its own (a partner for jobs that were passed over) are events.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numba import types

from optsched.cluster.lucid_pending import insert_pending, no_hosts, sorted_in, sorted_out
from optsched.cluster.queue_twin_heap import pop, push
from optsched.cluster.queue_twin_input import LUCID_NODE, columns
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
from optsched.cluster.queue_twin_nodes import CONSOLIDATED, board, place, release
from optsched.kernels.compile import INT, INTS, entry, helper

if TYPE_CHECKING:
    from optsched.cluster.contention import PackingTable
    from optsched.cluster.log import Log
    from optsched.cluster.nodes import Nodes
    from optsched.cluster.settings import Settings
    from optsched.cluster.workload import Workload
    from optsched.model.schedule import IntArray

NEVER: Final = 1 << 62
MILLION: Final = 10**6
NO_PAIR: Final = -1
_LONGEST: Final = 2**36
"""Millionths of it, and its product with many GPUs, fit 64 bits."""

# `Packing.state`
_NEXT: Final = 0
_PENDING: Final = 1
_HEAP: Final = 2
_STAYS: Final = 3
_USED: Final = 4
_AGAIN: Final = 5
"""Look at the pending jobs again at this time."""
_FROM: Final = 6
"""Pending jobs before this one cannot start: nothing has changed for them."""
_KINDS: Final = 7
_STATE: Final = 8

# `Packing.job`
_SUBMIT: Final = 0
_GANG: Final = 1
_KIND: Final = 2
_COST: Final = 3
_REMAINING: Final = 4
"""Millionths of a second alone, after the tick `_SINCE`."""
_RATE: Final = 5
_SINCE: Final = 6
_OVER: Final = 7
"""When its end will be seen."""
_ROW: Final = 8
_PARTNER: Final = 9
_FINISHED: Final = 10
_WORK: Final = 11
_CLASS: Final = 12
_JOB: Final = 14


class Packing(NamedTuple):
    """A simulation under way."""

    state: IntArray
    job: IntArray
    board: IntArray
    pending: IntArray
    """Pending jobs by cost, then number; then the class of each."""
    hosts: IntArray
    """By gang 1..8: number of running jobs alone on their GPUs, then their rows, ascending."""
    chances: IntArray
    """By class (gang and kind, or a gang above a node): which number of `version` counts for it."""
    failed: IntArray
    """By class: that number when a job of it could not start."""
    version: IntArray
    """By gang (0: all above 8): counts what may give one a chance."""
    pairs: IntArray
    """By kind that joins and kind there: speeds of both, in millionths; `NO_PAIR`."""
    ends: IntArray
    """Heap of ends, some of them outdated; then rows of stays."""
    end_rows: IntArray
    rows: IntArray
    nodes: IntArray
    counts: IntArray
    half: IntArray
    host: IntArray


PACKING: Final[Any] = types.NamedUniTuple(INTS, len(Packing._fields), Packing)


def lucid_twin(
    workload: Workload, nodes: Nodes, settings: Settings, *, table: PackingTable | None,
    memory_limit: float, gang: int | None,
) -> Log | None:  # fmt: skip
    """Simulate `Lucid` second by second, without looking at every second."""
    cols = columns(workload, nodes, settings, gang)
    if cols is None:
        return None
    if cols.duration.max() > _LONGEST or cols.estimate.max() > _LONGEST:
        return None
    n, total = len(cols.gang), sum(nodes.gpus)
    kind, pairs = pair_speeds(workload, table, memory_limit)
    kinds = int(kind.max()) + 1
    job = np.zeros((n, _JOB), np.int64)
    job[:, _SUBMIT], job[:, _GANG], job[:, _KIND] = cols.submit, cols.gang, kind
    job[:, _COST], job[:, _REMAINING] = cols.estimate * cols.gang, cols.duration * MILLION
    job[:, _ROW] = job[:, _PARTNER] = job[:, _FINISHED] = -1
    job[:, _WORK] = workload.work
    # kinds matter to those that may find a partner
    keys = np.where(cols.gang <= LUCID_NODE, cols.gang * kinds + kind, -cols.gang)
    classes, job[:, _CLASS] = np.unique(keys, return_inverse=True)
    chances = np.where(classes > 0, classes // kinds, 0)
    state = np.zeros(_STATE, np.int64)
    state[_AGAIN], state[_KINDS] = NEVER, kinds
    once = min(n, 2 * total) + 2
    kept = record(n, n * (1 + (int(cols.gang.max()) - 1) // LUCID_NODE))
    # an end is noted at the start, and at most twice again for every start
    ends, end_rows = np.empty((2, 4 * n + 4), np.int64)
    p = Packing(
        state=state, job=job.reshape(-1), board=board(nodes.gpus),
        pending=np.empty(2 * (n + 1), np.int64), hosts=no_hosts(once), chances=chances,
        failed=np.full(len(classes), -1), version=np.zeros(LUCID_NODE + 1, np.int64),
        pairs=pairs, ends=ends, end_rows=end_rows, rows=kept.rows, nodes=kept.nodes,
        counts=kept.counts, half=np.zeros(n, np.int64), host=np.full(n, -1),
    )  # fmt: skip
    _advance(p)
    finished = p.job.reshape(-1, _JOB)[:, _FINISHED].copy()
    return log(Record(p.rows, p.nodes, p.counts), n, int(state[_USED]), finished,
               np.zeros(n, np.int64), p.half, p.host)  # fmt: skip


def pair_speeds(
    workload: Workload, table: PackingTable | None, memory_limit: float
) -> tuple[IntArray, IntArray]:
    """Kind of every job, and speeds of all pairs of kinds (see `Packing.pairs`)."""
    from optsched.cluster.packing_table import type_of
    from optsched.cluster.policies.lucid import packable

    if table is None:
        return np.zeros(len(workload.submit), np.int64), np.full(2, NO_PAIR)
    names = [type_of(workload, j) for j in range(len(workload.submit))]
    known = {name: i for i, name in enumerate(dict.fromkeys(names))}
    speeds = np.full((len(known), len(known), 2), NO_PAIR)
    for own, i in known.items():
        for host, k in known.items():
            pair = table.pair(own, host)
            if pair is not None and packable(table, memory_limit, own, host):
                speeds[i, k] = np.maximum(np.rint(np.array(pair) * MILLION), 1)
    return np.array([known[name] for name in names]), speeds.reshape(-1)


@helper(INT, PACKING, INT, counted=False)
def _foresee(p, line):  # type: ignore[no-untyped-def]
    """Note when the end of a running job will be seen: a tick after its work is done."""
    left, rate = max(p.job[line + _REMAINING], 0), p.job[line + _RATE]
    over = p.job[line + _SINCE] + (left + rate - 1) // rate + 1
    p.job[line + _OVER] = over
    p.state[_HEAP] = push(p.ends, p.end_rows, p.state[_HEAP], over, p.job[line + _ROW])
    return over


@helper(INT, PACKING, INT, INT, INT, counted=False)
def _set_rate(p, line, tick, rate):  # type: ignore[no-untyped-def]
    """Another speed after a tick."""
    p.job[line + _REMAINING] -= p.job[line + _RATE] * (tick - p.job[line + _SINCE])
    p.job[line + _SINCE], p.job[line + _RATE] = tick, rate
    return _foresee(p, line)


@helper(INT, PACKING, INT, counted=False)
def _be_host(p, line):  # type: ignore[no-untyped-def]
    """A running job is alone on its GPUs."""
    gang = p.job[line + _GANG]
    if gang > LUCID_NODE:
        return 0
    p.version[gang] += 1
    return sorted_in(p.hosts, gang, p.job[line + _ROW])


@helper(INT, PACKING, INT, INT, counted=False)
def _end(p, row, time):  # type: ignore[no-untyped-def]
    """End the job of a stay, and let its partner have the GPUs."""
    at = row * WIDTH
    job = p.rows[at + JOB]
    line = job * _JOB
    gang, partner = p.job[line + _GANG], p.job[line + _PARTNER]
    p.job[line + _FINISHED] = p.rows[at + END] = time
    p.job[line + _ROW] = -1
    if partner >= 0:
        theirs = partner * _JOB
        p.job[theirs + _PARTNER] = p.job[line + _PARTNER] = -1
        if p.job[theirs + _OVER] != time:
            # those that started later get this tick at full speed already
            if p.job[theirs + _ROW] > row:
                p.job[theirs + _REMAINING] -= MILLION - p.job[theirs + _RATE]
            _set_rate(p, theirs, time, MILLION)
            _be_host(p, theirs)
        return 0
    if gang <= LUCID_NODE:
        sorted_out(p.hosts, gang, row)
    end = p.rows[at + WIDTH + PARTS] if row + 1 < p.state[_STAYS] else p.state[_USED]
    release(p.board, p.nodes, p.counts, p.rows[at + PARTS], end)
    for gang in range(LUCID_NODE + 1):
        p.version[gang] += 1
    return 1


@helper(INT, PACKING, INT, INT, INT, counted=False)
def _open(p, job, time, end):  # type: ignore[no-untyped-def]
    """Open the stay of a job whose parts end at `end`."""
    line, row = job * _JOB, p.state[_STAYS]
    at = row * WIDTH
    p.rows[at + JOB], p.rows[at + START], p.rows[at + RESTART] = job, time, 0
    p.rows[at + GPUS], p.rows[at + PARTS] = p.job[line + _GANG], p.state[_USED]
    p.rows[at + WORK_DONE] = p.job[line + _WORK]
    p.state[_STAYS], p.state[_USED] = row + 1, end
    p.job[line + _ROW], p.job[line + _SINCE], p.job[line + _RATE] = row, time, MILLION
    return row


@helper(INT, PACKING, INT, counted=False)
def _find_host(p, line):  # type: ignore[no-untyped-def]
    """Row of the first job that a pending one may join; -1 if there is none."""
    gang, kinds = p.job[line + _GANG], p.state[_KINDS]
    length = p.hosts[gang]
    base = p.hosts[0] * gang
    for i in range(length):
        row = p.hosts[base + i]
        theirs = p.rows[row * WIDTH + JOB] * _JOB
        pair = p.job[line + _KIND] * kinds + p.job[theirs + _KIND]
        if p.pairs[2 * pair] != NO_PAIR and p.job[line + _COST] <= 2 * p.job[theirs + _COST]:
            return row
    return -1


@helper(INT, PACKING, INT, INT, counted=False)
def _try_start(p, job, time):  # type: ignore[no-untyped-def]
    """Start a job beside another (2) or on GPUs of its own (1), if it can."""
    line = job * _JOB
    gang, used = p.job[line + _GANG], p.state[_USED]
    row = _find_host(p, line) if gang <= LUCID_NODE else -1
    if row >= 0:
        there = p.rows[row * WIDTH + JOB]
        theirs = there * _JOB
        # within a node there is one part
        begin = p.rows[row * WIDTH + PARTS]
        p.nodes[used], p.counts[used] = p.nodes[begin], p.counts[begin]
        own = _open(p, job, time, used + 1)
        if p.half[row] == 0:
            p.half[row] = 1
        p.half[own], p.host[own] = 3 - p.half[row], row
        pair = p.job[line + _KIND] * p.state[_KINDS] + p.job[theirs + _KIND]
        sorted_out(p.hosts, gang, row)
        p.job[line + _PARTNER], p.job[theirs + _PARTNER] = there, job
        p.job[line + _RATE] = p.pairs[2 * pair]
        _foresee(p, line)
        _set_rate(p, theirs, time, p.pairs[2 * pair + 1])
        return 2
    end = place(p.board, gang, CONSOLIDATED, p.nodes, p.counts, used)
    if end == used:
        return 0
    _open(p, job, time, end)
    _foresee(p, line)
    _be_host(p, line)
    return 1


@helper(INT, PACKING, INT, counted=False)
def _decide(p, time):  # type: ignore[no-untyped-def]
    """Try all pending jobs in order, those without a new chance excepted."""
    n, half = p.state[_PENDING], len(p.pending) >> 1
    kept = first = p.state[_FROM]
    p.state[_AGAIN] = NEVER
    for i in range(first, n):
        job, kind = p.pending[i], p.pending[half + i]
        started = 0
        if p.failed[kind] != p.version[p.chances[kind]]:
            started = _try_start(p, job, time)
            if started == 0:
                p.failed[kind] = p.version[p.chances[kind]]
            elif started == 1:
                p.state[_AGAIN] = time + 1
        if started == 0:
            p.pending[kept], p.pending[half + kept] = job, kind
            kept += 1
    p.state[_PENDING] = p.state[_FROM] = kept
    if kept == 0:
        p.state[_AGAIN] = NEVER
    return kept


@entry(INT, PACKING, counted=False)
def _advance(p):  # type: ignore[no-untyped-def]
    """Simulate to the end."""
    n = len(p.half)
    arrived = 0
    left = n
    while left > 0:
        time = p.state[_AGAIN]
        if arrived < n:
            time = min(time, p.job[arrived * _JOB + _SUBMIT])
        if p.state[_HEAP] > 0:
            time = min(time, p.ends[0])
        if time == p.state[_AGAIN]:
            p.state[_FROM] = 0
        # rows are numbered by start: ends of one tick come in that order
        while p.state[_HEAP] > 0 and p.ends[0] == time:
            row = p.end_rows[0]
            p.state[_HEAP] = pop(p.ends, p.end_rows, p.state[_HEAP])
            line = p.rows[row * WIDTH + JOB] * _JOB
            if p.job[line + _ROW] == row and p.job[line + _OVER] == time:
                _end(p, row, time)
                left -= 1
                p.state[_FROM] = 0
        while arrived < n and p.job[arrived * _JOB + _SUBMIT] == time:
            place_in_line = insert_pending(
                p.pending, p.state[_PENDING], arrived, p.job, _JOB, _COST, _CLASS
            )
            p.state[_FROM] = min(p.state[_FROM], place_in_line)
            # it may have a chance that costlier ones of its class have not
            p.failed[p.job[arrived * _JOB + _CLASS]] = -1
            p.state[_PENDING] += 1
            arrived += 1
        if p.state[_FROM] < p.state[_PENDING]:
            _decide(p, time)
    return 1
