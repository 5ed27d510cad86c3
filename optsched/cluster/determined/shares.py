"""Determined's fair share: slots are divided among groups, who then start or release; kernels.

Source: determined-ai/determined, ``master/internal/rm/agentrm/fair_share.go``.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numba import types

from optsched.cluster.determined.columns import COLUMNS
from optsched.cluster.determined.fitting import find, reset, take, undo
from optsched.kernels.compile import INT, INTS, helper

_INSERTION_SORT: Final = 12
"""Go sorts up to so many elements by insertion."""
_BYTE: Final = 256
_FINE: Final = 2.0**20
"""Weights in whole parts of it are added without error, in any order."""
_LARGE: Final = 2.0**32


@helper(INT, COLUMNS, INT, counted=False)
def _counts(c, i):  # type: ignore[no-untyped-def]
    """1 if a task counts: it fits the cluster and, if it waits, the slots that are free now.

    As documented: the slots that could be free if all preemptible tasks were released, and the
    limit of its group.
    """
    slots, limit = c.task[i].slots, c.group[c.task[i].group].limit
    if slots == 0 or slots > c.pool[0].capacity:
        return 0
    if c.task[i].runs == 1:
        return 1
    return 0 if c.pool[0].docs == 1 and 0 <= limit < slots else c.kind[c.task[i].kind].fits


@helper(INT, COLUMNS, INT, counted=False)
def _join(c, i):  # type: ignore[no-untyped-def]
    """A task counts in its group."""
    task, group, g = c.task[i], c.group[c.task[i].group], c.task[i].group
    task.following = -1
    if group.key < 0:
        group.key = c.pool[0].shares
        c.share[c.pool[0].shares] = g
        c.pool[0].shares += 1
        group.registered, group.head = task.registered, i
        group.demand = group.active = group.fixed = group.offer = group.off = group.credit = 0
        group.smallest = -1
    else:
        c.task[group.tail].following = i
    group.tail = i
    group.demand += task.slots
    stays = task.runs == 1 and (c.pool[0].docs == 0 or task.preemptible == 0)
    if task.runs == 1:
        group.active += task.slots
        group.fixed += 0 if task.preemptible == 1 else task.slots
    if not stays and (group.smallest < 0 or task.slots < group.smallest):
        group.smallest = task.slots
    return g


@helper(INT, COLUMNS, INTS, INT, counted=False)
def _sort(c, groups, most):  # type: ignore[no-untyped-def]
    """Order groups by their keys, 0 to `most`; equal ones stay as they are."""
    n, spare, base = c.pool[0].shares, c.scratch, len(c.scratch) - _BYTE - 1
    shift = 0
    while most >> shift > 0:
        for b in range(_BYTE + 1):
            spare[base + b] = 0
        for i in range(n):
            spare[base + 1 + ((c.group[groups[i]].key >> shift) & (_BYTE - 1))] += 1
        for b in range(_BYTE):
            spare[base + b + 1] += spare[base + b]
        for i in range(n):
            at = base + ((c.group[groups[i]].key >> shift) & (_BYTE - 1))
            spare[spare[at]] = groups[i]
            spare[at] += 1
        for i in range(n):
            groups[i] = spare[i]
        shift += 8
    return n


@helper(INT, COLUMNS, counted=False)
def divide(c):  # type: ignore[no-untyped-def]
    """Collect the groups, by demand, then registration; start tasks without slots."""
    pool = c.pool[0]
    reset(c)
    pool.capacity = pool.shares = pool.starts = pool.releases = pool.passing = 0
    for a in range(len(c.node)):
        node = c.node[a]
        pool.capacity += node.capacity if node.takes == 1 else node.capacity - node.free
    some = 0
    for at in range(pool.running):
        task = c.task[c.running[at]]
        c.group[task.group].key, c.group[task.group].credit = -1, 0
        if pool.docs == 1 and task.preemptible == 1 and task.slots > 0:
            take(c, c.running[at])
    for k in range(len(c.kind)):
        kind = c.kind[k]
        kind.fits = 1 if kind.pending > 0 and find(c, k, 0) > 0 else 0
        some |= kind.fits
    undo(c, 0)
    waiting = pool.pending if some == 1 else 0
    for at in range(waiting):
        i = c.pending[at]
        c.group[c.task[i].group].key = -1
        if c.task[i].slots == 0 and c.kind[c.task[i].kind].fits == 1:
            c.start[pool.starts] = i
            pool.starts += 1
    p = r = 0
    while p < waiting or r < pool.running:
        if r < pool.running and (p == waiting or c.running[r] < c.pending[p]):
            i, r = c.running[r], r + 1
        else:
            i, p = c.pending[p], p + 1
        if _counts(c, i) == 1:
            _join(c, i)
    most = 0
    for at in range(pool.shares):
        group = c.group[c.share[at]]
        if group.limit >= 0:
            group.demand = min(group.demand, group.limit)
        group.most = max(min(group.demand, pool.capacity), group.fixed)
        group.key, most = group.demand, max(most, group.demand)
    return _sort(c, c.share, most)


@helper(INT, COLUMNS, counted=False)
def _order_latest(c):  # type: ignore[no-untyped-def]
    """The latest registered first, as upstream sorts: its comparator reads the unsorted list.

    Up to 12 groups Go sorts by insertion, which is reproduced; beyond, the sort is a proper one.
    """
    n, share, latest = c.pool[0].shares, c.share, c.latest
    most = 0
    for i in range(n):
        latest[i] = share[i]
        most = max(most, c.group[share[i]].registered)
    if n > _INSERTION_SORT:
        for i in range(n):
            c.group[share[i]].key = most - c.group[share[i]].registered
        return _sort(c, latest, most)
    for i in range(1, n):
        j = i
        while j > 0 and c.group[share[j]].registered > c.group[share[j - 1]].registered:
            latest[j], latest[j - 1] = latest[j - 1], latest[j]
            j -= 1
    return n


@helper(INT, COLUMNS, INT, counted=False)
def _wants(c, g):  # type: ignore[no-untyped-def]
    """1 if a group is to be offered more."""
    return 1 if c.group[g].off == 0 and c.group[g].offer < c.group[g].demand else 0


@helper(types.float64, COLUMNS, counted=False)
def _total(c):  # type: ignore[no-untyped-def]
    """Weights of the groups that want more, added in their order: floats are not associative."""
    total = 0.0
    for at in range(c.pool[0].shares):
        if _wants(c, c.share[at]) == 1:
            total += c.weight[c.share[at]]
    return total


@helper(INT, COLUMNS, INT, INT, counted=False)
def _drop_stuck(c, turn, left):  # type: ignore[no-untyped-def]
    """Leave out the latest group whose smallest task exceeds its offer, and divide that anew.

    `turn` is the first place in `latest` to be looked at, for a group that is not stuck never
    becomes so again. Returns the next one; what was freed is in ``scratch[0]``.
    """
    c.scratch[0] = left
    while turn < c.pool[0].shares and c.scratch[0] == 0:
        group = c.group[c.latest[turn]]
        if _wants(c, c.latest[turn]) == 1 and group.smallest > group.offer:
            c.scratch[0], group.offer, group.off = group.offer, 0, 1
        turn += 1
    return turn


@helper(INT, COLUMNS, counted=False)
def fill(c):  # type: ignore[no-untyped-def]
    """Progressive filling, as Determined's master does it: passes over the groups that want more.

    When nothing is left, gangs that block each other are left out, one by one.
    """
    n, share, left, turn = c.pool[0].shares, c.share, c.pool[0].capacity, -1
    exact, fine = True, 0.0
    for at in range(n):
        group = c.group[share[at]]
        group.offer = group.credit = group.fixed
        left -= group.fixed
        parts = c.weight[share[at]] * _FINE
        exact = exact and parts == float(np.floor(parts))
        fine += c.weight[share[at]]
    left, exact = max(left, 0), exact and fine < _LARGE
    total, stale = _total(c), False
    while True:
        before, wanted = left, 0
        for at in range(n):
            g = share[at]
            if _wants(c, g) == 0:
                continue
            wanted = 1
            if left == 0:
                break
            if stale:
                total, stale = _total(c), False
            group, weight = c.group[g], c.weight[g]
            part = int(before * weight / total) if weight > 0.0 else 0
            given = min(max(1, part), left, group.demand - group.offer)
            if group.credit > 0 and given <= group.credit:
                group.credit -= given
                continue
            group.credit = 0  # upstream's slip: the rest of the credit is lost, not deducted
            group.offer += given
            left -= given
            if group.offer == group.demand:
                total, stale = total - weight, not exact
        if wanted == 0:
            return left
        if left > 0:
            continue
        if turn < 0:
            _order_latest(c)
            turn = 0
        turn = _drop_stuck(c, turn, left)
        left, stale = c.scratch[0], True
        if left == 0:
            return left


@helper(INT, COLUMNS, counted=False)
def hand_out(c):  # type: ignore[no-untyped-def]
    """Who holds more than its offer releases preemptible tasks, who holds less starts waiting ones.

    In task order, until the group holds no more than its offer; smaller tasks may pass.
    """
    pool = c.pool[0]
    for at in range(pool.shares):
        group = c.group[c.share[at]]
        above, i = group.active - group.offer, group.head
        while i >= 0 and above != 0:
            task = c.task[i]
            if above > 0 and task.runs == 1 and task.preemptible == 1:
                c.release[pool.releases] = i
                pool.releases += 1
                above = max(0, above - task.slots)
            elif above < 0 and task.runs == 0 and task.slots <= -above:
                c.start[pool.starts] = i
                pool.starts += 1
                above += task.slots
            i = task.following
    return pool.starts + pool.releases
