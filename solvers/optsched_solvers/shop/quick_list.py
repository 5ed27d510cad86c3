"""List scheduling in plain Python: a first answer while no compiled kernel is loaded.

`non_delay` makes the same schedules as the compiled `optsched_solvers.shop.list_schedule` (without
memory caps); loading the kernels takes longer than this on a job array that a rule can prove.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from optsched.model.schedule import IntArray, Schedule


def non_delay(graph: Schedule, priority: IntArray) -> tuple[list[int], list[int]]:
    """One non-delay list schedule.

    Parameters
    ----------
    graph
        At most one resource per operation; held memory and setups are not looked at.
    priority
        A permutation: of what can start at the same time the smallest goes first.

    Returns
    -------
    (operations, start)
        Operations in the order of dispatch, and the start of every operation.
    """
    rank, resource = priority.tolist(), graph.single_resource.tolist()
    duration, start = graph.duration.tolist(), graph.release.tolist()
    indptr, successor, weight = (column.tolist() for column in graph.successors)
    waiting = [0] * graph.n_operations
    for k in successor:
        waiting[k] += 1
    # per resource: who is available now, by rank, and who will be, by time
    now: list[list[tuple[int, int]]] = [[] for _ in graph.resources]
    later: list[list[tuple[int, int]]] = [[] for _ in graph.resources]
    free = [0] * graph.n_resources
    # when each resource can next start something; stale entries are skipped
    events: list[tuple[int, int, int]] = []
    order: list[int] = []

    def offer(r: int) -> None:
        """Announce the next possible start on r."""
        while later[r] and later[r][0][0] <= free[r]:
            i = heapq.heappop(later[r])[1]
            heapq.heappush(now[r], (rank[i], i))
        if now[r]:
            heapq.heappush(events, (free[r], now[r][0][0], r))
        elif later[r]:
            first = later[r][0][0]
            same = min(rank[i] for at, i in later[r] if at == first)
            heapq.heappush(events, (first, same, r))

    def release(i: int) -> None:
        """Make i, whose predecessors are all placed, available at start[i]."""
        stack = [i]
        while stack:
            i = stack.pop()
            r = resource[i]
            if r >= 0:
                heapq.heappush(later[r], (start[i], i))
                offer(r)
            else:
                order.append(i)
                stack.extend(follow(i))

    def follow(i: int) -> list[int]:
        """Successors of i that became ready."""
        ready = []
        for e in range(indptr[i], indptr[i + 1]):
            k = successor[e]
            start[k] = max(start[k], start[i] + weight[e])
            waiting[k] -= 1
            if not waiting[k]:
                ready.append(k)
        return ready

    for i in [i for i, count in enumerate(waiting) if not count]:
        release(i)
    while events:
        at, _, r = heapq.heappop(events)
        while later[r] and later[r][0][0] <= max(at, free[r]):
            i = heapq.heappop(later[r])[1]
            heapq.heappush(now[r], (rank[i], i))
        if at < free[r] or not now[r]:
            continue  # stale: r was offered again meanwhile
        i = heapq.heappop(now[r])[1]
        start[i] = max(at, start[i])
        free[r] = start[i] + duration[i]
        order.append(i)
        for k in follow(i):
            release(k)
        offer(r)
    return order, start


def one_job_at_a_time(graph: Schedule) -> IntArray:
    """All operations, job by job, every job in the order of the arcs: what memory caps allow most.

    Arcs between jobs may contradict this order: check the schedule.
    """
    from optsched.model.graph import evaluate

    position = np.empty(graph.n_operations, np.int64)
    position[evaluate(graph).order] = np.arange(graph.n_operations)
    return np.lexsort([position, graph.job])
