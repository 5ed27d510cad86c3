"""Tabu search on ordered cycles, compiled: moves within critical blocks, as N6 has them for shops.

The critical cycle of an order is cut into blocks, operations that follow each other on a device.
The period falls only if some operation leaves the inside of a block: it goes behind its last
operation, or before its first (Brucker & Kampmeyer 2008; Balas & Vazacopoulos 1998). A move has a
`step`: 1 puts operation u right behind v, which follows it on the device; -1 puts v right before u.
"""

from __future__ import annotations

from typing import Final

import numba
import numpy as np
from numba import types

from optsched.kernels.compile import INT, copy, entry, helper
from optsched_solvers.periodic.orders import (
    CYCLE,
    NO_LIMIT,
    STATE,
    least_period,
    machine_weight,
    shift,
    sort_by_time,
)

NO_PATH: Final = -(1 << 60)

REACH: Final = 20
"""How many operations a move passes at most."""

TRIES: Final = 50
"""Places to look at for a random move."""

RUNNING, STUCK, DONE = range(3)
"""What `walk` returns: moves are left to make; none is possible; a target or patience was met."""

CONTROL: Final = np.dtype([(name, np.int64) for name in (
    "moves", "stale", "best", "value", "random", "patience", "target", "tenure", "spread",
    "columns", "setups", "floor", "noise",  # noise: so many moves are made at random
    "estimate", "ties", "tabus", "u", "v", "step",  # the best move so far; twice the step if tabu
)])  # fmt: skip
"""What a walk carries from slice to slice: counters, settings, and the move being chosen."""

WALK: Final = types.Array(numba.from_dtype(CONTROL), 1, "C")


@helper(counted=False, inline=True)
def random_below(c, n):  # type: ignore[no-untyped-def]
    """A number in 0..n-1 (xorshift64*, Vigna 2016)."""
    x = c.random
    x ^= (x >> 12) & 0xFFFFFFFFFFFFF
    x ^= x << 25
    x ^= (x >> 27) & 0x1FFFFFFFFF
    c.random = x
    return ((((x * 0x2545F4914F6CDD1D) >> 33) & 0x7FFFFFFF) * n) >> 31


@helper(counted=False, inline=True)
def fits(cycle, state, u, v, step):  # type: ignore[no-untyped-def]
    """Whether the memory suffices after a move."""
    capacity = cycle.capacity[u]
    if capacity == NO_LIMIT:
        return True
    i = u if step > 0 else v
    held = state.level[u]
    if step < 0:
        if held + cycle.need[i] > capacity:
            return False
        held += cycle.change[i]
    x = u
    while True:
        if x != i:
            if held + cycle.need[x] > capacity:
                return False
            held += cycle.change[x]
        if x == v:
            break
        x = state.after[x]
    return step < 0 or held + cycle.need[i] <= capacity


@helper(counted=False, inline=True)
def is_safe(cycle, state, u, v, step, period):  # type: ignore[no-untyped-def]
    """Sufficient for a move not to make operations wait for each other for ever."""
    start = state.start
    spanned = 0
    x = u
    while x != v:
        spanned += state.tokens[x]
        x = state.after[x]
    if step > 0:
        for e in range(cycle.out[u], cycle.out[u + 1]):
            y = cycle.head[e]
            k = spanned - cycle.head_tokens[e]
            if start[v] + k * period >= start[y] + cycle.least[y]:
                return False
        return True
    for e in range(cycle.into[v], cycle.into[v + 1]):
        y = cycle.tail[e]
        k = spanned - cycle.tail_tokens[e]
        if start[y] + k * period >= start[u] + cycle.least[u]:
            return False
    return True


# what a move would make of the longest paths


@helper(counted=False, inline=True)
def longest_paths(cycle, state, period, r, ahead):  # type: ignore[no-untyped-def]
    """Longest paths at the period, from r to all (`ahead`) or from all to r."""
    tokens, order = state.tokens, state.order
    path, beside = (state.from_r, state.before) if ahead else (state.to_r, state.after)
    arcs, end = (cycle.into, cycle.tail) if ahead else (cycle.out, cycle.head)
    weight = cycle.tail_weight if ahead else cycle.head_weight
    spans = cycle.tail_tokens if ahead else cycle.head_tokens
    n = len(order)
    for i in range(n):
        path[i] = NO_PATH
    path[r] = 0
    first = 0
    while order[first] != r:
        first += 1
    for _ in range(n):
        moved = False
        for k in range(1, n):
            at = first + k if ahead else first + n - k
            j = order[at if at < n else at - n]
            longest = path[j]
            for e in range(arcs[j], arcs[j + 1]):
                reached = path[end[e]] + weight[e] - spans[e] * period
                if reached > longest:
                    longest = reached
            i = beside[j]
            if i >= 0:
                a, b = (i, j) if ahead else (j, i)
                reached = path[i] + machine_weight(cycle, a, b) - tokens[a] * period
                if reached > longest:
                    longest = reached
            if longest > path[j]:
                path[j] = longest
                moved = True
        if not moved:
            break


