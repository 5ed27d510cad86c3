# ruff: noqa: I001  (constants side by side, not one per line)
"""Propagation of windows and orders to the fixpoint, for kernels that search.

All functions are compiled into the kernel that calls them. They return False as soon as the target
is refuted; then `forget` drops what was still to be looked at.
"""

from __future__ import annotations

from optsched.kernels.compile import helper
from optsched_solvers.shop.proof.state import (
    AFTER, AFTER_OP, AFTER_PTR, AFTER_WEIGHT, BEFORE, BEFORE_OP, BEFORE_PTR, BEFORE_WEIGHT, BYTES,
    BY_DEADLINE, BY_HEAD, EST, EST_LEVEL, FALSE, FIRST, FREER, FRESH, FRESH_HEAD, FRESH_SIZE, GAP,
    HEAVY, HEAVY_HEAD, HEAVY_SIZE, HOLDER, IN_HEAVY, IN_LIGHT, LENGTH, LEVEL, LIGHT, LIGHT_HEAD,
    LIGHT_SIZE, LST, LST_LEVEL, MACHINE, MATRIX, MEMORY, NEGATION, N_OPEN, N_PAIRS, ON, OPEN,
    OPERATION, PAIRS, PART, PART_END, PLACE, QUEUE, QUEUED, QUEUE_HEAD, QUEUE_SIZE, SETUPS, SIZE,
    SLOT_OF, SLOT_OPEN, SLOT_PTR, TRAIL, TRUE, WATCHED, WORKSPACE,
)  # fmt: skip
from optsched_solvers.shop.proof.edge_finding import (
    DEADLINE, FAR, HEAD, LATE_FIRST, NEW, PROCESS, head_rules,
)  # fmt: skip

# what has changed: earliest starts, latest starts of operations, orders on a machine
_STARTS, _ENDS, _ORDERS = 1, 2, 4
_WINDOWS = 3
EVERYTHING = 7


@helper(counted=False)
def raise_start(s, i, value):  # type: ignore[no-untyped-def]
    """Operation i starts no sooner than value."""
    op, number = s.op, s.number
    old = op[EST, i]
    if value <= old:
        return True
    if value > op[LST, i]:
        return False
    number = s.number
    if number[LEVEL] > 0 and op[EST_LEVEL, i] != number[LEVEL]:
        s.trail[0, number[TRAIL]] = i
        s.trail[1, number[TRAIL]] = old
        number[TRAIL] += 1
        op[EST_LEVEL, i] = number[LEVEL]
    op[EST, i] = value
    if op[QUEUED, i] == 0:
        _push(s.op, QUEUE, number, QUEUE_HEAD, QUEUE_SIZE, i)
    op[QUEUED, i] |= _STARTS
    return True


@helper(counted=False)
def lower_start(s, i, value):  # type: ignore[no-untyped-def]
    """Operation i starts no later than value."""
    op = s.op
    old = op[LST, i]
    if value >= old:
        return True
    if value < op[EST, i]:
        return False
    number = s.number
    if number[LEVEL] > 0 and op[LST_LEVEL, i] != number[LEVEL]:
        s.trail[0, number[TRAIL]] = op.shape[1] + i
        s.trail[1, number[TRAIL]] = old
        number[TRAIL] += 1
        op[LST_LEVEL, i] = number[LEVEL]
    op[LST, i] = value
    if op[QUEUED, i] == 0:
        _push(s.op, QUEUE, number, QUEUE_HEAD, QUEUE_SIZE, i)
    op[QUEUED, i] |= _ENDS
    return True


