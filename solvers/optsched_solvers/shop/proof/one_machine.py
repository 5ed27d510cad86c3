"""Exact one-machine bounds: 1 | r_j, q_j | Cmax by Carlier's branch and bound (Carlier 1982).

**Tails include the operation's duration**, as everywhere in the library. Carlier (1982) and Pinedo
take delivery times *without* the duration. Mixing the two gives bounds above the optimum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numba import types

from optsched.kernels.compile import INT, INTS, READ, entry, helper
from optsched.model import bounds
from optsched.model.graph import evaluate

if TYPE_CHECKING:
    from optsched.model.schedule import IntArray, Schedule

NODE_LIMIT = 20_000
"""Default limit on nodes; a hundred jobs rarely need a hundred."""

_STEPS = 2 * 10**8  # limit on nodes x jobs^2 of `one_machine_bound`, a second at most
_FAR = 2**62


class OneMachine(NamedTuple):
    """A schedule of 1 | r_j, q_j | Cmax, and a lower bound."""

    value: int
    lower_bound: int
    order: IntArray
    """Positions of the given arrays, in the order of processing; shape (n,)."""
    optimal: bool


def one_machine_bound(graph: Schedule, node_limit: int = NODE_LIMIT) -> int:
    """Bound the makespan by the longest path and every machine alone, without preemption.

    Durations are lengthened by unavoidable setups (`bounds.setup_loss`). A machine that is not
    solved within the limit contributes its proved bound.

    Parameters
    ----------
    graph
        One-shot disjunctive graph, gangs included.
    node_limit
        Limit for each machine; fewer on machines of many operations.
    """
    paths, loss = evaluate(graph), bounds.setup_loss(graph)
    best = max(paths.makespan, bounds.load_bound(graph) if graph.has_setups else 0)
    for r in range(graph.n_resources):
        on = graph.users[r]
        # the last operation pays no setup: its tail, which includes its duration, is unchanged
        duration = graph.duration[on] + loss[r]
        limit = max(1, min(node_limit, _STEPS // max(1, len(on)) ** 2))
        best = max(best, carlier(paths.head[on], duration, paths.tail[on], limit).lower_bound)
    return best


def carlier(
    head: IntArray, duration: IntArray, tail: IntArray, node_limit: int = NODE_LIMIT
) -> OneMachine:
    """Solve 1 | r_j, q_j | Cmax.

    Parameters
    ----------
    head, duration, tail
        int64 arrays of one shape (n,); tails include the duration. Delivery times
        ``tail - duration`` may be negative.
    node_limit
        Largest number of Schrage schedules.

    Returns
    -------
    OneMachine
        With value 0 if there are no jobs. `optimal`: value and bound are equal.

    Examples
    --------
    >>> head, duration = np.array([0, 1, 2]), np.array([6, 2, 3])
    >>> found = carlier(head, duration, tail=duration + [1, 9, 4])
    >>> found.value, found.order.tolist()
    (13, [1, 2, 0])
    """
    value, bound, order, _ = carlier_search(head, duration, tail, node_limit)
    return OneMachine(int(value), int(bound), order, bool(value == bound))


@helper(INT, INTS, READ, INTS, INTS, INTS, types.boolean)
def _sequence(head, duration, urgency, left, order, preempt):  # type: ignore[no-untyped-def]
    """Value (at least 0) of Schrage's schedule, or with `preempt` of Jackson's.

    Schrage: whenever the machine is free it takes the released job of longest delivery time, which
    is an upper bound; Jackson also interrupts a job when a more urgent one is released, which is a
    lower bound. `urgency` is duration - tail, `left` scratch; Schrage's order goes to `order`.
    """
    n, done, now, value = len(head), 0, 0, 0
    for i in range(n):
        left[i] = duration[i]
    while done < n:  # invariant: left[i] of job i is to be done from `now` on; -1: done
        best, release = -1, _FAR
        for i in range(n):
            if left[i] < 0:
                continue
            if head[i] > now:
                release = min(release, head[i])
            elif best < 0 or urgency[i] < urgency[best]:
                best = i
        if best < 0:
            now = release
            continue
        run = min(left[best], release - now) if preempt else left[best]
        now += run
        left[best] -= run
        if left[best] == 0:
            left[best] = -1
            order[done] = best
            done += 1
            value = max(value, now - urgency[best])
    return value


@helper(types.Tuple((INT, INT)), INTS, INTS, READ, INTS)
def _interference(order, head, duration, urgency):  # type: ignore[no-untyped-def]
    """Places (c, p) of the interference job and the critical job in Schrage's order; c = -1: none.

    Without one the order is optimal: its critical block begins with its earliest head, and ends
    with its shortest delivery.
    """
    now, value = 0, -_FAR
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


@entry(types.Tuple((INT, INT, INTS, INT)), READ, READ, READ, INT)
def carlier_search(head, duration, tail, node_limit):  # type: ignore[no-untyped-def]
    """Returns (value, lower bound, order, nodes); see `carlier`.

    A node is a problem with later heads and longer tails. On the critical path of its Schrage
    schedule the interference job c goes before or behind the critical set: two children.
    """
    n = len(head)
    rows = min(node_limit, 4 * n + 64) + 2  # depth first: a node leaves, two come
    heads, urgencies = np.empty((rows, n), np.int64), np.empty((rows, n), np.int64)
    bound_of = np.zeros(rows, np.int64)
    left, order, best_order = np.empty(n, np.int64), np.empty(n, np.int64), np.empty(n, np.int64)
    for i in range(n):
        heads[0, i], urgencies[0, i], best_order[i] = head[i], duration[i] - tail[i], i
    n_open, nodes, best = 1, 0, _FAR
    # invariant: an optimal schedule has value `best`, or is one of an open node below `best`;
    # bound_of of an open node is a lower bound of it
    while 0 < n_open < rows - 1 and nodes < node_limit:
        nodes += 1
        at = n_open - 1
        n_open -= 1
        r, u = heads[at], urgencies[at]
        bound = max(bound_of[at], _sequence(r, duration, u, left, order, True))
        if bound >= best:
            continue
        _sequence(r, duration, u, left, order, False)
        now = value = 0  # of this order by the given data
        for k in range(n):
            i = order[k]
            now = max(now, head[i])
            value = max(value, now + tail[i])
            now += duration[i]
        if value < best:
            best = value
            best_order[:] = order
        c, p = _interference(order, r, duration, u)
        if c < 0 or bound >= best:
            continue
        least, work, last = r[order[p]], 0, u[order[p]]
        for k in range(c + 1, p + 1):
            work += duration[order[k]]
            least = min(least, r[order[k]])
        c = order[c]
        before_u, behind_r = min(u[c], last - work), max(r[c], least + work)
        bound = max(bound, least + work - last)
        before = max(bound, work + duration[c] + min(r[c], least) - max(last, before_u))
        behind = max(bound, least + work + duration[c] - max(last, u[c]))
        up = 1 if before <= behind else 0  # the child of the smaller bound is on top
        heads[at + 1], urgencies[at + 1] = r, u
        urgencies[at + up, c], heads[at + 1 - up, c] = before_u, behind_r
        bound_of[at + up], bound_of[at + 1 - up] = before, behind
        n_open += 2
    lower = best
    for k in range(n_open):
        lower = min(lower, bound_of[k])
    return best, lower, best_order, nodes
