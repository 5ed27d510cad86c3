"""A decision is checked, then applied: releases first, starts and resizes in its order; kernels."""

from __future__ import annotations

from typing import Final

from optsched.cluster.world.layout import (
    ABOUT,
    ACTIVE,
    AT,
    BESIDE,
    BEST_EFFORT,
    COUNT,
    FOLLOWING,
    FREE_GPUS,
    FREE_ZERO,
    GPUS,
    HELD,
    LEAVES,
    LEGAL,
    MID_PASS,
    NAMED,
    NODE_FULL,
    NODE_SUM,
    NOT_PREEMPTIBLE,
    ORDER,
    ORDERED,
    PARTNER,
    PASS_END,
    PASS_ONLY,
    PHASE,
    PREEMPTED,
    PREEMPTIBLE,
    RUNS,
    SHARE,
    SHARING,
    SIZE,
    TAKES,
    TIME,
    TOO_MANY,
    UNKNOWN_NODE,
    WHERE,
    WORLD,
)
from optsched.cluster.world.stays import is_size, release, start, start_beside, start_on
from optsched.kernels.compile import INT, entry, helper

_STAYS: Final = 0
_GOES: Final = 1
"""Bit of `LEAVES`: gives up its GPUs."""
_COMES: Final = 2
"""Bit of `LEAVES`: is to be placed."""


@helper(INT, WORLD, INT, INT, INT, counted=False)
def _is_there(w, j, first, end):  # type: ignore[no-untyped-def]
    """1 if job j runs on exactly the nodes of rows ``first:end`` of `World.named`, ascending."""
    row = w.job[j, HELD]
    for k in range(first, end):
        if row < 0 or w.held[row, WHERE] != w.named[k, 0] or w.held[row, COUNT] != w.named[k, 1]:
            return 0
        row = w.held[row, FOLLOWING]
    return 1 if row < 0 else 0


@helper(INT, WORLD, INT, counted=False)
def _mark(w, i):  # type: ignore[no-untyped-def]
    """Check what is decided about position i for itself; note whether it leaves and is placed."""
    s = w.state
    j, q = w.active[i], w.quota[i]
    running = w.job[j, PHASE] == RUNS
    if q == 0:
        if running:
            if w.given[j, PREEMPTIBLE] == 0:
                return NOT_PREEMPTIBLE
            w.job[j, LEAVES] = _GOES
        return LEGAL
    same = running and w.job[j, GPUS] == max(q, 0)
    if same and s[NAMED] == 0 and s[SHARING] == 0:
        return LEGAL
    if is_size(w, j, q) == 0:
        s[ABOUT] = q
        return SIZE
    if s[NAMED] == 1 and w.named_ptr[i + 1] > w.named_ptr[i]:
        total = 0
        for k in range(w.named_ptr[i], w.named_ptr[i + 1]):
            s[ABOUT] = w.named[k, 0]
            if w.named[k, 0] < 0 or w.named[k, 0] >= w.node.shape[0]:
                return UNKNOWN_NODE
            if w.named[k, 1] < 0 or (q > 0 and w.named[k, 1] == 0):
                return NODE_SUM
            total += w.named[k, 1]
        s[ABOUT], s[BESIDE] = total, max(q, 0)
        if total != max(q, 0) or (q < 0 and w.named_ptr[i + 1] > w.named_ptr[i] + 1):
            return NODE_SUM
        same = same and _is_there(w, j, w.named_ptr[i], w.named_ptr[i + 1]) == 1
    if s[SHARING] == 1 and w.share[i] >= 0:
        if w.share[i] >= s[ACTIVE] or w.share[i] == i:
            s[ABOUT] = w.share[i]
            return SHARE
        same = same and w.job[j, PARTNER] == w.active[w.share[i]]
    if same:
        return LEGAL
    if running and s[PASS_ONLY] == 1 and w.job[j, PASS_END] != s[TIME]:
        s[ABOUT], s[BESIDE] = w.job[j, GPUS], q
        return MID_PASS
    w.job[j, LEAVES] = _COMES | _GOES if running else _COMES
    return LEGAL