@helper(counted=False)
def decide(s, m):  # type: ignore[no-untyped-def]
    """Literal m is true; its consequences follow in `fixpoint`."""
    if s.value[m]:
        return s.value[m] == TRUE
    opposite = s.literal[NEGATION, m]
    number = s.number
    if number[LEVEL] > 0:
        s.trail[0, number[TRAIL]] = 2 * s.op.shape[1] + m
        number[TRAIL] += 1
    s.value[m], s.value[opposite] = TRUE, FALSE
    r = s.literal[ON, m]
    s.machine[N_OPEN, r] -= 1
    number[N_PAIRS] -= 1
    s.slot[SLOT_OPEN, s.literal[BEFORE, m]] -= 1
    s.slot[SLOT_OPEN, s.literal[AFTER, m]] -= 1
    pair = min(m, opposite)  # leaves the sparse set: changes place with the last open pair
    here = s.literal[PLACE, pair]
    end = s.machine[PAIRS, r] + s.machine[N_OPEN, r]
    last = s.literal[OPEN, end]
    s.literal[OPEN, here], s.literal[OPEN, end] = last, pair
    s.literal[PLACE, last], s.literal[PLACE, pair] = here, end
    _push(s.literal, FRESH, number, FRESH_HEAD, FRESH_SIZE, m)
    return True


@helper(counted=False)
def undo(s, mark):  # type: ignore[no-untyped-def]
    """Take back everything on the trail from mark on."""
    n = s.op.shape[1]
    for t in range(s.number[TRAIL] - 1, mark - 1, -1):
        what = s.trail[0, t]
        if what < n:
            s.op[EST, what] = s.trail[1, t]
        elif what < 2 * n:
            s.op[LST, what - n] = s.trail[1, t]
        else:
            m = what - 2 * n
            s.value[m] = s.value[s.literal[NEGATION, m]] = 0
            s.machine[N_OPEN, s.literal[ON, m]] += 1
            s.slot[SLOT_OPEN, s.literal[BEFORE, m]] += 1
            s.slot[SLOT_OPEN, s.literal[AFTER, m]] += 1
            s.number[N_PAIRS] += 1
    s.number[TRAIL] = mark


@helper(counted=False)
def forget(s):  # type: ignore[no-untyped-def]
    """Empty all queues after a refutation."""
    number = s.number
    while number[QUEUE_SIZE]:
        s.op[QUEUED, _pop(s.op, QUEUE, number, QUEUE_HEAD, QUEUE_SIZE)] = 0
    number[FRESH_SIZE] = 0
    while number[LIGHT_SIZE]:
        s.machine[IN_LIGHT, _pop(s.machine, LIGHT, number, LIGHT_HEAD, LIGHT_SIZE)] = 0
    while number[HEAVY_SIZE]:
        s.machine[IN_HEAVY, _pop(s.machine, HEAVY, number, HEAVY_HEAD, HEAVY_SIZE)] = 0


@helper(counted=False)
def fixpoint(s):  # type: ignore[no-untyped-def]
    """Propagate until nothing changes: orders, arcs, cheap machine rules, at last costly ones."""
    number = s.number
    while True:
        if number[FRESH_SIZE]:
            if not _follow_order(s, _pop(s.literal, FRESH, number, FRESH_HEAD, FRESH_SIZE)):
                return False
        elif number[QUEUE_SIZE]:
            if not _follow_arcs(s, _pop(s.op, QUEUE, number, QUEUE_HEAD, QUEUE_SIZE)):
                return False
        elif number[LIGHT_SIZE]:
            r = _pop(s.machine, LIGHT, number, LIGHT_HEAD, LIGHT_SIZE)
            sides = s.machine[IN_LIGHT, r]
            s.machine[IN_LIGHT, r] = 0
            if sides & _WINDOWS and not _pairs(s, r):
                return False
            if sides & _ORDERS and not _memory(s, r):
                return False
            if sides & (_STARTS | _ORDERS) and not _sums_before(s, r):
                return False
            if sides & (_ENDS | _ORDERS) and not _sums_behind(s, r):
                return False
        elif number[HEAVY_SIZE]:
            r = _pop(s.machine, HEAVY, number, HEAVY_HEAD, HEAVY_SIZE)
            s.machine[IN_HEAVY, r] = 0
            if not _windows(s, r):
                return False
        else:
            return True


@helper(counted=False)
def _push(ring, row, number, head, size, value):  # type: ignore[no-untyped-def]
    at = number[head] + number[size]
    if at >= ring.shape[1]:
        at -= ring.shape[1]
    ring[row, at] = value
    number[size] += 1


