"""Columns that policies see, by position of the active jobs: read from a `World` by kernels."""

from __future__ import annotations

from typing import Final

from optsched.cluster.world.advance import advance
from optsched.cluster.world.apply import apply
from optsched.cluster.world.layout import ASK, LEGAL, RUNS, WORLD
from optsched.cluster.world.stays import (
    at_pass_end,
    attained_now,
    done_now,
    remaining_now,
    set_rate,
)
from optsched.kernels.compile import INT, INTS, READ, entry, helper

PRESENT: Final = (
    "gpus", "running", "done", "remaining", "at_pass_end", "passes", "starts", "first_start",
    "entered", "attained", "partner",
)  # fmt: skip
"""Rows of `World.present`; bit k of ``state.columns``: `turn` fills row k."""


@helper(INT, WORLD, INT, counted=False)
def _position(w, job):  # type: ignore[no-untyped-def]
    """Position of an active job; -1 for job -1."""
    low, high = 0, w.state[0].active
    while low < high:
        middle = (low + high) >> 1
        if w.active[middle] < job:
            low = middle + 1
        else:
            high = middle
    return low if job >= 0 else -1


@helper(INT, WORLD, INT, INT, counted=False)
def _fill(w, row, clairvoyant):  # type: ignore[no-untyped-def]
    """Fill one row of `World.present`."""
    out = w.present
    for i in range(w.state[0].active):
        j = w.active[i]
        value = 0
        if row == 0:
            value = w.job[j].gpus
        elif row == 1:
            value = 1 if w.job[j].phase == RUNS else 0
        elif row == 2:
            value = done_now(w, j)
        elif row == 3:
            value = remaining_now(w, j, clairvoyant)
        elif row == 4:
            value = at_pass_end(w, j)
        elif row == 5:
            value = w.job[j].passes
        elif row == 6:
            value = w.job[j].starts
        elif row == 7:
            value = w.job[j].first_start
        elif row == 8:
            value = w.job[j].entered
        elif row == 9:
            value = attained_now(w, j)
        else:
            value = _position(w, w.job[j].partner)
        out[row, i] = value
    return row


@entry(INT, WORLD, INT, counted=False)
def fill(w, row):  # type: ignore[no-untyped-def]
    """Fill one row of `World.present`, now and at every `turn` to come."""
    w.state[0].columns |= 1 << row
    return _fill(w, row, w.state[0].clairvoyant)


@entry(INT, WORLD, counted=False)
def turn(w):  # type: ignore[no-untyped-def]
    """Apply the decision if there is one, `advance`, and fill the rows of ``state.columns``.

    One call, because passing a world takes longer than all of it. Returns the answer of `advance`,
    or the broken rule times -1.
    """
    s = w.state[0]
    if s.decided == 1:
        s.decided = 0
        rule = apply(w)
        if rule != LEGAL:
            return -rule
    status = advance(w)
    if status == ASK:
        for row in range(w.present.shape[0]):
            if s.columns >> row & 1 == 1:
                _fill(w, row, s.clairvoyant)
    return status


@entry(INT, WORLD, INTS, counted=False)
def held_rows(w, ptr):  # type: ignore[no-untyped-def]
    """Where the rows of every active job begin in `held`; their number."""
    total = 0
    for i in range(w.state[0].active):
        ptr[i] = total
        row = w.job[w.active[i]].held
        while row >= 0:
            total += 1
            row = w.held[row].following
    ptr[w.state[0].active] = total
    return total


@entry(INT, WORLD, INTS, INTS, counted=False)
def held(w, node, count):  # type: ignore[no-untyped-def]
    """Nodes and GPUs of all active jobs, one after the other."""
    k = 0
    for i in range(w.state[0].active):
        row = w.job[w.active[i]].held
        while row >= 0:
            node[k], count[k] = w.held[row].where, w.held[row].count
            k += 1
            row = w.held[row].following
    return k


@entry(INT, WORLD, READ, READ, counted=False)
def set_rates(w, jobs, rates):  # type: ignore[no-untyped-def]
    """Speeds of running jobs from now on."""
    changed = 0
    for i in range(jobs.shape[0]):
        changed += set_rate(w, jobs[i], rates[i])
    return changed
