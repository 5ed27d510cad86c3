"""Depth-first search over the options of a quota plan's jobs, with prices or levels as bounds."""

from __future__ import annotations

from typing import Final

from optsched.kernels.compile import INT, INTS, READ, entry

# `state`
DEPTH: Final = 0
BEST: Final = 1
FOUND: Final = 2
"""1 if the search has stopped at a better answer, to be read from `pos`."""
STATE: Final = 3

# `rule`
JOBS: Final = 0
TYPES: Final = 1
HIGHEST: Final = 2
"""1: the highest cost counts, 0: their sum."""
EXACT: Final = 3
"""1: all GPUs must be handed out."""
RULE: Final = 4


@entry(
    INT, INT, READ, READ, READ, READ, READ, READ, READ, READ, READ, INTS, INTS, INTS, INTS,
    counted=False,
)  # fmt: skip
def walk(  # type: ignore[no-untyped-def]
    most, rule, ptr, kind, size, cost, suffix, need, room, price, left, pos, acc, state
):
    """Try options until a better answer, the end (depth -1) or `most` nodes; nodes tried.

    ptr, kind, size, cost: options by job in order of the search. suffix[d]: bound of jobs d.. (with
    prices); need[d], room[d]: least and most GPUs they take. left: GPUs by type. pos[d]: option of
    job d, ``ptr[d] - 1`` before the first. acc[d]: cost of jobs before d.
    """
    n, nodes = rule[JOBS], 0
    state[FOUND] = 0
    while nodes < most and state[DEPTH] >= 0:
        d = state[DEPTH]
        if d == n:
            state[DEPTH] = d - 1
            if acc[n] < state[BEST]:
                state[BEST], state[FOUND] = acc[n], 1
                break
            continue
        o = pos[d]
        if o >= ptr[d]:
            left[kind[o]] += size[o]
        o += 1
        if o == ptr[d + 1]:
            pos[d] = ptr[d] - 1
            state[DEPTH] = d - 1
            continue
        pos[d] = o
        nodes += 1
        left[kind[o]] -= size[o]
        if left[kind[o]] < 0:
            continue
        total = paid = 0
        for k in range(rule[TYPES]):
            total += left[k]
            paid += price[k] * left[k]
        if rule[HIGHEST] == 1:
            acc[d + 1] = max(acc[d], cost[o])
            bound = max(acc[d + 1], suffix[d + 1])
        else:
            acc[d + 1] = acc[d] + cost[o]
            bound = acc[d + 1] + suffix[d + 1] - paid
        if bound >= state[BEST] or total < need[d + 1]:
            continue
        if rule[EXACT] == 1 and total > room[d + 1]:
            continue
        state[DEPTH] = d + 1
    return nodes
