"""Exact one-machine bounds: 1 | r_j, q_j | Cmax by Carlier's branch and bound (Carlier 1982).

**Tails include the operation's duration**, as everywhere in the library. Carlier (1982) and Pinedo
take delivery times *without* the duration. Mixing the two gives bounds above the optimum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numba import types

from optsched.kernels.compile import INT, INTS, entry, helper, record, records
from optsched.model import bounds
from optsched.model.graph import evaluate

if TYPE_CHECKING:
    from optsched.model.schedule import IntArray, Schedule

NODE_LIMIT = 20_000
"""Default limit on nodes; a hundred jobs rarely need a hundred."""

_STEPS = 2 * 10**8  # limit on nodes x jobs^2 of `one_machine_bound`, a second at most
_FAR = 2**62

JOB = record("head duration tail left done best")
"""Data of a job, and its processing time left in a sequence (-1: done). By place: the jobs of the
last sequence (`done`), and of the best schedule."""
IN_NODE = record("head urgency")
"""A job in a node: later head, shorter urgency (duration - tail)."""
_JOBS, _NODES = records(JOB), records(IN_NODE)


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
    jobs = np.zeros(n, JOB)
    jobs["head"], jobs["duration"], jobs["tail"], jobs["best"] = head, duration, tail, np.arange(n)
    rows = min(node_limit, 4 * n + 64) + 2  # depth first: a node leaves, two come
    nodes = np.empty(rows * n, IN_NODE)
    nodes["head"][:n], nodes["urgency"][:n] = head, duration - tail
    value, bound = carlier_search(jobs, nodes, np.zeros(rows, np.int64), node_limit)
    return OneMachine(int(value), int(bound), jobs["best"].copy(), bool(value == bound))


@helper(counted=False)
def _sequence(jobs, nodes, at, preempt):  # type: ignore[no-untyped-def]
    """Value (at least 0) of Schrage's schedule of the node at `at`, or with `preempt` of Jackson's.

    Schrage: whenever the machine is free it takes the released job of longest delivery time, which
    is an upper bound; Jackson also interrupts a job when a more urgent one is released, which is a
    lower bound.
    """
    n, done, now, value = len(jobs), 0, 0, 0
    for i in range(n):
        jobs[i].left = jobs[i].duration
    while done < n:
        best, release = -1, _FAR
        for i in range(n):
            if jobs[i].left < 0:
                continue
            if nodes[at + i].head > now:
                release = min(release, nodes[at + i].head)
            elif best < 0 or nodes[at + i].urgency < nodes[at + best].urgency:
                best = i
        if best < 0:
            now = release
            continue
        run = min(jobs[best].left, release - now) if preempt else jobs[best].left
        now += run
        jobs[best].left -= run
        if jobs[best].left == 0:
            jobs[best].left = -1
            jobs[done].done = best
            done += 1
            value = max(value, now - nodes[at + best].urgency)
    return value


@helper(counted=False)
def _interference(jobs, nodes, at):  # type: ignore[no-untyped-def]
    """Places (c, p) of the interference job and the critical job in Schrage's order; c = -1: none.

    Without one the order is optimal: its critical block begins with its earliest head, and ends
    with its shortest delivery.
    """
    now, value = 0, -_FAR
    begin = critical_begin = critical = 0
    for k in range(len(jobs)):
        i = jobs[k].done
        job = nodes[at + i]
        if job.head > now:
            begin = k  # the machine idles before i
            now = job.head
        now += jobs[i].duration
        if now - job.urgency > value:
            value = now - job.urgency
            critical, critical_begin = k, begin
    for k in range(critical - 1, critical_begin - 1, -1):
        if nodes[at + jobs[k].done].urgency > nodes[at + jobs[critical].done].urgency:
            return k, critical
    return -1, critical


@entry(types.Tuple((INT, INT)), _JOBS, _NODES, INTS, INT, counted=False)
def carlier_search(jobs, nodes, bounds_of, node_limit):  # type: ignore[no-untyped-def]
    """Returns (value, lower bound), and the order in ``jobs.best``; see `carlier`.

    A node is a problem with later heads and shorter urgencies, n jobs from place n * row on. On the
    critical path of its Schrage schedule the interference job c goes before or behind the critical
    set: two children. Row 0 is the given problem.
    """
    n = len(jobs)
    n_open, tried, best = 1, 0, _FAR
    # invariant: an optimal schedule has value `best`, or is one of an open node below `best`;
    # bounds_of an open node is a lower bound of it
    while 0 < n_open < len(bounds_of) - 1 and tried < node_limit:
        tried += 1
        n_open -= 1
        at = n * n_open
        bound = max(bounds_of[n_open], _sequence(jobs, nodes, at, True))
        if bound >= best:
            continue
        _sequence(jobs, nodes, at, False)
        now = value = 0  # of this order by the given data
        for k in range(n):
            job = jobs[jobs[k].done]
            now = max(now, job.head)
            value = max(value, now + job.tail)
            now += job.duration
        if value < best:
            best = value
            for k in range(n):
                jobs[k].best = jobs[k].done
        c, p = _interference(jobs, nodes, at)
        if c < 0 or bound >= best:
            continue
        end = nodes[at + jobs[p].done]
        last, least, work = end.urgency, end.head, 0
        for k in range(c + 1, p + 1):
            work += jobs[jobs[k].done].duration
            least = min(least, nodes[at + jobs[k].done].head)
        c = jobs[c].done
        head, urgency, duration = nodes[at + c].head, nodes[at + c].urgency, jobs[c].duration
        before_u, behind_r = min(urgency, last - work), max(head, least + work)
        bound = max(bound, least + work - last)
        before = work + duration + min(head, least) - max(last, before_u)
        behind = least + work + duration - max(last, urgency)
        up = 1 if before <= behind else 0  # the child of the smaller bound is on top
        for i in range(n):
            nodes[at + n + i].head = nodes[at + i].head
            nodes[at + n + i].urgency = nodes[at + i].urgency
        nodes[at + n * up + c].urgency = before_u
        nodes[at + n * (1 - up) + c].head = behind_r
        bounds_of[n_open + up], bounds_of[n_open + 1 - up] = max(bound, before), max(bound, behind)
        n_open += 2
    lower = best
    for k in range(n_open):
        lower = min(lower, bounds_of[k])
    return best, lower
