"""Whether a periodic plan runs for ever: every cycle of its marked graph needs a token."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from optsched.schedule_checks import cycle_of

if TYPE_CHECKING:
    from collections.abc import Sequence


def token_free_cycle(
    n: int, arcs: Sequence[tuple[int, int, int]], lines: Sequence[Sequence[int]]
) -> list[int]:
    """Operations on a cycle whose tokens add up to less than one, or ``[]`` if the plan is live.

    A marked graph is live iff every directed cycle carries a token (Commoner et al. 1971).

    Parameters
    ----------
    n
        Number of operations.
    arcs
        ``(tail, head, tokens)``: instance c of head waits for instance c - tokens of tail.
    lines
        Operations of every device in order; neighbours are joined by arcs without token, the last
        and the first by one with one token.
    """
    rows = list(arcs)
    for line in lines:
        rows += [(i, j, 0) for i, j in pairwise(line)]
        rows += [(line[-1], line[0], 1)] if line else []
    table = np.array(rows, dtype=np.int64).reshape(-1, 3)
    tail, head, tokens = table.T
    if (tokens >= 0).all():
        loop = (tail == head) & (tokens == 0)
        if loop.any():
            return [int(tail[np.argmax(loop)])]
        return cycle_of(n, tail[tokens == 0], head[tokens == 0])
    # sum of tokens <= 0 on a cycle of at most n arcs <=> sum of these weights < 0
    return _negative_cycle(n, [(i, j, h * (n + 1) - 1) for i, j, h in rows])


def _negative_cycle(n: int, arcs: Sequence[tuple[int, int, int]]) -> list[int]:
    """Nodes of a cycle of negative weight, in order (Bellman-Ford with early detection)."""
    distance, before = [0] * n, [-1] * n
    for _ in range(n + 1):
        changed = False
        for i, j, weight in arcs:
            if distance[i] + weight < distance[j]:
                distance[j] = distance[i] + weight
                before[j] = i
                changed = True
        if not changed:
            return []
        cycle = _parent_cycle(before)
        if cycle:
            return cycle
    raise AssertionError("Bellman-Ford went on for more than n rounds without a negative cycle")


def _parent_cycle(before: Sequence[int]) -> list[int]:
    """A cycle of the predecessor graph, in the direction of the arcs."""
    seen = [0] * len(before)
    for root in range(len(before)):
        node = root
        while node >= 0 and not seen[node]:
            seen[node] = root + 1
            node = before[node]
        if node >= 0 and seen[node] == root + 1:
            cycle = [node]
            while before[cycle[-1]] != node:
                cycle.append(before[cycle[-1]])
            return cycle[::-1]
    return []
