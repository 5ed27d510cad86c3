"""Insertion into a circle of fixed length, compiled: every operation once a cycle.

Modulo scheduling (Rau, 1994, without ejection): time is a circle of T units on every device. A job
starts where it idles least on its way through the gaps between earlier jobs. The orders found are
then evaluated exactly, which removes idle time. Memory limits are ignored: where there are any,
list schedules are better.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from numba import types

from optsched.io.values import frozen
from optsched.kernels.compile import BOOL, INT, INTS, READ, entry, helper
from optsched_solvers.periodic.orders import CYCLE, Cycle, machine_weight

if TYPE_CHECKING:
    from collections.abc import Callable

    from optsched.model.schedule import IntArray, Schedule

FAR: Final = 1 << 60

MAX_TRIES: Final = 500
"""Starts of a unit that are tried, at most."""

MAX_WORK: Final = 40_000_000
"""Operations visited in one insertion of all units (a second at most)."""

SLICE: Final = 1_000_000
"""Operations visited between two polls of `stop` (some 10 ms)."""


class Units(NamedTuple):
    """Micro-batches with the updates that depend on them alone, in the order of insertion.

    Jobs of most work are first.
    """

    indptr: IntArray
    operations: IntArray
    path: IntArray  # from the first start to the last end without idle time

    @classmethod
    def of(cls, graph: Schedule) -> Units:
        """The units of a cycle."""
        rank = graph.microbatch.copy()
        tail, head, lag, distance = graph.arcs
        inside = (distance == 0) & (graph.iteration[tail] == graph.iteration[head])
        order = np.flatnonzero(inside)[np.argsort(tail[inside], kind="stable")]
        for i, j in zip(tail[order].tolist(), head[order].tolist(), strict=True):
            rank[j] = max(rank[j], rank[i])
        reach = [0] * graph.n_operations  # longest path from the unit's first start
        weight = (graph.duration[tail] + lag).tolist()
        for e in order.tolist():
            i, j = int(tail[e]), int(head[e])
            if rank[i] == rank[j]:
                reach[j] = max(reach[j], reach[i] + weight[e])
        work = np.bincount(graph.job, weights=graph.duration)
        keys = (rank, graph.iteration, graph.job, -work[graph.job])
        operations = np.lexsort((np.arange(len(rank)), *keys))
        labels = np.stack(keys)[:, operations]
        first = np.flatnonzero(np.append(True, (labels[:, 1:] != labels[:, :-1]).any(axis=0)))
        ends = (np.array(reach, np.int64) + graph.duration)[operations]
        path = np.maximum.reduceat(ends, first)
        return cls(frozen(np.append(first, len(rank))), frozen(operations), frozen(path))


class Places(NamedTuple):
    """The operations inserted so far; written by the kernel."""

    start: IntArray  # absolute; undefined before the operation is inserted
    phase: IntArray  # start modulo the period
    placed: IntArray  # 0 or 1
    row: IntArray  # operations on every resource by phase, in the layout of `Cycle.users`
    filled: IntArray  # operations per resource


def inserted(
    cycle: Cycle, units: Units, period: int, stop: Callable[[], bool] | None = None
) -> IntArray | None:
    """Insert all units and return the starts; None if one does not fit, or after `stop`."""
    n, many = len(cycle.operation), len(units.path)
    sizes = (n, n, n, int(cycle.users[-1]), len(cycle.users) - 1)
    places = Places(*(np.zeros(size, np.int64) for size in sizes))
    tries = max(4, min(MAX_TRIES, MAX_WORK // (many * n + 1)))
    step = max(1, SLICE // (tries * n + 1))
    for begin in range(0, many, step):
        end = min(begin + step, many)
        if not insert_some(cycle, units, places, begin, end, period, tries):
            return None
        if stop is not None and end < many and stop():
            return None
    return places.start


UNITS: Final = types.NamedUniTuple(READ, len(Units._fields), Units)
PLACES: Final = types.NamedUniTuple(INTS, len(Places._fields), Places)


@helper(INT, CYCLE, PLACES, INT, INT)
def rank_of(cycle, places, r, at):  # type: ignore[no-untyped-def]
    """The number of operations of a resource that begin before this phase."""
    low, high = 0, places.filled[r]
    while low < high:
        mid = (low + high) // 2
        if places.phase[places.row[cycle.users[r] + mid]] < at:
            low = mid + 1
        else:
            high = mid
    return low


@helper(types.UniTuple(INT, 2), CYCLE, PLACES, INT, INT, INT)
def gap(cycle, places, i, lo, period):  # type: ignore[no-untyped-def]
    """Earliest start of i from `lo` on in a gap of its resource, and its place in the row.

    (-1, 0) if there is none.
    """
    r = cycle.operation[i].resource
    p = cycle.operation[i].duration
    count = places.filled[r]
    if count == 0:
        return (lo if p <= period else -1), 0
    base = cycle.users[r]
    row, phase = places.row, places.phase
    at = lo % period
    shift = lo - at
    k = rank_of(cycle, places, r, at + 1)
    # invariant: operation i fits into no gap before the k-th operation of the row, from `lo` on
    for _ in range(count + 1):
        a = row[base + (k if k > 0 else count) - 1]
        t = phase[a] + machine_weight(cycle.operation, a, i) + shift
        if k == 0:
            t -= period
        t = max(t, lo)
        b = row[base + k] if k < count else row[base]
        end = phase[b] + shift
        if k == count:
            end += period
        if t + machine_weight(cycle.operation, i, b) <= end:
            if k == count and t - shift >= period:
                k = 0
            return t, k
        if k == count:
            k = 1
            shift += period
        else:
            k += 1
    return -1, 0


@helper(types.void, CYCLE, UNITS, PLACES, INT, INT)
def take_out(cycle, units, places, first, last):  # type: ignore[no-untyped-def]
    """Remove the unit's operations from `first` to before `last` again."""
    for u in range(first, last):
        i = units.operations[u]
        places.placed[i] = 0
        r = cycle.operation[i].resource
        if r < 0:
            continue
        at = cycle.users[r] + rank_of(cycle, places, r, places.phase[i])
        while places.row[at] != i:
            at += 1
        places.filled[r] -= 1
        for k in range(at, cycle.users[r] + places.filled[r]):
            places.row[k] = places.row[k + 1]


