"""One schedule as compiled code holds it: links, exact heads and tails, and what a move changes.

It is held as links to the neighbours on the machine, a topological order with positions, heads r,
tails q (own duration included) and the level of memory before every operation.
Helpers take a constant `general`: False is for classic chains, where lags, setups, releases and
memory vanish at compile time, True for any graph.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numba import types

from optsched.kernels.compile import INT, INTS, READ, entry, helper
from optsched_solvers.shop.tabu.arrays import (
    ACQUIRE,
    AFTER,
    AFTER_END,
    BEFORE,
    BEFORE_END,
    FACTS,
    FAMILY,
    FREE,
    MACHINE,
    RELEASE,
    SETUP_IN,
    SETUP_OUT,
)

# links: one row of 8 indices (uint32) per operation and one for the dummy operation n.
LINK: Final = 8
JP, JS, MP, MS, AT, RANK, MARK = 0, 1, 2, 3, 4, 5, 6
"""Predecessor and successor in the job and on the machine, position in the order, number among the
operations of the machine, scratch."""

# times: one row of 4 integers per operation and one (all 0) for the dummy.
TIME: Final = 4
END, Q, P, LEVEL = 0, 1, 2, 3
"""Head plus duration, tail, duration, bytes held before it on its resource."""

GRAPH = types.UniTuple(READ, 3)
"""`SearchArrays`."""
INDICES = types.Array(types.uint32, 1, "C")
STATE = types.Tuple((INDICES, INTS, INDICES))
"""Links, times, and the topological order."""


@helper(counted=False, inline=True)
def setup_of(i, j, n, graph):  # type: ignore[no-untyped-def]
    """Setup between neighbours i, j; 0 next to the dummy n."""
    facts = graph[0]
    if i == n or j == n or facts[i * FACTS + FAMILY] == facts[j * FACTS + FAMILY]:
        return 0
    return facts[i * FACTS + SETUP_OUT] + facts[j * FACTS + SETUP_IN]


@helper(counted=False, inline=True)
def arc_head(i, general, graph, links, times):  # type: ignore[no-untyped-def]
    """Head of i from its release and conjunctive arcs alone."""
    if not general:
        jp = links[i * LINK + JP]
        return times[jp * TIME + END]
    facts, arcs, _ends = graph
    h = facts[i * FACTS + RELEASE]
    for e in range(facts[i * FACTS + BEFORE], facts[i * FACTS + BEFORE_END]):
        h = max(h, times[arcs[2 * e] * TIME + END] + arcs[2 * e + 1])
    return h


@helper(counted=False, inline=True)
def arc_tail(i, general, graph, links, times):  # type: ignore[no-untyped-def]
    """Tail of i from its duration and conjunctive arcs alone."""
    p = times[i * TIME + P]
    if not general:
        return p + times[links[i * LINK + JS] * TIME + Q]
    facts, arcs, _ends = graph
    q = p
    for e in range(facts[i * FACTS + AFTER], facts[i * FACTS + AFTER_END]):
        q = max(q, times[arcs[2 * e] * TIME + Q] + arcs[2 * e + 1])
    return q


@helper(counted=False, inline=True)
def machine_head(i, n, general, graph, links, times):  # type: ignore[no-untyped-def]
    """Head of i from its machine predecessor alone."""
    mp = links[i * LINK + MP]
    h = times[mp * TIME + END]
    if general:
        h += setup_of(mp, i, n, graph)
    return h


@helper(counted=False, inline=True)
def machine_tail(i, n, general, graph, links, times):  # type: ignore[no-untyped-def]
    """Tail of i from its machine successor alone."""
    ms = links[i * LINK + MS]
    q = times[i * TIME + P] + times[ms * TIME + Q]
    if general:
        q += setup_of(i, ms, n, graph)
    return q


@helper(counted=False, inline=True)
def reschedule(first, last, n, general, graph, state):  # type: ignore[no-untyped-def]
    """Exact heads and tails after the machine segment first..last has been reordered.

    Everything behind and before is computed again, without asking what changed: about half of it
    does, and branches that nobody can foresee cost more than the arithmetic they save.
    """
    links, times, order = state
    for k in range(np.int64(links[first * LINK + AT]), n):
        i = order[k]
        times[i * TIME + END] = times[i * TIME + P] + max(
            arc_head(i, general, graph, links, times),
            machine_head(i, n, general, graph, links, times),
        )
    for k in range(np.int64(links[last * LINK + AT]), -1, -1):
        i = order[k]
        times[i * TIME + Q] = max(
            arc_tail(i, general, graph, links, times),
            machine_tail(i, n, general, graph, links, times),
        )


@helper(counted=False, inline=True)
def shift(u, v, step, general, graph, state, window):  # type: ignore[no-untyped-def]
    """Put u right behind v on its machine (step 1), or v right before u (step -1, mirrored).

    No path may lead from an arc successor of u to v (to an arc predecessor of v from u). Only the
    window between their positions changes: what the moved one reaches stays behind (before) it.
    """
    links, _times, order = state
    x, before, after = u, v, np.int64(links[v * LINK + MS])
    near, job, first, last = MP, JP, BEFORE, BEFORE_END
    if step < 0:
        x, before, after = v, np.int64(links[u * LINK + MP]), u
        near, job, first, last = MS, JS, AFTER, AFTER_END
    size = np.int64(links[v * LINK + AT]) - np.int64(links[u * LINK + AT])
    a, b = links[x * LINK + MP], links[x * LINK + MS]
    links[a * LINK + MS], links[b * LINK + MP] = b, a
    links[before * LINK + MS], links[x * LINK + MP] = x, before
    links[x * LINK + MS], links[after * LINK + MP] = after, x
    start = np.int64(links[x * LINK + AT])
    kept, moved = start, 1
    window[0] = x
    links[x * LINK + MARK] = 1
    for k in range(start + step, start + step * (size + 1), step):
        i = order[k]
        hit = links[links[i * LINK + near] * LINK + MARK]
        if general:
            facts, arcs, _ends = graph
            for e in range(facts[i * FACTS + first], facts[i * FACTS + last]):
                hit |= links[arcs[2 * e] * LINK + MARK]
        else:
            hit |= links[links[i * LINK + job] * LINK + MARK]
        if hit:
            links[i * LINK + MARK] = 1
            window[moved] = i
            moved += 1
        else:
            order[kept] = i
            links[i * LINK + AT] = kept
            kept += step
    for k in range(moved):
        i = window[k]
        order[kept + step * k] = i
        links[i * LINK + AT] = kept + step * k
        links[i * LINK + MARK] = 0


@helper(counted=False, inline=True)
def update_levels(first, last, graph, links, times, level):  # type: ignore[no-untyped-def]
    """Bytes held before each operation of the machine segment first..last."""
    facts = graph[0]
    i = first
    while True:
        times[i * TIME + LEVEL] = level
        level += facts[i * FACTS + ACQUIRE] - facts[i * FACTS + FREE]
        if i == last:
            break
        i = links[i * LINK + MS]


@helper(counted=False, inline=True)
def makespan_of(graph, times):  # type: ignore[no-untyped-def]
    """Latest end."""
    ends = graph[2]
    value = 0
    for k in range(len(ends)):
        i = ends[k]
        value = max(value, times[i * TIME + END])
    return value


@entry(INT, GRAPH, STATE, INTS, counted=False)
def load(graph, state, machine_last):  # type: ignore[no-untyped-def]
    """Links, heads, tails and levels of `state.order`; returns the makespan.

    `machine_last`: scratch, one entry per resource, filled with n.
    """
    links, times, order = state
    n = len(order)
    facts = graph[0]
    for i in range(n):
        links[i * LINK + MP] = n
        links[i * LINK + MS] = n
    for k in range(n):
        i = order[k]
        links[i * LINK + AT] = k
        m = facts[i * FACTS + MACHINE]
        if m >= 0:
            mp = machine_last[m]
            links[i * LINK + MP] = mp
            links[mp * LINK + MS] = i
            level = 0
            if mp != n:
                level = times[mp * TIME + LEVEL]
                level += facts[mp * FACTS + ACQUIRE] - facts[mp * FACTS + FREE]
            times[i * TIME + LEVEL] = level
            machine_last[m] = i
        times[i * TIME + END] = times[i * TIME + P] + max(
            arc_head(i, True, graph, links, times),
            machine_head(i, n, True, graph, links, times),
        )
    for k in range(n - 1, -1, -1):
        i = order[k]
        times[i * TIME + Q] = max(
            arc_tail(i, True, graph, links, times),
            machine_tail(i, n, True, graph, links, times),
        )
    return makespan_of(graph, times)
