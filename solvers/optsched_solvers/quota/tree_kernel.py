"""Depth-first search over the options of a quota plan's jobs, with prices or levels as bounds."""

from __future__ import annotations

from typing import Final

from numba import types

from optsched.kernels.compile import INT, INTS, READ, entry

TABLE: Final = types.Array(types.int64, 2, "C")

DEPTH, BEST, FOUND, HIGHEST, EXACT = range(5)
"""Of `state`. Found: 1 if the search has stopped at a better answer, to be read from `path`;
highest: 1: the highest cost counts, 0: their sum; exact: 1: all GPUs must be handed out."""
KIND, SIZE, COST = range(3)
"""Of `option`."""
LEAST, NEED, ROOM = range(3)
"""Of `behind`: bound of the cost (with prices), least and most GPUs of all jobs from one on."""
AT, PAID = range(2)
"""Of `path`: option of a job, ``ptr[d] - 1`` before the first; cost of the jobs before it."""


@entry(INT, INT, INTS, READ, TABLE, TABLE, READ, INTS, TABLE, counted=False)
def walk(most, state, ptr, option, behind, price, left, path):  # type: ignore[no-untyped-def]
    """Try options until a better answer, the end (depth -1) or `most` nodes; nodes tried.

    Jobs are in order of the search. left: GPUs by type.
    """
    n, nodes = len(ptr) - 1, 0
    state[FOUND] = 0
    while nodes < most and state[DEPTH] >= 0:
        d = state[DEPTH]
        if d == n:
            state[DEPTH] = d - 1
            if path[PAID, n] < state[BEST]:
                state[BEST], state[FOUND] = path[PAID, n], 1
                break
            continue
        o = path[AT, d]
        if o >= ptr[d]:
            left[option[KIND, o]] += option[SIZE, o]
        o += 1
        if o == ptr[d + 1]:
            path[AT, d] = ptr[d] - 1
            state[DEPTH] = d - 1
            continue
        path[AT, d] = o
        nodes += 1
        left[option[KIND, o]] -= option[SIZE, o]
        if left[option[KIND, o]] < 0:
            continue
        total = rest = 0
        for k in range(len(price)):
            total += left[k]
            rest += price[k] * left[k]
        if state[HIGHEST] == 1:
            path[PAID, d + 1] = max(path[PAID, d], option[COST, o])
            bound = max(path[PAID, d + 1], behind[LEAST, d + 1])
        else:
            path[PAID, d + 1] = path[PAID, d] + option[COST, o]
            bound = path[PAID, d + 1] + behind[LEAST, d + 1] - rest
        if bound >= state[BEST] or total < behind[NEED, d + 1]:
            continue
        if state[EXACT] == 0 or total <= behind[ROOM, d + 1]:
            state[DEPTH] = d + 1
    return nodes
