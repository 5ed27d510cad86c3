"""The least period of given orders: the maximum cycle ratio, exact in integers.

Orders and offsets give every arc its tokens, the number of cycles it spans. A schedule of period T
exists if no cycle of arcs weighs more than T times its tokens, so the least one is the largest
ratio of weight to tokens, rounded up. It is found from below: longest paths at a guess T; if they
diverge, the ratio of the cycle is the next guess (Newton's method: Dinkelbach 1967, Lawler 1976).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numba import types

from optsched.errors import CyclicOrder, InputError
from optsched.io.strict_json import MAX_INTEGER
from optsched.io.values import int_array
from optsched.kernels.compile import BOOL, INT, INTS, READ, entry, helper, record, records
from optsched.kernels.plain_python import run
from optsched.model.arrays import grouped
from optsched.model.graph import check_permutations, describe, shortest_cycle
from optsched.model.schedule import Csr

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.model.schedule import IntArray, Schedule

NODE = record("start through source key waiting")

_SAFE = 1 << 61

_SMALL = 5000
"""Operations up to which Python takes less time than compiling does."""


class CycleTime(NamedTuple):
    """The least period of given orders, when everything starts in it, and why it is no shorter."""

    period: int
    start: IntArray
    """Earliest starts, 0 or more, that keep every arc; not reduced by the period."""
    late: IntArray
    """Cycles to subtract from the offsets so that no arc has fewer than 0 tokens; mostly zeros."""
    critical: list[int]
    """Operations on a cycle of this ratio, rounded up; none if the period is 1 anyway."""


class ArcsByTail(NamedTuple):
    """Arcs of kernels (CSR): those of tail i are ``indptr[i]`` to ``indptr[i + 1] - 1``."""

    indptr: IntArray
    head: IntArray
    weight: IntArray
    tokens: IntArray


ARCS: Final[Any] = types.NamedUniTuple(INTS, 4, ArcsByTail)


class CycleArcs(NamedTuple):
    """Arcs and machine arcs of an ordered cycle, with start-to-start weights and tokens."""

    tail: IntArray
    head: IntArray
    weight: IntArray
    tokens: IntArray
    resource: IntArray
    """The resource of a machine arc, -1 for an arc of the graph."""

    def shifted(self, late: IntArray) -> CycleArcs:
        """The same arcs after taking so many cycles off the offset of every operation."""
        return self._replace(tokens=self.tokens - late[self.head] + late[self.tail])

    def by_tail(self, n: int) -> ArcsByTail:
        """Sort the arcs for kernels."""
        indptr, order = grouped(self.tail, n)
        return ArcsByTail(indptr, self.head[order], self.weight[order], self.tokens[order])


def cycle_time(
    graph: Schedule,
    sequences: Csr | Sequence[Sequence[int]] | None = None,
    offsets: IntArray | None = None,
) -> CycleTime:
    """The least period of a periodic graph under the given orders; its own period does not count.

    Without `sequences` only the arcs count, so that the period is a lower bound for every order.
    Offsets are as in `Schedule.offset`, by default 0. `CyclicOrder`: a cycle without tokens, a
    deadlock.
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
    node = np.zeros(n, NODE)
    period, cycle = run(least_period, arcs.by_tail(n), node, 1, is_small=n <= _SMALL)
    if not period:
        stuck = np.flatnonzero(node["waiting"] > 0).tolist()
        after: list[list[int]] = [[] for _ in range(n)]
        now = arcs.tokens == 0
        for i, j in zip(arcs.tail[now].tolist(), arcs.head[now].tolist(), strict=True):
            after[i].append(j)
        cycle = shortest_cycle(stuck, after)
        raise _deadlock(graph, arcs.shifted(-late), cycle)
    return CycleTime(int(period), node["start"].copy(), late, np.asarray(cycle).tolist())


def _offset(given: IntArray | None, n: int) -> IntArray:
    """Check offsets; negative offsets are legal, because they count from any cycle."""
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
    setup = graph.setups(before, after)
    resource = np.repeat(np.arange(len(sequences)), np.diff(sequences.indptr))
    machine = (before, after, graph.duration[before] + setup, wraps, resource)
    return CycleArcs(*(np.concatenate(pair) for pair in zip(arcs, machine, strict=True)))


def lower_starts(arcs: CycleArcs, period: int, order: IntArray, start: IntArray) -> None:
    """Lower the starts of the operations in `order`, latest first, until their arcs hold."""
    is_small = len(start) <= _SMALL
    run(_latest_starts, arcs.by_tail(len(start)), period, order, start, is_small=is_small)


def _without_debts(graph: Schedule, arcs: CycleArcs) -> IntArray:
    """Cycles per operation that turn negative tokens into none: shortest paths over the tokens."""
    n = graph.n_operations
    if arcs.tokens.min(initial=0) >= 0:
        return np.zeros(n, np.int64)
    if int(np.abs(arcs.tokens).max()) * (n + 1) > _SAFE:
        raise InputError("offsets: too far apart")
    node = np.zeros(n, NODE)
    by_tail = arcs._replace(weight=-arcs.tokens).by_tail(n)
    _, cycle = run(least_period, by_tail, node, 0, is_small=n <= _SMALL)
    if len(cycle):
        raise _deadlock(graph, arcs, np.asarray(cycle).tolist())
    return -node["start"]