@helper(INT, WORLD, counted=False)
def _lacks(w):  # type: ignore[no-untyped-def]
    """1 if GPUs or zero-slot units are too few for all; notes the first position without."""
    s = w.state
    free, units = s[FREE_GPUS], s[FREE_ZERO]
    for i in range(s[ACTIVE]):
        j = w.active[i]
        if w.job[j, LEAVES] & _GOES == 0:
            continue
        partner = w.job[j, PARTNER]
        if partner >= 0 and (w.job[partner, LEAVES] & _GOES == 0 or partner < j):
            continue
        row = w.job[j, HELD]
        while row >= 0:
            if w.job[j, GPUS] == 0:
                units += w.node[w.held[row, WHERE], TAKES]
            else:
                free += w.held[row, COUNT] * w.node[w.held[row, WHERE], TAKES]
            row = w.held[row, FOLLOWING]
    for k in range(s[ACTIVE]):
        i = w.order[k] if s[ORDERED] == 1 else k
        if w.job[w.active[i], LEAVES] & _COMES == 0:
            continue
        if s[SHARING] == 1 and w.share[i] >= 0:
            continue
        have = free if w.quota[i] > 0 else units
        free -= max(w.quota[i], 0)
        units -= 1 if w.quota[i] < 0 else 0
        if free < 0 or units < 0:
            s[AT], s[ABOUT], s[BESIDE] = i, w.quota[i], have
            return 1
    return 0


@helper(INT, WORLD, INT, counted=False)
def _put(w, i):  # type: ignore[no-untyped-def]
    """Place position i if that is still to be done."""
    s = w.state
    j, q = w.active[i], w.quota[i]
    if w.job[j, LEAVES] & _COMES == 0:
        return LEGAL
    resized = w.job[j, LEAVES] & _GOES != 0
    w.job[j, LEAVES] = _STAYS
    rule = NODE_FULL
    if s[SHARING] == 1 and w.share[i] >= 0:
        rule = SHARE
        partner = w.active[w.share[i]]
        placed = 0
        if w.job[partner, GPUS] == q:
            placed = start_beside(w, j, partner)
    elif s[NAMED] == 1 and w.named_ptr[i + 1] > w.named_ptr[i]:
        placed = start_on(w, j, q, w.named_ptr[i], w.named_ptr[i + 1])
    else:
        placed = start(w, j, q)
    if placed == 1:
        return LEGAL
    if s[BEST_EFFORT] == 0 or (resized and w.given[j, PREEMPTIBLE] == 0):
        s[AT] = i
        return rule if s[BEST_EFFORT] == 0 else NOT_PREEMPTIBLE
    if resized:
        w.job[j, PREEMPTED] += 1
    return LEGAL


@helper(INT, WORLD, INT, counted=False)
def _forget(w, rule):  # type: ignore[no-untyped-def]
    """Take back all marks of a decision that is refused."""
    for i in range(w.state[ACTIVE]):
        w.job[w.active[i], LEAVES] = _STAYS
    return rule


@entry(INT, WORLD, counted=False)
def apply(w):  # type: ignore[no-untyped-def]
    """Do what `World.quota` and its companions say, for all active jobs by position.

    Answers `LEGAL`, or the rule that is broken, with ``state[AT]`` the position. Nothing has been
    changed then, except for `NODE_FULL` and `SHARE`, found while jobs are placed: the world is not
    to be used any more. Under ``state[BEST_EFFORT]`` what finds no place stays pending.
    """
    s = w.state
    busy = 0
    for i in range(s[ACTIVE]):
        rule = _mark(w, i)
        if rule != LEGAL:
            s[AT] = i
            return _forget(w, rule)
        busy |= w.job[w.active[i], LEAVES]
    if busy == _STAYS:
        return LEGAL
    if s[ORDERED] >= 1:
        for i in range(s[ACTIVE]):
            if w.order[i] < 0 or w.order[i] >= s[ACTIVE]:
                s[AT], s[ABOUT] = i, w.order[i]
                return _forget(w, ORDER)
    if s[BEST_EFFORT] == 0 and _lacks(w) == 1:
        return _forget(w, TOO_MANY)
    if busy & _GOES != 0:
        for i in range(s[ACTIVE]):
            j = w.active[i]
            if w.job[j, LEAVES] == _GOES:
                w.job[j, LEAVES] = _STAYS
                release(w, j, 0)
            elif w.job[j, LEAVES] == _GOES | _COMES:
                release(w, j, 1)
    if busy & _COMES == 0:
        return LEGAL
    if s[ORDERED] == 1:
        for k in range(s[ACTIVE]):
            rule = _put(w, w.order[k])
            if rule != LEGAL:
                return rule
    for i in range(s[ACTIVE]):  # those that the order leaves out; without one, all
        rule = _put(w, i)
        if rule != LEGAL:
            return rule
    return LEGAL
