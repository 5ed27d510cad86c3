"""An ordered cycle as arrays, compiled: who follows whom on every device, and its least period."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from numba import types

from optsched.kernels.compile import INT, INTS, READ, copy, entry, helper
from optsched.model.schedule import Csr
from optsched.solving.solution import PeriodicOrders

if TYPE_CHECKING:
    from optsched.model.schedule import IntArray, Schedule

NO_LIMIT: Final = int(np.iinfo(np.int64).max) // 4


class Cycle(NamedTuple):
    """What never changes; per operation unless said otherwise. Weights are start to start."""

    duration: IntArray
    resource: IntArray  # -1 for none
    family: IntArray
    setup_in: IntArray
    setup_out: IntArray
    change: IntArray  # bytes acquired less bytes freed
    need: IntArray  # bytes acquired, and workspace
    capacity: IntArray  # bytes of its device; `NO_LIMIT` where unlimited
    least: IntArray  # the smallest weight of any arc out of it
    users: IntArray  # indptr per resource
    into: IntArray  # arcs by head begin here
    tail: IntArray
    tail_weight: IntArray
    tail_tokens: IntArray
    out: IntArray  # arcs by tail begin here
    head: IntArray
    head_weight: IntArray
    head_tokens: IntArray

    @classmethod
    def of(cls, graph: Schedule) -> Cycle:
        """Arrays of a periodic graph whose operations hold at most one resource each."""
        n = graph.n_operations
        tail, head, lag, distance = graph.arcs
        weight = graph.duration[tail] + lag
        memory = np.append(graph.memory, 0)[graph.single_resource]
        least = graph.duration.copy()
        np.minimum.at(least, tail, weight)
        arcs = []
        for end, other in ((head, tail), (tail, head)):
            by = np.argsort(end, kind="stable")
            indptr = np.concatenate([[0], np.cumsum(np.bincount(end, minlength=n))])
            arcs += [indptr, other[by], weight[by], distance[by]]
        return cls(*map(frozen, (
            graph.duration, graph.single_resource, graph.family, graph.setup_in, graph.setup_out,
            graph.acquire - graph.free, graph.acquire + graph.workspace,
            np.where(memory == 0, NO_LIMIT, memory), least, graph.users.indptr, *arcs,
        )))  # fmt: skip


def frozen(values: IntArray) -> IntArray:
    """A read-only copy, contiguous: kernels know one type of array only."""
    copied: IntArray = np.array(values, np.int64)
    copied.flags.writeable = False
    return copied


class State(NamedTuple):
    """Orders as lists that close on every device, and what is known about them."""

    before: IntArray  # neighbour on the device, -1 for none
    after: IntArray
    tokens: IntArray  # cycles that the arc to the one after spans
    level: IntArray  # bytes held when the operation begins
    start: IntArray  # times that keep all arcs at the last period found
    order: IntArray  # operations by their time in the cycle: how soon longest paths are found
    parent: IntArray  # who made the start, and through which arc (-1: the device's)
    through: IntArray
    seen: IntArray
    critical: IntArray  # length of the last critical cycle, then its operations in order
    from_r: IntArray  # longest paths from one critical operation at the period, and to it
    to_r: IntArray
    moved: IntArray  # what a move reorders, as it then is, and tokens before each
    gap: IntArray
    new_head: IntArray  # longest paths after the move
    rank: IntArray  # of the operation on its device
    until: IntArray  # per operation and rank: until when it may not come before that one
    best_after: IntArray  # the best order
    best_tokens: IntArray

    @classmethod
    def of(cls, graph: Schedule) -> State:
        """Nothing known yet."""
        n = graph.n_operations
        columns = int(np.diff(graph.users.indptr).max(initial=1))
        sizes = {"critical": n + 1, "gap": n + 1, "until": n * columns}
        state = cls(*(np.zeros(sizes.get(name, n), np.int64) for name in cls._fields))
        for r in range(graph.n_resources):
            row = graph.users[r]
            state.rank[row] = np.arange(len(row))
        return state

    def best(self, graph: Schedule) -> PeriodicOrders:
        """Sequences and offsets, none negative, of `best_after` with `best_tokens`."""
        offset = np.zeros(graph.n_operations, np.int64)
        rows = []
        follow, spans = self.best_after.tolist(), self.best_tokens.tolist()
        for r in range(graph.n_resources):
            row = graph.users[r][:1].tolist()
            late = 0
            while row and follow[row[-1]] != row[0]:
                late -= spans[row[-1]]
                row.append(follow[row[-1]])
                offset[row[-1]] = late
            rows.append(row)
        return PeriodicOrders(Csr.of(rows), offset)


CYCLE: Final = types.NamedUniTuple(READ, len(Cycle._fields), Cycle)
STATE: Final = types.NamedUniTuple(INTS, len(State._fields), State)


@helper(counted=False, inline=True)
def machine_weight(cycle, i, j):  # type: ignore[no-untyped-def]
    """Least time from the start of i to the start of j right behind it on the device."""
    if cycle.family[i] == cycle.family[j]:
        return cycle.duration[i]
    return cycle.duration[i] + cycle.setup_out[i] + cycle.setup_in[j]


@helper(INT, CYCLE, STATE, INT)
def longer_cycle(cycle, state, period):  # type: ignore[no-untyped-def]
    """The longest period that a circle of parents asks for, if above `period`; else `period`.

    -1 for one that spans no token. `critical` receives the circle.
    """
    parent, through, critical, seen = state.parent, state.through, state.critical, state.seen
    n = len(parent)
    for i in range(n):
        seen[i] = -1
    longest = period
    for i in range(n):
        if seen[i] >= 0:
            continue
        j = i
        while j >= 0 and seen[j] == -1:
            seen[j] = i
            j = parent[j]
        if j < 0 or seen[j] != i:
            continue
        total, spanned, length = 0, 0, 0
        at = j
        while True:
            source = parent[at]
            if through[at] < 0:
                total += machine_weight(cycle, source, at)
                spanned += state.tokens[source]
            else:
                total += cycle.tail_weight[through[at]]
                spanned += cycle.tail_tokens[through[at]]
            length += 1
            at = source
            if at == j:
                break
        if spanned <= 0:
            return -1
        ratio = -(-total // spanned)
        if ratio > longest:
            longest = ratio
            critical[0] = length
            for k in range(length):
                critical[length - k] = at
                at = parent[at]
    return longest


@helper(INT, CYCLE, STATE, INT)
def least_period(cycle, state, floor):  # type: ignore[no-untyped-def]
    """Least T >= floor without a circle of weight above T times its tokens; 0: there is none.

    `start` may hold anything; the better it fits, the sooner it ends. It ends with starts that keep
    all arcs at T. `critical` has length 0 if the floor holds.
    """
    before, tokens = state.before, state.tokens
    start, order, parent, through = state.start, state.order, state.parent, state.through
    into, tail = cycle.into, cycle.tail
    weight, spans = cycle.tail_weight, cycle.tail_tokens
    n = len(start)
    period = floor
    state.critical[0] = 0
    shift = start[0] if n else 0
    for i in range(n):
        start[i] -= shift
        parent[i] = -1
    while True:
        moved = False
        for k in range(n):
            j = order[k]
            latest = start[j]
            by = -1
            for e in range(into[j], into[j + 1]):
                reached = start[tail[e]] + weight[e] - spans[e] * period
                if reached > latest:
                    latest = reached
                    by = e
            i = before[j]
            if i >= 0:
                reached = start[i] + machine_weight(cycle, i, j) - tokens[i] * period
                if reached > latest:
                    latest = reached
                    parent[j] = i
                    through[j] = -1
                    start[j] = latest
                    moved = True
                    continue
            if by >= 0:
                start[j] = latest
                parent[j] = tail[by]
                through[j] = by
                moved = True
        if not moved:
            return period
        found = longer_cycle(cycle, state, period)
        if found < 0:
            return 0
        if found > period:
            period = found
            for i in range(n):
                parent[i] = -1


@helper(types.void, STATE, INT)
def sort_by_time(state, period):  # type: ignore[no-untyped-def]
    """Bring `order` up to date."""
    start, order, key = state.start, state.order, state.seen
    n = len(order)
    for i in range(n):
        key[i] = start[i] % period
    for k in range(1, n):
        i = order[k]
        t = key[i]
        m = k
        while m > 0 and key[order[m - 1]] > t:
            order[m] = order[m - 1]
            m -= 1
        order[m] = i


@helper(types.void, CYCLE, STATE, INT, INT, INT)
def shift(cycle, state, u, v, step):  # type: ignore[no-untyped-def]
    """Make a move; tokens and bytes follow."""
    before, after, tokens, level = state.before, state.after, state.tokens, state.level
    i = u if step > 0 else v  # who moves
    p, s = before[u], after[v]
    if s == u:  # the same order, a cycle later or earlier
        tokens[before[i]] -= step
        tokens[i] += step
        x = u
        while True:
            level[x] -= step * cycle.change[i]
            x = after[x]
            if x == u:
                return
    spanned = 0
    x = u
    while x != v:
        spanned += tokens[x]
        x = after[x]
    held = level[u]
    tokens[before[i]] += tokens[i]
    after[before[i]], before[after[i]] = after[i], before[i]
    a = v if step > 0 else p
    b = after[a]
    total = tokens[a]
    tokens[a] = -spanned if step > 0 else total + spanned
    tokens[i] = total - tokens[a]
    after[a], before[i] = i, a
    after[i], before[b] = b, i
    x = after[p]
    while x != s:
        level[x] = held
        held += cycle.change[x]
        x = after[x]


@entry(INT, CYCLE, STATE, READ, READ, READ, INT)
def load(cycle, state, row, offset, start, floor):  # type: ignore[no-untyped-def]
    """Take over rows and offsets; returns their least period >= floor, 0 if they contradict arcs.

    Tokens are counted between equal iterations: rotations of a sequence look all the same. On every
    device they add up to 1. The better `start` fits, and `order` with it, the sooner it ends.
    Whether the bytes in `level` fit is for the caller to see, and whether blocks of no time wait
    for each other.
    """
    for i in range(len(offset)):
        state.before[i] = state.after[i] = -1
        state.tokens[i] = state.level[i] = 0
        state.start[i] = start[i]
    for r in range(len(cycle.users) - 1):
        begin, end = cycle.users[r], cycle.users[r + 1]
        held = 0
        for at in range(begin, end):
            held -= offset[row[at]] * cycle.change[row[at]]
        for at in range(begin, end):
            i = row[at]
            j = row[at + 1] if at + 1 < end else row[begin]
            state.after[i], state.before[j] = j, i
            state.tokens[i] = offset[i] - offset[j]
            state.level[i] = held
            held += cycle.change[i]
        if end > begin:
            state.tokens[row[end - 1]] += 1
    copy(state.best_after, state.after)
    copy(state.best_tokens, state.tokens)
    return least_period(cycle, state, floor)