@helper(counted=False)
def _pop(ring, row, number, head, size):  # type: ignore[no-untyped-def]
    value = ring[row, number[head]]
    number[head] += 1
    if number[head] == ring.shape[1]:
        number[head] = 0
    number[size] -= 1
    return value


@helper(counted=False)
def touch(s, r, what):  # type: ignore[no-untyped-def]
    """Machine r is to be looked at again: what changed of it, as a sum of the bits above."""
    if s.machine[IN_LIGHT, r] == 0:
        _push(s.machine, LIGHT, s.number, LIGHT_HEAD, LIGHT_SIZE, r)
    s.machine[IN_LIGHT, r] |= what
    if what & _WINDOWS and s.machine[IN_HEAVY, r] == 0:
        s.machine[IN_HEAVY, r] = 1
        _push(s.machine, HEAVY, s.number, HEAVY_HEAD, HEAVY_SIZE, r)


@helper(counted=False)
def _follow_order(s, m):  # type: ignore[no-untyped-def]
    """What a literal implies: two windows, transitive orders on its machine, nogoods."""
    first, second = s.literal[BEFORE, m], s.literal[AFTER, m]
    i, k = s.slot[OPERATION, first], s.slot[OPERATION, second]
    if not raise_start(s, k, s.op[EST, i] + s.literal[GAP, m]):
        return False
    if not lower_start(s, i, s.op[LST, k] - s.literal[GAP, m]):
        return False
    r = s.literal[ON, m]
    n, at = s.machine[SIZE, r], s.machine[MATRIX, r]
    a, b = first - s.machine[FIRST, r], second - s.machine[FIRST, r]
    before, behind = at + a * n, at + b * n  # rows of a and b: FALSE is "the column first"
    value = s.value
    for c in range(n):
        if value[before + c] == FALSE and value[behind + c] != FALSE:
            if not decide(s, at + c * n + b):
                return False
        elif value[behind + c] == TRUE and value[before + c] != TRUE and not decide(s, before + c):
            return False
    touch(s, r, _ORDERS)
    return _watch(s, m)


@helper(counted=False)
def _watch(s, m):  # type: ignore[no-untyped-def]
    """Literal m is true: nogoods that watch it watch another, or make their last one false."""
    previous = -1
    watch = s.literal[WATCHED, m]
    while watch >= 0:
        following = s.next_watch[watch]
        k = watch >> 1
        at, end = s.nogood_ptr[k], s.nogood_ptr[k + 1]
        mine = at + (watch & 1)
        other = s.nogood[at + 1 - (watch & 1)]
        moved = False
        if s.value[other] != FALSE:
            for x in range(at + 2, end):
                if s.value[s.nogood[x]] != TRUE:
                    s.nogood[mine], s.nogood[x] = s.nogood[x], m
                    s.next_watch[watch] = s.literal[WATCHED, s.nogood[mine]]
                    s.literal[WATCHED, s.nogood[mine]] = watch
                    moved = True
                    break
            if not moved and not decide(s, s.literal[NEGATION, other]):
                return False
        if not moved:
            previous = watch
        elif previous < 0:
            s.literal[WATCHED, m] = following
        else:
            s.next_watch[previous] = following
        watch = following
    return True


@helper(counted=False)
def _follow_arcs(s, i):  # type: ignore[no-untyped-def]
    """The window of i changed: its neighbours by arcs, and its machines."""
    changed = s.op[QUEUED, i]
    s.op[QUEUED, i] = 0
    if changed & _STARTS:
        start = s.op[EST, i]
        for e in range(s.op[AFTER_PTR, i], s.op[AFTER_PTR, i + 1]):
            if not raise_start(s, s.arc[AFTER_OP, e], start + s.arc[AFTER_WEIGHT, e]):
                return False
    if changed & _ENDS:
        start = s.op[LST, i]
        for e in range(s.op[BEFORE_PTR, i], s.op[BEFORE_PTR, i + 1]):
            if not lower_start(s, s.arc[BEFORE_OP, e], start - s.arc[BEFORE_WEIGHT, e]):
                return False
    for x in range(s.op[SLOT_PTR, i], s.op[SLOT_PTR, i + 1]):
        touch(s, s.slot[MACHINE, s.slot[SLOT_OF, x]], changed)
    return True


