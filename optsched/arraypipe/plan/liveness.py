"""Whether a periodic plan runs for ever: every cycle of its marked graph needs a token."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from optsched.model.cycles import cycle_of
from optsched.model.graph import shortest_cycle

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from optsched.model.schedule import IntArray


def token_free_cycle(
    n: int,
    arcs: Sequence[tuple[int, int, int]] | npt.NDArray[np.int64],
    lines: Sequence[Sequence[int]],
) -> list[int]:
    """Operations on a cycle whose tokens add up to less than one, or ``[]`` if the plan is live.

    A marked graph is live iff every directed cycle carries a token (Commoner et al. 1971). Of
    ``(tail, head, tokens)`` instance c of head waits for instance c - tokens of tail; tokens may be
    negative. Neighbours in `lines`, the devices' orders, are joined by arcs without token, the last
    and the first by one with one token.
    """
    steps: list[tuple[int, int, int]] = []
    for line in lines:
        steps += [(i, j, 0) for i, j in pairwise(line)]
        steps += [(line[-1], line[0], 1)] if len(line) else []
    table = np.concatenate([
        np.asarray(arcs, np.int64).reshape(-1, 3), np.array(steps, np.int64).reshape(-1, 3),
    ])  # fmt: skip
    tail, head, tokens = table.T
    if (tokens < 0).any():
        late, cycle = _without_debts(n, table)
        if cycle:
            return cycle
        tokens = tokens + late[tail] - late[head]
    free = tokens == 0
    cycle = cycle_of(tail[free], head[free])
    if not cycle:
        return []
    after: list[list[int]] = [[] for _ in range(n)]
    for i, j in zip(tail[free].tolist(), head[free].tolist(), strict=True):
        after[i].append(j)
    return shortest_cycle(cycle, after)


def _without_debts(n: int, arcs: IntArray) -> tuple[IntArray, list[int]]:
    """Cycles per operation that leave no arc with negative tokens, or a cycle that owes some.

    Shortest paths over the tokens (Bellman-Ford): moving an operation by so many cycles changes the
    tokens of arcs, but those of no cycle (retiming; Leiserson & Saxe 1991).
    """
    after: list[list[tuple[int, int]]] = [[] for _ in range(n)]
    for i, j, h in arcs.tolist():
        after[i].append((j, h))
    late, before = [0] * n, [-1] * n
    moved, rounds, look = list(range(n)), 0, 1
    while moved:
        changed: dict[int, None] = {}
        for i in moved:
            for j, h in after[i]:
                if late[i] + h < late[j]:
                    late[j], before[j] = late[i] + h, i
                    changed[j] = None
        moved, rounds = list(changed), rounds + 1
        if rounds == look:  # without such a cycle the paths are final after n rounds
            look *= 2
            cycle = _parent_cycle(before)
            if cycle:
                return np.zeros(n, np.int64), cycle
    return np.array(late, np.int64), []


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
