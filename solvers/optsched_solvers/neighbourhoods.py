"""N7 tabu search on machine orders, compiled: state, exact updates, estimates, moves, walk.

One solution is held as links to the neighbours on the machine, a topological order with positions,
heads r, tails q (own duration included) and, where memory counts, the level before every operation.
Every kernel exists twice, compiled from the same source: `general=False` for classic chains, where
lags, setups, releases and memory vanish at compile time, and `general=True` for any graph.
"""

from __future__ import annotations

from typing import Any, Final

import numba
import numpy as np
from numba import types

from optsched_solvers.compiled import INT, INTS, READ, kernel
from optsched_solvers.search_arrays import (
    ACQUIRE,
    AFTER,
    AFTER_END,
    BEFORE,
    BEFORE_END,
    CAPACITY,
    FACTS,
    FAMILY,
    FREE,
    LEAST,
    MACHINE,
    RELEASE,
    SETUP_IN,
    SETUP_OUT,
    WORKSPACE,
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

# control: what a walk carries from slice to slice
MOVES, STALE, BEST, VALUE, RANDOM, PATIENCE, TARGET, TENURE, SPREAD, COLUMNS = range(10)
CONTROL: Final = 16

RUNNING, STUCK, DONE = 0, 1, 2

GRAPH = types.UniTuple(READ, 3)  # SearchArrays
INDICES = types.Array(types.uint32, 1, "C")
STATE = types.Tuple((INDICES, INTS, INDICES))  # links, times, order
SCRATCH = types.Tuple((types.Array(types.uint32, 2, "C"), types.Array(types.int64, 2, "C")))
INDEX_ROWS, TIME_ROWS = 3, 6
"""Rows of the two scratch arrays, each as long as there are operations and 3 more."""

inlined: Any = numba.njit(
    forceinline=True, nogil=True, _nrt=False, no_cpython_wrapper=True, no_cfunc_wrapper=True
)
"""Helpers of kernels: one copy inside each, none to call from Python."""


@inlined
def random_below(control, n):  # type: ignore[no-untyped-def]
    """A number in 0..n-1 (xorshift64*, Vigna 2016); the state is `control[RANDOM]`."""
    x = control[RANDOM]
    x ^= (x >> 12) & 0xFFFFFFFFFFFFF
    x ^= x << 25
    x ^= (x >> 27) & 0x1FFFFFFFFF
    control[RANDOM] = x
    return ((((x * 0x2545F4914F6CDD1D) >> 33) & 0x7FFFFFFF) * n) >> 31


@inlined
def setup_of(i, j, n, graph):  # type: ignore[no-untyped-def]
    """Setup between neighbours i, j; 0 next to the dummy n."""
    facts = graph[0]
    if i == n or j == n or facts[i * FACTS + FAMILY] == facts[j * FACTS + FAMILY]:
        return 0
    return facts[i * FACTS + SETUP_OUT] + facts[j * FACTS + SETUP_IN]


@inlined
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


@inlined
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


@inlined
def machine_head(i, n, general, graph, links, times):  # type: ignore[no-untyped-def]
    """Head of i from its machine predecessor alone."""
    mp = links[i * LINK + MP]
    h = times[mp * TIME + END]
    if general:
        h += setup_of(mp, i, n, graph)
    return h


@inlined
def machine_tail(i, n, general, graph, links, times):  # type: ignore[no-untyped-def]
    """Tail of i from its machine successor alone."""
    ms = links[i * LINK + MS]
    q = times[i * TIME + P] + times[ms * TIME + Q]
    if general:
        q += setup_of(i, ms, n, graph)
    return q


@inlined
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


@inlined
def shift_right(u, v, general, graph, state, later):  # type: ignore[no-untyped-def]
    """Put u right behind v on its machine; no path may lead from an arc successor of u to v.

    Only the window between their positions changes: what u reaches moves behind v.
    """
    links, _times, order = state
    a, x, b = links[u * LINK + MP], links[u * LINK + MS], links[v * LINK + MS]
    links[a * LINK + MS], links[x * LINK + MP] = x, a
    links[v * LINK + MS], links[u * LINK + MP] = u, v
    links[u * LINK + MS], links[b * LINK + MP] = b, u
    lo, hi = np.int64(links[u * LINK + AT]), np.int64(links[v * LINK + AT])
    kept, moved = lo, 1
    later[0] = u
    links[u * LINK + MARK] = 1
    for k in range(lo + 1, hi + 1):
        i = order[k]
        hit = links[links[i * LINK + MP] * LINK + MARK]
        if general:
            facts, arcs, _ends = graph
            for e in range(facts[i * FACTS + BEFORE], facts[i * FACTS + BEFORE_END]):
                hit |= links[arcs[2 * e] * LINK + MARK]
        else:
            hit |= links[links[i * LINK + JP] * LINK + MARK]
        if hit:
            links[i * LINK + MARK] = 1
            later[moved] = i
            moved += 1
        else:
            order[kept] = i
            links[i * LINK + AT] = kept
            kept += 1
    for k in range(moved):
        i = later[k]
        order[kept + k] = i
        links[i * LINK + AT] = kept + k
        links[i * LINK + MARK] = 0


@inlined
def shift_left(u, v, general, graph, state, earlier):  # type: ignore[no-untyped-def]
    """Put v right before u on its machine; the mirror image of `shift_right`."""
    links, _times, order = state
    a, x, b = links[u * LINK + MP], links[v * LINK + MP], links[v * LINK + MS]
    links[x * LINK + MS], links[b * LINK + MP] = b, x
    links[a * LINK + MS], links[v * LINK + MP] = v, a
    links[v * LINK + MS], links[u * LINK + MP] = u, v
    lo, hi = np.int64(links[u * LINK + AT]), np.int64(links[v * LINK + AT])
    kept, moved = hi, 1
    earlier[0] = v
    links[v * LINK + MARK] = 1
    for k in range(hi - 1, lo - 1, -1):
        i = order[k]
        hit = links[links[i * LINK + MS] * LINK + MARK]
        if general:
            facts, arcs, _ends = graph
            for e in range(facts[i * FACTS + AFTER], facts[i * FACTS + AFTER_END]):
                hit |= links[arcs[2 * e] * LINK + MARK]
        else:
            hit |= links[links[i * LINK + JS] * LINK + MARK]
        if hit:
            links[i * LINK + MARK] = 1
            earlier[moved] = i
            moved += 1
        else:
            order[kept] = i
            links[i * LINK + AT] = kept
            kept -= 1
    for k in range(moved):
        i = earlier[k]
        order[kept - k] = i
        links[i * LINK + AT] = kept - k
        links[i * LINK + MARK] = 0


@inlined
def right_is_safe(u, v, general, graph, links, times):  # type: ignore[no-untyped-def]
    """Sufficient: no arc successor y of u reaches v, else q[y] >= least[y] + q[v]."""
    q = times[v * TIME + Q]
    if not general:
        y = links[u * LINK + JS]
        return q + times[y * TIME + P] > times[y * TIME + Q] and y != v
    facts, arcs, _ends = graph
    for e in range(facts[u * FACTS + AFTER], facts[u * FACTS + AFTER_END]):
        y = arcs[2 * e]
        if y == v or q + facts[y * FACTS + LEAST] <= times[y * TIME + Q]:
            return False
    return True


@inlined
def left_is_safe(u, v, general, graph, links, times):  # type: ignore[no-untyped-def]
    """Sufficient: u reaches no arc predecessor y of v, else r[y] >= r[u] + least[u]."""
    end = times[u * TIME + END]
    if not general:
        y = links[v * LINK + JP]
        return end > times[y * TIME + END] - times[y * TIME + P] and y != u
    facts, arcs, _ends = graph
    r = end - times[u * TIME + P]
    for e in range(facts[v * FACTS + BEFORE], facts[v * FACTS + BEFORE_END]):
        y = arcs[2 * e]
        if y == u or r + facts[u * FACTS + LEAST] <= times[y * TIME + END] - times[y * TIME + P]:
            return False
    return True


@inlined
def makespan_of(graph, times):  # type: ignore[no-untyped-def]
    """Latest end."""
    ends = graph[2]
    value = 0
    for k in range(len(ends)):
        i = ends[k]
        value = max(value, times[i * TIME + END])
    return value


@inlined
def critical_path(n, general, graph, state, control, path):  # type: ignore[no-untyped-def]
    """One random critical path into `path`; returns its length."""
    links, times, _order = state
    ends = graph[2]
    k = random_below(control, len(ends))
    while times[ends[k] * TIME + END] != control[VALUE]:
        k += 1
        if k == len(ends):
            k = 0
    i = ends[k]
    length = 0
    while True:
        path[length] = i
        length += 1
        r = times[i * TIME + END] - times[i * TIME + P]
        if general:
            facts, arcs, _ = graph
            if r == facts[i * FACTS + RELEASE]:
                break
            found, i_next = 0, i
            if machine_head(i, n, general, graph, links, times) == r:
                found, i_next = 1, np.int64(links[i * LINK + MP])
            for e in range(facts[i * FACTS + BEFORE], facts[i * FACTS + BEFORE_END]):
                if times[arcs[2 * e] * TIME + END] + arcs[2 * e + 1] == r:
                    found += 1
                    if found == 1 or random_below(control, found) == 0:
                        i_next = arcs[2 * e]
            i = i_next
        else:
            if r == 0:
                break
            mp, jp = np.int64(links[i * LINK + MP]), np.int64(links[i * LINK + JP])
            by_machine = times[mp * TIME + END] == r
            by_job = times[jp * TIME + END] == r
            if by_machine and by_job:
                by_machine = random_below(control, 2) == 0
            i = mp if by_machine else jp
    for k in range(length >> 1):
        path[k], path[length - 1 - k] = path[length - 1 - k], path[k]
    return length


@inlined
def is_tabu(i, j, step, now, n, columns, op, links, until):  # type: ignore[no-untyped-def]
    """Whether a move of block places i..j restores a machine arc that was reversed lately."""
    if step == 1:
        column = links[op[i] * LINK + RANK]
        for x in range(i + 1, j + 1):
            if until[op[x] * columns + column] > now:
                return True
    else:
        row = op[j] * columns
        for x in range(i, j):
            if until[row + links[op[x] * LINK + RANK]] > now:
                return True
    return False


@inlined
def forbid(u, v, step, date, columns, links, until):  # type: ignore[no-untyped-def]
    """Forbid the machine arcs that moving u behind v (or v before u) reverses, until `date`."""
    i = u
    if step == 1:
        row = u * columns
        while i != v:
            i = np.int64(links[i * LINK + MS])
            until[row + links[i * LINK + RANK]] = date
    else:
        column = links[v * LINK + RANK]
        while i != v:
            until[i * columns + column] = date
            i = np.int64(links[i * LINK + MS])


@inlined
def estimate(i, j, step, cutoff, n, general, graph, op, head, tail, p, q_old, end_old, r_new):  # type: ignore[no-untyped-def]
    """Longest path through block places i..j after a move (Balas & Vazacopoulos 1998, generalised).

    `step` 1 puts place i behind place j, -1 place j before place i. Gives up above `cutoff`.
    """
    size = j - i + 1
    r = end_old[i - 1]
    last = op[i - 1]
    for t in range(size):
        x = i + t + step
        if x > j:
            x = i
        elif x < i:
            x = j
        if general:
            r += setup_of(last, op[x], n, graph)
            last = op[x]
        r = max(r, head[x])
        r_new[t] = r
        r += p[x]
    value = 0
    q = q_old[j + 1]
    last = op[j + 1]
    for t in range(size - 1, -1, -1):
        x = i + t + step
        if x > j:
            x = i
        elif x < i:
            x = j
        if general:
            q += setup_of(op[x], last, n, graph)
            last = op[x]
        q = max(q + p[x], tail[x])
        value = max(value, r_new[t] + q)
        if value > cutoff:
            break
    return value


@inlined
def memory_fits(i, j, step, graph, times, op):  # type: ignore[no-untyped-def]
    """Whether block places i..j keep the bytes within the limit after a move."""
    facts = graph[0]
    level = times[op[i] * TIME + LEVEL]
    for t in range(j - i + 1):
        x = i + t + step
        if x > j:
            x = i
        elif x < i:
            x = j
        o = op[x] * FACTS
        if level + facts[o + ACQUIRE] + facts[o + WORKSPACE] > facts[o + CAPACITY]:
            return False
        level += facts[o + ACQUIRE] - facts[o + FREE]
        if level < 0:
            return False
    return True


@inlined
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


@inlined
def load_block(path, s, e, n, general, graph, state, op, head, tail, p, q_old, end_old):  # type: ignore[no-untyped-def]
    """Copy what estimates need of the block path[s..e] to places 1..K; its neighbours to 0, K+1."""
    links, times, _order = state
    size = e - s + 1
    op[0] = links[path[s] * LINK + MP]
    op[size + 1] = links[path[e] * LINK + MS]
    for x in range(size + 2):
        if 0 < x <= size:
            i = path[s + x - 1]
            op[x] = i
            head[x] = arc_head(i, general, graph, links, times)
            tail[x] = arc_tail(i, general, graph, links, times)
        i = op[x]
        p[x] = times[i * TIME + P]
        q_old[x] = times[i * TIME + Q]
        end_old[x] = times[i * TIME + END]


def _walk(general):  # type: ignore[no-untyped-def]
    @kernel(INT, GRAPH, STATE, INTS, SCRATCH, INTS, INTS, INT, counted=False)
    def walk(  # type: ignore[no-untyped-def]
        graph, state, control, scratch, best_order, until, moves
    ):
        """Up to `moves` tabu moves; RUNNING, STUCK (no move left) or DONE (patience or target)."""
        links, times, order = state
        n, columns = len(order), control[COLUMNS]
        indices, integers = scratch
        op, path, window = indices[0], indices[1], indices[2]
        head, tail, p = integers[0], integers[1], integers[2]
        q_old, end_old, r_new = integers[3], integers[4], integers[5]
        for _ in range(moves):
            if control[STALE] >= control[PATIENCE] or control[BEST] <= control[TARGET]:
                return DONE
            length = critical_path(n, general, graph, state, control, path)
            best, ties, tabus = np.iinfo(np.int64).max, 0, 0
            u = v = way = s = np.int64(0)  # typed: a literal 0 would have helpers compiled twice
            while s < length:
                e = s
                while (
                    e + 1 < length
                    and links[path[e + 1] * LINK + MP] == path[e]
                    and machine_head(path[e + 1], n, general, graph, links, times)
                    == times[path[e + 1] * TIME + END] - times[path[e + 1] * TIME + P]
                ):
                    e += 1
                size = e - s + 1
                if size == 1:
                    s = e + 1
                    continue
                load_block(path, s, e, n, general, graph, state, op, head, tail, p, q_old, end_old)
                # without releases nothing is gained at the front of the first block, nor at the
                # back of the last one (Nowicki & Smutnicki 1996)
                to_front, to_back = general or s > 0, general or e + 1 < length
                for kind in range(4):
                    if not (to_back if kind == 0 or kind == 3 else to_front):
                        continue
                    lo, hi = 2, size - 1
                    if kind == 0:
                        lo = 1
                    elif kind == 1:
                        hi = size
                        if size == 2 and to_back:
                            continue
                    elif kind == 2:
                        lo = 3
                    else:
                        hi = size - 2
                    for x in range(lo, hi + 1):
                        i, j, step = 1, x, 1
                        if kind == 0:
                            i, j = x, size
                        elif kind == 1:
                            step = -1
                        elif kind == 3:
                            i, j, step = x, size, -1
                        if step == 1:
                            safe = right_is_safe(op[i], op[j], general, graph, links, times)
                        else:
                            safe = left_is_safe(op[i], op[j], general, graph, links, times)
                        if not safe:
                            continue
                        value = estimate(
                            i, j, step, best, n, general, graph,
                            op, head, tail, p, q_old, end_old, r_new,
                        )  # fmt: skip
                        if value > best:
                            continue
                        if general and not memory_fits(i, j, step, graph, times, op):
                            continue
                        if value >= control[BEST] and is_tabu(
                            i, j, step, control[MOVES], n, columns, op, links, until
                        ):
                            tabus += 1
                            if ties == 0 and random_below(control, tabus) == 0:
                                u, v, way = op[i], op[j], step
                            continue
                        ties = ties + 1 if value == best else 1
                        if ties == 1 or random_below(control, ties) == 0:
                            best = value
                            u, v, way = op[i], op[j], step
                s = e + 1
            if way == 0:
                return STUCK
            date = control[MOVES] + control[TENURE] + random_below(control, control[SPREAD] + 1)
            forbid(u, v, way, date, columns, links, until)
            first, last = u, v
            if way == 1:
                first = np.int64(links[u * LINK + MS])
                last = u
                level = times[u * TIME + LEVEL]
                shift_right(u, v, general, graph, state, window)
            else:
                first = v
                last = np.int64(links[v * LINK + MP])
                level = times[u * TIME + LEVEL]
                shift_left(u, v, general, graph, state, window)
            if general:
                update_levels(first, last, graph, links, times, level)
            reschedule(first, last, n, general, graph, state)
            control[VALUE] = makespan_of(graph, times)
            control[MOVES] += 1
            control[STALE] += 1
            if control[VALUE] < control[BEST]:
                control[BEST] = control[VALUE]
                control[STALE] = 0
                for k in range(n):
                    best_order[k] = order[k]
        return RUNNING

    return walk


@kernel(INT, GRAPH, STATE, INTS, counted=False)
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


walk_chains, walk_general = _walk(False), _walk(True)
