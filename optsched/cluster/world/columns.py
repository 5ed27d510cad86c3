"""One step of a simulation: a decision is applied, time advances, columns are filled."""

from __future__ import annotations

from typing import Final

from optsched.cluster.world.apply import apply
from optsched.cluster.world.events import advance
from optsched.cluster.world.jobs import show
from optsched.cluster.world.layout import DECIDE, LEGAL, at
from optsched.kernels.compile import INT, entry

PRESENT: Final = (
    "gpus", "running", "done", "remaining", "at_pass_end", "passes", "starts", "first_start",
    "entered", "attained", "partner",
)  # fmt: skip
"""Rows of `World.present`; bit k of ``state.columns``: row k is kept up to date."""


@entry(INT, INT, INT, counted=False)
def turn(address, columns):  # type: ignore[no-untyped-def]
    """Apply the decision if there is one, `advance`, and update columns of the active jobs.

    With `columns` only these rows of `World.present` are filled, and kept up to date from now on.
    Returns the answer of `advance`, or the broken rule times -1. It takes the address of a `World`.
    """
    w = at(address)
    s, status = w.state[0], DECIDE
    if columns == 0:
        if s.decided == 1:
            s.decided = 0
            rule = apply(w)
            if rule != LEGAL:
                return -rule
        status = advance(w)
    s.columns |= columns
    if status == DECIDE:
        for i in range(s.active):
            if w.assigned[i] != 0 or columns != 0:
                show(w, i, s.columns)
    return status
