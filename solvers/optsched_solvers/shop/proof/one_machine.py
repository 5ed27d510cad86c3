"""Lower bounds of one machine and of the makespan, compiled: Jackson, Schrage, Carlier.

**Tails include the operation's own duration** here, as in every kernel of this package:
``tail = duration + delivery time``. `optsched.model.bounds.jackson_preemptive`, in Python, takes
the delivery time *without* the duration, as Carlier (1982) and Pinedo do. Mixing the two is the
classic mistake: it gives bounds above the optimum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numba import types

from optsched.kernels.compile import INT, INTS, READ, entry, helper
from optsched.model import bounds as core
from optsched.model.graph import evaluate

if TYPE_CHECKING:
    from optsched.model.schedule import IntArray, Schedule

NODE_LIMIT = 20_000
"""Nodes of `carlier` unless told otherwise; a hundred jobs rarely need a hundred."""

NOTHING = -(2**62)
"""A target below every value: `carlier_search` then runs to the end."""


class OneMachine(NamedTuple):
    """What is known of 1 | r_j, q_j | Cmax: a schedule, and a bound that says how good it is."""

    value: int
    lower_bound: int
    order: IntArray
    """Positions of the given arrays, in the order of processing; shape (n,)."""
    optimal: bool


# the makespan of a graph


def chain_bound(graph: Schedule) -> int:
    """Longest path of the arcs, releases included; machines are not looked at."""
    return evaluate(graph).makespan


def machine_bound(graph: Schedule) -> int:
    """The best of the longest path and every machine's preemptive relaxation.

    Durations are lengthened by the setup time that nobody can avoid (`bounds.setup_loss`);
    with setups, least head + load + least number of changes + least tail counts too.
    """
    return _bound_of(graph, _machines(graph))


def one_machine_bound(graph: Schedule, node_limit: int = NODE_LIMIT) -> int:
    """`machine_bound` with every machine solved by `carlier` instead of preemptively.

    Parameters
    ----------
    graph
        One-shot disjunctive graph, gangs included.
    node_limit
        For each machine; one that is not solved within it counts with its proved bound.
    """
    machines = _machines(graph)
    best = _bound_of(graph, machines)
    for head, duration, tail in machines:
        if schrage(head, duration, tail)[0] > best:  # else its optimum is not above
            best = max(best, carlier(head, duration, tail, node_limit).lower_bound)
    return best


def _machines(graph: Schedule) -> list[tuple[IntArray, IntArray, IntArray]]:
    """Heads, durations (with the setup loss) and tails of the users of every resource."""
    paths, loss = evaluate(graph), core.setup_loss(graph)
    # the last one pays no setup: its tail, which includes its duration, stays as it is
    return [
        (paths.head[on], graph.duration[on] + loss[r], paths.tail[on])
        for r, on in ((r, graph.users[r]) for r in range(graph.n_resources))
    ]


def _bound_of(graph: Schedule, machines: list[tuple[IntArray, IntArray, IntArray]]) -> int:
    values = [int(jackson_preemptive(*machine)) for machine in machines]
    load = core.load_bound(graph) if graph.has_setups else 0
    return max(chain_bound(graph), load, *values)


# one machine


def schrage(head: IntArray, duration: IntArray, tail: IntArray) -> tuple[int, IntArray]:
    """Schrage's schedule of one machine: always the released job of longest delivery time.

    An *upper* bound of 1 | r_j, q_j | Cmax; it proves nothing.

    Parameters
    ----------
    head, duration, tail
        int64 arrays of one shape (n,); tails include the duration.

    Returns
    -------
    (value, order)
        ``max(start + tail)`` and the order of processing (positions of the arrays).
    """
    n = len(head)
    order, space = np.empty(n, np.int64), np.empty(3 * n, np.int64)
    value = schrage_on(np.arange(n), n, head, duration, duration - tail, space, order)
    return int(value), order


def carlier(
    head: IntArray, duration: IntArray, tail: IntArray, node_limit: int = NODE_LIMIT
) -> OneMachine:
    """Optimum of 1 | r_j, q_j | Cmax by Carlier's branch and bound (Carlier 1982).

    A node is Schrage's schedule; on its critical path the *interference job* c goes before or
    behind the critical set: two children, one with a longer tail of c, one with a later head.
    Nodes are bounded by Jackson's preemptive schedule.

    Parameters
    ----------
    head, duration, tail
        int64 arrays of one shape (n,); tails include the duration. Delivery times
        ``tail - duration`` may be negative.
    node_limit
        Schrage schedules made at most.

    Returns
    -------
    OneMachine
        Without jobs 0. `optimal` tells whether value and bound meet.
    """
    value, bound, order, _ = carlier_search(head, duration, tail, node_limit, NOTHING)
    return OneMachine(int(value), int(bound), order, bool(value == bound))


# kernels


@helper(types.void, INTS, INT, READ, INT)
def _sift_down(heap, size, key, at):  # type: ignore[no-untyped-def]
    """Restore a binary min-heap of ids, compared by key[id], below position `at`."""
    item = heap[at]
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        if child + 1 < size and key[heap[child + 1]] < key[heap[child]]:
            child += 1
        if key[heap[child]] >= key[item]:
            break
        heap[at] = heap[child]
        at = child
    heap[at] = item


@helper(types.void, INTS, INT, READ, INT)
def _push(heap, size, key, item):  # type: ignore[no-untyped-def]
    """Add an id to a heap of `size` ids."""
    at = size
    while at > 0 and key[heap[(at - 1) // 2]] > key[item]:
        heap[at] = heap[(at - 1) // 2]
        at = (at - 1) // 2
    heap[at] = item


@helper(INT, READ, INT, READ, READ, READ, INTS)
def jackson_on(on, m, head, duration, urgency, space):  # type: ignore[no-untyped-def]
    """Jackson's preemptive value of jobs ``on[:m]``; at least 0.

    `head`, `duration` and `urgency` = duration - tail are indexed by job; `space` holds 2 m +
    len(head) values of no meaning.
    """
    waiting, ready, left = space[:m], space[m : 2 * m], space[2 * m :]
    for k in range(m):
        waiting[k] = on[k]
    for k in range(m // 2 - 1, -1, -1):
        _sift_down(waiting, m, head, k)
    n_waiting, n_ready = m, 0
    now = best = 0
    while n_waiting > 0 or n_ready > 0:
        if n_ready == 0:
            now = max(now, head[waiting[0]])
        while n_waiting > 0 and head[waiting[0]] <= now:
            i = waiting[0]
            n_waiting -= 1
            if n_waiting > 0:
                waiting[0] = waiting[n_waiting]
                _sift_down(waiting, n_waiting, head, 0)
            left[i] = duration[i]
            _push(ready, n_ready, urgency, i)
            n_ready += 1
        i = ready[0]
        run = left[i]
        if n_waiting > 0:
            run = min(run, head[waiting[0]] - now)
        now += run
        left[i] -= run
        if left[i] == 0:
            best = max(best, now - urgency[i])
            n_ready -= 1
            if n_ready > 0:
                ready[0] = ready[n_ready]
                _sift_down(ready, n_ready, urgency, 0)
    return best


@entry(INT, READ, READ, READ)
def jackson_preemptive(head, duration, tail):  # type: ignore[no-untyped-def]
    """Makespan of Jackson's preemptive schedule in O(n log n): a bound of 1 | r_j, q_j | Cmax.

    int64 arrays of one shape (n,). **`tail` includes the duration**: unlike the function of the
    same name in `optsched.model.bounds`, which takes ``tail - duration``. 0 without jobs.
    """
    n = len(head)
    everybody, urgency = np.empty(n, np.int64), np.empty(n, np.int64)
    space = np.empty(3 * n, np.int64)
    for i in range(n):
        everybody[i], urgency[i] = i, duration[i] - tail[i]
    return jackson_on(everybody, n, head, duration, urgency, space)


@entry(INT, READ, INT, READ, READ, READ, INTS, INTS)
def schrage_on(on, m, head, duration, urgency, space, order):  # type: ignore[no-untyped-def]
    """Value of Schrage's schedule of jobs ``on[:m]``, at least 0; fills ``order[:m]``.

    `head`, `duration` and `urgency` = duration - tail are indexed by job; `space` as above.
    """
    waiting, ready = space[:m], space[m : 2 * m]
    for k in range(m):
        waiting[k] = on[k]
    for k in range(m // 2 - 1, -1, -1):
        _sift_down(waiting, m, head, k)
    n_waiting, n_ready = m, 0
    now = value = 0
    for k in range(m):
        if n_ready == 0:
            now = max(now, head[waiting[0]])
        while n_waiting > 0 and head[waiting[0]] <= now:
            i = waiting[0]
            n_waiting -= 1
            if n_waiting > 0:
                waiting[0] = waiting[n_waiting]
                _sift_down(waiting, n_waiting, head, 0)
            _push(ready, n_ready, urgency, i)
            n_ready += 1
        i = ready[0]
        n_ready -= 1
        if n_ready > 0:
            ready[0] = ready[n_ready]
            _sift_down(ready, n_ready, urgency, 0)
        order[k] = i
        now += duration[i]
        value = max(value, now - urgency[i])
    return value


@helper(types.Tuple((INT, INT)), READ, READ, READ, READ)
def _interference(order, head, duration, urgency):  # type: ignore[no-untyped-def]
    """Places (c, p) of the interference job and the critical job in Schrage's order; c = -1: none.

    The order is then optimal: its critical block starts with its earliest head, and ends with its
    shortest delivery.
    """
    now = 0
    value = NOTHING
    begin = critical_begin = critical = 0
    for k in range(len(order)):
        i = order[k]
        if head[i] > now:
            begin = k  # the machine idles before i
            now = head[i]
        now += duration[i]
        if now - urgency[i] > value:
            value = now - urgency[i]
            critical, critical_begin = k, begin
    for k in range(critical - 1, critical_begin - 1, -1):
        if urgency[order[k]] > urgency[order[critical]]:
            return k, critical
    return -1, critical


@entry(types.Tuple((INT, INT, INTS, INT)), READ, READ, READ, INT, INT)
def carlier_search(head, duration, tail, node_limit, target):  # type: ignore[no-untyped-def]
    """Returns (value, lower bound, order, nodes); see `carlier`.

    Stops also as soon as a schedule below `target`, or none, can exist.
    """
    n = len(head)
    rows = min(node_limit, 4 * n + 64) + 1  # depth first: a node leaves, two come
    # of every open node: heads, urgencies (duration - tail), and a lower bound
    stack, bound_of = np.empty(2 * n * rows, np.int64), np.empty(rows, np.int64)
    everybody, order, best_order = (
        np.empty(n, np.int64),
        np.empty(n, np.int64),
        np.empty(n, np.int64),
    )
    for i in range(n):
        stack[i], stack[n + i] = head[i], duration[i] - tail[i]
        everybody[i] = best_order[i] = i
    space = np.empty(3 * n, np.int64)
    bound_of[0] = 0
    n_open, nodes, best = 1, 0, 2**62
    while n_open > 0 and n_open < rows and best >= target and nodes < node_limit:
        nodes += 1
        at = 2 * n * (n_open - 1)
        r, u = stack[at : at + n], stack[at + n : at + 2 * n]
        bound = jackson_on(everybody, n, r, duration, u, space)
        if bound < bound_of[n_open - 1]:
            bound = bound_of[n_open - 1]
        if bound >= best:
            n_open -= 1
            continue
        schrage_on(everybody, n, r, duration, u, space, order)
        now = value = 0  # of this order by the original data
        for k in range(n):
            i = order[k]
            if head[i] > now:
                now = head[i]
            if now + tail[i] > value:
                value = now + tail[i]
            now += duration[i]
        if value < best:
            best = value
            for k in range(n):
                best_order[k] = order[k]
        c, p = _interference(order, r, duration, u)
        if c < 0 or bound >= best:
            n_open -= 1
            continue
        least, work, last = r[order[p]], 0, u[order[p]]
        for k in range(c + 1, p + 1):
            work += duration[order[k]]
            if r[order[k]] < least:
                least = r[order[k]]
        if least + work - last > bound:
            bound = least + work - last
        for k in range(2 * n):
            stack[at + 2 * n + k] = stack[at + k]
        # one child below, the one of the smaller bound on top: c before the critical set, or behind
        c = order[c]
        before_u, behind_r = u[c], r[c]
        if last - work < before_u:
            before_u = last - work
        if least + work > behind_r:
            behind_r = least + work
        before = work + duration[c] + (r[c] if r[c] < least else least)
        before -= last if last > before_u else before_u
        behind = least + work + duration[c] - (last if last > u[c] else u[c])
        if before < bound:
            before = bound
        if behind < bound:
            behind = bound
        up = 1 if before <= behind else 0
        stack[at + 2 * n * up + n + c] = before_u
        stack[at + 2 * n * (1 - up) + c] = behind_r
        bound_of[n_open - 1 + up], bound_of[n_open - up] = before, behind
        n_open += 1
    lower = best
    for k in range(n_open):
        if bound_of[k] < lower:
            lower = bound_of[k]
    return best, lower, best_order, nodes
