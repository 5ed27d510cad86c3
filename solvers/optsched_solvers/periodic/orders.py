"""The orders of a cycle as records, compiled: neighbors on every device, and the least period."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numba import types

from optsched.io.values import frozen
from optsched.kernels.compile import INT, INTS, READ, entry, helper, record, records
from optsched.model.schedule import Csr
from optsched.solving.result import PeriodicOrders

if TYPE_CHECKING:
    from optsched.model.schedule import IntArray, Schedule

NO_LIMIT: Final = int(np.iinfo(np.int64).max) // 4

# change: bytes acquired less bytes freed; need: bytes acquired, and workspace; capacity: bytes of
# the device, `NO_LIMIT` if unlimited; least: the smallest weight of an arc out of the operation;
# resource: -1 for none; the arcs into it are `arc_in[first_in:end_in]`, those out of it `arc_out`
OPERATION: Final = record(
    "duration family first_in end_in first_out end_out least resource"
    " setup_in setup_out change need capacity"
)
# other: the tail of an arc in `arc_in`, the head of one in `arc_out`; weight: start to start
ARC: Final = record("other weight tokens")
# before, after: neighbors on the device, -1 for none; tokens: cycles that the arc to `after` spans;
# level: bytes held when the operation begins; start: keeps all arcs at the last period found;
# parent, through: tail and number of the arc that made the start (-1: the device's arc);
# rank: the number of the operation on its device; key: scratch;
# best_after, best_tokens: the best orders
NODE: Final = record(
    "start before after tokens parent through level rank key best_after best_tokens"
)
# the operations that a move reorders, in their new order; gap: tokens before each, and after the
# last; head: longest path after the move
MOVED: Final = record("operation gap head")


class Cycle(NamedTuple):
    """The constant part of a cycle."""

    operation: Any
    arc_in: Any  # by head
    arc_out: Any  # by tail
    users: IntArray  # indptr per resource

    @classmethod
    def of(cls, graph: Schedule) -> Cycle:
        """Make the records of a periodic graph with at most one resource an operation."""
        n = graph.n_operations
        tail, head, lag, distance = graph.arcs
        weight = graph.duration[tail] + lag
        memory = np.append(graph.memory, 0)[graph.single_resource]
        op = np.recarray(n, OPERATION)
        for name in ("duration", "family", "setup_in", "setup_out"):
            op[name] = getattr(graph, name)
        op.resource = graph.single_resource
        op.change, op.need = graph.acquire - graph.free, graph.acquire + graph.workspace
        op.capacity = np.where(memory == 0, NO_LIMIT, memory)
        op.least = graph.duration
        np.minimum.at(op["least"], tail, weight)
        arcs = []
        for side, end, other in (("in", head, tail), ("out", tail, head)):
            by = np.argsort(end, kind="stable")
            arc = np.recarray(len(tail), ARC)
            arc.other, arc.weight, arc.tokens = other[by], weight[by], distance[by]
            op[f"end_{side}"] = np.cumsum(np.bincount(end, minlength=n))
            op[f"first_{side}"] = op[f"end_{side}"] - np.bincount(end, minlength=n)
            arcs.append(arc)
        return cls(frozen(op), frozen(arcs[0]), frozen(arcs[1]), frozen(graph.users.indptr))


class State(NamedTuple):
    """Orders as closed lists on every device, with their starts and longest paths."""

    node: Any
    order: IntArray  # operations by time in the cycle: a good order to relax arcs in
    critical: IntArray  # length of the last critical cycle, then its operations in order
    head: IntArray  # longest paths from one critical operation at the period
    tail: IntArray  # and to it
    moved: Any
    until: IntArray  # per operation and rank: move until which it is tabu before that one

    @classmethod
    def of(cls, graph: Schedule) -> State:
        """Make an empty state."""
        n = graph.n_operations
        columns = int(np.diff(graph.users.indptr).max(initial=1))
        order, critical, until = (np.zeros(size, np.int64) for size in (n, n + 1, n * columns))
        head, tail = np.zeros((2, n), np.int64)
        node, moved = np.recarray(n, NODE), np.recarray(n + 1, MOVED)
        node[:] = moved[:] = 0
        for r in range(graph.n_resources):
            node.rank[graph.users[r]] = np.arange(len(graph.users[r]))
        return cls(node, order, critical, head, tail, moved, until)

    def best(self, graph: Schedule) -> PeriodicOrders:
        """Read sequences and offsets, none negative, of `best_after` with `best_tokens`."""
        offset = np.zeros(graph.n_operations, np.int64)
        rows = []
        follow, spans = self.node.best_after.tolist(), self.node.best_tokens.tolist()
        for r in range(graph.n_resources):
            row = graph.users[r][:1].tolist()
            late = 0
            while row and follow[row[-1]] != row[0]:
                late -= spans[row[-1]]
                row.append(follow[row[-1]])
                offset[row[-1]] = late
            rows.append(row)
        return PeriodicOrders(Csr.of(rows), offset)


CYCLE: Final[Any] = types.NamedTuple(
    (records(OPERATION, True), records(ARC, True), records(ARC, True), READ), Cycle
)
STATE: Final[Any] = types.NamedTuple(
    (records(NODE), INTS, INTS, INTS, INTS, records(MOVED), INTS), State
)


@helper(counted=False, inline=True)
def machine_weight(op, i, j):  # type: ignore[no-untyped-def]
    """Least time from the start of i to the start of its successor j on the device."""
    if op[i].family == op[j].family:
        return op[i].duration
    return op[i].duration + op[i].setup_out + op[j].setup_in


@helper(INT, CYCLE, STATE, INT)
def longer_cycle(cycle, state, period):  # type: ignore[no-untyped-def]
    """The longest period that a cycle of parents demands, if above `period`; else `period`.

    -1 for a cycle without tokens. `critical` receives the cycle.
    """
    op, arc, node, critical = cycle.operation, cycle.arc_in, state.node, state.critical
    n = len(node)
    for i in range(n):
        node[i].key = -1
    longest = period
    # invariant: `key` is the number of the path that reached an operation first, -1 for none
    for i in range(n):
        if node[i].key >= 0:
            continue
        j = i
        while j >= 0 and node[j].key == -1:
            node[j].key = i
            j = node[j].parent
        if j < 0 or node[j].key != i:
            continue
        total, spanned, length = 0, 0, 0
        at = j
        while True:
            source, through = node[at].parent, node[at].through
            if through < 0:
                total += machine_weight(op, source, at)
                spanned += node[source].tokens
            else:
                total += arc[through].weight
                spanned += arc[through].tokens
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
                at = node[at].parent
    return longest


@helper(INT, CYCLE, STATE, INT)
def least_period(cycle, state, floor):  # type: ignore[no-untyped-def]
    """Least T >= floor for which no cycle weighs more than T times its tokens; 0: there is none.

    Any `start` is allowed; a better fit needs fewer rounds. Afterwards `start` keeps all arcs at T,
    and `critical` has length 0 if the floor is the answer.
    """
    op, arc, node, order = cycle.operation, cycle.arc_in, state.node, state.order
    n = len(node)
    period = floor
    state.critical[0] = 0
    shift = node[0].start if n else 0
    for i in range(n):
        node[i].start -= shift
        node[i].parent = -1
    # invariant: no T below `period` is feasible; a start with a parent is on a path from it
    while True:
        moved = False
        for k in range(n):
            j = order[k]
            latest = node[j].start
            by = -1
            for e in range(op[j].first_in, op[j].end_in):
                reached = node[arc[e].other].start + arc[e].weight - arc[e].tokens * period
                if reached > latest:
                    latest = reached
                    by = e
            i = node[j].before
            if i >= 0:
                reached = node[i].start + machine_weight(op, i, j) - node[i].tokens * period
                if reached > latest:
                    node[j].parent = i
                    node[j].through = -1
                    node[j].start = reached
                    moved = True
                    continue
            if by >= 0:
                node[j].start = latest
                node[j].parent = arc[by].other
                node[j].through = by
                moved = True
        if not moved:
            return period
        found = longer_cycle(cycle, state, period)
        if found < 0:
            return 0
        if found > period:
            period = found
            for i in range(n):
                node[i].parent = -1


@helper(types.void, STATE, INT)
def sort_by_time(state, period):  # type: ignore[no-untyped-def]
    """Sort `order` by the present starts modulo the period (insertion sort: nearly sorted)."""
    node, order = state.node, state.order
    n = len(order)
    for i in range(n):
        node[i].key = node[i].start % period
    for k in range(1, n):
        i = order[k]
        t = node[i].key
        m = k
        while m > 0 and node[order[m - 1]].key > t:
            order[m] = order[m - 1]
            m -= 1
        order[m] = i


@helper(types.void, CYCLE, STATE, INT, INT, INT)
def shift(cycle, state, u, v, step):  # type: ignore[no-untyped-def]
    """Make a move (see `walk`); tokens and bytes follow."""
    op, node = cycle.operation, state.node
    i = u if step > 0 else v  # the operation that moves
    p, s = node[u].before, node[v].after
    if s == u:  # the same order, a cycle later or earlier
        node[node[i].before].tokens -= step
        node[i].tokens += step
        x = u
        while True:
            node[x].level -= step * op[i].change
            x = node[x].after
            if x == u:
                return
    spanned = 0
    x = u
    while x != v:
        spanned += node[x].tokens
        x = node[x].after
    held = node[u].level
    node[node[i].before].tokens += node[i].tokens
    node[node[i].before].after, node[node[i].after].before = node[i].after, node[i].before
    a = v if step > 0 else p
    b = node[a].after
    total = node[a].tokens
    node[a].tokens = -spanned if step > 0 else total + spanned
    node[i].tokens = total - node[a].tokens
    node[a].after, node[i].before = i, a
    node[i].after, node[b].before = b, i
    x = node[p].after
    while x != s:
        node[x].level = held
        held += op[x].change
        x = node[x].after


@helper(counted=False, inline=True)
def keep_best(node):  # type: ignore[no-untyped-def]
    """Copy the present orders to the best orders."""
    for i in range(len(node)):
        node[i].best_after = node[i].after
        node[i].best_tokens = node[i].tokens


@entry(INT, CYCLE, STATE, READ, READ, READ, INT)
def load(cycle, state, row, offset, start, floor):  # type: ignore[no-untyped-def]
    """Load orders; return their least period >= floor, 0 if they contradict the arcs.

    Tokens are counted between equal iterations, so all rotations of a sequence are the same; on
    every device they add up to 1. The better `start` and `state.order` fit, the sooner it ends.
    Callers check the bytes in `level`, and blocks of no time that wait for each other.
    """
    op, node = cycle.operation, state.node
    for i in range(len(node)):
        node[i].before = node[i].after = -1
        node[i].tokens = node[i].level = 0
        node[i].start = start[i]
    for r in range(len(cycle.users) - 1):
        begin, end = cycle.users[r], cycle.users[r + 1]
        held = 0
        for at in range(begin, end):
            held -= offset[row[at]] * op[row[at]].change
        for at in range(begin, end):
            i = row[at]
            j = row[at + 1] if at + 1 < end else row[begin]
            node[i].after, node[j].before = j, i
            node[i].tokens = offset[i] - offset[j]
            node[i].level = held
            held += op[i].change
        if end > begin:
            node[row[end - 1]].tokens += 1
    keep_best(node)
    return least_period(cycle, state, floor)