@helper(counted=False, inline=True)
def new_order(state, u, v, step):  # type: ignore[no-untyped-def]
    """`moved` and `gap` of a move; returns how many operations there are."""
    after, tokens, moved, gap = state.after, state.tokens, state.moved, state.gap
    p = state.before[u]
    first, last = (after[u], v) if step > 0 else (u, state.before[v])
    spanned = 0
    k = 1 if step < 0 else 0
    x = first
    gap[k] = tokens[p] + tokens[u]
    while True:
        moved[k] = x
        k += 1
        if x == last:
            break
        gap[k] = tokens[x]
        spanned += tokens[x]
        x = after[x]
    if step > 0:
        spanned += tokens[u]
        moved[k] = u
        gap[k] = -spanned
        gap[k + 1] = tokens[v] + spanned
        return k + 1
    spanned += tokens[last]
    moved[0] = v
    gap[0] = tokens[p] + spanned
    gap[1] = -spanned
    gap[k] = tokens[last] + tokens[v]
    return k


@helper(counted=False, inline=True)
def estimate(cycle, state, period, r, u, v, step):  # type: ignore[no-untyped-def]
    """Longest closed walk through r and what moves, at the period (Balas & Vazacopoulos 1998)."""
    moved, gap, new_head = state.moved, state.gap, state.new_head
    i, s = state.before[u], state.after[v]
    n = new_order(state, u, v, step)
    longest = NO_PATH
    t = state.from_r[i]
    for k in range(n):
        x = moved[k]
        t += machine_weight(cycle, i, x) - gap[k] * period
        for e in range(cycle.into[x], cycle.into[x + 1]):
            reached = state.from_r[cycle.tail[e]]
            reached += cycle.tail_weight[e] - cycle.tail_tokens[e] * period
            if reached > t:
                t = reached
        if x == r:
            longest = max(longest, t)
            t = max(t, 0)
        new_head[k] = t
        i = x
    t = state.to_r[s]
    i = s
    for k in range(n - 1, -1, -1):
        x = moved[k]
        t += machine_weight(cycle, x, i) - gap[k + 1] * period
        for e in range(cycle.out[x], cycle.out[x + 1]):
            reached = state.to_r[cycle.head[e]]
            reached += cycle.head_weight[e] - cycle.head_tokens[e] * period
            if reached > t:
                t = reached
        if x == r:
            longest = max(longest, t)
            t = max(t, 0)
        else:
            longest = max(longest, new_head[k] + t)
        i = x
    return longest


# choosing a move


@helper(counted=False, inline=True)
def is_tabu(state, c, u, v, step):  # type: ignore[no-untyped-def]
    """Whether a move brings back an order that was given up lately."""
    rank, until = state.rank, state.until
    x = u
    while True:
        if step > 0:
            if x != u and until[x * c.columns + rank[u]] > c.moves:
                return True
        elif x != v and until[v * c.columns + rank[x]] > c.moves:
            return True
        if x == v:
            return False
        x = state.after[x]


@helper(types.void, CYCLE, STATE, WALK, INT, INT, INT, INT)
def consider(cycle, state, control, r, u, v, step):  # type: ignore[no-untyped-def]
    """Keep a move if it is the best so far."""
    c = control[0]
    period = c.value
    after = state.after
    if after[v] == u and after[u] != v:
        return
    if not fits(cycle, state, u, v, step):
        return
    if (after[u] != v or c.setups == 0) and not is_safe(cycle, state, u, v, step, period):
        return
    if c.noise > 0:
        value = random_below(c, 1 << 20)
    elif after[v] == u:
        value = 0
    else:
        value = estimate(cycle, state, period, r, u, v, step)
    if is_tabu(state, c, u, v, step) and (c.noise > 0 or period + value >= c.best):
        c.tabus += 1
        if random_below(c, c.tabus) == 0 and c.step == 0:
            c.u, c.v, c.step = u, v, 2 * step
        return
    taken = abs(c.step) == 1
    if taken and value > c.estimate:
        return
    if taken and value == c.estimate:
        c.ties += 1
        if random_below(c, c.ties) > 0:
            return
    else:
        c.ties = 1
    c.estimate = value
    c.u, c.v, c.step = u, v, step


