"""Propagation of windows and orders to the fixpoint, and edge finding on one machine.

Functions return False as soon as the target is refuted; then `forget` empties the queues.
"""

from __future__ import annotations

from optsched.kernels.compile import helper
from optsched_solvers.shop.proof.state import (
    BY_DEADLINE,
    BY_HEAD,
    DECIDED,
    FALSE,
    FAR,
    HEAVY,
    LIGHT,
    MOVED,
    TRUE,
)

# what has changed: earliest starts, latest starts of operations, orders on a machine
_STARTS, _ENDS, _ORDERS = 1, 2, 4
_WINDOWS = 3
EVERYTHING = 7

# rows of `State.scratch`: of what `head_rules` works on, and of one machine before it
HEAD, PROCESS, DEADLINE, LATE_FIRST, NEW, ECT, EARLY, LATE, COLUMN, WHO = range(10)


@helper(counted=False)
def raise_start(s, i, value):  # type: ignore[no-untyped-def]
    """Operation i starts no sooner than value."""
    op = s.op[i]
    old = op.est
    if value <= old:
        return True
    if value > op.lst:
        return False
    search = s.search[0]
    if search.level > 0 and op.est_level != search.level:
        s.trail[search.trail].what = i
        s.trail[search.trail].old = old
        search.trail += 1
        op.est_level = search.level
    op.est = value
    if op.changed == 0:
        _push(s, MOVED, i)
    op.changed |= _STARTS
    return True


@helper(counted=False)
def lower_start(s, i, value):  # type: ignore[no-untyped-def]
    """Operation i starts no later than value."""
    op = s.op[i]
    old = op.lst
    if value >= old:
        return True
    if value < op.est:
        return False
    search = s.search[0]
    if search.level > 0 and op.lst_level != search.level:
        s.trail[search.trail].what = len(s.op) + i
        s.trail[search.trail].old = old
        search.trail += 1
        op.lst_level = search.level
    op.lst = value
    if op.changed == 0:
        _push(s, MOVED, i)
    op.changed |= _ENDS
    return True


@helper(counted=False)
def decide(s, m):  # type: ignore[no-untyped-def]
    """Literal m is true; its consequences follow in `fixpoint`."""
    if s.value[m]:
        return s.value[m] == TRUE
    literal, search = s.literal[m], s.search[0]
    opposite = s.negation[m]
    if search.level > 0:
        s.trail[search.trail].what = 2 * len(s.op) + m
        search.trail += 1
    s.value[m], s.value[opposite] = TRUE, FALSE
    machine = s.machine[literal.machine]
    machine.open -= 1
    search.pairs -= 1
    s.slot[literal.before].open -= 1
    s.slot[literal.after].open -= 1
    pair = min(m, opposite)  # leaves the sparse set: changes place with the last open pair
    here = s.literal[pair].place
    end = machine.pairs + machine.open
    last = s.open[end]
    s.open[here], s.open[end] = last, pair
    s.literal[last].place, s.literal[pair].place = here, end
    _push(s, DECIDED, m)
    return True


@helper(counted=False)
def undo(s, mark):  # type: ignore[no-untyped-def]
    """Take back everything on the trail from mark on."""
    n = len(s.op)
    for t in range(s.search[0].trail - 1, mark - 1, -1):
        what = s.trail[t].what
        if what < n:
            s.op[what].est = s.trail[t].old
        elif what < 2 * n:
            s.op[what - n].lst = s.trail[t].old
        else:
            m = what - 2 * n
            s.value[m] = s.value[s.negation[m]] = 0
            s.machine[s.literal[m].machine].open += 1
            s.slot[s.literal[m].before].open += 1
            s.slot[s.literal[m].after].open += 1
            s.search[0].pairs += 1
    s.search[0].trail = mark


@helper(counted=False)
def forget(s):  # type: ignore[no-untyped-def]
    """Empty all queues after a refutation."""
    while s.queue[MOVED].size:
        s.op[_pop(s, MOVED)].changed = 0
    s.queue[DECIDED].size = 0
    while s.queue[LIGHT].size:
        s.machine[_pop(s, LIGHT)].light = 0
    while s.queue[HEAVY].size:
        s.machine[_pop(s, HEAVY)].heavy = 0


