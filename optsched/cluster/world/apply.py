"""A decision is checked, then applied: releases first, starts and resizes in its order; kernels.

`turn` is what Python and the loops of compiled rules call: it applies a decision, and goes to the
next one.
"""

from __future__ import annotations

from typing import Final

from optsched.cluster.world.events import advance
from optsched.cluster.world.jobs import has_room, rate_of, release, show, start, start_shared
from optsched.cluster.world.layout import (
    DECIDE,
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
)
from optsched.cluster.world.pointers import WORLD, at
from optsched.kernels.compile import INT, entry, helper

_STAYS: Final = 0
_GOES: Final = 1
"""Bit of `JOB.leaves`: gives up its GPUs."""
_COMES: Final = 2
"""Bit of `JOB.leaves`: is to be placed."""
_GROWS: Final = 4
"""`JOB.leaves` of a job that keeps its GPUs if it does not fit at its new size."""


@helper(INT, WORLD, INT, counted=False)
def _same_nodes(w, i):  # type: ignore[no-untyped-def]
    """Check the nodes named for position i: 1 if it runs on exactly these, 0 if not, or -rule."""
    s, j, q = w.state, w.active[i], w.quota[i]
    first, end, total = w.named_ptr[i], w.named_ptr[i + 1], 0
    for k in range(first, end):
        s.about = w.named[k].node
        if s.about < 0 or s.about >= len(w.node):
            return -UNKNOWN_NODE
        if w.named[k].gpus < 0 or (q > 0 and w.named[k].gpus == 0):
            return -NODE_SUM
        total += w.named[k].gpus
    s.about, s.other = total, max(q, 0)
    if total != max(q, 0) or (q < 0 and end > first + 1):
        return -NODE_SUM
    if w.assigned[i] != q:
        return 0
    if q < 0:
        return 1 if w.job[j].unit == w.named[first].node else 0
    stay = w.log[w.job[j].row]
    if stay.end_node - stay.first != end - first:
        return 0
    for k in range(end - first):
        held, named = w.log_node[stay.first + k], w.named[first + k]
        if held.node != named.node or held.gpus != named.gpus:
            return 0
    return 1


@helper(INT, WORLD, INT, counted=False)
def _mark(w, i):  # type: ignore[no-untyped-def]
    """Check the decision for position i alone; note whether it leaves and is placed."""
    s, j, q = w.state, w.active[i], w.quota[i]
    job, running, movable = w.job[j], w.assigned[i] != 0, w.given[j].preemptible
    if q == 0:
        if running and movable == 0:
            return NOT_PREEMPTIBLE
        job.leaves = _GOES if running else _STAYS
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
        if job.partner != w.active[w.share[i]]:
            same = 0
    if same == 1:
        return LEGAL
    if running and s.pass_only == 1 and job.pass_end != s.time:
        s.about, s.other = job.gpus, q
        return MID_PASS
    job.leaves = _COMES
    if running:
        job.leaves = _GROWS if movable == 0 and len(w.supply) > 0 and q > 0 else _COMES | _GOES
    return LEGAL


@helper(INT, WORLD, INT, counted=False)
def _put(w, i):  # type: ignore[no-untyped-def]
    """Place position i if that is still to be done."""
    s, j, q = w.state, w.active[i], w.quota[i]
    leaves, rule, placed, strict = w.job[j].leaves, NODE_FULL, 0, s.best_effort == 0 and q > 0
    w.job[j].leaves = _STAYS
    if leaves == _STAYS or (leaves == _GROWS and has_room(w, j, q) == 0):
        return LEGAL
    if leaves == _GROWS:
        release(w, j, 0)
    if s.sharing == 1 and w.share[i] >= 0:
        rule, partner = SHARE, w.active[w.share[i]]
        if w.job[partner].gpus == q:
            placed = start_shared(w, j, partner)
    elif strict and q > s.free_gpus:
        rule, s.about, s.other = TOO_MANY, q, s.free_gpus
        return rule
    else:
        first, end = 0, 0
        if s.named == 1:
            first, end = w.named_ptr[i], w.named_ptr[i + 1]
        placed = start(w, j, q, first, end)
        if placed == 0 and end > first and len(w.supply) > 0:
            placed = start(w, j, q, 0, 0)
    if placed == 1:
        return LEGAL
    if strict and len(w.supply) == 0:
        return rule
    if leaves & _GOES:
        if w.given[j].preemptible == 0:
            return NOT_PREEMPTIBLE
        w.job[j].preempted += 1
    return LEGAL


@helper(INT, WORLD, counted=False)
def _apply(w):  # type: ignore[no-untyped-def]
    """Apply `World.quota` and its companions to all active jobs, by position.

    Returns `LEGAL`, or the rule that is broken, with ``state.at`` the position; the world is not to
    be used any more then. Under ``state.best_effort`` a job that does not fit stays pending.
    """
    s, count = w.state, 0
    for i in range(s.active):
        if w.quota[i] == w.assigned[i] and s.named == 0 and s.sharing == 0:
            continue
        w.changed[count] = i
        count += 1
        s.at = i
        rule = _mark(w, i)
        if rule != LEGAL:
            return rule
    for c in range(count):
        j = w.active[w.changed[c]]
        leaves = w.job[j].leaves
        if leaves & _GOES:
            if leaves == _GOES:
                w.job[j].leaves = _STAYS
            release(w, j, 1 if leaves == _GOES else 0)
    for k in range(s.ordered + count if count > 0 else 0):
        i = w.order[k] if k < s.ordered else w.changed[k - s.ordered]
        if i < 0 or i >= s.active:
            s.about = i
            return ORDER
        s.at = i
        rule = _put(w, i)
        if rule != LEGAL:
            return rule
    return LEGAL


@entry(INT, INT, INT, counted=False)
def turn(address, columns):  # type: ignore[no-untyped-def]
    """Apply the decision if there is one, `advance`, and update columns of the active jobs.

    With `columns` only these rows of `World.present` are filled, and kept up to date from now on.
    Returns the answer of `advance`, or the broken rule times -1. It takes the address of a `World`.
    """
    w = at(address)
    s, status = w.state, DECIDE
    if columns == 0:
        if s.decided == 1:
            s.decided = 0
            rule = _apply(w)
            if rule != LEGAL:
                return -rule
        status = advance(w)
    s.columns |= columns
    if status == DECIDE:
        for i in range(s.active):
            if w.assigned[i] != 0 or columns != 0:
                show(w, i, s.columns)
    return status
