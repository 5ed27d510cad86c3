"""Late-acceptance local search (Burke & Bykov 2017) over the list schedules of a pipeline.

A point of the search is a priority of the list scheduler: the orders in which units, pairs of job
and micro-batch, enter and drain the pipeline. Its value is the makespan of the list schedule, so
memory caps need no repair. Long arrays have their optimum among these schedules more often than
not.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from optsched_solvers.shop.rules import Dispatcher, is_pipeline

if TYPE_CHECKING:
    from optsched.model.schedule import Csr, IntArray, Schedule
    from optsched.solving.monitor import Monitor

MEMORY: Final = 40
"""A point is accepted if it is no worse than the current point of that many steps ago."""

STUCK: Final = int(np.iinfo(np.int64).max)
"""Value of a point without a schedule: memory blocks it."""


def improve(
    graph: Schedule,
    monitor: Monitor,
    *,
    seed: int,
    iterations: int | None = None,
    seconds: float = float("inf"),
    patience: int | None = None,
) -> int:
    """Search from the best of the job rules; returns the number of list schedules made.

    Parameters
    ----------
    graph
        Without effect unless it is a pipeline of F and B (or I) blocks.
    monitor
        Receives every improvement, and stops the search.
    seed
        Equal seeds and numbers of iterations give equal schedules.
    iterations, seconds, patience
        Limits: list schedules in all, time, and list schedules without a new best point.
    """
    if not is_pipeline(graph):
        return 0
    search = _Search(graph, monitor, seed, STUCK if iterations is None else iterations)
    until = monitor.elapsed + seconds
    points, ranked = search.space.starts(), list[tuple[int, int]]()
    for k, point in enumerate(points):
        if search.is_over() or (ranked and monitor.elapsed >= until):
            break
        ranked.append((search.value(point), k))
    if len(ranked) < len(points) and search.is_over():
        return search.made
    search.walk(points[min(ranked)[1]], min(ranked)[0], until, patience)
    return search.made


class _Search:
    """Number of points evaluated so far, and its limit."""

    def __init__(self, graph: Schedule, monitor: Monitor, seed: int, most: int) -> None:
        self.graph, self.monitor, self.most = graph, monitor, most
        self.random = np.random.default_rng(seed)
        self.space = JobOrders(graph, seed)
        self.made = 0

    def is_over(self) -> bool:
        return self.made >= self.most or self.monitor.should_stop()

    def value(self, point: JobOrder) -> int:
        """Makespan of a point; an improvement is reported."""
        self.made += 1
        self.monitor.advance(1)
        found = self.space.listed(point)
        if found is None:
            return STUCK
        end = int((found[1] + self.graph.duration).max(initial=0))
        if self.monitor.objective is None or end < self.monitor.objective:
            self.monitor.incumbent(found[0], end, "job orders")
        return end

    def walk(self, point: JobOrder, value: int, until: float, patience: int | None) -> None:
        """Accept neighbours by the late-acceptance criterion until a limit."""
        best, stale = value, 0
        past = [value] * MEMORY  # values of the current point, MEMORY steps back at most
        while self.made < self.most and not (patience is not None and stale >= patience):
            if self.made % 8 == 0 and (self.is_over() or self.monitor.elapsed >= until):
                break
            neighbour = self.space.neighbour(self.random, point)
            new = self.value(neighbour)
            if new <= value or new <= past[self.made % MEMORY]:
                point, value = neighbour, new
            past[self.made % MEMORY] = value
            stale = 0 if new < best else stale + 1
            best = min(best, new)


class JobOrder(NamedTuple):
    """A point of `JobOrders`."""

    forward: IntArray  # rank of every unit
    backward: IntArray
    lead: int  # units by which backward blocks come first
    active: bool
    backwards: bool  # of the mirrored problem, where forward blocks drain the pipeline


class JobOrders:
    """Permutations of the units, (job, micro-batch) pairs, for forward and for backward blocks."""

    def __init__(self, graph: Schedule, seed: int) -> None:
        self.graph, self.dispatcher = graph, Dispatcher(graph, seed)
        pairs = np.stack([graph.job, graph.microbatch])
        names, of = np.unique(pairs, axis=1, return_inverse=True)
        self.unit_of, self.job = of.ravel(), names[0]
        self.is_forward = graph.kind == "F"
        self.is_late = np.isin(graph.kind, ("W", "U"))

    def starts(self) -> list[JobOrder]:
        """The job rules: backward blocks first, jobs in the order of the rule."""
        n, points = len(self.job), []
        rules = ("valley", "b_first", "job_lpt", "job_spt")
        for backwards, rule, active in product((False, True), rules, (False, True)):
            order = np.empty(n, np.int64)
            rank = self.dispatcher.job_rank(rule)[self.job]
            order[np.argsort(rank, kind="stable")] = np.arange(n)
            points.append(JobOrder(order, order, n, active, backwards))
        return points

    def listed(self, point: JobOrder) -> tuple[Csr, IntArray] | None:
        """Orders and starts of a point; None if it gets stuck."""
        fills = self.is_forward != point.backwards
        key = np.where(
            self.is_forward, point.forward[self.unit_of], point.backward[self.unit_of]
        )  # fmt: skip
        key[fills] += point.lead  # what fills the pipeline comes later
        number = np.arange(len(key))
        rank = np.empty(len(key), np.int64)
        keys = (-number if point.backwards else number, fills, key, self.is_late)
        rank[np.lexsort(keys)] = number
        return self.dispatcher.listed(rank, point.active, point.backwards)

    def neighbour(self, random: np.random.Generator, point: JobOrder) -> JobOrder:
        """A point that differs in one respect."""
        n = len(self.job)
        kind = int(random.integers(10))
        if kind == 0:
            return point._replace(active=not point.active)
        if kind == 1:
            return point._replace(lead=int(random.integers(-n // 2, n + 1)))
        a, b = random.integers(n, size=2)
        if kind <= 4:  # both alike: a job takes another place in the array
            return point._replace(
                forward=_moved(point.forward, a, b, kind == 2),
                backward=_moved(point.backward, a, b, kind == 2),
            )
        if kind % 2:
            return point._replace(forward=_moved(point.forward, a, b, kind <= 7))
        return point._replace(backward=_moved(point.backward, a, b, kind <= 7))


def _moved(rank: IntArray, a: int, b: int, swap: bool) -> IntArray:
    """Ranks with units a and b exchanged, or a moved to the place of b."""
    new = rank.copy()
    if swap:
        new[a], new[b] = rank[b], rank[a]
        return new
    lo, hi = sorted((int(rank[a]), int(rank[b])))
    between = (rank >= lo) & (rank <= hi)
    new[between] += 1 if rank[b] <= rank[a] else -1
    new[a] = rank[b]
    return new
