"""Optimal makespan or period of tiny graphs by enumeration; shares no code with the solvers."""

from __future__ import annotations

import math
from itertools import combinations, product
from typing import TYPE_CHECKING, Any

import numpy as np

from optsched.model.schedule import NO_DEADLINE, Schedule

if TYPE_CHECKING:
    from collections.abc import Iterator

_TOGETHER = 4096  # combinations of orders that are timed at once
_FAR = -(10**15)  # no path
_CYCLE = 10**6  # more than a path has arcs


def best_makespan(graph: Schedule) -> int | None:
    """Find the optimal makespan, or objective of jobs, over all machine orders; None if infeasible.

    Examples
    --------
    >>> from optsched.testing import best_makespan
    >>> best_makespan(optsched.JobShop([[(0, 3), (1, 2)], [(1, 4), (0, 1)]]).graph())
    6
    """
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
            for tail in _orders([k for k in left if k != i], before):
                yield (i, *tail)


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
    """The least value of many combinations of orders, by repeated relaxation of all at once.

    Every edge adds 1 to its time, so that the starts of cyclic orders rise in every round.
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
    if not feasible.any():
        return None
    if graph.goal is None:
        return int(end[feasible].max(axis=1, initial=0).min())
    jobs = sorted(set(graph.job.tolist()))
    last = np.stack([end[feasible][:, graph.job == j].max(axis=1) for j in jobs], axis=1)
    if graph.goal.objective == "maximum_lateness":
        return int((last - np.array(graph.goal.due)[jobs]).max(axis=1).min())
    weights = graph.goal.job_weight or (1,) * (jobs[-1] + 1)
    return int((last * np.array(weights)[jobs]).sum(axis=1).min())


class TooLarge(Exception):
    """Brute force would take longer than it may."""


def best_period(graph: Schedule, effort: float = math.inf) -> int | None:
    """The least period of a cycle over all orders and offsets, or None if none is feasible.

    For operations i, k of one resource some integer K has ``start_k + K T >= end_i + setup`` and
    ``start_i + (1 - K) T >= end_k + setup`` (Hanen 1994): iteration K of k comes next after
    iteration 0 of i. All values of all K are tried, with longest paths between all pairs of
    operations at a fixed T; T by bisection, since orders that allow T allow all larger ones. Orders
    with a deadlock do not count, even if their operations take no time.

    Parameters
    ----------
    graph
        Periodic, without orders, such as `JobArray.graph` of a rolling array. Its own period, and
        its offsets, do not count. Setups must be triangular and depend on families alone; jobs
        must not wait for each other.
    effort
        Maximal number of partial orders for one period.

    Raises
    ------
    TooLarge
        They are not enough.
    """
    most = int(graph.duration.sum() + graph.setup_in.sum() + graph.setup_out.sum())
    most = max(1, most + int(graph.arcs.lag.clip(0).sum()))
    if not _possible(graph, most, effort):
        return None
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        if _possible(graph, middle, effort):
            high = middle
        else:
            low = middle + 1
    return low


def _possible(graph: Schedule, period: int, effort: float) -> bool:
    """Whether some order and offsets repeat with this period."""
    if (graph.duration[np.diff(graph.op_resources.indptr) > 0] > period).any():
        return False
    far = np.full((2, graph.n_operations, graph.n_operations), _FAR)
    far[:, range(graph.n_operations), range(graph.n_operations)] = 0
    for i, k, lag, distance in zip(*(column.tolist() for column in graph.arcs), strict=True):
        reached = _with_arc(far, i, k, _weight(int(graph.duration[i]) + lag, distance, period))
        if reached is None:
            return False
        far = reached
    # jobs repeat for ever: each may be renumbered so that its first operation starts in cycle 0
    first = np.unique(graph.job, return_index=True)[1].tolist()
    for i in first[1:]:
        for tail, head, least in ((first[0], i, 0), (i, first[0], 1 - period)):
            reached = _with_arc(far, tail, head, np.array([least, _FAR]))
            if reached is None:
                return False
            far = reached
    pairs = [
        (i, k)
        for r in range(graph.n_resources)
        for i, k in combinations(graph.users[r].tolist(), 2)
    ]
    for number, fits in enumerate(_all_orders(graph, period, far, pairs, {})):
        if fits:
            return True
        if number >= effort:
            raise TooLarge
    return False


def _all_orders(
    graph: Schedule, period: int, far: Any, pairs: list[tuple[int, int]], turn: dict[Any, int]
) -> Iterator[bool]:
    """True for every way to order the pairs that fits the memory, False for every part of one."""
    yield False
    if not pairs:
        if _steady_memory_fits(graph, turn):
            yield True
        return
    gaps = [_gap(graph, i, k) for i, k in pairs]
    ranges = [_turns(far, period, pair, gap) for pair, gap in zip(pairs, gaps, strict=True)]
    at = min(range(len(pairs)), key=lambda p: len(ranges[p]))
    (i, k), (ahead, behind) = pairs[at], gaps[at]
    others = pairs[:at] + pairs[at + 1 :]
    for number in ranges[at]:
        reached = _with_arc(far, i, k, _weight(ahead, number, period))
        if reached is not None:
            reached = _with_arc(reached, k, i, _weight(behind, 1 - number, period))
        if reached is not None:
            yield from _all_orders(graph, period, reached, others, {**turn, (i, k): number})


def _gap(graph: Schedule, i: int, k: int) -> tuple[int, int]:
    """From start to start, if k is next after i, and if i is next after k."""
    change = int(graph.family[i] != graph.family[k])
    ahead = int(graph.duration[i] + change * (graph.setup_out[i] + graph.setup_in[k]))
    behind = int(graph.duration[k] + change * (graph.setup_out[k] + graph.setup_in[i]))
    return ahead, behind


def _turns(far: Any, period: int, pair: tuple[int, int], gap: tuple[int, int]) -> range:
    """Values of K that the distances between two operations leave."""
    i, k = pair
    least, most = int(far[0, i, k]), -int(far[0, k, i])
    return range(-((most - gap[0]) // period), 1 - -(-(least + gap[1]) // period) + 1)


def _weight(gap: int, spanned: int, period: int) -> Any:
    """Of an arc between starts: its time, and a step in the order, both less the cycles spanned."""
    return np.array([gap - spanned * period, 1 - spanned * _CYCLE])


def _with_arc(far: Any, tail: int, head: int, weight: Any) -> Any:
    """All longest paths, in time and in steps, with one more arc.

    None if it closes a cycle of positive weight: in time that is too long for the period, in steps
    it spans no cycle of the schedule, so that its operations wait for each other.
    """
    if (far[:, tail, head] >= weight).all():
        return far
    if (weight + far[:, head, tail] > 0).any():
        return None
    through = far[:, :, tail, None] + weight[:, None, None] + far[:, None, head, :]
    return np.maximum(far, np.maximum(through, _FAR))


def _steady_memory_fits(graph: Schedule, turn: dict[Any, int]) -> bool:
    """Bytes in use at the start of every operation once the cycle has filled up.

    Of iteration n of k, K more than n iterations of i have begun or ended before.
    """
    gain = graph.acquire - graph.free
    for r in range(graph.n_resources):
        on, capacity = graph.users[r].tolist(), graph.resources[r].memory
        for k in on:
            level = int(graph.acquire[k] + graph.workspace[k])
            for i in on:
                if i != k:
                    number = turn[i, k] if (i, k) in turn else 1 - turn[k, i]
                    level += (1 - number) * int(gain[i])
            if 0 < capacity < level:
                return False
    return True
