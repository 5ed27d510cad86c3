"""Late-acceptance local search (Burke & Bykov 2017) from the best of several points."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from optsched.solving.monitor import Monitor

Point = TypeVar("Point")

MEMORY: Final = 40
"""A point is kept if it is no worse than the one so many steps ago."""

NOTHING: Final = int(np.iinfo(np.int64).max)
"""The value of a point without a schedule."""


def walk(
    starts: Sequence[Point],
    value: Callable[[Point], int],
    neighbour: Callable[[Point], Point],
    monitor: Monitor,
    *,
    iterations: int | None = None,
    seconds: float = float("inf"),
    patience: int | None = None,
) -> int:
    """Value all starts, then go on from the best of them; returns the number of points valued.

    Parameters
    ----------
    starts
        At least one point.
    value
        What is minimised; reports what is worth it to the monitor itself.
    neighbour
        A random point near another.
    monitor
        Stops the search, and counts its points.
    iterations, seconds, patience
        Points in all, time, and points in a row without a new best one.
    """
    most = NOTHING if iterations is None else iterations
    until = monitor.elapsed + seconds
    made = 0

    def valued(point: Point) -> int:
        nonlocal made
        made += 1
        monitor.advance(1)
        return value(point)

    ranked: list[tuple[int, int]] = []
    for k, point in enumerate(starts):
        if made >= most or monitor.should_stop() or (ranked and monitor.elapsed >= until):
            break
        ranked.append((valued(point), k))
    if len(ranked) < len(starts) and (made >= most or monitor.should_stop()):
        return made
    best, k = min(ranked)
    here, now = starts[k], best
    past = [best] * MEMORY
    stale = 0
    while made < most and not (patience is not None and stale >= patience):
        if made % 8 == 0 and (monitor.should_stop() or monitor.elapsed >= until):
            break
        there = neighbour(here)
        new = valued(there)
        if new <= now or new <= past[made % MEMORY]:
            here, now = there, new
        past[made % MEMORY] = now
        stale = 0 if new < best else stale + 1
        best = min(best, new)
    return made
