"""Tabu search on ordered cycles, compiled: moves within critical blocks, as N6 has them for shops.

The critical cycle of an order is cut into blocks, operations that follow each other on a device.
The period falls only if some operation leaves the inside of a block: it goes behind its last
operation, or before its first (Brucker & Kampmeyer 2008; Balas & Vazacopoulos 1998). A move has a
`step`: 1 puts operation u right behind v, which follows it on the device; -1 puts v right before u.
"""

from __future__ import annotations

from typing import Final

from numba import types

from optsched.kernels.compile import INT, entry, helper, record, records
from optsched_solvers._random import random_below
from optsched_solvers.periodic.orders import (
    CYCLE,
    NO_LIMIT,
    STATE,
    keep_best,
    least_period,
    machine_weight,
    shift,
    sort_by_time,
)

NO_PATH: Final = -(1 << 60)

REACH: Final = 20
"""Operations that a move passes, at most."""

TRIES: Final = 50
"""Pairs that are tried for a random move."""

RUNNING, STUCK, DONE = range(3)
"""What `walk` returns: moves are left to make; none is possible; a target or patience was met."""

# settings and counters of a walk, kept between calls: noise: moves left to make at random;
# estimate, equals, tabus, u, v, step: the move being chosen, its step doubled if it is tabu
CONTROL: Final = record(
    "moves stale best value random patience target tenure spread columns setups floor noise"
    " estimate equals tabus u v step"
)
WALK: Final = records(CONTROL)


@helper(counted=False, inline=True)
def fits(cycle, state, u, v, step):  # type: ignore[no-untyped-def]
    """Whether the memory suffices after a move."""
    op, node = cycle.operation, state.node
    capacity = op[u].capacity
    if capacity == NO_LIMIT:
        return True
    i = u if step > 0 else v
    held = node[u].level
    if step < 0:
        if held + op[i].need > capacity:
            return False
        held += op[i].change
    x = u
    while True:
        if x != i:
            if held + op[x].need > capacity:
                return False
            held += op[x].change
        if x == v:
            break
        x = node[x].after
    return step < 0 or held + op[i].need <= capacity


@helper(counted=False, inline=True)
def is_safe(cycle, state, u, v, step, period):  # type: ignore[no-untyped-def]
    """A sufficient condition for a move to keep the orders free of deadlocks."""
    op, node = cycle.operation, state.node
    spanned = 0
    x = u
    while x != v:
        spanned += node[x].tokens
        x = node[x].after
    if step > 0:
        for e in range(op[u].first_out, op[u].end_out):
            arc = cycle.arc_out[e]
            y = arc.other
            k = spanned - arc.tokens
            if node[v].start + k * period >= node[y].start + op[y].least:
                return False
        return True
    for e in range(op[v].first_in, op[v].end_in):
        arc = cycle.arc_in[e]
        k = spanned - arc.tokens
        if node[arc.other].start + k * period >= node[u].start + op[u].least:
            return False
    return True


# what a move would make of the longest paths


@helper(counted=False, inline=True)
def longest_paths(cycle, state, period, r, forward):  # type: ignore[no-untyped-def]
    """Longest paths from r to all operations at the period into `head`, or to r into `tail`."""
    op, node, order = cycle.operation, state.node, state.order
    arc = cycle.arc_in if forward else cycle.arc_out
    path = state.head if forward else state.tail
    n = len(order)
    for i in range(n):
        path[i] = NO_PATH
    path[r] = 0
    first = 0
    while order[first] != r:
        first += 1
    # invariant: `path` is the length of a path; no cycle is longer than 0 at the least period
    for _ in range(n):
        moved = False
        for k in range(1, n):
            if forward:
                j = order[first + k if first + k < n else first + k - n]
            else:
                j = order[first - k if first >= k else first - k + n]
            longest = path[j]
            begin, end = op[j].first_in, op[j].end_in
            i = node[j].before
            if not forward:
                begin, end = op[j].first_out, op[j].end_out
                i = node[j].after
            for e in range(begin, end):
                reached = path[arc[e].other] + arc[e].weight - arc[e].tokens * period
                if reached > longest:
                    longest = reached
            if i >= 0:
                u, v = (i, j) if forward else (j, i)
                reached = path[i] + machine_weight(op, u, v) - node[u].tokens * period
                if reached > longest:
                    longest = reached
            if longest > path[j]:
                path[j] = longest
                moved = True
        if not moved:
            break


@helper(counted=False, inline=True)
def new_order(state, u, v, step):  # type: ignore[no-untyped-def]
    """Write the operations and gaps of a move to `moved`; return their number."""
    node, moved = state.node, state.moved
    p = node[u].before
    first, last = (node[u].after, v) if step > 0 else (u, node[v].before)
    spanned = 0
    k = 1 if step < 0 else 0
    x = first
    moved[k].gap = node[p].tokens + node[u].tokens
    while True:
        moved[k].operation = x
        k += 1
        if x == last:
            break
        moved[k].gap = node[x].tokens
        spanned += node[x].tokens
        x = node[x].after
    if step > 0:
        spanned += node[u].tokens
        moved[k].operation = u
        moved[k].gap = -spanned
        moved[k + 1].gap = node[v].tokens + spanned
        return k + 1
    spanned += node[last].tokens
    moved[0].operation = v
    moved[0].gap = node[p].tokens + spanned
    moved[1].gap = -spanned
    moved[k].gap = node[last].tokens + node[v].tokens
    return k


