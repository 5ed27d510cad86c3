"""A decision is checked, then applied: releases first, starts and resizes in its order; kernels."""

from __future__ import annotations

from typing import Final

from optsched.cluster.world.jobs import rate_of, release, start, start_shared
from optsched.cluster.world.layout import (
    LEGAL,
    MID_PASS,
    NODE_FULL,
    NODE_SUM,
    NOT_PREEMPTIBLE,
    ORDER,
    SHARE,
    SIZE,
    TOO_MANY,
    UNKNOWN_NODE,
    WORLD,
)
from optsched.kernels.compile import INT, helper

_STAYS: Final = 0
_GOES: Final = 1
"""Bit of `JOB.leaves`: gives up its GPUs."""
_COMES: Final = 2
"""Bit of `JOB.leaves`: is to be placed."""


@helper(INT, WORLD, INT, counted=False)
def _same_nodes(w, i):  # type: ignore[no-untyped-def]
    """Check the nodes named for position i: 1 if it runs on exactly these, 0 if not, or -rule."""
    s, j, q = w.state[0], w.active[i], w.quota[i]
    first, end, total = w.named_ptr[i], w.named_ptr[i + 1], 0
    for k in range(first, end):
        s.about = w.named[k, 0]
        if w.named[k, 0] < 0 or w.named[k, 0] >= w.node.shape[0]:
            return -UNKNOWN_NODE
        if w.named[k, 1] < 0 or (q > 0 and w.named[k, 1] == 0):
            return -NODE_SUM
        total += w.named[k, 1]
    s.about, s.other = total, max(q, 0)
    if total != max(q, 0) or (q < 0 and end > first + 1):
        return -NODE_SUM
    if w.assigned[i] != q:
        return 0
    if q < 0:
        return 1 if w.job[j].unit == w.named[first, 0] else 0
    row = w.log[w.job[j].row].first
    if w.log[w.job[j].row].end_node - row != end - first:
        return 0
    for k in range(first, end):
        if w.log_node[row, 0] != w.named[k, 0] or w.log_node[row, 1] != w.named[k, 1]:
            return 0
        row += 1
    return 1


@helper(INT, WORLD, INT, counted=False)
def _mark(w, i):  # type: ignore[no-untyped-def]
    """Check the decision for position i alone; note whether it leaves and is placed."""
    s = w.state[0]
    j, q = w.active[i], w.quota[i]
    running = w.assigned[i] != 0
    if q == 0:
        if running and w.given[j].preemptible == 0:
            return NOT_PREEMPTIBLE
        w.job[j].leaves = _GOES if running else _STAYS
        return LEGAL
    if rate_of(w, j, q, 0) == 0:
        s.about = q
        return SIZE
    same = 1 if w.assigned[i] == q else 0
    if s.named == 1 and w.named_ptr[i + 1] > w.named_ptr[i]:
        same = _same_nodes(w, i)
        if same < 0:
            return -same
    if s.sharing == 1 and w.share[i] >= 0:
        if w.share[i] >= s.active or w.share[i] == i:
            s.about = w.share[i]
            return SHARE
        if w.job[j].partner != w.active[w.share[i]]:
            same = 0
    if same == 1:
        return LEGAL
    if running and s.pass_only == 1 and w.job[j].pass_end != s.time:
        s.about, s.other = w.job[j].gpus, q
        return MID_PASS
    w.job[j].leaves = _COMES | _GOES if running else _COMES
    return LEGAL


@helper(INT, WORLD, INT, counted=False)
def _lacks(w, count):  # type: ignore[no-untyped-def]
    """1 if GPUs are too few for all changes; notes the first position without."""
    s = w.state[0]
    free = s.free_gpus
    for c in range(count):
        j = w.active[w.changed[c]]
        partner = w.job[j].partner
        if w.job[j].leaves & _GOES == 0:
            continue
        if partner >= 0 and (w.job[partner].leaves & _GOES == 0 or partner < j):
            continue
        row = w.log[w.job[j].row]
        for k in range(row.first, row.end_node):
            free += w.log_node[k, 1] * w.node[w.log_node[k, 0]].takes
    for c in range(count):
        i = w.changed[c]
        if w.quota[i] < 0 or w.job[w.active[i]].leaves & _COMES == 0:
            continue
        if s.sharing == 1 and w.share[i] >= 0:
            continue
        free -= w.quota[i]
        if free < 0:
            s.at, s.about, s.other = i, w.quota[i], free + w.quota[i]
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
    rule, placed = NODE_FULL, 0
    if s.sharing == 1 and w.share[i] >= 0:
        rule, partner = SHARE, w.active[w.share[i]]
        if w.job[partner].gpus == q:
            placed = start_shared(w, j, partner)
    else:
        first, end = 0, 0
        if s.named == 1:
            first, end = w.named_ptr[i], w.named_ptr[i + 1]
        placed = start(w, j, q, first, end)
        if placed == 0 and end > first and w.supply.shape[0] > 0:
            placed = start(w, j, q, 0, 0)
    if placed == 1:
        return LEGAL
    strict = s.best_effort == 0 and w.supply.shape[0] == 0 and q > 0
    if strict or (resized and w.given[j].preemptible == 0):
        s.at = i
        return rule if strict else NOT_PREEMPTIBLE
    if resized:
        w.job[j].preempted += 1
    return LEGAL


@helper(INT, WORLD, INT, INT, counted=False)
def _forget(w, count, rule):  # type: ignore[no-untyped-def]
    """Take back all marks of a decision that is refused."""
    for c in range(count):
        w.job[w.active[w.changed[c]]].leaves = _STAYS
    return rule


@helper(INT, WORLD, counted=False)
def apply(w):  # type: ignore[no-untyped-def]
    """Apply `World.quota` and its companions to all active jobs, by position.

    Returns `LEGAL`, or the rule that is broken, with ``state.at`` the position. Nothing has been
    changed then, except for `NODE_FULL` and `SHARE`, found while jobs are placed: the world is not
    to be used any more. Under ``state.best_effort`` a job that does not fit stays pending.
    """
    s, count = w.state[0], 0
    for i in range(s.active):
        if w.quota[i] == w.assigned[i] and s.named == 0 and s.sharing == 0:
            continue
        w.changed[count] = i
        count += 1
        rule = _mark(w, i)
        if rule != LEGAL:
            s.at = i
            return _forget(w, count, rule)
    if count == 0:
        return LEGAL
    for k in range(s.ordered):
        if w.order[k] < 0 or w.order[k] >= s.active:
            s.about = w.order[k]
            return _forget(w, count, ORDER)
    if s.best_effort == 0 and _lacks(w, count) == 1:
        return _forget(w, count, TOO_MANY)
    for c in range(count):
        j = w.active[w.changed[c]]
        if w.job[j].leaves & _GOES:
            resized = w.job[j].leaves & _COMES
            w.job[j].leaves = w.job[j].leaves if resized else _STAYS
            release(w, j, 0 if resized else 1)
    for k in range(s.ordered + count):
        rule = _put(w, w.order[k] if k < s.ordered else w.changed[k - s.ordered])
        if rule != LEGAL:
            return rule
    return LEGAL
