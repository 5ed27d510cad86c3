"""N7 tabu search on machine orders, compiled: feasible moves, their estimates, and the walk.

A move takes one operation of a critical block to another place of the block. To change what moves
there are, edit three things: the members of `Move`, `candidates` (for which places x of a block a
member is tried) and `places_of` (what it does at x). Everything below `consider` follows: safety,
estimate, memory, tabu list. Helpers take a constant `general`, see `state`.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import numpy as np

from optsched.kernels.compile import BOOL, INT, entry, helper
from optsched_solvers._random import random_below
from optsched_solvers.shop.tabu.state import (
    NO_LIMIT,
    STATE,
    arc_head,
    arc_tail,
    level_behind,
    machine_head,
    makespan_of,
    move,
    setup_of,
)


class Move(IntEnum):
    """What is done with place x of a critical block (Zhang, Li, Guan & Rao 2007: N7)."""

    BEHIND_LAST = 0
    """x right behind the last place."""
    BEFORE_FIRST = 1
    """x right before the first place."""
    FIRST_BEHIND = 2
    """The first place right behind x."""
    LAST_BEFORE = 3
    """The last place right before x."""
    TO_FAMILY = 4
    """x right before the next place of its family, where setups count."""
    FROM_FAMILY = 5
    """The next place of the family of x right behind x, where setups count."""
    SWAP = 6
    """x behind its neighbor: gains nothing by itself, tried if no other move is left."""


RUNNING, STUCK, DONE = 0, 1, 2
"""What a walk returns: moves used up; no move left; patience over or target met."""

REACH: Final = 300
"""How many operations a move passes at most in longer blocks."""


# which moves there are


@helper(counted=False, inline=True)
def candidates(kind, size, to_front, to_back):  # type: ignore[no-untyped-def]
    """First and last place x at which a kind of move is tried in a block of `size` places.

    Never the same order by two kinds: the first behind the second is the second before the first.
    """
    low, high = 2, size - 1
    if kind == Move.BEHIND_LAST:
        low = 1
    elif kind == Move.BEFORE_FIRST and (size > 2 or not to_back):
        high = size
    elif kind == Move.FIRST_BEHIND:
        low = 3
    elif kind == Move.LAST_BEFORE:
        high = size - 2
    elif kind == Move.SWAP:
        low, high = 1, size - 1
    elif kind >= Move.TO_FAMILY:
        low, high = 1, size - 2
    ends_at_back = kind == Move.BEHIND_LAST or kind == Move.LAST_BEFORE
    if size > REACH:  # estimates are quadratic in the length of a block
        if ends_at_back:
            low = max(low, size - REACH)
        elif kind < Move.LAST_BEFORE:
            high = min(high, REACH)
    if kind < Move.TO_FAMILY and not (to_back if ends_at_back else to_front):
        high = low - 1
    return low, high


@helper(counted=False, inline=True)
def places_of(s, kind, x, size):  # type: ignore[no-untyped-def]
    """Places i..j of the block that a move reorders, and its step (0: no such move).

    `step` 1 puts place i right behind place j, -1 place j right before place i.
    """
    if kind == Move.BEHIND_LAST:
        return x, size, 1
    if kind == Move.BEFORE_FIRST:
        return 1, x, -1
    if kind == Move.FIRST_BEHIND:
        return 1, x, 1
    if kind == Move.LAST_BEFORE:
        return x, size, -1
    if kind == Move.SWAP:
        return x, x + 1, 1
    family = s.op[s.block[x].op].family
    for y in range(x + 1, min(size, x + REACH) + 1):
        if s.op[s.block[y].op].family == family:
            if y == x + 1:
                break
            return (x, y - 1, 1) if kind == Move.TO_FAMILY else (x + 1, y, -1)
    return x, x, 0


# whether a move is possible, and what it gives


@helper(counted=False, inline=True)
def right_is_safe(general, s, u, v):  # type: ignore[no-untyped-def]
    """Sufficient for no path from an arc successor y of u to v.

    With a path tail(y) >= least(y) + tail(v).
    """
    q = s.time[v].tail
    if not general:
        y = s.link[u].job_after
        return q + s.time[y].duration > s.time[y].tail and y != v
    for e in range(s.op[u].arcs_out, s.op[u].arcs_out_end):
        y = s.arc[e].other
        if y == v or q + s.op[y].least <= s.time[y].tail:
            return False
    return True


@helper(counted=False, inline=True)
def left_is_safe(general, s, u, v):  # type: ignore[no-untyped-def]
    """Sufficient for no path from u to an arc predecessor y of v.

    With a path head(y) >= head(u) + least(u).
    """
    end = s.time[u].end
    if not general:
        y = s.link[v].job_before
        return end > s.time[y].end - s.time[y].duration and y != u
    r = end - s.time[u].duration
    for e in range(s.op[v].arcs_in, s.op[v].arcs_in_end):
        y = s.arc[e].other
        if y == u or r + s.op[u].least <= s.time[y].end - s.time[y].duration:
            return False
    return True


@helper(counted=False, inline=True)
def moved_place(i, j, step, t):  # type: ignore[no-untyped-def]
    """The place of which the operation comes to place i + t when a move reorders i..j."""
    x = i + t + step
    if x > j:
        x = i
    elif x < i:
        x = j
    return x


@helper(counted=False, inline=True)
def estimate(general, s, i, j, step):  # type: ignore[no-untyped-def]
    """Longest path through block places i..j after a move (Balas & Vazacopoulos 1998, generalized).

    A lower bound of the makespan after it. Gives up above the best estimate so far.
    """
    block, cutoff = s.block, s.control[0].estimate
    size = j - i + 1
    # invariant: head is the new head of the operation at place x, if only its machine predecessor
    # in the new order and its old arc predecessors count
    head = block[i - 1].old_end
    last = block[i - 1].op
    for t in range(size):
        x = moved_place(i, j, step, t)
        if general:
            head += setup_of(s, last, block[x].op)
            last = block[x].op
        head = max(head, block[x].head)
        block[x].new_head = head
        head += block[x].duration
    value = 0
    tail = block[j + 1].old_tail
    last = block[j + 1].op
    for t in range(size - 1, -1, -1):  # the same with tails, from the back
        x = moved_place(i, j, step, t)
        if general:
            tail += setup_of(s, block[x].op, last)
            last = block[x].op
        tail = max(tail + block[x].duration, block[x].tail)
        value = max(value, block[x].new_head + tail)
        if value > cutoff:
            break
    return value


@helper(counted=False, inline=True)
def memory_fits(s, i, j, step):  # type: ignore[no-untyped-def]
    """Whether block places i..j keep the bytes within the limit after a move."""
    level = s.time[s.block[i].op].level
    for t in range(j - i + 1):
        level = level_behind(s.op[s.block[moved_place(i, j, step, t)].op], level)
        if level < 0:
            return False
    return True


# the tabu list


@helper(counted=False, inline=True)
def is_tabu(s, i, j, step):  # type: ignore[no-untyped-def]
    """Whether a move of block places i..j restores a machine arc that was reversed lately.

    Arcs share entries of `until` (a power of two) where there are more arcs; few are ever alive.
    """
    c, block, mask = s.control[0], s.block, len(s.until) - 1
    if step == 1:
        column = s.link[block[i].op].rank
        for x in range(i + 1, j + 1):
            if s.until[(block[x].op * c.columns + column) & mask] > c.moves:
                return True
    else:
        row = block[j].op * c.columns
        for x in range(i, j):
            if s.until[(row + s.link[block[x].op].rank) & mask] > c.moves:
                return True
    return False


@helper(counted=False, inline=True)
def forbid(s, u, v, step, date):  # type: ignore[no-untyped-def]
    """Forbid the machine arcs that moving u behind v (or v before u) reverses, until `date`."""
    columns, i, mask = s.control[0].columns, u, len(s.until) - 1
    if step == 1:
        row = u * columns
        while i != v:
            i = np.int64(s.link[i].machine_after)
            s.until[(row + s.link[i].rank) & mask] = date
    else:
        column = s.link[v].rank
        while i != v:
            s.until[(i * columns + column) & mask] = date
            i = np.int64(s.link[i].machine_after)


# choosing


@helper(counted=False, inline=True)
def consider(general, s, i, j, step):  # type: ignore[no-untyped-def]
    """Keep a move of block places i..j if it is better than the best one so far, ties at random."""
    c, u, v = s.control[0], s.block[i].op, s.block[j].op
    if not (right_is_safe(general, s, u, v) if step == 1 else left_is_safe(general, s, u, v)):
        return
    value = estimate(general, s, i, j, step)
    if value > c.estimate or (general and not memory_fits(s, i, j, step)):
        return
    if value >= c.best and is_tabu(s, i, j, step):
        c.tabus += 1  # if all moves are tabu, a random one is taken
        if c.equal > 0 or random_below(c, c.tabus) > 0:
            return
    else:
        c.equal = c.equal + 1 if value == c.estimate else 1
        if c.equal > 1 and random_below(c, c.equal) > 0:
            return
        c.estimate = value
    c.u, c.v, c.step = u, v, step


@helper(counted=False, inline=True)
def load_block(general, s, first, last):  # type: ignore[no-untyped-def]
    """Copy what estimates need of path[first..last] to `State.block`."""
    path, block = s.path, s.block
    size = last - first + 1
    block[0].op = s.link[path[first]].machine_before
    block[size + 1].op = s.link[path[last]].machine_after
    for x in range(size + 2):
        if 0 < x <= size:
            i = path[first + x - 1]
            block[x].op = i
            block[x].head = arc_head(general, s, i)
            block[x].tail = arc_tail(general, s, i)
        time = s.time[block[x].op]
        block[x].duration = time.duration
        block[x].old_tail = time.tail
        block[x].old_end = time.end


@helper(counted=False, inline=True)
def choose(general, s, length, only_swaps):  # type: ignore[no-untyped-def]
    """Best move inside the blocks of the critical path, into the control."""
    c, path = s.control[0], s.path
    c.estimate = NO_LIMIT
    c.equal = c.tabus = c.step = 0
    first_kind, last_kind = Move.BEHIND_LAST, Move.LAST_BEFORE
    if only_swaps:
        first_kind, last_kind = Move.SWAP, Move.SWAP
    elif general and c.has_setups:
        last_kind = Move.FROM_FAMILY
    first = 0
    while first < length:
        last = first
        while (
            last + 1 < length
            and s.link[path[last + 1]].machine_before == path[last]
            and machine_head(general, s, path[last + 1])
            == s.time[path[last + 1]].end - s.time[path[last + 1]].duration
        ):
            last += 1
        if last > first:
            load_block(general, s, first, last)
            # in a classic shop nothing is gained at the front of the first block, nor at the back
            # of the last one (Nowicki & Smutnicki 1996); releases and setups break that
            to_front, to_back = general or first > 0, general or last + 1 < length
            size = last - first + 1
            for kind in range(first_kind, last_kind + 1):
                low, high = candidates(kind, size, to_front, to_back)
                for x in range(low, high + 1):
                    i, j, step = places_of(s, kind, x, size)
                    if step != 0:
                        consider(general, s, i, j, step)
        first = last + 1


@helper(counted=False, inline=True)
def critical_path(general, s):  # type: ignore[no-untyped-def]
    """One random critical path into `State.path`; returns its length."""
    c, path = s.control[0], s.path
    k = random_below(c, len(s.ends))
    while s.time[s.ends[k]].end != c.value:
        k += 1
        if k == len(s.ends):
            k = 0
    i = s.ends[k]
    length = 0
    while True:  # from the end to the start; every operation starts when the next one ends
        path[length] = i
        length += 1
        r = s.time[i].end - s.time[i].duration
        if general:
            if r == s.op[i].release:
                break
            found, following = 0, i
            if machine_head(general, s, i) == r:
                found, following = 1, np.int64(s.link[i].machine_before)
            for e in range(s.op[i].arcs_in, s.op[i].arcs_in_end):
                if s.time[s.arc[e].other].end + s.arc[e].weight == r:
                    found += 1
                    if found == 1 or random_below(c, found) == 0:
                        following = s.arc[e].other
            i = following
        else:
            if r == 0:
                break
            on_machine = np.int64(s.link[i].machine_before)
            in_job = np.int64(s.link[i].job_before)
            by_machine = s.time[on_machine].end == r
            if by_machine and s.time[in_job].end == r:
                by_machine = random_below(c, 2) == 0
            i = on_machine if by_machine else in_job
    for k in range(length >> 1):
        path[k], path[length - 1 - k] = path[length - 1 - k], path[k]
    return length


@helper(counted=False, inline=True)
def _walk(general, s, moves):  # type: ignore[no-untyped-def]
    c = s.control[0]
    # invariant: links, order, heads, tails and levels are exact for the present schedule, whose
    # makespan is c.value; c.best and best_order belong to the best schedule since `load`
    for _ in range(moves):
        if c.stale >= c.patience or c.best <= c.target:
            return DONE
        length = critical_path(general, s)
        for only_swaps in range(2):
            choose(general, s, length, only_swaps)
            if c.step != 0:
                break
        u, v, step = c.u, c.v, c.step
        if step == 0:
            return STUCK
        forbid(s, u, v, step, c.moves + c.tenure + random_below(c, c.spread + 1))
        move(general, s, u, v, step)
        c.value = makespan_of(s)
        c.moves += 1
        c.stale += 1
        if c.value < c.best:
            c.best = c.value
            c.stale = 0
            for k in range(len(s.order)):
                s.best_order[k] = s.order[k]
    return RUNNING


@entry(INT, BOOL, STATE, INT, counted=False)
def walk(general, s, moves):  # type: ignore[no-untyped-def]
    """Up to `moves` tabu moves, with machine code of its own for classic chains.

    Returns RUNNING, STUCK or DONE.
    """
    if general:
        return _walk(True, s, moves)
    return _walk(False, s, moves)