@helper(counted=False)
def fixpoint(s):  # type: ignore[no-untyped-def]
    """Propagate until nothing changes: orders, arcs, cheap machine rules, costly machine rules.

    Invariant: everything that changed since its rules were last applied is in one of the queues.
    Cheap rules go first, so that costly rules see their results.
    """
    while True:
        if s.queue[DECIDED].size:
            if not _follow_order(s, _pop(s, DECIDED)):
                return False
        elif s.queue[MOVED].size:
            if not _follow_arcs(s, _pop(s, MOVED)):
                return False
        elif s.queue[LIGHT].size:
            r = _pop(s, LIGHT)
            changed = s.machine[r].light
            s.machine[r].light = 0
            if changed & _WINDOWS and not _pairs(s, r):
                return False
            if changed & _ORDERS and not _memory(s, r):
                return False
            if changed & (_STARTS | _ORDERS) and not _sums_before(s, r):
                return False
            if changed & (_ENDS | _ORDERS) and not _sums_behind(s, r):
                return False
        elif s.queue[HEAVY].size:
            r = _pop(s, HEAVY)
            s.machine[r].heavy = 0
            if not _windows(s, r):
                return False
        else:
            return True


@helper(counted=False)
def _push(s, kind, value):  # type: ignore[no-untyped-def]
    queue = s.queue[kind]
    at = queue.head + queue.size
    if at >= queue.capacity:
        at -= queue.capacity
    s.ring[queue.first + at] = value
    queue.size += 1


@helper(counted=False)
def _pop(s, kind):  # type: ignore[no-untyped-def]
    queue = s.queue[kind]
    value = s.ring[queue.first + queue.head]
    queue.head += 1
    if queue.head == queue.capacity:
        queue.head = 0
    queue.size -= 1
    return value


@helper(counted=False)
def touch(s, r, what):  # type: ignore[no-untyped-def]
    """Queue machine r: `what` has changed, a sum of the bits above."""
    machine = s.machine[r]
    if machine.light == 0:
        _push(s, LIGHT, r)
    machine.light |= what
    if what & _WINDOWS and machine.heavy == 0:
        machine.heavy = 1
        _push(s, HEAVY, r)


@helper(counted=False)
def _follow_order(s, m):  # type: ignore[no-untyped-def]
    """What a literal implies: two windows, transitive orders on its machine, nogoods."""
    literal = s.literal[m]
    first, second = literal.before, literal.after
    i, k = s.slot[first].operation, s.slot[second].operation
    if not raise_start(s, k, s.op[i].est + s.gap[m]):
        return False
    if not lower_start(s, i, s.op[k].lst - s.gap[m]):
        return False
    r = literal.machine
    n, at = s.machine[r].size, s.machine[r].matrix
    a, b = first - s.machine[r].first, second - s.machine[r].first
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
    watch = s.literal[m].watched
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
                    s.next_watch[watch] = s.literal[s.nogood[mine]].watched
                    s.literal[s.nogood[mine]].watched = watch
                    moved = True
                    break
            if not moved and not decide(s, s.negation[other]):
                return False
        if not moved:
            previous = watch
        elif previous < 0:
            s.literal[m].watched = following
        else:
            s.next_watch[previous] = following
        watch = following
    return True


@helper(counted=False)
def _follow_arcs(s, i):  # type: ignore[no-untyped-def]
    """The window of i changed: its neighbours by arcs, and its machines."""
    changed = s.op[i].changed
    s.op[i].changed = 0
    if changed & _STARTS:
        start = s.op[i].est
        for e in range(s.op[i].after, s.op[i + 1].after):
            if not raise_start(s, s.arc[e].to, start + s.arc[e].weight):
                return False
    if changed & _ENDS:
        start = s.op[i].lst
        for e in range(s.op[i].before, s.op[i + 1].before):
            if not lower_start(s, s.arc[e].origin, start - s.arc[e].weight_back):
                return False
    for x in range(s.op[i].slots, s.op[i + 1].slots):
        touch(s, s.slot[s.slot[x].of].machine, changed)
    return True


