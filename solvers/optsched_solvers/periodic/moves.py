"""Tabu search on ordered cycles: moves within critical blocks, as N6 has them for job shops.

The critical cycle of an order is cut into blocks, operations that follow each other on a device.
The period falls only if some operation leaves the inside of a block: it goes behind its last
operation, or before its first (Brucker & Kampmeyer 2008; Balas & Vazacopoulos 1998).
"""

from __future__ import annotations

from typing import Final

from numba import types

from optsched.kernels.compile import INT, INTS, copy, entry, helper
from optsched_solvers.periodic.estimates import (
    BEST_AFTER,
    BEST_TOKENS,
    HEADS,
    RANK,
    SCRATCH,
    TAILS,
    UNTIL,
    estimate,
    heads_from,
    tails_to,
)
from optsched_solvers.periodic.shifts import fits, is_safe, shift_left, shift_right
from optsched_solvers.periodic.state import (
    AFTER,
    BEFORE,
    CYCLE,
    GRAPH,
    ORDER,
    SEEN,
    START,
    STATE,
    THROUGH,
    TOKENS,
    least_period,
)
from optsched_solvers.shop.tabu.neighbourhoods import DONE, RUNNING, STUCK, random_below

# control: what a walk carries from slice to slice; the first ten as `neighbourhoods` has them
MOVES, STALE, BEST, VALUE, RANDOM, PATIENCE, TARGET, TENURE, SPREAD, COLUMNS = range(10)
SETUPS, FLOOR, NOISE = range(10, 13)
"""NOISE: so many moves are made at random."""

# the best move found so far: its estimate, moves as good, tabu moves seen, and what it does
ESTIMATE, TIES, TABUS, U, V, STEP = range(13, 19)
"""STEP 1 puts U right behind V, -1 puts V right before U, twice that if it is tabu; 0: none."""
CONTROL: Final = 20

REACH: Final = 20
"""How many operations a move passes at most."""
TRIES: Final = 50
"""Places to look at for a random move."""


@helper(types.void, STATE, INT)
def sort_by_time(state, period):  # type: ignore[no-untyped-def]
    """Bring ORDER up to date: it only decides how soon the longest paths are found."""
    start, order, key = state[START], state[ORDER], state[SEEN]
    n = len(order)
    for i in range(n):
        key[i] = start[i] % period
    for k in range(1, n):
        i = order[k]
        t = key[i]
        m = k
        while m > 0 and key[order[m - 1]] > t:
            order[m] = order[m - 1]
            m -= 1
        order[m] = i


@helper(types.void, GRAPH, STATE, SCRATCH, INTS, INT, INT, INT, INT)
def consider(graph, state, scratch, control, r, u, v, step):  # type: ignore[no-untyped-def]
    """Keep a move if it is the best so far."""
    period = control[VALUE]
    after = state[AFTER]
    if after[v] == u and after[u] != v:
        return
    if not fits(graph, state, u, v, step):
        return
    if (after[u] != v or control[SETUPS] == 0) and not is_safe(graph, state, u, v, step, period):
        return
    if control[NOISE] > 0:
        value = random_below(control, 1 << 20)
    elif after[v] == u:
        value = 0
    else:
        value = estimate(graph, state, scratch, period, r, u, v, step)
    # tabu: an order that was given up lately
    rank, until, columns = scratch[RANK], scratch[UNTIL], control[COLUMNS]
    tabu = False
    x = u
    while not tabu:
        if step > 0:
            if x != u:
                tabu = until[x * columns + rank[u]] > control[MOVES]
        elif x != v:
            tabu = until[v * columns + rank[x]] > control[MOVES]
        if x == v:
            break
        x = after[x]
    if tabu and (control[NOISE] > 0 or period + value >= control[BEST]):
        control[TABUS] += 1
        if random_below(control, control[TABUS]) == 0 and control[STEP] == 0:
            control[U], control[V], control[STEP] = u, v, 2 * step
        return
    taken = abs(control[STEP]) == 1
    if taken and value > control[ESTIMATE]:
        return
    if taken and value == control[ESTIMATE]:
        control[TIES] += 1
        if random_below(control, control[TIES]) > 0:
            return
    else:
        control[TIES] = 1
    control[ESTIMATE] = value
    control[U], control[V], control[STEP] = u, v, step


