"""Determined's priority scheduler: level by level, on a copy of the cluster; kernels.

If agents of different sizes may not be mixed, more free slots never make a task misfit: then a kind
of task that did not fit is not tried again until something came free, and one that no release could
help never is, for what could be released only shrinks from level to level.

Source: determined-ai/determined, ``master/internal/rm/agentrm/priority.go``.
"""

from __future__ import annotations

from typing import Final

from optsched.cluster.determined.columns import COLUMNS
from optsched.cluster.determined.fitting import find, put, reset, take, undo
from optsched.kernels.compile import INT, helper

_FEW: Final = 32
"""So many kinds are all looked at before each level: who waits in vain need not be."""


@helper(INT, COLUMNS, INT, counted=False)
def by_level(c, zero):  # type: ignore[no-untyped-def]
    """Walk over the tasks without slots (zero = 1), or over the others; adds to the answer."""
    pool, at, blocked = c.pool[0], 0, False
    hopeful = _begin(c, zero)
    while at < pool.pending and hopeful > 0:
        level = c.task[c.pending[at]].level
        if len(c.kind) <= _FEW and pool.heterogeneous == 0:
            for k in range(len(c.kind)):
                kind = c.kind[k]
                if kind.left > 0 and kind.dead == 0:
                    if kind.fits != 0:
                        kind.fits = 1 if find(c, k, 0) > 0 else 0
                    if kind.fits == 0:
                        hopeful -= _give_up(c, k, level)
        begun, misfits, misfit = pool.starts, 0, False
        while at < pool.pending and c.task[c.pending[at]].level == level and hopeful > 0:
            i, at = c.pending[at], at + 1
            kind = c.kind[c.task[i].kind]
            if (c.task[i].slots == 0) != (zero == 1):
                continue
            kind.left -= 1
            hopeful -= 1 - kind.dead
            rows = _fits(c, i) if kind.dead == 0 else 0
            if rows > 0:
                put(c, rows)
                c.start[pool.starts] = i
                pool.starts += 1
                continue
            misfit = True
            if kind.dead == 0:
                c.end[misfits] = i
                misfits += 1
                hopeful -= _give_up(c, c.task[i].kind, level)
        if pool.gone > 0:
            pool.starts = begun
        elif blocked:
            _backfill(c, begun)
        blocked = blocked or misfit
        for m in range(misfits if pool.preemption == 1 else 0):
            _make_room(c, c.end[m], level)
        while at < pool.pending and c.task[c.pending[at]].level == level:
            at += 1
    return pool.starts


@helper(INT, COLUMNS, INT, counted=False)
def _begin(c, zero):  # type: ignore[no-untyped-def]
    """The cluster as it is, and who may be released; returns how many tasks wait."""
    pool, waiting = c.pool[0], 0
    for k in range(len(c.kind)):
        kind = c.kind[k]
        kind.left = kind.pending if (kind.slots == 0) == (zero == 1) else 0
        kind.fits, kind.dead, kind.level = -1, 0, -1
        waiting += kind.left
    pool.victims = pool.gone = 0
    if waiting > 0:
        reset(c)
    if waiting > 0 and pool.running > 0:
        worst, best = c.task[c.running[pool.running - 1]].level, c.task[c.pending[0]].level
        displaces = pool.preemption == 1 and (worst > best or pool.positions == 1)
        for at in range(pool.running - 1 if displaces else -1, -1, -1):
            task = c.task[c.running[at]]
            if task.preemptible == 1 and (task.slots == 0) == (zero == 1):
                c.victim[pool.victims] = c.running[at]
                pool.victims += 1
    return waiting


@helper(INT, COLUMNS, INT, counted=False)
def _fits(c, i):  # type: ignore[no-untyped-def]
    """Rows of a task, 0 if it fits nowhere."""
    k = c.task[i].kind
    if c.kind[k].fits == 0 and c.pool[0].heterogeneous == 0:
        return 0
    rows = find(c, k, c.task[i].first)
    if rows == 0:
        c.kind[k].fits = 0
    return rows


