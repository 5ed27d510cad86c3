"""An ordered cycle that moves: who follows whom on every device, and the least period of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from numba import types

from optsched.kernels.compile import INT, INTS, entry, helper

if TYPE_CHECKING:
    from optsched.model.schedule import IntArray, Rows, Schedule

NO_LIMIT: Final = int(np.iinfo(np.int64).max)

# graph: what never changes
DURATION, FAMILY, SETUP_IN, SETUP_OUT, ACQUIRE, FREE, WORKSPACE, CAPACITY = range(8)
INTO, TAIL, TAIL_WEIGHT, TAIL_TOKENS, OUT, HEAD, HEAD_WEIGHT, HEAD_TOKENS = range(8, 16)
LEAST = 16
GRAPH: Final = types.UniTuple(INTS, 17)

# state: what a move changes, or the search for the least period
BEFORE, AFTER, TOKENS, LEVEL, START, ORDER, PARENT, THROUGH, CYCLE, SEEN = range(10)
STATE: Final = types.UniTuple(INTS, 10)
"""BEFORE, AFTER: neighbours on the device, -1 for none; TOKENS of the arc to the one after.
LEVEL: bytes held when the operation begins. START: times that keep all arcs at the last period
found. ORDER: operations by their time in the cycle. CYCLE: its length, then the operations of the
last critical cycle, each before the next."""


class CycleArrays(NamedTuple):
    """The arrays that the kernels read, in their order."""

    duration: IntArray
    family: IntArray
    setup_in: IntArray
    setup_out: IntArray
    acquire: IntArray
    free: IntArray
    workspace: IntArray
    capacity: IntArray
    """Bytes of the operation's device; `NO_LIMIT` where unlimited."""
    into: IntArray
    """Arcs by head begin here: tails, start-to-start weights, tokens."""
    tail: IntArray
    tail_weight: IntArray
    tail_tokens: IntArray
    out: IntArray
    """Arcs by tail begin here: heads, start-to-start weights, tokens."""
    head: IntArray
    head_weight: IntArray
    head_tokens: IntArray
    least: IntArray
    """The smallest start-to-start weight of any arc out of the operation."""

    @classmethod
    def of(cls, graph: Schedule) -> CycleArrays:
        """Arrays of a periodic graph whose operations hold at most one resource each."""
        n = graph.n_operations
        tail, head, lag, distance = graph.arcs
        memory = np.append(graph.memory, 0)[graph.single_resource]
        columns = []
        for end, other in ((head, tail), (tail, head)):
            by = np.argsort(end, kind="stable")
            indptr = np.concatenate([[0], np.cumsum(np.bincount(end, minlength=n))])
            weight = graph.duration[tail] + lag
            columns += [indptr, other[by], weight[by], distance[by]]
        least = graph.duration.copy()
        np.minimum.at(least, tail, graph.duration[tail] + lag)
        facts = (
            graph.duration, graph.family, graph.setup_in, graph.setup_out, graph.acquire,
            graph.free, graph.workspace, np.where(memory == 0, NO_LIMIT, memory), *columns, least,
        )  # fmt: skip
        return cls(*(np.array(column, np.int64) for column in facts))


