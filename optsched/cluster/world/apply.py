"""A decision is checked, then applied: releases first, starts and resizes in its order; kernels."""

from __future__ import annotations

from typing import Final

from optsched.cluster.world.layout import (
    LEGAL,
    MID_PASS,
    NODE_FULL,
    NODE_SUM,
    NOT_PREEMPTIBLE,
    ORDER,
    RUNS,
    SHARE,
    SIZE,
    TOO_MANY,
    UNKNOWN_NODE,
    WORLD,
)
from optsched.cluster.world.stays import is_size, release, start, start_beside, start_on
from optsched.kernels.compile import INT, entry, helper

_STAYS: Final = 0
_GOES: Final = 1
"""Bit of `JOB.leaves`: gives up its GPUs."""
_COMES: Final = 2
"""Bit of `JOB.leaves`: is to be placed."""
_COUNTED: Final = 4
"""Bit of `JOB.leaves`: its GPUs have been counted."""


@helper(INT, WORLD, INT, INT, INT, counted=False)
def _is_there(w, j, first, end):  # type: ignore[no-untyped-def]
    """1 if job j runs on exactly the nodes of rows ``first:end`` of `World.named`, ascending."""
    row = w.job[j].held
    for k in range(first, end):
        if row < 0 or w.held[row].where != w.named[k, 0] or w.held[row].count != w.named[k, 1]:
            return 0
        row = w.held[row].following
    return 1 if row < 0 else 0


@helper(INT, WORLD, INT, counted=False)
def _mark(w, i):  # type: ignore[no-untyped-def]
    """Check what is decided about position i for itself; note whether it leaves and is placed."""
    s = w.state[0]
    j, q = w.active[i], w.quota[i]
    running = w.job[j].phase == RUNS
    if q == 0:
        if running:
            if w.given[j].preemptible == 0:
                return NOT_PREEMPTIBLE
            w.job[j].leaves = _GOES
        return LEGAL
    same = running and w.job[j].gpus == max(q, 0)
    if same and s.named == 0 and s.sharing == 0:
        return LEGAL
    if is_size(w, j, q) == 0:
        s.about = q
        return SIZE
    if s.named == 1 and w.named_ptr[i + 1] > w.named_ptr[i]:
        total = 0
        for k in range(w.named_ptr[i], w.named_ptr[i + 1]):
            s.about = w.named[k, 0]
            if w.named[k, 0] < 0 or w.named[k, 0] >= w.node.shape[0]:
                return UNKNOWN_NODE
            if w.named[k, 1] < 0 or (q > 0 and w.named[k, 1] == 0):
                return NODE_SUM
            total += w.named[k, 1]
        s.about, s.beside = total, max(q, 0)
        if total != max(q, 0) or (q < 0 and w.named_ptr[i + 1] > w.named_ptr[i] + 1):
            return NODE_SUM
        same = same and _is_there(w, j, w.named_ptr[i], w.named_ptr[i + 1]) == 1
    if s.sharing == 1 and w.share[i] >= 0:
        if w.share[i] >= s.active or w.share[i] == i:
            s.about = w.share[i]
            return SHARE
        same = same and w.job[j].partner == w.active[w.share[i]]
    if same:
        return LEGAL
    if running and s.pass_only == 1 and w.job[j].pass_end != s.time:
        s.about, s.beside = w.job[j].gpus, q
        return MID_PASS
    w.job[j].leaves = _COMES | _GOES if running else _COMES
    return LEGAL