def _deadlock(graph: Schedule, arcs: CycleArcs, cycle: list[int]) -> CyclicOrder:
    """Make a `CyclicOrder` with the arcs of a cycle in its message."""
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


@helper(INT, ARCS, INTS, records(NODE), INTS, INT, BOOL)
def _positive_cycle(arcs, order, node, cycle, period, is_sorted):  # type: ignore[no-untyped-def]
    """Compute longest paths at a period; return the length of a cycle longer than 0, else 0.

    `cycle` receives it backwards. `is_sorted`: arcs without tokens agree with `order`, so that one
    round relaxes all of them.
    """
    n, indptr, head, weight, tokens = len(node), arcs.indptr, arcs.head, arcs.weight, arcs.tokens
    for i in range(n):
        node[i].start = 0
        node[i].through = -1
    moved = True
    # invariant: a start above 0 is the length of a path that ends with arc `through`, from `source`
    while moved:
        moved = False
        for k in range(n):
            i = order[k]
            for e in range(indptr[i], indptr[i + 1]):
                j = head[e]
                reached = node[i].start + weight[e] - tokens[e] * period
                if reached > node[j].start:
                    node[j].start = reached
                    node[j].through = e
                    node[j].source = i
                    moved = moved or tokens[e] > 0 or not is_sorted
        for i in range(n):
            node[i].key = -1
        # invariant: `key` is the first operation with a path through an operation, -1 for none
        for i in range(n):
            j = i
            while moved and j >= 0 and node[j].key == -1:
                node[j].key = i
                j = node[j].source if node[j].through >= 0 else -1
            if moved and j >= 0 and node[j].key == i:
                length = 0
                at = j
                while length == 0 or at != j:
                    cycle[length] = at
                    length += 1
                    at = node[at].source
                return length
    return 0


@helper(INT, ARCS, INTS, records(NODE))
def _sort(arcs, order, node):  # type: ignore[no-untyped-def]
    """Order operations by the arcs without tokens (Kahn); return how many could be placed."""
    n, indptr, head, tokens = len(node), arcs.indptr, arcs.head, arcs.tokens
    for i in range(n):
        node[i].waiting = 0
    for e in range(len(head)):
        if tokens[e] == 0:
            node[head[e]].waiting += 1
    placed = 0
    for i in range(n):
        if node[i].waiting == 0:
            order[placed] = i
            placed += 1
    k = 0
    while k < placed:
        i = order[k]
        k += 1
        for e in range(indptr[i], indptr[i + 1]):
            if tokens[e] == 0:
                node[head[e]].waiting -= 1
                if node[head[e]].waiting == 0:
                    order[placed] = head[e]
                    placed += 1
    return placed


@entry(types.Tuple((INT, INTS)), ARCS, records(NODE), INT)
def least_period(arcs, node, guess):  # type: ignore[no-untyped-def]
    """Least T >= guess for which no cycle weighs more than T times its tokens.

    Weights and tokens are >= 0. `node` receives least starts >= 0 that keep all
    arcs at T. Returns T and the last cycle that refuted a guess; T is 0 if arcs without tokens form
    a cycle, and operations with ``waiting > 0`` are on one or behind one.

    With guess 0 tokens are ignored and weights have any sign: returns 0 and a cycle longer than 0,
    if there is one.
    """
    n = len(node)
    order, cycle = np.arange(n), np.empty(n, np.int64)
    if guess == 0:
        length = _positive_cycle(arcs, order, node, cycle, 0, False)
        return 0, cycle[:length][::-1].copy()
    if _sort(arcs, order, node) < n:
        return 0, cycle[:0].copy()
    period, length = guess, 0
    # invariant: no period below `period` is feasible
    while True:
        found = _positive_cycle(arcs, order, node, cycle, period, True)
        if found == 0:
            return period, cycle[:length][::-1].copy()
        length, total, spanned = found, 0, 0
        for k in range(length):
            through = node[cycle[k]].through
            total += arcs.weight[through]
            spanned += arcs.tokens[through]
        period = -(-total // spanned)


@entry(types.void, ARCS, INT, READ, INTS)
def _latest_starts(arcs, period, order, start):  # type: ignore[no-untyped-def]
    """Lower the starts of the operations in `order` until all arcs from them hold at this period.

    `start` has the latest starts allowed otherwise, not too early for any arc
    into an operation that is not in `order`.
    """
    moved = True
    # invariant: no start is below the latest one that keeps all arcs
    while moved:
        moved = False
        for i in order:
            for e in range(arcs.indptr[i], arcs.indptr[i + 1]):
                reached = start[arcs.head[e]] - arcs.weight[e] + arcs.tokens[e] * period
                if reached < start[i]:
                    start[i] = reached
                    moved = True