class CycleOrder:
    """Orders and offsets as a list that closes on every device, with tokens on its arcs.

    Tokens say how many cycles an arc spans, counted between equal iterations: rotations of a
    sequence look all the same. On every device they add up to 1.
    """

    def __init__(self, graph: Schedule) -> None:
        self.graph = graph
        self.arrays = tuple(CycleArrays.of(graph))
        n = graph.n_operations
        self.state = tuple(np.zeros(n + (k == CYCLE), np.int64) for k in range(10))

    def load(self, sequences: Rows, offset: IntArray) -> None:
        """Take over orders and offsets; starts are 0 until `least_period` is called."""
        before, after, tokens, level = self.state[: LEVEL + 1]
        before[:], after[:], tokens[:], level[:] = -1, -1, 0, 0
        change = self.graph.acquire - self.graph.free
        for r in range(len(sequences)):
            row = sequences[r]
            if not len(row):
                continue
            after[row] = np.roll(row, -1)
            before[row] = np.roll(row, 1)
            tokens[row] = offset[row] - np.roll(offset[row], -1)
            tokens[row[-1]] += 1
            carried = -int((offset[row] * change[row]).sum())
            level[row] = carried + np.cumsum(change[row]) - change[row]
        self.state[START][:] = 0
        self.state[ORDER][:] = np.arange(len(before))
        self.state[CYCLE][:] = 0

    @staticmethod
    def orders(graph: Schedule, after: IntArray, tokens: IntArray) -> tuple[Rows, IntArray]:
        """Sequences and offsets, none negative, of closed lists with their tokens."""
        from optsched.model.schedule import Rows

        offset = np.zeros(graph.n_operations, np.int64)
        rows = []
        follow, spans = after.tolist(), tokens.tolist()
        for r in range(graph.n_resources):
            row = graph.users[r][:1].tolist()
            late = 0
            while row and follow[row[-1]] != row[0]:
                late -= spans[row[-1]]
                row.append(follow[row[-1]])
                offset[row[-1]] = late
            rows.append(row)
        return Rows.of(rows), offset


@helper(counted=False, inline=True)
def machine_weight(graph, i, j):  # type: ignore[no-untyped-def]
    """Least time from the start of i to the start of j right behind it on the device."""
    if graph[FAMILY][i] == graph[FAMILY][j]:
        return graph[DURATION][i]
    return graph[DURATION][i] + graph[SETUP_OUT][i] + graph[SETUP_IN][j]


@helper(INT, GRAPH, STATE, INT)
def longer_cycle(graph, state, period):  # type: ignore[no-untyped-def]
    """The longest period that a cycle of PARENT asks for, if above `period`; else `period`.

    -1 for a cycle that spans no token. CYCLE receives the cycle.
    """
    tokens = state[TOKENS]
    parent, through, cycle = state[PARENT], state[THROUGH], state[CYCLE]
    n = len(parent)
    seen = state[SEEN]
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
                total += machine_weight(graph, source, at)
                spanned += tokens[source]
            else:
                total += graph[TAIL_WEIGHT][through[at]]
                spanned += graph[TAIL_TOKENS][through[at]]
            length += 1
            at = source
            if at == j:
                break
        if spanned <= 0:
            return -1
        ratio = -(-total // spanned)
        if ratio > longest:
            longest = ratio
            cycle[0] = length
            for k in range(length):
                cycle[length - k] = at
                at = parent[at]
    return longest


@entry(INT, GRAPH, STATE, INT)
def least_period(graph, state, floor):  # type: ignore[no-untyped-def]
    """Least T >= floor without a cycle of weight above T times its tokens; 0: there is none.

    START may hold anything; the better it fits, the sooner it ends. It ends with starts that keep
    all arcs at T. CYCLE has length 0 if the floor holds.
    """
    before, tokens = state[BEFORE], state[TOKENS]
    start, order, parent, through = state[START], state[ORDER], state[PARENT], state[THROUGH]
    cycle = state[CYCLE]
    into, tail = graph[INTO], graph[TAIL]
    weight, spans = graph[TAIL_WEIGHT], graph[TAIL_TOKENS]
    n = len(start)
    period = floor
    cycle[0] = 0
    shift = start[0] if n else 0
    for i in range(n):
        start[i] -= shift
        parent[i] = -1
    sweeps = 0
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
                reached = start[i] + machine_weight(graph, i, j) - tokens[i] * period
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
        sweeps += 1
        found = longer_cycle(graph, state, period)
        if found < 0:
            return 0
        if found > period:
            period = found
            for i in range(n):
                parent[i] = -1
