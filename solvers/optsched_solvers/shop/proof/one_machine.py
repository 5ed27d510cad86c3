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
    solved within its limit (fewer nodes with many operations) contributes its proved bound.
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
    n = len(head)
    rows = min(node_limit, 4 * n + 64) + 2  # depth first: a node leaves, two come
    nodes, bounds_of, order = (
        np.empty((2, rows * n), np.int64),
        np.zeros(rows, np.int64),
        np.arange(n),
    )
    nodes[0, :n], nodes[1, :n] = head, duration - tail
    value, bound = carlier_search(
        head, duration, tail, nodes[0], nodes[1], bounds_of, order, np.empty((2, n), np.int64),
        node_limit,
    )  # fmt: skip
    return OneMachine(int(value), int(bound), order, bool(value == bound))


@helper(counted=False)
def _sequence(heads, urgencies, at, duration, scratch, preempt):  # type: ignore[no-untyped-def]
    """Value (at least 0) of Schrage's schedule of the node at `at`, or with `preempt` of Jackson's.

    Schrage: whenever the machine is free it takes the released job of longest delivery time, which
    is an upper bound; Jackson also interrupts a job when a more urgent one is released, which is a
    lower bound. Rows of `scratch`: processing time left (-1: done), and the order of completion.
    """
    n, done, now, value = len(duration), 0, 0, 0
    for i in range(n):
        scratch[0, i] = duration[i]
    while done < n:
        best, release = -1, _FAR
        for i in range(n):
            if scratch[0, i] < 0:
                continue
            if heads[at + i] > now:
                release = min(release, heads[at + i])
            elif best < 0 or urgencies[at + i] < urgencies[at + best]:
                best = i
        if best < 0:
            now = release
            continue
        run = min(scratch[0, best], release - now) if preempt else scratch[0, best]
        now += run
        scratch[0, best] -= run
        if scratch[0, best] == 0:
            scratch[0, best] = -1
            scratch[1, done] = best
            done += 1
            value = max(value, now - urgencies[at + best])
    return value


@helper(counted=False)
def _interference(heads, urgencies, at, duration, scratch):  # type: ignore[no-untyped-def]
    """Places (c, p) of the interference job and the critical job in Schrage's order; c = -1: none.

    Without one the order is optimal: its critical block begins with its earliest head, and ends
    with its shortest delivery.
    """
    now, value = 0, -_FAR
    begin = critical_begin = critical = 0
    for k in range(len(duration)):
        i = scratch[1, k]
        if heads[at + i] > now:
            begin = k  # the machine idles before i
            now = heads[at + i]
        now += duration[i]
        if now - urgencies[at + i] > value:
            value = now - urgencies[at + i]
            critical, critical_begin = k, begin
    for k in range(critical - 1, critical_begin - 1, -1):
        if urgencies[at + scratch[1, k]] > urgencies[at + scratch[1, critical]]:
            return k, critical
    return -1, critical


@entry(
    types.Tuple((INT, INT)), READ, READ, READ, INTS, INTS, INTS, INTS,
    types.Array(types.int64, 2, "C"), INT, counted=False,
)  # fmt: skip
def carlier_search(  # type: ignore[no-untyped-def]
    head, duration, tail, heads, urgencies, bounds_of, best_order, scratch, node_limit
):
    """Returns (value, lower bound); see `carlier`.

    A node is a problem with later heads and shorter urgencies (duration - tail), n numbers each
    from place n * row on. On the critical path of its Schrage schedule the interference job c goes
    before or behind the critical set: two children. Row 0 is the given problem.
    """
    n = len(head)
    n_open, nodes, best = 1, 0, _FAR
    # invariant: an optimal schedule has value `best`, or is one of an open node below `best`;
    # bounds_of an open node is a lower bound of it
    while 0 < n_open < len(bounds_of) - 1 and nodes < node_limit:
        nodes += 1
        n_open -= 1
        at = n * n_open
        bound = max(
            bounds_of[n_open], _sequence(heads, urgencies, at, duration, scratch, True)
        )  # fmt: skip
        if bound >= best:
            continue
        _sequence(heads, urgencies, at, duration, scratch, False)
        now = value = 0  # of this order by the given data
        for k in range(n):
            i = scratch[1, k]
            now = max(now, head[i])
            value = max(value, now + tail[i])
            now += duration[i]
        if value < best:
            best = value
            for k in range(n):
                best_order[k] = scratch[1, k]
        c, p = _interference(heads, urgencies, at, duration, scratch)
        if c < 0 or bound >= best:
            continue
        last = urgencies[at + scratch[1, p]]
        least, work = heads[at + scratch[1, p]], 0
        for k in range(c + 1, p + 1):
            work += duration[scratch[1, k]]
            least = min(least, heads[at + scratch[1, k]])
        c = scratch[1, c]
        before_u, behind_r = min(urgencies[at + c], last - work), max(heads[at + c], least + work)
        bound = max(bound, least + work - last)
        before = work + duration[c] + min(heads[at + c], least) - max(last, before_u)
        behind = least + work + duration[c] - max(last, urgencies[at + c])
        up = 1 if before <= behind else 0  # the child of the smaller bound is on top
        for i in range(n):
            heads[at + n + i], urgencies[at + n + i] = heads[at + i], urgencies[at + i]
        urgencies[at + n * up + c], heads[at + n * (1 - up) + c] = before_u, behind_r
        bounds_of[n_open + up], bounds_of[n_open + 1 - up] = max(bound, before), max(bound, behind)
        n_open += 2
    lower = best
    for k in range(n_open):
        lower = min(lower, bounds_of[k])
    return best, lower