@helper(types.void, GRAPH, STATE, SCRATCH, INTS)
def choose(graph, state, scratch, control):  # type: ignore[no-untyped-def]
    """The best move on the critical cycle: U, V, STEP of control; STEP 0 if there is none."""
    after, through, cycle = state[AFTER], state[THROUGH], state[CYCLE]
    length = cycle[0]
    control[STEP] = control[TIES] = control[TABUS] = 0
    first = -1  # where a block begins
    single = -1
    for k in range(length):
        i = cycle[1 + (k - 1) % length]
        j = cycle[1 + k]
        j2 = cycle[1 + (k + 1) % length]
        if after[i] != j or through[j] >= 0:
            first = k
            if after[j] != j2 or through[j2] >= 0:
                single = j
    if first < 0:
        r = cycle[1]
    elif single >= 0:
        r = single
    else:
        r = cycle[1 + first]
    heads_from(graph, state, control[VALUE], r, scratch[HEADS])
    tails_to(graph, state, control[VALUE], r, scratch[TAILS])
    if first < 0:
        for k in range(length):
            u = cycle[1 + k]
            if after[u] != u:
                consider(graph, state, scratch, control, r, u, after[u], 1)
        return
    k = first
    while k < first + length:
        m = k
        while m + 1 < first + length:
            j = cycle[1 + (m + 1) % length]
            if after[cycle[1 + m % length]] != j or through[j] >= 0:
                break
            m += 1
        if m > k:
            b = cycle[1 + k % length]
            e = cycle[1 + m % length]
            for c in range(max(k, m - REACH), m):
                consider(graph, state, scratch, control, r, cycle[1 + c % length], e, 1)
            for c in range(k + 1, min(m, k + REACH) + 1):
                if c == k + 1 and m == k + 1:
                    break
                consider(graph, state, scratch, control, r, b, cycle[1 + c % length], -1)
            if control[SETUPS]:
                for c in range(k, m):
                    i = cycle[1 + c % length]
                    consider(graph, state, scratch, control, r, i, after[i], 1)
        k = m + 1


@helper(types.void, STATE, SCRATCH, INTS)
def forbid(state, scratch, control):  # type: ignore[no-untyped-def]
    """Before a move: the orders that it gives up are tabu for a while."""
    u, v, step = control[U], control[V], control[STEP]
    rank, until, columns = scratch[RANK], scratch[UNTIL], control[COLUMNS]
    after = state[AFTER]
    end = control[MOVES] + control[TENURE] + random_below(control, control[SPREAD] + 1)
    x = u
    while True:
        if step > 0 and x != u:
            until[u * columns + rank[x]] = end
        if step < 0 and x != v:
            until[x * columns + rank[v]] = end
        if x == v:
            break
        x = after[x]


@helper(types.void, GRAPH, STATE, SCRATCH, INTS)
def choose_any(graph, state, scratch, control):  # type: ignore[no-untyped-def]
    """Any two neighbours on a device that may change places, critical or not."""
    after = state[AFTER]
    control[STEP] = control[TIES] = control[TABUS] = 0
    for _ in range(TRIES):
        u = random_below(control, len(after))
        if after[u] >= 0 and after[u] != u:
            consider(graph, state, scratch, control, -1, u, after[u], 1)
        if control[STEP] != 0:
            return


@helper(types.void, GRAPH, STATE, INTS)
def move(graph, state, control):  # type: ignore[no-untyped-def]
    """Make the chosen move; take it back if operations then wait for each other for ever."""
    u, v = control[U], control[V]
    right = control[STEP] > 0
    first, last = state[AFTER][u], state[BEFORE][v]
    if right:
        shift_right(graph, state, u, v)
    else:
        shift_left(graph, state, u, v)
    control[VALUE] = least_period(graph, state, control[FLOOR])
    if control[VALUE] == 0:
        if right:
            shift_left(graph, state, first, u)
        else:
            shift_right(graph, state, v, last)
        control[VALUE] = least_period(graph, state, control[FLOOR])


@entry(INT, GRAPH, STATE, SCRATCH, INTS, INT)
def walk(graph, state, scratch, control, moves):  # type: ignore[no-untyped-def]
    """Up to so many moves; RUNNING, STUCK or DONE (see `neighbourhoods`)."""
    for _ in range(moves):
        if control[BEST] <= control[TARGET] or control[STALE] >= control[PATIENCE]:
            return DONE
        if control[MOVES] % 8 == 0:
            sort_by_time(state, control[VALUE])
        control[STEP] = 0
        if control[NOISE] <= 0 or random_below(control, 2) == 0:
            choose(graph, state, scratch, control)
        if control[STEP] == 0 and control[NOISE] > 0:
            choose_any(graph, state, scratch, control)
        if control[STEP] == 0:
            return STUCK
        control[MOVES] += 1
        control[STALE] += 1
        control[NOISE] -= 1
        forbid(state, scratch, control)
        move(graph, state, control)
        if control[VALUE] < control[BEST]:
            control[BEST] = control[VALUE]
            control[STALE] = 0
            copy(scratch[BEST_AFTER], state[AFTER])
            copy(scratch[BEST_TOKENS], state[TOKENS])
    return RUNNING
