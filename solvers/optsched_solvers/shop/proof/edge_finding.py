"""What one machine's time windows imply: edge finding, not-first, overload; on bare arrays.

An operation has a window [head, deadline) for its processing. Every rule here looks at heads only;
for deadlines mirror time: heads are then ``-deadline``, deadlines ``-head``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numba import types

from optsched.kernels.compile import BOOL, INT, entry, helper

if TYPE_CHECKING:
    from optsched.model.schedule import IntArray

FAR = 2**62
"""Beyond every time; sums of all durations stay below 2^53."""

TABLE: Any = types.Array(types.int64, 2, "C")

# rows of the table that `head_rules` works on
HEAD, PROCESS, DEADLINE, LATE_FIRST, NEW, ECT = range(6)


def raise_heads(head: IntArray, duration: IntArray, deadline: IntArray) -> IntArray | None:
    """Heads raised by one pass of edge finding and not-first on one machine.

    Parameters
    ----------
    head, duration, deadline
        Earliest start, processing time >= 0 and latest end of every operation; shape (n,), int64.

    Returns
    -------
    IntArray or None
        No start of any feasible sequence is below its head; None if there is no feasible sequence
        for a reason that these rules see. Times are O(n^2): Carlier & Pinson (1990) in the form
        of Nuijten (1994); not-first: Torres & Lopez (2000).
    """
    by_head = np.argsort(head, kind="stable")
    t = np.zeros((6, len(by_head)), np.int64)
    t[HEAD] = t[NEW] = np.asarray(head)[by_head]
    t[PROCESS], t[DEADLINE] = np.asarray(duration)[by_head], np.asarray(deadline)[by_head]
    t[LATE_FIRST] = np.argsort(-t[DEADLINE], kind="stable")
    if not _head_rules(len(by_head), t):
        return None
    heads = np.empty(len(by_head), np.int64)
    heads[by_head] = t[NEW]
    return heads


def tighten(
    head: IntArray, duration: IntArray, deadline: IntArray
) -> tuple[IntArray, IntArray] | None:
    """Heads and deadlines of one machine at the fixpoint of `raise_heads` in both directions.

    Returns
    -------
    (head, deadline) or None
        None if no sequence is feasible, as far as the rules see.
    """
    early, late = np.array(head, np.int64), np.array(deadline, np.int64)
    while True:
        raised = raise_heads(early, duration, late)
        if raised is None:
            return None
        mirrored = raise_heads(-late, duration, -raised)
        if mirrored is None:
            return None
        if np.array_equal(raised, early) and np.array_equal(-mirrored, late):
            return early, late
        early, late = raised, -mirrored


@helper(counted=False)
def head_rules(n, t):  # type: ignore[no-untyped-def]
    """Raise NEW (given as a copy of HEAD); False if some set of operations cannot fit.

    A table of rows HEAD .. ECT with at least n columns, sorted by head, ascending; LATE_FIRST lists
    columns by deadline, descending; ECT is scratch.
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


@entry(BOOL, INT, TABLE, counted=False)
def _head_rules(n, t):  # type: ignore[no-untyped-def]
    """`head_rules` as a kernel of its own; further, no operation may end after its deadline."""
    if not head_rules(n, t):
        return False
    late = 0
    for x in range(n):
        if t[NEW, x] + t[PROCESS, x] > t[DEADLINE, x]:
            late += 1
    return late == 0