@helper(INT, CYCLE, UNITS, PLACES, INT, INT, INT)
def pass_through(cycle, units, places, unit, begin, period):  # type: ignore[no-untyped-def]
    """Insert a unit that starts at `begin` or later, each operation at its earliest.

    Returns the end of its last operation. If it does not fit, nothing is inserted, and the result
    is minus a delay of `begin` after which it may fit.
    """
    first = units.indptr[unit]
    finish = -1
    for u in range(first, units.indptr[unit + 1]):
        i = units.operations[u]
        lo, hi = -FAR, FAR
        for e in range(cycle.operation[i].first_in, cycle.operation[i].end_in):
            o = cycle.arc_in[e].other
            if places.placed[o]:
                t = places.start[o] + cycle.arc_in[e].weight - cycle.arc_in[e].tokens * period
                lo = max(lo, t)
        if u == first or lo == -FAR:
            lo = max(lo, begin)
        for e in range(cycle.operation[i].first_out, cycle.operation[i].end_out):
            o = cycle.arc_out[e].other
            if places.placed[o]:
                t = places.start[o] - cycle.arc_out[e].weight + cycle.arc_out[e].tokens * period
                hi = min(hi, t)
        r = cycle.operation[i].resource
        t, k = lo, 0
        if r >= 0:
            t, k = gap(cycle, places, i, lo, period)
        missing = FAR if t < 0 else t - hi
        if missing > 0:
            take_out(cycle, units, places, first, u)
            return -missing
        places.start[i] = t
        places.phase[i] = t % period
        places.placed[i] = 1
        finish = max(finish, t + cycle.operation[i].duration)
        if r >= 0:
            base = cycle.users[r]
            for at in range(base + places.filled[r], base + k, -1):
                places.row[at] = places.row[at - 1]
            places.row[base + k] = i
            places.filled[r] += 1
    return finish


@entry(BOOL, CYCLE, UNITS, PLACES, INT, INT, INT, INT)
def insert_some(cycle, units, places, begin, end, period, tries):  # type: ignore[no-untyped-def]
    """Insert units `begin` to `end - 1`, each where it idles least; False if one does not fit.

    A unit that depends on an earlier unit of its job begins as soon as possible instead.
    """
    since = 0
    if begin > 0:
        since = places.start[units.operations[units.indptr[begin - 1]]]
    for unit in range(begin, end):
        first = units.operations[units.indptr[unit]]
        follows = False
        for e in range(cycle.operation[first].first_in, cycle.operation[first].end_in):
            o = cycle.arc_in[e].other
            if places.placed[o] and cycle.arc_in[e].tokens == 0:
                follows = True
                since = max(since, places.start[o] + cycle.arc_in[e].weight)
        best_cost, best = FAR, -1
        at = since
        for _ in range(tries):
            if at >= since + period:
                break
            finish = pass_through(cycle, units, places, unit, at, period)
            if finish < 0:
                if finish == -FAR:
                    break
                at -= finish
                continue
            start = places.start[first]
            take_out(cycle, units, places, units.indptr[unit], units.indptr[unit + 1])
            cost = finish if follows else finish - start
            if cost < best_cost:
                best_cost, best = cost, start
            if follows or cost <= units.path[unit]:
                break
            at = max(start + 1, finish - units.path[unit])
        if best < 0 or pass_through(cycle, units, places, unit, best, period) < 0:
            return False
        since = places.start[first]
    return True
