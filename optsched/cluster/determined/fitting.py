"""Which agents a task is put on; kernels.

Source: determined-ai/determined, ``master/internal/rm/agentrm/fitting.go``.
"""

from __future__ import annotations

from typing import Final

from numba import types

from optsched.cluster.determined.columns import COLUMNS
from optsched.kernels.compile import INT, helper

_ALL: Final = 2**62


@helper(types.float64, INT, INT, INT, INT, INT, INT, counted=False)
def score(best, slots, agent_slots, used, zero_slots, zero_used):  # type: ignore[no-untyped-def]
    """Determined's score of an agent that takes work, 0 (worst) to 1."""
    total, free = agent_slots, agent_slots - used
    if used == 0 and slots == 0:
        if zero_slots == 0:
            return 0.0
        total, free = zero_slots, zero_slots - zero_used
    if best == 1:
        return 1.0 / (1.0 + free)
    return free / total if total > 0 else 0.0


@helper(INT, COLUMNS, INT, INT, counted=False)
def _is_barred(c, k, a):  # type: ignore[no-untyped-def]
    """1 if tasks of kind k must not be put on agent a."""
    row = c.kind[k].barred
    return 1 if row >= 0 and c.barred[row * len(c.node) + a] else 0


@helper(INT, COLUMNS, INT, INT, counted=False)
def _on_one(c, k, first):  # type: ignore[no-untyped-def]
    """The agent of the best score that holds all of it, the first on the ring; -1: none."""
    n, slots, found, most = len(c.node), c.kind[k].slots, -1, -1.0
    for i in range(n):
        a = c.ring[first + i - n if first + i >= n else first + i]
        node = c.node[a]
        if node.free < slots or node.takes == 0 or (slots == 0 and node.free_units <= 0):
            continue
        if _is_barred(c, k, a) == 1:
            continue
        used, busy = node.capacity - node.free, node.units - node.free_units
        own = score(c.best[0], slots, node.capacity, used, node.units, busy)
        if own > most:
            found, most = a, own
    return found


@helper(INT, COLUMNS, INT, INT, counted=False)
def _largest_idle(c, k, below):  # type: ignore[no-untyped-def]
    """The largest size, less than `below`, of agents none of whose slots is used; 0: none."""
    size = 0
    for a in range(len(c.node)):
        node = c.node[a]
        if size < node.free < below and node.free == node.capacity and node.takes == 1:
            size = node.free if _is_barred(c, k, a) == 0 else size
    return size


@helper(INT, COLUMNS, INT, INT, INT, INT, INT, counted=False)
def _idle(c, k, first, size, most, at):  # type: ignore[no-untyped-def]
    """Put at most so many idle agents of a size, in the order of the ring, at `fit[at]`."""
    n, found = len(c.node), 0
    for i in range(n):
        if found == most:
            break
        a = c.ring[first + i - n if first + i >= n else first + i]
        node = c.node[a]
        fits = node.free == size and node.capacity == size and node.takes == 1
        if fits and _is_barred(c, k, a) == 0:
            c.fit[at + found].where, c.fit[at + found].count = a, size
            found += 1
    return found


@helper(INT, COLUMNS, INT, counted=False)
def _pieces(c, slots):  # type: ignore[no-untyped-def]
    """The emptiest agents wholly, until the rest fits on one: then on the fullest such one."""
    found, last, below = 0, -1, _ALL
    while slots > 0:
        best = most = -1
        for a in range(len(c.node)):
            free = c.node[a].free
            if c.node[a].takes == 0 or free <= 0 or free > below or (free == below and a <= last):
                continue
            if free >= slots and (best < 0 or free < c.node[best].free):
                best = a
            if most < 0 or free > c.node[most].free:
                most = a
        if most < 0:
            return 0
        if best < 0:
            best = last = most
            below = c.node[most].free
        count = min(slots, c.node[best].free)
        c.fit[found].where, c.fit[found].count = best, count
        found += 1
        slots -= count
    return found


@helper(INT, COLUMNS, INT, INT, counted=False)
def find(c, k, first):  # type: ignore[no-untyped-def]
    """The number of agents that a task of kind k is put on, written to `fit`; 0: it fits nowhere.

    One agent; else idle agents of one size that divides the request, the largest size first; else,
    if sizes may be mixed, idle agents from the largest size down, without going back.
    """
    slots = c.kind[k].slots
    if c.kind[k].pieces == 1:
        return _pieces(c, slots)
    one = _on_one(c, k, first)
    if one >= 0:
        c.fit[0].where, c.fit[0].count = one, slots
        return 1
    if c.kind[k].single == 1 or slots <= 1:
        return 0
    size = _largest_idle(c, k, _ALL)
    while size > 0:
        if slots % size == 0 and _idle(c, k, first, size, slots // size, 0) * size == slots:
            return slots // size
        size = _largest_idle(c, k, size)
    if c.pool[0].heterogeneous == 0:
        return 0
    found, size = 0, _largest_idle(c, k, _ALL)
    while size > 0:
        rows = _idle(c, k, first, size, slots // size, found)
        found += rows
        slots -= rows * size
        if slots == 0:
            return found
        size = _largest_idle(c, k, size)
    return 0


@helper(INT, COLUMNS, counted=False)
def reset(c):  # type: ignore[no-untyped-def]
    """The agents as they are."""
    for a in range(len(c.node)):
        c.node[a].free, c.node[a].free_units = c.given[a].free, c.given[a].free_units
        c.node[a].capacity, c.node[a].units = c.given[a].capacity, c.given[a].units
        c.node[a].takes = c.given[a].takes
    c.pool[0].undone = 0
    return 0


@helper(INT, COLUMNS, INT, counted=False)
def put(c, rows):  # type: ignore[no-untyped-def]
    """Book the rows of `fit`."""
    for i in range(rows):
        node = c.node[c.fit[i].where]
        if c.fit[i].count > 0:
            node.free -= c.fit[i].count
        else:
            node.free_units -= 1
    return rows


@helper(INT, COLUMNS, INT, counted=False)
def take(c, i):  # type: ignore[no-untyped-def]
    """Give back what task i holds, as far as agents show it as used; 1 if that is anything."""
    before, row = c.pool[0].undone, c.task[i].held
    while row >= 0:
        a, slots = c.held[row].where, c.held[row].count
        node = c.node[a]
        back = min(slots, node.capacity - node.free)
        if back > 0 or (slots == 0 and node.units > node.free_units):
            node.free += back
            node.free_units += 1 if slots == 0 else 0
            c.undo[c.pool[0].undone].where, c.undo[c.pool[0].undone].count = a, back
            c.pool[0].undone += 1
        row = c.held[row].following
    return 1 if c.pool[0].undone > before else 0


@helper(INT, COLUMNS, INT, counted=False)
def undo(c, keep):  # type: ignore[no-untyped-def]
    """Take back what was given back, but for the first `keep` rows of it."""
    for i in range(keep, c.pool[0].undone):
        node = c.node[c.undo[i].where]
        node.free -= c.undo[i].count
        node.free_units -= 1 if c.undo[i].count == 0 else 0
    c.pool[0].undone = keep
    return 0