@helper(types.void, CYCLE, STATE, WALK)
def choose(cycle, state, control):  # type: ignore[no-untyped-def]
    """The best move on the critical cycle: u, v, step of control; step 0 if there is none."""
    c = control[0]
    after, through, critical = state.after, state.through, state.critical
    length = critical[0]
    c.step = c.ties = c.tabus = 0
    first = -1  # where a block begins
    single = -1
    for k in range(length):
        i = critical[1 + (k - 1) % length]
        j = critical[1 + k]
        j2 = critical[1 + (k + 1) % length]
        if after[i] != j or through[j] >= 0:
            first = k
            if after[j] != j2 or through[j2] >= 0:
                single = j
    r = critical[1 + max(first, 0)]
    if single >= 0:
        r = single
    longest_paths(cycle, state, c.value, r, True)
    longest_paths(cycle, state, c.value, r, False)
    if first < 0:
        for k in range(length):
            u = critical[1 + k]
            if after[u] != u:
                consider(cycle, state, control, r, u, after[u], 1)
        return
    k = first
    while k < first + length:
        m = k
        while m + 1 < first + length:
            j = critical[1 + (m + 1) % length]
            if after[critical[1 + m % length]] != j or through[j] >= 0:
                break
            m += 1
        if m > k:
            b = critical[1 + k % length]
            e = critical[1 + m % length]
            for q in range(max(k, m - REACH), m):
                consider(cycle, state, control, r, critical[1 + q % length], e, 1)
            for q in range(k + 1, min(m, k + REACH) + 1):
                if q == k + 1 and m == k + 1:
                    break
                consider(cycle, state, control, r, b, critical[1 + q % length], -1)
            if c.setups:
                for q in range(k, m):
                    i = critical[1 + q % length]
                    consider(cycle, state, control, r, i, after[i], 1)
        k = m + 1


@helper(types.void, CYCLE, STATE, WALK)
def choose_any(cycle, state, control):  # type: ignore[no-untyped-def]
    """Any two neighbours on a device that may change places, critical or not."""
    c = control[0]
    after = state.after
    c.step = c.ties = c.tabus = 0
    for _ in range(TRIES):
        u = random_below(c, len(after))
        if after[u] >= 0 and after[u] != u:
            consider(cycle, state, control, -1, u, after[u], 1)
        if c.step != 0:
            return


@helper(types.void, CYCLE, STATE, WALK)
def move(cycle, state, control):  # type: ignore[no-untyped-def]
    """Make the chosen move, and forbid to undo it for a while.

    Taken back at once if operations then wait for each other for ever.
    """
    c = control[0]
    u, v, step = c.u, c.v, 1 if c.step > 0 else -1
    rank, until = state.rank, state.until
    end = c.moves + c.tenure + random_below(c, c.spread + 1)
    x = u
    while True:
        if step > 0 and x != u:
            until[u * c.columns + rank[x]] = end
        if step < 0 and x != v:
            until[x * c.columns + rank[v]] = end
        if x == v:
            break
        x = state.after[x]
    first, last = state.after[u], state.before[v]
    shift(cycle, state, u, v, step)
    c.value = least_period(cycle, state, c.floor)
    if c.value == 0:
        if step > 0:
            shift(cycle, state, first, u, -1)
        else:
            shift(cycle, state, v, last, 1)
        c.value = least_period(cycle, state, c.floor)


@entry(INT, CYCLE, STATE, WALK, INT)
def walk(cycle, state, control, moves):  # type: ignore[no-untyped-def]
    """Up to so many moves; `RUNNING`, `STUCK` or `DONE`."""
    c = control[0]
    for _ in range(moves):
        if c.best <= c.target or c.stale >= c.patience:
            return DONE
        if c.moves % 8 == 0:
            sort_by_time(state, c.value)
        c.step = 0
        if c.noise <= 0 or random_below(c, 2) == 0:
            choose(cycle, state, control)
        if c.step == 0 and c.noise > 0:
            choose_any(cycle, state, control)
        if c.step == 0:
            return STUCK
        c.moves += 1
        c.stale += 1
        c.noise -= 1
        move(cycle, state, control)
        if c.value < c.best:
            c.best = c.value
            c.stale = 0
            copy(state.best_after, state.after)
            copy(state.best_tokens, state.tokens)
    return RUNNING