@helper(counted=False)
def _pairs(s, r):  # type: ignore[no-untyped-def]
    """Immediate selection: an order that no longer fits into both windows is excluded."""
    machine = s.machine[r]
    n, at, first = machine.size, machine.matrix, machine.first
    if machine.open == 0:
        return True
    t, early, late, length = s.scratch, 0, 1, 2
    for a in range(n):
        i = s.slot[first + a].operation
        t[early, a], t[late, a] = s.op[i].est, s.op[i].lst
        t[length, a] = s.slot[first + a].length
    for a in range(n):
        if s.slot[first + a].open == 0:
            continue
        row = at + a * n
        end = t[early, a] + t[length, a]
        for b in range(a + 1, n):
            if s.value[row + b]:
                continue
            forth = end <= t[late, b]
            back = t[early, b] + t[length, b] <= t[late, a]
            if machine.setups:
                forth = t[early, a] + s.gap[row + b] <= t[late, b]
                back = t[early, b] + s.gap[at + b * n + a] <= t[late, a]
            if forth and back:
                continue
            if not forth and not back:
                return False
            decide(s, row + b if forth else at + b * n + a)
    return True


@helper(counted=False)
def _sums_before(s, r):  # type: ignore[no-untyped-def]
    """Operations wait for all who precede them, one after the other (Jackson's sum)."""
    machine = s.machine[r]
    n, at, first = machine.size, machine.matrix, machine.first
    t, key, total, apart = s.scratch, 0, 1, 2  # apart: by gaps of single pairs, no part of sums
    for a in range(n):
        t[key, a] = s.op[s.slot[first + a].operation].est
        t[total, a] = t[apart, a] = -FAR
    _sort(t, key, s.order, BY_HEAD, first, n)
    for x in range(n):
        a = s.order[BY_HEAD, first + x]
        head, row, length = t[key, a], at + a * n, s.slot[first + a].length
        start = max(head, t[total, a], t[apart, a])
        if start > head and not raise_start(s, s.slot[first + a].operation, start):
            return False
        for b in range(n):
            later = max(t[total, b], head) + length
            t[total, b] = later if s.value[row + b] == TRUE else t[total, b]
        if machine.setups:
            for b in range(n):
                if s.value[row + b] == TRUE:
                    t[apart, b] = max(t[apart, b], start + s.gap[row + b])
    return True


@helper(counted=False)
def _sums_behind(s, r):  # type: ignore[no-untyped-def]
    """Operations leave time for all who follow them; `_sums_before` mirrored."""
    machine = s.machine[r]
    n, at, first = machine.size, machine.matrix, machine.first
    t, key, total, apart = s.scratch, 0, 1, 2
    for a in range(n):
        t[key, a] = s.op[s.slot[first + a].operation].lst + s.slot[first + a].length
        t[total, a] = t[apart, a] = FAR
    _sort(t, key, s.order, BY_DEADLINE, first, n)
    for x in range(n - 1, -1, -1):
        b = s.order[BY_DEADLINE, first + x]
        deadline, row, length = t[key, b], at + b * n, s.slot[first + b].length
        end = min(deadline, t[total, b], t[apart, b])
        if end < deadline and not lower_start(s, s.slot[first + b].operation, end - length):
            return False
        for a in range(n):
            sooner = min(t[total, a], deadline) - length
            t[total, a] = sooner if s.value[row + a] == FALSE else t[total, a]
        if machine.setups:
            for a in range(n):
                if s.value[row + a] == FALSE:
                    late = end - length - s.gap[at + a * n + b]
                    t[apart, a] = min(t[apart, a], late + s.slot[first + a].length)
    return True


