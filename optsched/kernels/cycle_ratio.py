"""The least period of given orders: the maximum cycle ratio, exact in integers.

Orders and offsets give every arc its tokens, the number of cycles it spans. A schedule of period T
exists if no cycle of arcs weighs more than T times its tokens, so the least one is the largest
ratio of weight to tokens, rounded up. It is found from below: longest paths at a guess T, and where
they diverge, a cycle whose ratio is the next guess (Newton's method, as in Dinkelbach, 1967, and
the policy iterations of Howard; the test of a guess is Lawler's, 1976).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numba import types

from optsched.errors import CyclicOrder, InputError
from optsched.io.strict_json import MAX_INTEGER
from optsched.io.values import int_array
from optsched.kernels.compile import INT, INTS, READ, entry
from optsched.kernels.plain_python import run
from optsched.model.graph import check_permutations, describe, shortest_cycle
from optsched.model.schedule import Csr

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.model.schedule import IntArray, Schedule

_SAFE = 1 << 61

_SMALL = 5000
"""Operations up to which Python takes less time than compiling does."""


class CycleTime(NamedTuple):
    """The least period of given orders, when everything starts in it, and why it is no shorter."""

    period: int
    start: IntArray
    """Earliest starts, 0 or more, that keep every arc; not reduced by the period."""
    late: IntArray
    """Cycles to take off the offsets so that no arc has fewer than 0 tokens; mostly zeros."""
    critical: list[int]
    """Operations on a cycle whose ratio, rounded up, is the period; none if that is 1 anyway."""


class CycleArcs(NamedTuple):
    """Arcs and machine arcs of an ordered cycle, with start-to-start weights and tokens."""

    tail: IntArray
    head: IntArray
    weight: IntArray
    tokens: IntArray
    resource: IntArray
    """Whose neighbours the two operations are, -1 for an arc of the graph."""

    def shifted(self, late: IntArray) -> CycleArcs:
        """The same arcs after taking so many cycles off the offset of every operation."""
        return self._replace(tokens=self.tokens - late[self.head] + late[self.tail])

    def by_tail(self, n: int) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """The arcs as kernels take them (CSR): indptr, head, weight, tokens."""
        order = np.argsort(self.tail, kind="stable")
        indptr = np.zeros(n + 1, np.int64)
        np.cumsum(np.bincount(self.tail, minlength=n), out=indptr[1:])
        return indptr, self.head[order], self.weight[order], self.tokens[order]


def cycle_time(
    graph: Schedule,
    sequences: Csr | Sequence[Sequence[int]] | None = None,
    offsets: IntArray | None = None,
) -> CycleTime:
    """The least period of a periodic graph under the given orders.

    Parameters
    ----------
    graph
        Its own period does not count here; its arcs may have distances.
    sequences
        One order of operations per resource, each repeated for ever; without it only the arcs
        count, so that the period is a lower bound for every order.
    offsets
        As `Schedule.offset`, shape (n_operations,); default 0.

    Raises
    ------
    CyclicOrder
        A cycle without tokens: its operations wait for each other for ever.
    InputError
        A sequence is not a permutation of the users of its resource, or offsets are wrong.
    """
    if sequences is not None:
        sequences = sequences if isinstance(sequences, Csr) else Csr.of(sequences)
        check_permutations(graph, sequences)
    n = graph.n_operations
    arcs = cycle_arcs(graph, sequences, _offset(offsets, n))
    late = _without_debts(graph, arcs)
    arcs = arcs.shifted(late)
    if int(arcs.weight.sum()) * (1 + int(arcs.tokens.max(initial=0))) > _SAFE:
        raise InputError("offsets: too far apart for such long times")
    period, start, waiting, cycle = run(least_period, *arcs.by_tail(n), 1, is_small=n <= _SMALL)
    if not period:
        stuck = np.flatnonzero(waiting > 0).tolist()
        cycle = shortest_cycle(stuck, _waits(n, arcs))
        raise _deadlock(graph, arcs.shifted(-late), cycle)
    return CycleTime(int(period), start, late, cycle.tolist())


def _offset(given: IntArray | None, n: int) -> IntArray:
    """Checked offsets; negative ones are legal, they count from any cycle."""
    if given is None:
        return np.zeros(n, np.int64)
    offset = int_array("offsets", given)
    if len(offset) != n:
        raise InputError(f"offsets: expected {n} integers, one per operation, got {len(offset)}")
    wrong = np.flatnonzero((offset > MAX_INTEGER) | (offset < -MAX_INTEGER))
    if len(wrong):
        i = wrong[0]
        raise InputError(f"offsets[{i}]: expected -2^53..2^53, got {offset[i]}")
    return offset


def cycle_arcs(graph: Schedule, sequences: Csr | None, offset: IntArray) -> CycleArcs:
    """All arcs of an ordered cycle; the last operation of a resource precedes the first again."""
    tail, head, lag, distance = graph.arcs
    tokens = distance + offset[head] - offset[tail]
    none = np.full(len(tail), -1, np.int64)
    arcs = CycleArcs(tail, head, graph.duration[tail] + lag, tokens, none)
    if sequences is None or not len(sequences.ids):
        return arcs
    before = sequences.ids
    last = sequences.indptr[1:][np.diff(sequences.indptr) > 0] - 1
    first = sequences.indptr[:-1][np.diff(sequences.indptr) > 0]
    after = np.roll(before, -1)
    after[last] = before[first]
    wraps = np.zeros(len(before), np.int64)
    wraps[last] = 1
    setup = np.where(
        graph.family[before] == graph.family[after],
        0,
        graph.setup_out[before] + graph.setup_in[after],
    )
    resource = np.repeat(np.arange(len(sequences)), np.diff(sequences.indptr))
    machine = (before, after, graph.duration[before] + setup, wraps, resource)
    return CycleArcs(*(np.concatenate(pair) for pair in zip(arcs, machine, strict=True)))


def lower_starts(arcs: CycleArcs, period: int, order: IntArray, start: IntArray) -> None:
    """Lower the starts of the operations in `order`, latest first, until their arcs hold."""
    given = (*arcs.by_tail(len(start)), period, order, start)
    run(_latest_starts, *given, is_small=len(start) <= _SMALL)


def _without_debts(graph: Schedule, arcs: CycleArcs) -> IntArray:
    """Cycles per operation that turn negative tokens into none: shortest paths over the tokens."""
    n = graph.n_operations
    late = np.zeros(n, np.int64)
    if arcs.tokens.min(initial=0) >= 0:
        return late
    if int(np.abs(arcs.tokens).max()) * (n + 1) > _SAFE:
        raise InputError("offsets: too far apart")
    parent = np.arange(n)
    looks = 1
    for turn in range(n + 1):
        through = late[arcs.tail] + arcs.tokens
        shorter = np.flatnonzero(through < late[arcs.head])
        if not len(shorter):
            return late
        np.minimum.at(late, arcs.head[shorter], through[shorter])
        best = shorter[through[shorter] == late[arcs.head[shorter]]]
        parent[arcs.head[best]] = arcs.tail[best]
        if turn in (looks, n):  # a contradiction shows long before the last turn
            looks *= 2
            cycle = _circle(parent)
            if cycle:
                raise _deadlock(graph, arcs, cycle)
    raise AssertionError("unreachable: shortest paths without a cycle end after n turns")


def _circle(parent: IntArray) -> list[int]:
    """A cycle of pointers to parents, from parent to child; roots point to themselves."""
    far = parent
    for _ in range(len(parent).bit_length()):
        far = far[far]
    inside = far[parent[far] != far]
    if not len(inside):
        return []
    cycle = [int(inside[0])]
    while (before := int(parent[cycle[-1]])) != cycle[0]:
        cycle.append(before)
    return cycle[::-1]


def _waits(n: int, arcs: CycleArcs) -> list[list[int]]:
    """Per operation the operations that wait for it within a cycle."""
    after: list[list[int]] = [[] for _ in range(n)]
    now = arcs.tokens == 0
    for i, j in zip(arcs.tail[now].tolist(), arcs.head[now].tolist(), strict=True):
        after[i].append(j)
    return after


def _deadlock(graph: Schedule, arcs: CycleArcs, cycle: list[int]) -> CyclicOrder:
    """A `CyclicOrder` that tells in words what a cycle of operations waits for."""
    steps = []
    for i, j in zip(cycle, cycle[1:] + cycle[:1], strict=True):
        between = np.flatnonzero((arcs.tail == i) & (arcs.head == j))
        a = between[np.argmin(arcs.tokens[between])]
        r, tokens = int(arcs.resource[a]), int(arcs.tokens[a])
        where = "by an arc " if r < 0 else f"{graph.resources[r].name}: "
        when = ""
        if tokens:
            ago = "later" if tokens > 0 else "earlier"
            when = f" {abs(tokens)} cycle{'s' * (abs(tokens) > 1)} {ago}"
        steps.append(f"{where}{describe(graph, i)} before {describe(graph, j)}{when}")
    return CyclicOrder("the orders contradict each other: " + "; ".join(steps), cycle)


@entry(types.Tuple((INT, INTS, INTS, INTS)), READ, READ, READ, READ, INT)
def least_period(indptr, head, weight, tokens, guess):  # type: ignore[no-untyped-def]
    """Least T >= guess for which no cycle weighs more than T times its tokens.

    Arcs by tail (CSR), weights and tokens >= 0; guess >= 1. Returns T, or 0 if arcs without tokens
    form a cycle; least starts >= 0 that keep all arcs at T; for 0, how many predecessors every
    operation still waits for; the last cycle that refuted a guess (none if the first one holds).
    """
    n = len(indptr) - 1
    start = np.zeros(n, np.int64)
    waiting = np.zeros(n, np.int64)
    for e in range(len(head)):
        if tokens[e] == 0:
            waiting[head[e]] += 1
    order = np.empty(n, np.int64)
    placed = 0
    for i in range(n):
        if waiting[i] == 0:
            order[placed] = i
            placed += 1
    k = 0
    while k < placed:
        i = order[k]
        k += 1
        for e in range(indptr[i], indptr[i + 1]):
            if tokens[e] == 0:
                waiting[head[e]] -= 1
                if waiting[head[e]] == 0:
                    order[placed] = head[e]
                    placed += 1
    cycle = np.empty(n, np.int64)
    length = 0
    if placed < n:
        return 0, start, waiting, cycle[:0].copy()
    period = guess
    through = np.empty(n, np.int64)  # the arc that made an operation's start, -1 for none
    source = np.empty(n, np.int64)  # the tail of that arc
    seen = np.empty(n, np.int64)
    while True:
        for i in range(n):
            start[i] = 0
            through[i] = -1
        diverges = False
        moved = True
        while moved and not diverges:
            moved = False
            for k in range(n):
                i = order[k]
                for e in range(indptr[i], indptr[i + 1]):
                    j = head[e]
                    reached = start[i] + weight[e] - tokens[e] * period
                    if reached > start[j]:
                        start[j] = reached
                        through[j] = e
                        source[j] = i
                        moved = moved or tokens[e] > 0
            if not moved:
                break
            # arcs that made starts and form a cycle: it weighs more than it may
            for i in range(n):
                seen[i] = -1
            for i in range(n):
                j = i
                while j >= 0 and seen[j] == -1:
                    seen[j] = i
                    j = source[j] if through[j] >= 0 else -1
                if j >= 0 and seen[j] == i:
                    diverges = True
                    total, spanned, length = 0, 0, 0
                    at = j
                    while True:
                        cycle[length] = at
                        length += 1
                        total += weight[through[at]]
                        spanned += tokens[through[at]]
                        at = source[at]
                        if at == j:
                            break
                    period = -(-total // spanned)
                    break
        if not diverges:
            return period, start, waiting, cycle[:length][::-1].copy()


@entry(types.void, READ, READ, READ, READ, INT, READ, INTS)
def _latest_starts(indptr, head, weight, tokens, period, order, start):  # type: ignore[no-untyped-def]
    """Lower the starts of the operations in `order` until all arcs from them hold at this period.

    Arcs by tail (CSR). `start` comes with the latest starts that are wanted, not too early for any
    arc into an operation that is not in `order`.
    """
    moved = True
    while moved:
        moved = False
        for i in order:
            for e in range(indptr[i], indptr[i + 1]):
                reached = start[head[e]] - weight[e] + tokens[e] * period
                if reached < start[i]:
                    start[i] = reached
                    moved = True