@helper(INT, WORLD, counted=False)
def _lacks(w):  # type: ignore[no-untyped-def]
    """1 if GPUs are too few for all; notes the first position without."""
    s = w.state[0]
    free = s.free_gpus
    for i in range(s.active):
        j = w.active[i]
        if w.job[j].leaves & _GOES == 0:
            continue
        partner = w.job[j].partner
        if partner >= 0 and (w.job[partner].leaves & _GOES == 0 or partner < j):
            continue
        row = w.job[j].held
        while row >= 0:
            free += w.held[row].count * w.node[w.held[row].where].takes
            row = w.held[row].following
    for k in range(s.ordered + s.active):
        i = w.order[k] if k < s.ordered else k - s.ordered
        j = w.active[i]
        if w.quota[i] < 0 or w.job[j].leaves & _COMES == 0 or w.job[j].leaves & _COUNTED:
            continue
        if s.sharing == 1 and w.share[i] >= 0:
            continue
        w.job[j].leaves |= _COUNTED
        free -= w.quota[i]
        if free < 0:
            s.at, s.about, s.beside = i, w.quota[i], free + w.quota[i]
            return 1
    return 0


@helper(INT, WORLD, INT, counted=False)
def _put(w, i):  # type: ignore[no-untyped-def]
    """Place position i if that is still to be done."""
    s = w.state[0]
    j, q = w.active[i], w.quota[i]
    if w.job[j].leaves & _COMES == 0:
        return LEGAL
    resized = w.job[j].leaves & _GOES != 0
    w.job[j].leaves = _STAYS
    rule = NODE_FULL
    if s.sharing == 1 and w.share[i] >= 0:
        rule = SHARE
        partner = w.active[w.share[i]]
        placed = 0
        if w.job[partner].gpus == q:
            placed = start_beside(w, j, partner)
    elif s.named == 1 and w.named_ptr[i + 1] > w.named_ptr[i]:
        placed = start_on(w, j, q, w.named_ptr[i], w.named_ptr[i + 1])
        if placed == 0 and w.supply.shape[0] > 0:
            placed = start(w, j, q)
    else:
        placed = start(w, j, q)
    if placed == 1:
        return LEGAL
    strict = s.best_effort == 0 and w.supply.shape[0] == 0 and q > 0
    if strict or (resized and w.given[j].preemptible == 0):
        s.at = i
        return rule if strict else NOT_PREEMPTIBLE
    if resized:
        w.job[j].preempted += 1
    return LEGAL


@helper(INT, WORLD, INT, counted=False)
def _forget(w, rule):  # type: ignore[no-untyped-def]
    """Take back all marks of a decision that is refused."""
    for i in range(w.state[0].active):
        w.job[w.active[i]].leaves = _STAYS
    return rule


@entry(INT, WORLD, counted=False)
def apply(w):  # type: ignore[no-untyped-def]
    """Do what `World.quota` and its companions say, for all active jobs by position.

    Answers `LEGAL`, or the rule that is broken, with ``state.at`` the position. Nothing has been
    changed then, except for `NODE_FULL` and `SHARE`, found while jobs are placed: the world is not
    to be used any more. Under ``state.best_effort`` what finds no place stays pending.
    """
    s = w.state[0]
    busy = 0
    for i in range(s.active):
        rule = _mark(w, i)
        if rule != LEGAL:
            s.at = i
            return _forget(w, rule)
        busy |= w.job[w.active[i]].leaves
    if busy == _STAYS:
        return LEGAL
    for k in range(s.ordered):
        if w.order[k] < 0 or w.order[k] >= s.active:
            s.at, s.about = 0, w.order[k]
            return _forget(w, ORDER)
    if s.best_effort == 0 and _lacks(w) == 1:
        return _forget(w, TOO_MANY)
    if busy & _GOES != 0:
        for i in range(s.active):
            j = w.active[i]
            if w.job[j].leaves & _GOES == 0:
                continue
            release(w, j, 1 if w.job[j].leaves & _COMES else 0)
            if w.job[j].leaves & _COMES == 0:
                w.job[j].leaves = _STAYS
    if busy & _COMES == 0:
        return LEGAL
    for k in range(s.ordered):
        rule = _put(w, w.order[k])
        if rule != LEGAL:
            return rule
    for i in range(s.active):  # those that the order leaves out; without one, all
        rule = _put(w, i)
        if rule != LEGAL:
            return rule
    return LEGAL
