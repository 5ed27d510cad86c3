"""Local search for cycles: job orders behind rolling dispatch.

A walk over two permutations of the jobs, for F and for B blocks, how far B comes first, and the
list scheduler's mode; a point is worth the least period of its folded list schedule.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from optsched_solvers._loading import load
from optsched_solvers.periodic.rules import MODULES, best_fold, busiest, cycles_of, unrolled
from optsched_solvers.shop.late_acceptance import NOTHING, walk
from optsched_solvers.shop.rules import Dispatcher

if TYPE_CHECKING:
    from optsched.model.schedule import IntArray, Schedule
    from optsched.solving.monitor import Monitor
    from optsched_solvers.periodic.insertion import Circle

CYCLES: Final = 4
"""Of the unrolled cycle whose list schedules are folded."""


class _Point(NamedTuple):
    forward: IntArray  # rank of every job
    backward: IntArray
    lead: int  # jobs by which B comes first
    laps: int  # 0: cycles do not count, 1: earlier cycles first, 2: among F or B
    active: bool


def improve(
    graph: Schedule,
    monitor: Monitor,
    *,
    seed: int,
    iterations: int | None = None,
    seconds: float = float("inf"),
) -> int:
    """Search until a limit; returns the number of list schedules made.

    Parameters
    ----------
    graph
        A cycle, as for `optsched_solvers.periodic.rules.first_answers`.
    monitor
        Takes every improvement, and stops the search.
    seed
        Same seed and number of iterations, same orders.
    iterations, seconds
        List schedules in all, and time.
    """
    if not load(monitor, *MODULES):
        return 0
    search = _Search(graph, monitor, seed)
    return walk(
        _starts(graph, search.n_jobs), search.valued, search.neighbour, monitor,
        iterations=iterations, seconds=seconds,
    )  # fmt: skip


class _Search:
    """What all points of one cycle share."""

    def __init__(self, graph: Schedule, monitor: Monitor, seed: int) -> None:
        from optsched_solvers.periodic.insertion import Circle

        self.graph, self.monitor = graph, monitor
        self.circle: Circle = Circle.of(graph)
        self.least = monitor.lower_bound or busiest(graph)
        self.cycles = cycles_of(graph, CYCLES)
        self.dispatcher = Dispatcher(unrolled(graph, self.cycles), 0)
        self.rng = np.random.default_rng(seed)
        self.n_jobs = int(graph.job.max(initial=-1)) + 1

    def valued(self, point: _Point) -> int:
        """The least period of the point's orders; told to the monitor if it is the best."""
        listed = self.dispatcher.listed(self._priority(point), point.active)
        if listed is None:
            return NOTHING
        found = best_fold(self.circle, listed[1].reshape(self.cycles, -1), self.least)
        if found is None:
            return NOTHING
        if self.monitor.objective is None or found.period < self.monitor.objective:
            self.monitor.incumbent(found.answer, found.period, "job orders")
        return found.period

    def _priority(self, point: _Point) -> IntArray:
        graph = self.dispatcher.graph
        forward = graph.kind == "F"
        key = np.where(forward, point.forward[graph.job] + point.lead, point.backward[graph.job])
        late = np.isin(graph.kind, ("W", "U"))
        number = np.arange(graph.n_operations)
        cycle = number // self.graph.n_operations
        keys = [number, key]
        if point.laps == 1:
            keys.append(cycle)
        elif point.laps == 2:
            keys += [cycle, forward if point.lead >= 0 else ~forward]
        rank = np.empty(graph.n_operations, np.int64)
        rank[np.lexsort((*keys, late))] = number
        return rank

    def neighbour(self, point: _Point) -> _Point:
        """A point that differs in one respect."""
        rng, n = self.rng, self.n_jobs
        kind = int(rng.integers(12))
        if kind == 0:
            return point._replace(active=not point.active)
        if kind == 1:
            return point._replace(laps=int(rng.integers(3)))
        if kind == 2:
            return point._replace(lead=int(rng.integers(-n, n + 1)))
        a, b = rng.integers(n, size=2).tolist()
        forward = _moved(point.forward, a, b, bool(kind % 2)) if kind < 9 else point.forward
        backward = point.backward
        if kind < 6 or kind >= 9:
            backward = _moved(point.backward, a, b, bool(kind % 2))
        return point._replace(forward=forward, backward=backward)


def _starts(graph: Schedule, n_jobs: int) -> list[_Point]:
    """Jobs by number, the largest first and the smallest first, B or F first."""
    work = np.zeros(n_jobs, np.int64)
    np.add.at(work, graph.job, graph.duration)
    number = np.arange(n_jobs)
    largest = np.empty(n_jobs, np.int64)
    largest[np.argsort(-work, kind="stable")] = number
    return [
        _Point(rank, rank, lead, laps, active)
        for laps in (1, 2, 0)
        for lead in (n_jobs, -n_jobs)
        for rank in (largest, number, n_jobs - 1 - largest)
        for active in (False, True)
    ]


def _moved(rank: IntArray, a: int, b: int, swap: bool) -> IntArray:
    """Ranks with jobs a and b exchanged, or a moved to the place of b."""
    new = rank.copy()
    if swap:
        new[a], new[b] = rank[b], rank[a]
        return new
    order = np.argsort(rank).tolist()
    order.remove(a)
    order.insert(int(rank[b]), a)
    new[order] = np.arange(len(order))
    return new