@helper(INT, COLUMNS, INT, INT, counted=False)
def _give_up(c, k, level):  # type: ignore[no-untyped-def]
    """A kind does not fit; how many tasks wait in vain if no release can help it any more."""
    pool = c.pool[0]
    if pool.heterogeneous == 1 or (pool.preemption == 1 and pool.positions == 1):
        return 0
    if pool.preemption == 1 and _could_fit(c, k, _worse(c, level)) == 1:
        return 0
    c.kind[k].dead = 1
    return c.kind[k].left


@helper(INT, COLUMNS, INT, counted=False)
def _backfill(c, begun):  # type: ignore[no-untyped-def]
    """Of those placed behind a misfit only preemptible ones start."""
    pool, to = c.pool[0], begun
    for s in range(begun, pool.starts if pool.preemption == 1 and pool.backfill == 1 else begun):
        i = c.start[s]
        if c.task[i].preemptible == 1:
            c.start[to] = c.backfilled[pool.passing] = i
            to, pool.passing = to + 1, pool.passing + 1
    pool.starts = to
    return to


@helper(INT, COLUMNS, INT, counted=False)
def _worse(c, level):  # type: ignore[no-untyped-def]
    """How many victims are of worse levels, at least those that are gone."""
    low, high = c.pool[0].gone, c.pool[0].victims
    while low < high:
        middle = (low + high) >> 1
        if c.task[c.victim[middle]].level > level:
            low = middle + 1
        else:
            high = middle
    return low


@helper(INT, COLUMNS, INT, INT, counted=False)
def _could_fit(c, k, end):  # type: ignore[no-untyped-def]
    """1 if it would help to release all of ``victim[:end]``: cheaper than one after the other."""
    for v in range(c.pool[0].gone, end):
        take(c, c.victim[v])
    found = 1 if c.pool[0].undone > 0 and find(c, k, 0) > 0 else 0
    undo(c, 0)
    return found


@helper(INT, COLUMNS, INT, INT, counted=False)
def _behind(c, i, level):  # type: ignore[no-untyped-def]
    """How many it may displace on its own level: those behind it in the queue, last first.

    The first that is not behind ends it. Without positions nobody is.
    """
    pool, found, gone = c.pool[0], 0, 0
    if pool.positions == 0:
        return 0
    for v in range(pool.gone - 1, -1, -1):
        if c.task[c.victim[v]].level > level:
            break
        gone += 1
    for at in range(pool.running - 1, -1, -1):
        other = c.task[c.running[at]]
        if other.level < level:
            break
        if other.level > level or (other.slots == 0) != (c.task[i].slots == 0):
            continue
        if c.task[i].position >= other.position:
            break
        found += other.preemptible
    return max(0, found - gone)


@helper(INT, COLUMNS, INT, INT, counted=False)
def _make_room(c, i, level):  # type: ignore[no-untyped-def]
    """Reserve for a misfit: where earlier releases made room, or by releasing some more."""
    pool, rows, k = c.pool[0], _fits(c, i), c.task[i].kind
    if rows > 0:
        return put(c, rows)
    kind, own = c.kind[k], _behind(c, i, level)
    known = kind.level >= 0 and (kind.level < level or own <= kind.own)
    if kind.dead == 1 or (known and pool.heterogeneous == 0):
        return 0
    end = _worse(c, level) + own
    if pool.heterogeneous == 1 or _could_fit(c, k, end) == 1:
        for v in range(pool.gone, end):
            rows = find(c, k, c.task[i].first) if take(c, c.victim[v]) == 1 else 0
            if rows > 0:
                pool.undone = 0
                put(c, rows)
                for u in range(pool.gone, v + 1):
                    c.release[pool.releases] = c.victim[u]
                    pool.releases += 1
                pool.gone = v + 1
                for other in range(len(c.kind)):
                    c.kind[other].fits = -1
                return rows
        undo(c, 0)
    kind.level, kind.own = level, own
    return 0
