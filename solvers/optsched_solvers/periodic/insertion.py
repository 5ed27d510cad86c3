"""Jobs inserted one after the other into a circle of fixed length: every operation once a cycle.

Modulo scheduling (Rau, 1994, without ejection): time runs round a circle of T units on every
device. A job starts where it waits least on its way through the gaps that earlier jobs left. The
orders found so are then evaluated exactly, which squeezes out the idle time that is left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numba import types

from optsched.kernels.compile import BOOL, INT, INTS, READ, entry, helper
from optsched.model.bounds import holdings

if TYPE_CHECKING:
    from collections.abc import Callable

    from optsched.model.schedule import IntArray, Schedule

NO_LIMIT = np.iinfo(np.int64).max // 4
FAR = 1 << 60

MAX_TRIES = 500
"""Starts of a unit that are tried."""

MAX_WORK = 40_000_000
"""Operations looked at in one insertion of everything (a second at most), where a try of every
unit looks at every operation once."""

SLICE = 1_000_000
"""Operations looked at between two questions whether to stop (some 10 ms)."""


class Circle(NamedTuple):
    """The arrays that the kernels read; one value per operation unless said otherwise."""

    duration: IntArray
    resource: IntArray  # -1 for none
    family: IntArray
    setup_in: IntArray
    setup_out: IntArray
    acquire: IntArray
    free: IntArray
    need: IntArray  # bytes: acquired, and workspace
    memory: IntArray  # per resource
    users: IntArray  # indptr per resource
    before_indptr: IntArray
    before: IntArray
    before_weight: IntArray  # start to start
    before_tokens: IntArray
    after_indptr: IntArray
    after: IntArray
    after_weight: IntArray
    after_tokens: IntArray
    hold_indptr: IntArray  # per operation that frees
    hold_first: IntArray
    hold_size: IntArray
    unit_indptr: IntArray  # per unit
    unit_operations: IntArray
    unit_path: IntArray  # per unit: from its first start to its last end if it never waits

    @classmethod
    def of(cls, graph: Schedule) -> Circle:
        """Arrays of a cycle whose operations hold at most one resource each."""
        n = graph.n_operations
        tail, head, lag, distance = graph.arcs
        weight = graph.duration[tail] + lag
        into, out = np.argsort(head, kind="stable"), np.argsort(tail, kind="stable")
        held = [h for h in holdings(graph) if graph.memory[h.resource] and h.last >= 0]
        held.sort(key=lambda h: h.last)
        last = np.array([h.last for h in held], np.int64)
        operations, unit = units(graph)
        indptr = _indptr(unit, int(unit.max(initial=-1)) + 1)
        return cls(*(frozen(column) for column in (
            graph.duration, graph.single_resource, graph.family, graph.setup_in, graph.setup_out,
            graph.acquire, graph.free, graph.acquire + graph.workspace,
            np.where(graph.memory == 0, NO_LIMIT, graph.memory),
            graph.users.indptr,
            _indptr(head, n), tail[into], weight[into], distance[into],
            _indptr(tail, n), head[out], weight[out], distance[out],
            _indptr(last, n), np.array([h.first for h in held], np.int64),
            np.array([h.size for h in held], np.int64),
            indptr, operations, _paths(graph, indptr, operations),
        )))  # fmt: skip


class Places(NamedTuple):
    """What has been inserted so far; the kernels change it."""

    start: IntArray  # absolute; means nothing before the operation is inserted
    phase: IntArray  # start modulo the period
    placed: IntArray  # 0 or 1
    held: IntArray  # bytes on the resource just before the operation
    row: IntArray  # operations on every resource by phase, in the layout of `Circle.users`
    filled: IntArray  # operations per resource

    @classmethod
    def none(cls, circle: Circle) -> Places:
        """Nothing inserted."""
        n = len(circle.duration)
        sizes = (n, n, n, n, int(circle.users[-1]), len(circle.memory))
        return cls(*(np.zeros(size, np.int64) for size in sizes))


def inserted(
    circle: Circle, order: IntArray, period: int, stop: Callable[[], bool] | None = None
) -> IntArray | None:
    """Starts of all operations after insertion of the units in this order; None: no room."""
    places = Places.none(circle)
    if insert_all(circle, places, order, period, stop) < len(order):
        return None
    return places.start


def insert_all(
    circle: Circle,
    places: Places,
    order: IntArray,
    period: int,
    stop: Callable[[], bool] | None = None,
) -> int:
    """Insert units in this order; how many before the first without room, or before a stop."""
    order = frozen(order)
    work = len(order) * len(circle.duration) + 1
    tries = max(4, min(MAX_TRIES, MAX_WORK // work))
    step = max(1, SLICE // (tries * len(circle.duration) + 1))
    for begin in range(0, len(order), step):
        end = min(begin + step, len(order))
        placed: int = insert_some(circle, places, order, begin, end, period, tries)
        if placed < end or (stop is not None and end < len(order) and stop()):
            return placed
    return len(order)


def frozen(values: IntArray) -> IntArray:
    """A read-only copy, contiguous: kernels know one type of array only."""
    copy: IntArray = np.array(values, np.int64)
    copy.flags.writeable = False
    return copy


def units(graph: Schedule) -> tuple[IntArray, IntArray]:
    """Operations ordered by unit, and the unit of each of them.

    A unit is what passes through the pipeline at once: a micro-batch of an iteration of a job,
    with the updates that wait for it alone.
    """
    rank = graph.microbatch.copy()
    inside = graph.arcs.distance == 0
    inside &= graph.iteration[graph.arcs.tail] == graph.iteration[graph.arcs.head]
    tail, head = graph.arcs.tail[inside], graph.arcs.head[inside]
    order = np.argsort(tail, kind="stable")
    for i, j in zip(tail[order].tolist(), head[order].tolist(), strict=True):
        rank[j] = max(rank[j], rank[i])
    operations = np.lexsort((np.arange(len(rank)), rank, graph.iteration, graph.job))
    labels = np.stack([graph.job, graph.iteration, rank], axis=1)[operations]
    new = np.ones(len(labels), np.int64)
    new[1:] = (labels[1:] != labels[:-1]).any(axis=1)
    return operations, np.cumsum(new) - 1


def _indptr(row: IntArray, n: int) -> IntArray:
    indptr = np.zeros(n + 1, np.int64)
    np.cumsum(np.bincount(row, minlength=n), out=indptr[1:])
    return indptr


def _paths(graph: Schedule, indptr: IntArray, operations: IntArray) -> IntArray:
    """Per unit the longest path through its own operations."""
    unit = np.empty(graph.n_operations, np.int64)
    unit[operations] = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    head = np.zeros(graph.n_operations, np.int64)
    tail, to, lag, distance = graph.arcs
    inside = (unit[tail] == unit[to]) & (distance == 0)
    order = np.argsort(tail[inside], kind="stable")
    columns = (tail[inside][order], to[inside][order], lag[inside][order])
    duration = graph.duration.tolist()
    reach = head.tolist()
    for i, j, gap in zip(*(column.tolist() for column in columns), strict=True):
        reach[j] = max(reach[j], reach[i] + duration[i] + gap)
    path = np.zeros(len(indptr) - 1, np.int64)
    np.maximum.at(path, unit, np.array(reach, np.int64) + graph.duration)
    return path


CIRCLE = types.NamedUniTuple(READ, len(Circle._fields), Circle)
PLACES = types.NamedUniTuple(INTS, len(Places._fields), Places)


@entry(types.UniTuple(INT, 2), CIRCLE, PLACES, INT, INT, INT, INT)
def gap(circle, places, i, lo, hi, period):  # type: ignore[no-untyped-def]
    """Earliest start of i in [lo, hi] that its resource has room for, and the place in its row.

    (-1, 0) if there is none.
    """
    r = circle.resource[i]
    p = circle.duration[i]
    count = places.filled[r]
    if count == 0:
        return (lo if p <= period else -1), 0
    base = circle.users[r]
    row, phase = places.row, places.phase
    at = lo % period
    shift = lo - at
    low, high = 0, count
    while low < high:
        mid = (low + high) // 2
        if phase[row[base + mid]] <= at:
            low = mid + 1
        else:
            high = mid
    k = low
    for _ in range(count + 1):
        if k > 0:
            a = row[base + k - 1]
            t = phase[a] + circle.duration[a] + shift
        else:
            a = row[base + count - 1]
            t = phase[a] + circle.duration[a] - period + shift
        if circle.family[a] != circle.family[i]:
            t += circle.setup_out[a] + circle.setup_in[i]
        t = max(t, lo)
        if t > hi:
            return -1, 0
        b = row[base + k] if k < count else row[base]
        end = phase[b] + shift
        if k == count:
            end += period
        if circle.family[b] != circle.family[i]:
            end -= circle.setup_out[i] + circle.setup_in[b]
        if t + p <= end:
            if k == count and t - shift >= period:
                k = 0
            return t, k
        if k == count:
            k = 1
            shift += period
        else:
            k += 1
    return -1, 0


@helper(BOOL, CIRCLE, PLACES, INT, INT, INT)
def _hold(circle, places, k, sign, period):  # type: ignore[no-untyped-def]
    """Count (sign 1) or forget (-1) the bytes that k frees; False if somebody lacks room."""
    fits = True
    r = circle.resource[k]
    base = circle.users[r]
    limit = circle.memory[r]
    for e in range(circle.hold_indptr[k], circle.hold_indptr[k + 1]):
        first = circle.hold_first[e]
        if not places.placed[first]:
            continue
        begin, end = places.start[first], places.start[k]
        for at in range(base, base + places.filled[r]):
            q = places.row[at]
            laps = (end - places.phase[q]) // period - (begin - places.phase[q]) // period
            if laps:
                places.held[q] += sign * laps * circle.hold_size[e]
                fits &= places.held[q] + circle.need[q] <= limit
    return fits


@helper(types.void, CIRCLE, PLACES, INT, INT)
def remove(circle, places, i, period):  # type: ignore[no-untyped-def]
    """Take an operation out again; those that waited for it keep their starts."""
    places.placed[i] = 0
    r = circle.resource[i]
    if r < 0:
        return
    _hold(circle, places, i, -1, period)
    base = circle.users[r]
    low, high = 0, places.filled[r]
    while low < high:
        mid = (low + high) // 2
        if places.phase[places.row[base + mid]] < places.phase[i]:
            low = mid + 1
        else:
            high = mid
    at = base + low
    while places.row[at] != i:
        at += 1
    places.filled[r] -= 1
    for k in range(at, base + places.filled[r]):
        places.row[k] = places.row[k + 1]


@helper(INT, CIRCLE, PLACES, INT, INT, INT)
def pass_through(circle, places, unit, begin, period):  # type: ignore[no-untyped-def]
    """Insert a unit that starts at `begin` or later, each operation at its earliest.

    Returns the end of its last operation; or minus the least by which it must start later (about)
    to fit, and has changed nothing.
    """
    first = circle.unit_indptr[unit]
    end = -1
    for u in range(first, circle.unit_indptr[unit + 1]):
        i = circle.unit_operations[u]
        lo, hi = -FAR, FAR
        for e in range(circle.before_indptr[i], circle.before_indptr[i + 1]):
            o = circle.before[e]
            if places.placed[o]:
                t = places.start[o] + circle.before_weight[e] - circle.before_tokens[e] * period
                lo = max(lo, t)
        if u == first or lo == -FAR:
            lo = max(lo, begin)
        for e in range(circle.after_indptr[i], circle.after_indptr[i + 1]):
            o = circle.after[e]
            if places.placed[o]:
                t = places.start[o] - circle.after_weight[e] + circle.after_tokens[e] * period
                hi = min(hi, t)
        r = circle.resource[i]
        t, k = lo, 0
        if r >= 0:
            t, k = gap(circle, places, i, lo, FAR, period)
        missing = FAR if t < 0 else t - hi
        fits = missing <= 0
        if fits:
            places.start[i] = t
            places.phase[i] = t % period
            places.placed[i] = 1
            end = max(end, t + circle.duration[i])
            if r >= 0:
                base = circle.users[r]
                count = places.filled[r]
                follows = places.row[base + k] if k < count else places.row[base]
                places.held[i] = places.held[follows] if count else 0
                for at in range(base + count, base + k, -1):
                    places.row[at] = places.row[at - 1]
                places.row[base + k] = i
                places.filled[r] = count + 1
                fits = places.held[i] + circle.need[i] <= circle.memory[r]
                fits &= _hold(circle, places, i, 1, period)
        if not fits:
            if missing > 0:
                u -= 1
            for w in range(u, first - 1, -1):
                remove(circle, places, circle.unit_operations[w], period)
            if missing <= 0:  # no bytes: until the next operation there has ended
                missing = period
                for at in range(circle.users[r], circle.users[r] + places.filled[r]):
                    q = places.row[at]
                    later = (places.phase[q] + circle.duration[q] - t) % period
                    if later > 0:
                        missing = min(missing, later)
            return -missing
    return end


@helper(types.void, CIRCLE, PLACES, INT, INT)
def take_out(circle, places, unit, period):  # type: ignore[no-untyped-def]
    """Remove a unit, those that free bytes before those that took them."""
    for u in range(circle.unit_indptr[unit + 1] - 1, circle.unit_indptr[unit] - 1, -1):
        remove(circle, places, circle.unit_operations[u], period)


@helper(BOOL, CIRCLE, PLACES, INT, INT, INT, BOOL, INT)
def insert(circle, places, unit, since, period, sooner, tries):  # type: ignore[no-untyped-def]
    """Insert a unit within a period from `since` on, where it waits least, or ends soonest.

    False, and nothing is changed, if there is no room.
    """
    first = circle.unit_operations[circle.unit_indptr[unit]]
    path = circle.unit_path[unit]
    best_cost, best = FAR, -1
    begin = since
    until = since + period
    for _ in range(tries):
        if begin >= until:
            break
        end = pass_through(circle, places, unit, begin, period)
        if end < 0:
            if end == -FAR:
                break
            begin -= end
            continue
        start = places.start[first]
        take_out(circle, places, unit, period)
        cost = end if sooner else end - start
        if cost < best_cost:
            best_cost, best = cost, start
        if sooner or cost <= path:
            break
        begin = max(start + 1, end - path)
    if best < 0:
        return False
    return pass_through(circle, places, unit, best, period) >= 0


@entry(INT, CIRCLE, PLACES, READ, INT, INT, INT, INT)
def insert_some(  # type: ignore[no-untyped-def]
    circle, places, order, begin, end, period, tries,
):  # fmt: skip
    """Insert the units from one place in the order up to another; where it had no room, or end."""
    since = 0
    if begin > 0:
        since = places.start[circle.unit_operations[circle.unit_indptr[order[begin - 1]]]]
    for k in range(begin, end):
        unit = order[k]
        first = circle.unit_operations[circle.unit_indptr[unit]]
        follows = False
        for e in range(circle.before_indptr[first], circle.before_indptr[first + 1]):
            o = circle.before[e]
            if places.placed[o] and circle.before_tokens[e] == 0:
                follows = True
                since = max(since, places.start[o] + circle.before_weight[e])
        if not insert(circle, places, unit, since, period, follows, tries):
            return k
        since = places.start[first]
    return end