@helper(counted=False)
def _pairs(s, r):  # type: ignore[no-untyped-def]
    """Immediate selection: an order that no longer fits into both windows is excluded."""
    n, at, first = s.machine[SIZE, r], s.machine[MATRIX, r], s.machine[FIRST, r]
    if s.machine[N_OPEN, r] == 0:
        return True
    t, early, late, length = s.scratch, 0, 1, 2
    for a in range(n):
        i = s.slot[OPERATION, first + a]
        t[early, a], t[late, a] = s.op[EST, i], s.op[LST, i]
        t[length, a] = s.slot[LENGTH, first + a]
    for a in range(n):
        if s.slot[SLOT_OPEN, first + a] == 0:
            continue
        row = at + a * n
        end = t[early, a] + t[length, a]
        for b in range(a + 1, n):
            if s.value[row + b]:
                continue
            forth = end <= t[late, b]
            back = t[early, b] + t[length, b] <= t[late, a]
            if s.machine[SETUPS, r]:
                forth = t[early, a] + s.literal[GAP, row + b] <= t[late, b]
                back = t[early, b] + s.literal[GAP, at + b * n + a] <= t[late, a]
            if forth and back:
                continue
            if not forth and not back:
                return False
            decide(s, row + b if forth else at + b * n + a)
    return True


@helper(counted=False)
def _sums_before(s, r):  # type: ignore[no-untyped-def]
    """Operations wait for all who precede them, one after the other (Jackson's sum)."""
    n, at, first = s.machine[SIZE, r], s.machine[MATRIX, r], s.machine[FIRST, r]
    t, key, total, apart = s.scratch, 0, 1, 2  # apart: by gaps of single pairs, no part of sums
    for a in range(n):
        t[key, a] = s.op[EST, s.slot[OPERATION, first + a]]
        t[total, a] = t[apart, a] = -FAR
    _sort(t, key, s.slot, BY_HEAD, first, n)
    for x in range(n):
        a = s.slot[BY_HEAD, first + x]
        head, row, length = t[key, a], at + a * n, s.slot[LENGTH, first + a]
        start = max(head, t[total, a], t[apart, a])
        if start > head and not raise_start(s, s.slot[OPERATION, first + a], start):
            return False
        for b in range(n):
            later = max(t[total, b], head) + length
            t[total, b] = later if s.value[row + b] == TRUE else t[total, b]
        if s.machine[SETUPS, r]:
            for b in range(n):
                if s.value[row + b] == TRUE:
                    t[apart, b] = max(t[apart, b], start + s.literal[GAP, row + b])
    return True


@helper(counted=False)
def _sums_behind(s, r):  # type: ignore[no-untyped-def]
    """Operations leave time for all who follow them; `_sums_before` mirrored."""
    n, at, first = s.machine[SIZE, r], s.machine[MATRIX, r], s.machine[FIRST, r]
    t, key, total, apart = s.scratch, 0, 1, 2
    for a in range(n):
        t[key, a] = s.op[LST, s.slot[OPERATION, first + a]] + s.slot[LENGTH, first + a]
        t[total, a] = t[apart, a] = FAR
    _sort(t, key, s.slot, BY_DEADLINE, first, n)
    for x in range(n - 1, -1, -1):
        b = s.slot[BY_DEADLINE, first + x]
        deadline, row, length = t[key, b], at + b * n, s.slot[LENGTH, first + b]
        end = min(deadline, t[total, b], t[apart, b])
        if end < deadline and not lower_start(s, s.slot[OPERATION, first + b], end - length):
            return False
        for a in range(n):
            sooner = min(t[total, a], deadline) - length
            t[total, a] = sooner if s.value[row + a] == FALSE else t[total, a]
        if s.machine[SETUPS, r]:
            for a in range(n):
                if s.value[row + a] == FALSE:
                    late = end - length - s.literal[GAP, at + a * n + b]
                    t[apart, a] = min(t[apart, a], late + s.slot[LENGTH, first + a])
    return True


