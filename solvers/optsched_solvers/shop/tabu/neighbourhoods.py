"""N7 tabu search on machine orders, compiled: feasible moves, their estimates, and the walk.

Helpers take a constant `general`, see `state`.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numba import types

from optsched.kernels.compile import BOOL, INT, INTS, entry, helper
from optsched_solvers.shop.tabu.arrays import (
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
    RELEASE,
    WORKSPACE,
)
from optsched_solvers.shop.tabu.state import (
    END,
    GRAPH,
    JP,
    JS,
    LEVEL,
    LINK,
    MP,
    MS,
    RANK,
    STATE,
    TIME,
    P,
    Q,
    arc_head,
    arc_tail,
    machine_head,
    makespan_of,
    reschedule,
    setup_of,
    shift,
    update_levels,
)

# control: what a walk carries from slice to slice
MOVES, STALE, BEST, VALUE, RANDOM, PATIENCE, TARGET, TENURE, SPREAD, COLUMNS = range(10)
HAS_SETUPS = 10
CONTROL: Final = 16

RUNNING, STUCK, DONE = 0, 1, 2
"""What a walk returns: moves used up; no move left; patience over or target met."""

SCRATCH = types.Tuple(
    (types.Array(types.uint32, 2, "C"), types.Array(types.int64, 2, "C"), INTS)
)  # fmt: skip
INDEX_ROWS, TIME_ROWS = 3, 6
"""Rows of the two scratch arrays, each as long as there are operations and 3 more."""

# the best move found so far: its estimate, moves as good, tabu moves seen, and what it does
ESTIMATE, TIES, TABUS, U, V, STEP = range(6)
CHOICE: Final = 8
"""STEP 1 puts U right behind V, -1 puts V right before U; 0 is no move."""
REACH: Final = 300
"""How many operations a move passes at most in longer blocks."""
INTERIOR: Final = 6
"""The kind of moves that is tried last; see `places_of`."""


@helper(counted=False, inline=True)
def random_below(control, n):  # type: ignore[no-untyped-def]
    """A number in 0..n-1 (xorshift64*, Vigna 2016); the state is `control[RANDOM]`."""
    x = control[RANDOM]
    x ^= (x >> 12) & 0xFFFFFFFFFFFFF
    x ^= x << 25
    x ^= (x >> 27) & 0x1FFFFFFFFF
    control[RANDOM] = x
    return ((((x * 0x2545F4914F6CDD1D) >> 33) & 0x7FFFFFFF) * n) >> 31


@helper(counted=False, inline=True)
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


@helper(counted=False, inline=True)
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


@helper(counted=False, inline=True)
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


@helper(counted=False, inline=True)
def is_tabu(i, j, step, now, columns, op, links, until):  # type: ignore[no-untyped-def]
    """Whether a move of block places i..j restores a machine arc that was reversed lately.

    Arcs share entries of `until` (a power of two) where there are more arcs; few are ever alive.
    """
    mask = len(until) - 1
    if step == 1:
        column = links[op[i] * LINK + RANK]
        for x in range(i + 1, j + 1):
            if until[(op[x] * columns + column) & mask] > now:
                return True
    else:
        row = op[j] * columns
        for x in range(i, j):
            if until[(row + links[op[x] * LINK + RANK]) & mask] > now:
                return True
    return False


@helper(counted=False, inline=True)
def forbid(u, v, step, date, columns, links, until):  # type: ignore[no-untyped-def]
    """Forbid the machine arcs that moving u behind v (or v before u) reverses, until `date`."""
    i, mask = u, len(until) - 1
    if step == 1:
        row = u * columns
        while i != v:
            i = np.int64(links[i * LINK + MS])
            until[(row + links[i * LINK + RANK]) & mask] = date
    else:
        column = links[v * LINK + RANK]
        while i != v:
            until[(i * columns + column) & mask] = date
            i = np.int64(links[i * LINK + MS])


@helper(counted=False, inline=True)
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


@helper(counted=False, inline=True)
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


@helper(counted=False, inline=True)
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


@helper(counted=False, inline=True)
def places_of(kind, x, size, op, graph):  # type: ignore[no-untyped-def]
    """Block places i..j and step (see `estimate`) of a move; step 0 if there is none.

    Kinds 0, 1: place x behind the last, before the first. 2, 3: the first behind x, the last
    before x (N7). 4, 5: x and the next place of its family side by side, where setups count.
    6: x behind its neighbour, for want of anything better.
    """
    if kind == 0:
        return x, size, 1
    if kind == 1:
        return 1, x, -1
    if kind == 2:
        return 1, x, 1
    if kind == 3:
        return x, size, -1
    if kind == INTERIOR:
        return x, x + 1, 1
    facts = graph[0]
    family = facts[op[x] * FACTS + FAMILY]
    for y in range(x + 1, min(size, x + REACH) + 1):
        if facts[op[y] * FACTS + FAMILY] == family:
            if y == x + 1:
                break
            return (x, y - 1, 1) if kind == 4 else (x + 1, y, -1)
    return x, x, 0


@helper(counted=False, inline=True)
def choose_in_block(  # type: ignore[no-untyped-def]
    size, to_front, to_back, inner, n, general, graph, state, control, scratch, until
):
    """Best move inside one block, if it is better than the best one so far, ties at random.

    With `inner`, exchanges of neighbours, which cannot gain by themselves, instead of N7.
    """
    links, times, _order = state
    indices, integers, choice = scratch
    op = indices[0]
    head, tail, p, q_old, end_old, r_new = (
        integers[0], integers[1], integers[2], integers[3], integers[4], integers[5],
    )  # fmt: skip
    kinds = 6 if general and control[HAS_SETUPS] else 4
    for kind in range(INTERIOR if inner else 0, INTERIOR + 1 if inner else kinds):
        lo, hi = 2, size - 1
        if kind == 0:
            lo = 1
        elif kind == 1 and (size > 2 or not to_back):
            hi = size
        elif kind == 2:
            lo = 3  # the first behind the second is the second before the first
        elif kind == 3:
            hi = size - 2
        elif kind > 3:
            lo, hi = 1, size - (1 if inner else 2)
        if size > REACH:  # estimates are quadratic in the length of a block
            if kind == 0 or kind == 3:
                lo = max(lo, size - REACH)
            elif kind < 3:
                hi = min(hi, REACH)
        if kind < 4 and not (to_back if kind == 0 or kind == 3 else to_front):
            continue
        for x in range(lo, hi + 1):
            i, j, step = places_of(kind, x, size, op, graph)
            if step == 0:
                continue
            if step == 1:
                safe = right_is_safe(op[i], op[j], general, graph, links, times)
            else:
                safe = left_is_safe(op[i], op[j], general, graph, links, times)
            if not safe:
                continue
            value = estimate(
                i, j, step, choice[ESTIMATE], n, general, graph,
                op, head, tail, p, q_old, end_old, r_new,
            )  # fmt: skip
            if value > choice[ESTIMATE]:
                continue
            if general and not memory_fits(i, j, step, graph, times, op):
                continue
            if value >= control[BEST] and is_tabu(
                i, j, step, control[MOVES], control[COLUMNS], op, links, until
            ):
                choice[TABUS] += 1  # if all are tabu, a random one is taken
                if choice[TIES] > 0 or random_below(control, choice[TABUS]) > 0:
                    continue
            else:
                choice[TIES] = choice[TIES] + 1 if value == choice[ESTIMATE] else 1
                if choice[TIES] > 1 and random_below(control, choice[TIES]) > 0:
                    continue
                choice[ESTIMATE] = value
            choice[U], choice[V], choice[STEP] = op[i], op[j], step


@helper(counted=False, inline=True)
def choose(length, inner, n, general, graph, state, control, scratch, until):  # type: ignore[no-untyped-def]
    """Best move inside the blocks of the critical path, into `choice`."""
    links, times, _order = state
    indices, integers, choice = scratch
    op, path = indices[0], indices[1]
    choice[ESTIMATE] = np.iinfo(np.int64).max
    choice[TIES] = choice[TABUS] = choice[STEP] = 0
    s = 0
    while s < length:
        e = s
        while (
            e + 1 < length
            and links[path[e + 1] * LINK + MP] == path[e]
            and machine_head(path[e + 1], n, general, graph, links, times)
            == times[path[e + 1] * TIME + END] - times[path[e + 1] * TIME + P]
        ):
            e += 1
        if e > s:
            load_block(
                path, s, e, n, general, graph, state, op, integers[0], integers[1], integers[2],
                integers[3], integers[4],
            )  # fmt: skip
            # in a classic shop nothing is gained at the front of the first block, nor at the back
            # of the last one (Nowicki & Smutnicki 1996); releases and setups break that
            choose_in_block(
                e - s + 1, general or s > 0, general or e + 1 < length, inner,
                n, general, graph, state, control, scratch, until,
            )  # fmt: skip
        s = e + 1


@helper(counted=False, inline=True)
def make_move(u, v, step, n, general, graph, state, window):  # type: ignore[no-untyped-def]
    """Put u right behind v (step 1), or v right before u (-1); heads, tails and levels follow."""
    links, times, _order = state
    first, last = u, v
    level = times[u * TIME + LEVEL]
    if step == 1:
        first = np.int64(links[u * LINK + MS])
        last = u
        shift(u, v, 1, general, graph, state, window)
    else:
        first = v
        last = np.int64(links[v * LINK + MP])
        shift(u, v, -1, general, graph, state, window)
    if general:
        update_levels(first, last, graph, links, times, level)
    reschedule(first, last, n, general, graph, state)


@helper(counted=False, inline=True)
def _walk(general, graph, state, control, scratch, best_order, until, moves):  # type: ignore[no-untyped-def]
    """Up to `moves` tabu moves; returns RUNNING, STUCK or DONE."""
    links, times, order = state
    n = len(order)
    indices, _, choice = scratch
    path, window = indices[1], indices[2]
    for _ in range(moves):
        if control[STALE] >= control[PATIENCE] or control[BEST] <= control[TARGET]:
            return DONE
        length = critical_path(n, general, graph, state, control, path)
        for inner in range(2):
            choose(length, inner, n, general, graph, state, control, scratch, until)
            if choice[STEP] != 0:
                break
        u, v, step = choice[U], choice[V], choice[STEP]
        if step == 0:
            return STUCK
        date = control[MOVES] + control[TENURE] + random_below(control, control[SPREAD] + 1)
        forbid(u, v, step, date, control[COLUMNS], links, until)
        make_move(u, v, step, n, general, graph, state, window)
        control[VALUE] = makespan_of(graph, times)
        control[MOVES] += 1
        control[STALE] += 1
        if control[VALUE] < control[BEST]:
            control[BEST] = control[VALUE]
            control[STALE] = 0
            for k in range(n):
                best_order[k] = order[k]
    return RUNNING


@entry(INT, BOOL, GRAPH, STATE, INTS, SCRATCH, INTS, INTS, INT, counted=False)
def walk(general, graph, state, control, scratch, best_order, until, moves):  # type: ignore[no-untyped-def]
    """`_walk` with machine code of its own for classic chains (`general` False)."""
    if general:
        return _walk(True, graph, state, control, scratch, best_order, until, moves)
    return _walk(False, graph, state, control, scratch, best_order, until, moves)