@helper(counted=False)
def _memory(s, r):  # type: ignore[no-untyped-def]
    """Bytes that are certainly held while an operation runs; orders that would overflow it."""
    machine = s.machine[r]
    if machine.part == machine.part_end and machine.memory >= FAR:
        return True
    n, at, first = machine.size, machine.matrix, machine.first
    t, if_before, if_after = s.scratch, 0, 1
    for k in range(n):
        level = s.slot[first + k].workspace
        for u in range(n):
            t[if_before, u] = t[if_after, u] = 0
        for x in range(machine.part, machine.part_end):
            i, f, size = s.part[x].holder, s.part[x].freer, s.part[x].bytes
            if i < 0:  # freed without a holder
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
        free = machine.memory - level
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
    machine = s.machine[r]
    n, first = machine.size, machine.first
    if machine.open == 0:
        return True
    t = s.scratch
    for mirrored in range(2):
        for a in range(n):
            i = s.slot[first + a].operation
            t[EARLY, a] = s.op[i].est
            t[LATE, a] = s.op[i].lst + s.slot[first + a].length
        _sort(t, EARLY, s.order, BY_HEAD, first, n)
        _sort(t, LATE, s.order, BY_DEADLINE, first, n)
        loose = 0
        for x in range(n):
            a = s.order[BY_DEADLINE, first + n - 1 - x] if mirrored else s.order[BY_HEAD, first + x]
            if s.slot[first + a].open:
                t[HEAD, loose] = -t[LATE, a] if mirrored else t[EARLY, a]
                t[DEADLINE, loose] = -t[EARLY, a] if mirrored else t[LATE, a]
                t[PROCESS, loose] = s.slot[first + a].length
                t[NEW, loose] = t[HEAD, loose]
                t[COLUMN, a] = loose
                t[WHO, loose] = s.slot[first + a].operation
                loose += 1
        y = 0
        for x in range(n):
            a = s.order[BY_HEAD, first + x] if mirrored else s.order[BY_DEADLINE, first + n - 1 - x]
            if s.slot[first + a].open:
                t[LATE_FIRST, y] = t[COLUMN, a]
                y += 1
        if not head_rules(loose, t):
            return False
        for x in range(loose):
            if t[NEW, x] > t[HEAD, x]:
                if mirrored:
                    if not lower_start(s, t[WHO, x], -t[NEW, x] - t[PROCESS, x]):
                        return False
                elif not raise_start(s, t[WHO, x], t[NEW, x]):
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


@helper(counted=False)
def head_rules(n, t):  # type: ignore[no-untyped-def]
    """Edge finding and not-first on one machine: raise NEW; False if some operations cannot fit.

    An operation has a window [head, deadline) for its processing; only heads are raised: for
    deadlines mirror time. `t` has rows HEAD .. ECT with at least n columns, sorted by head; NEW is
    given as a copy of HEAD, LATE_FIRST lists columns by deadline, descending; ECT is scratch.
    O(n^2): Carlier & Pinson (1990) in the form of Nuijten (1994); not-first: Torres & Lopez (2000).
    """
    longest = -FAR  # of operations with later deadlines
    y = 0
    while y < n:
        limit = t[DEADLINE, t[LATE_FIRST, y]]
        # Omega: all that must end by limit; ECT: its earliest end without heads below HEAD
        load = 0
        end = -FAR
        for x in range(n - 1, -1, -1):
            if t[DEADLINE, x] <= limit:
                load += t[PROCESS, x]
                end = max(end, t[HEAD, x] + load)
            t[ECT, x] = end
        if end > limit:
            return False
        if end + longest > limit:
            earlier = -FAR
            for x in range(n):
                if t[DEADLINE, x] <= limit:
                    earlier = max(earlier, t[HEAD, x] + load)
                    load -= t[PROCESS, x]
                else:  # x and Omega together miss the limit unless x is last
                    if t[HEAD, x] + load + t[PROCESS, x] > limit:
                        t[NEW, x] = max(t[NEW, x], t[ECT, x])
                    if earlier + t[PROCESS, x] > limit:
                        t[NEW, x] = max(t[NEW, x], end)
        while y < n and t[DEADLINE, t[LATE_FIRST, y]] == limit:
            longest = max(longest, t[PROCESS, t[LATE_FIRST, y]])
            y += 1
    for x in range(n):
        # Omega: all that end after HEAD at the earliest; x is not first if it would start too late
        latest = FAR
        first_end = FAR
        for y in range(n):
            z = t[LATE_FIRST, y]
            if z != x and t[HEAD, z] + t[PROCESS, z] > t[HEAD, x]:
                latest = min(latest, t[DEADLINE, z]) - t[PROCESS, z]
                first_end = min(first_end, t[HEAD, z] + t[PROCESS, z])
        if latest < t[HEAD, x] + t[PROCESS, x]:
            t[NEW, x] = max(t[NEW, x], first_end)
    return True
