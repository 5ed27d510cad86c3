"""What policies see, read out of a `World`: kernels that fill columns by position."""

from __future__ import annotations

from typing import Final

from optsched.cluster.world.advance import advance
from optsched.cluster.world.apply import apply
from optsched.cluster.world.layout import ASK, INTS2, LEGAL, RUNS, WORLD
from optsched.cluster.world.stays import (
    at_pass_end,
    attained_now,
    done_now,
    remaining_now,
    set_rate,
)
from optsched.kernels.compile import INT, INTS, READ, entry

PRESENT: Final = ("job", "gpus", "done", "remaining", "running", "at_pass_end")
"""Rows of `World.present`."""

PAST: Final = ("passes", "starts", "first_start", "entered", "attained")
"""Rows of the table that `past` fills."""


@entry(INT, WORLD, INT, INT, counted=False)
def turn(w, decided, clairvoyant):  # type: ignore[no-untyped-def]
    """`apply` a decision (if decided = 1), `advance`, and fill ``present[:, :active]``.

    One call, for handing over a world takes longer than all of it. Answers as `advance`, or the
    broken rule times -1.
    """
    if decided == 1:
        rule = apply(w)
        if rule != LEGAL:
            return -rule
    status = advance(w)
    if status == ASK:
        out = w.present
        for i in range(w.state[0].active):
            j = w.active[i]
            out[0, i], out[1, i] = j, w.job[j].gpus
            out[2, i], out[3, i] = done_now(w, j), remaining_now(w, j, clairvoyant)
            out[4, i], out[5, i] = 1 if w.job[j].phase == RUNS else 0, at_pass_end(w, j)
    return status


@entry(INT, WORLD, INTS2, counted=False)
def past(w, out):  # type: ignore[no-untyped-def]
    """Fill the rows `PAST` of ``out``, shape (5, active)."""
    for i in range(w.state[0].active):
        j = w.active[i]
        out[0, i], out[1, i] = w.job[j].passes, w.job[j].starts
        out[2, i], out[3, i] = w.job[j].first_start, w.job[j].entered
        out[4, i] = attained_now(w, j)
    return w.state[0].active


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
