"""The best makespan of tiny graphs by trying every order on every resource; shares no code."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from optsched.model.schedule import NO_DEADLINE, Schedule

if TYPE_CHECKING:
    from collections.abc import Iterator

_TOGETHER = 4096  # combinations of orders that are timed at once


def best_makespan(graph: Schedule) -> int | None:
    """Optimal makespan over all machine orders, or None if no order is feasible."""
    choices = machine_orders(graph)
    every = product(*(range(len(rows)) for rows in choices))
    best: int | None = None
    while picked := [pick for _, pick in zip(range(_TOGETHER), every, strict=False)]:
        at = np.array(picked, np.int64).reshape(len(picked), len(choices))
        rows = [np.array(on, np.int64)[at[:, r]] for r, on in enumerate(choices)]
        value = _best_of(graph, rows, len(picked))
        if value is not None:
            best = value if best is None else min(best, value)
    return best


def machine_orders(graph: Schedule) -> list[list[tuple[int, ...]]]:
    """Of every resource the orders of its operations that fit its memory and the arcs."""
    n = graph.n_operations
    before = np.eye(n, dtype=bool)
    before[graph.arcs.tail, graph.arcs.head] = True
    for i in range(n):
        before |= before[:, i, None] & before[None, i, :]
    return [
        [row for row in _orders(on, before) if _memory_fits(graph, r, row)]
        for r, on in enumerate(graph.users.to_lists())
    ]


def _orders(left: list[int], before: Any) -> Iterator[tuple[int, ...]]:
    if not left:
        yield ()
    for i in left:
        if not any(before[k, i] for k in left if k != i):
            for rest in _orders([k for k in left if k != i], before):
                yield (i, *rest)


def _memory_fits(graph: Schedule, r: int, row: tuple[int, ...]) -> bool:
    level, capacity = 0, graph.resources[r].memory
    for i in row:
        if capacity and level + graph.acquire[i] + graph.workspace[i] > capacity:
            return False
        level += int(graph.acquire[i] - graph.free[i])
        if level < 0:
            return False
    return True


def _best_of(graph: Schedule, rows: list[Any], many: int) -> int | None:
    """The least makespan of many combinations of orders, by repeated relaxation of all at once.

    Every edge counts 1 besides its time, so that orders in a circle rise for ever.
    """
    n, every = graph.n_operations, np.arange(many)
    unit = n + 1
    start = np.tile(graph.release * unit, (many, 1))
    arcs = [
        (int(i), int(j), int(graph.duration[i] + lag) * unit + 1)
        for i, j, lag, _ in zip(*graph.arcs, strict=True)
    ]
    setup = graph.setup_out[:, None] + graph.setup_in[None, :]
    setup = np.where(graph.family[:, None] == graph.family[None, :], 0, setup)
    weight = (graph.duration[:, None] + setup) * unit + 1
    rising = np.zeros(many, bool)
    for _ in range(n + 1):
        last = start.copy()
        for i, j, least in arcs:
            np.maximum(start[:, j], start[:, i] + least, out=start[:, j])
        for row in rows:
            for p in range(row.shape[1] - 1):
                i, j = row[:, p], row[:, p + 1]
                start[every, j] = np.maximum(start[every, j], start[every, i] + weight[i, j])
        rising = (start != last).any(axis=1)
        if not rising.any():
            break
    end = start // unit + graph.duration
    late = end > np.where(graph.deadline == NO_DEADLINE, np.iinfo(np.int64).max, graph.deadline)
    feasible = ~rising & ~late.any(axis=1)
    return int(end[feasible].max(axis=1, initial=0).min()) if feasible.any() else None


__all__ = ["best_makespan", "machine_orders"]