@helper(counted=False, inline=True)
def estimate(cycle, state, period, r, u, v, step):  # type: ignore[no-untyped-def]
    """Longest closed walk through r and the moved operations, at the period.

    Balas & Vazacopoulos 1998: heads and tails of other operations are those before the move.
    """
    op, node, moved = cycle.operation, state.node, state.moved
    i, s = node[u].before, node[v].after
    n = new_order(state, u, v, step)
    longest = NO_PATH
    t = state.head[i]
    for k in range(n):
        x = moved[k].operation
        t += machine_weight(op, i, x) - moved[k].gap * period
        for e in range(op[x].first_in, op[x].end_in):
            arc = cycle.arc_in[e]
            reached = state.head[arc.other] + arc.weight - arc.tokens * period
            if reached > t:
                t = reached
        if x == r:
            longest = max(longest, t)
            t = max(t, 0)
        moved[k].head = t
        i = x
    t = state.tail[s]
    i = s
    for k in range(n - 1, -1, -1):
        x = moved[k].operation
        t += machine_weight(op, x, i) - moved[k + 1].gap * period
        for e in range(op[x].first_out, op[x].end_out):
            arc = cycle.arc_out[e]
            reached = state.tail[arc.other] + arc.weight - arc.tokens * period
            if reached > t:
                t = reached
        if x == r:
            longest = max(longest, t)
            t = max(t, 0)
        else:
            longest = max(longest, moved[k].head + t)
        i = x
    return longest


# choosing a move


@helper(counted=False, inline=True)
def is_tabu(state, c, u, v, step):  # type: ignore[no-untyped-def]
    """Whether a move restores an order that was changed recently."""
    node, until = state.node, state.until
    x = u
    while True:
        if step > 0:
            if x != u and until[x * c.columns + node[u].rank] > c.moves:
                return True
        elif x != v and until[v * c.columns + node[x].rank] > c.moves:
            return True
        if x == v:
            return False
        x = node[x].after


@helper(types.void, CYCLE, STATE, WALK, INT, INT, INT, INT)
def consider(cycle, state, control, r, u, v, step):  # type: ignore[no-untyped-def]
    """Keep a move if it is the best so far."""
    c = control[0]
    period = c.value
    node = state.node
    if node[v].after == u and node[u].after != v:
        return
    if not fits(cycle, state, u, v, step):
        return
    if (node[u].after != v or c.setups == 0) and not is_safe(cycle, state, u, v, step, period):
        return
    if c.noise > 0:
        value = random_below(c, 1 << 20)
    elif node[v].after == u:
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
        c.equals += 1
        if random_below(c, c.equals) > 0:
            return
    else:
        c.equals = 1
    c.estimate = value
    c.u, c.v, c.step = u, v, step


@helper(types.void, CYCLE, STATE, WALK)
def choose(cycle, state, control):  # type: ignore[no-untyped-def]
    """The best move on the critical cycle: u, v, step of control; step 0 if there is none."""
    c = control[0]
    node, critical = state.node, state.critical
    length = critical[0]
    c.step = c.equals = c.tabus = 0
    first = -1  # where a block begins
    single = -1
    for k in range(length):
        i = critical[1 + (k - 1) % length]
        j = critical[1 + k]
        j2 = critical[1 + (k + 1) % length]
        if node[i].after != j or node[j].through >= 0:
            first = k
            if node[j].after != j2 or node[j2].through >= 0:
                single = j
    r = critical[1 + max(first, 0)]
    if single >= 0:
        r = single
    longest_paths(cycle, state, c.value, r, True)
    longest_paths(cycle, state, c.value, r, False)
    if first < 0:
        for k in range(length):
            u = critical[1 + k]
            if node[u].after != u:
                consider(cycle, state, control, r, u, node[u].after, 1)
        return
    k = first
    while k < first + length:
        m = k
        while m + 1 < first + length:
            j = critical[1 + (m + 1) % length]
            if node[critical[1 + m % length]].after != j or node[j].through >= 0:
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
                    consider(cycle, state, control, r, i, node[i].after, 1)
        k = m + 1


@helper(types.void, CYCLE, STATE, WALK)
def choose_any(cycle, state, control):  # type: ignore[no-untyped-def]
    """Any two neighbors on a device that may change places, critical or not."""
    c = control[0]
    node = state.node
    c.step = c.equals = c.tabus = 0
    for _ in range(TRIES):
        u = random_below(c, len(node))
        if node[u].after >= 0 and node[u].after != u:
            consider(cycle, state, control, -1, u, node[u].after, 1)
        if c.step != 0:
            return


@helper(types.void, CYCLE, STATE, WALK)
def move(cycle, state, control):  # type: ignore[no-untyped-def]
    """Make the chosen move, and make its reverse tabu; undo it if it leads to a deadlock."""
    c = control[0]
    u, v, step = c.u, c.v, 1 if c.step > 0 else -1
    node, until = state.node, state.until
    end = c.moves + c.tenure + random_below(c, c.spread + 1)
    x = u
    while True:
        if step > 0 and x != u:
            until[u * c.columns + node[x].rank] = end
        if step < 0 and x != v:
            until[x * c.columns + node[v].rank] = end
        if x == v:
            break
        x = node[x].after
    first, last = node[u].after, node[v].before
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
    """Make moves until a limit; return `RUNNING`, `STUCK` or `DONE`."""
    c = control[0]
    # invariant: `value` is the least period of the present orders, at which `start` keeps all arcs
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
            keep_best(state.node)
    return RUNNING