@helper(counted=False)
def _memory(s, r):  # type: ignore[no-untyped-def]
    """Bytes that are certainly held while an operation runs; orders that would overflow it."""
    if s.machine[PART, r] == s.machine[PART_END, r] and s.machine[MEMORY, r] >= FAR:
        return True
    n, at, first = s.machine[SIZE, r], s.machine[MATRIX, r], s.machine[FIRST, r]
    t, if_before, if_after = s.scratch, 0, 1
    for k in range(n):
        level = s.slot[WORKSPACE, first + k]
        for u in range(n):
            t[if_before, u] = t[if_after, u] = 0
        for x in range(s.machine[PART, r], s.machine[PART_END, r]):
            i, f, size = s.part[HOLDER, x], s.part[FREER, x], s.part[BYTES, x]
            if i < 0:  # freed for nobody in particular
                if f == k or s.value[at + k * n + f] == TRUE:
                    continue
                level -= size
                t[if_after, f] += size
                continue
            holds = i == k or s.value[at + i * n + k] == TRUE
            keeps = f < 0 or f == k or s.value[at + k * n + f] == TRUE
            if holds and keeps:
                level += size
            elif holds:
                t[if_after, f] += size
            elif keeps:
                t[if_before, i] += size
        free = s.machine[MEMORY, r] - level
        if free < 0:
            return False
        for u in range(n):
            if u == k:
                continue
            if t[if_before, u] > free and not decide(s, at + k * n + u):
                return False
            if t[if_after, u] > free and not decide(s, at + u * n + k):
                return False
    return True


@helper(counted=False)
def _windows(s, r):  # type: ignore[no-untyped-def]
    """Edge finding and not-first, not-last on machine r, forwards and backwards.

    Only for operations with an open pair: where a place is known, the sums of predecessors and
    successors say as much.
    """
    n, first = s.machine[SIZE, r], s.machine[FIRST, r]
    if s.machine[N_OPEN, r] == 0:
        return True
    t, early, late, column, who = s.scratch, 6, 7, 8, 9
    for mirrored in range(2):
        for a in range(n):
            i = s.slot[OPERATION, first + a]
            t[early, a] = s.op[EST, i]
            t[late, a] = s.op[LST, i] + s.slot[LENGTH, first + a]
        _sort(t, early, s.slot, BY_HEAD, first, n)
        _sort(t, late, s.slot, BY_DEADLINE, first, n)
        loose = 0
        for x in range(n):
            a = s.slot[BY_DEADLINE, first + n - 1 - x] if mirrored else s.slot[BY_HEAD, first + x]
            if s.slot[SLOT_OPEN, first + a]:
                t[HEAD, loose] = -t[late, a] if mirrored else t[early, a]
                t[DEADLINE, loose] = -t[early, a] if mirrored else t[late, a]
                t[PROCESS, loose] = s.slot[LENGTH, first + a]
                t[NEW, loose] = t[HEAD, loose]
                t[column, a] = loose
                t[who, loose] = s.slot[OPERATION, first + a]
                loose += 1
        y = 0
        for x in range(n):
            a = s.slot[BY_HEAD, first + x] if mirrored else s.slot[BY_DEADLINE, first + n - 1 - x]
            if s.slot[SLOT_OPEN, first + a]:
                t[LATE_FIRST, y] = t[column, a]
                y += 1
        if not head_rules(loose, t):
            return False
        for x in range(loose):
            if t[NEW, x] > t[HEAD, x]:
                if mirrored:
                    if not lower_start(s, t[who, x], -t[NEW, x] - t[PROCESS, x]):
                        return False
                elif not raise_start(s, t[who, x], t[NEW, x]):
                    return False
    return True


@helper(counted=False)
def _sort(t, row, order, by, first, n):  # type: ignore[no-untyped-def]
    """Sort order[by, first : first + n] by a row of t; it is nearly sorted from the last time."""
    for x in range(first + 1, first + n):
        a = order[by, x]
        y = x - 1
        while y >= first and t[row, order[by, y]] > t[row, a]:
            order[by, y + 1] = order[by, y]
            y -= 1
        order[by, y + 1] = a
