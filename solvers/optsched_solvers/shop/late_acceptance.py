"""Late-acceptance local search (Burke & Bykov 2017) over the list schedules of a pipeline.

A point says how the list scheduler breaks ties; its value is the schedule's makespan, so memory
caps cost the search nothing. Of many jobs a point is the orders in which they enter and drain the
pipeline (`JobOrders`): long arrays have their optimum among these more often than not. Of one job,
whose micro-batches are alike, it is how every device mixes its blocks (`MicroBatches`).
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar

import numpy as np

from optsched_solvers.shop.rules import Dispatcher, is_pipeline

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from optsched.kernels.list_schedule import DispatchGraph
    from optsched.model.schedule import Csr, IntArray, Schedule
    from optsched.solving.monitor import Monitor

Point = TypeVar("Point")

MEMORY: Final = 40
"""A point is kept if it is no worse than the one so many steps ago."""

NOTHING: Final = int(np.iinfo(np.int64).max)
"""The value of a point without a schedule."""


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
        Nothing is done if it is no pipeline of F and B (or I) blocks.
    monitor
        Takes every improvement, and stops the search.
    seed
        Same seed and number of iterations, same schedules.
    iterations, seconds, patience
        List schedules in all, time, and list schedules in a row without a new best point.
    """
    if not is_pipeline(graph):
        return 0
    rng = np.random.default_rng(seed)
    space: _Space = (MicroBatches if is_one_job(graph) else JobOrders)(graph, seed)
    starts = space.starts()
    if iterations is not None and is_one_job(graph):  # half for the walk; the seed decides which
        kept = np.sort(rng.permutation(len(starts))[: max(1, iterations // 2)])
        starts = [starts[k] for k in kept.tolist()]

    def value(point: Any) -> int:
        found = space.listed(point)
        if found is None:
            return NOTHING
        end = int((found[1] + graph.duration).max(initial=0))
        if monitor.objective is None or end < monitor.objective:
            monitor.incumbent(found[0], end, space.name)
        return end

    return walk(
        starts, value, lambda point: space.neighbour(rng, point), monitor,
        iterations=iterations, seconds=seconds, patience=patience,
    )  # fmt: skip


def is_one_job(graph: Schedule) -> bool:
    """Whether the graph is the pipeline of one job with several micro-batches."""
    alone = len(np.unique(graph.job)) == 1 and not graph.iteration.any()
    return alone and is_pipeline(graph) and bool(graph.microbatch.any())


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


class _Space(Protocol):
    """Points, and what they stand for."""

    name: str

    def starts(self) -> list[Any]: ...

    def listed(self, point: Any) -> tuple[Csr, IntArray] | None: ...

    def neighbour(self, rng: np.random.Generator, point: Any) -> Any: ...


class JobOrder(NamedTuple):
    """A point of `JobOrders`."""

    forward: IntArray  # rank of every unit
    backward: IntArray
    lead: int  # units by which backward blocks come first
    active: bool
    backwards: bool  # of the mirrored problem, where forward blocks drain the pipeline


class JobOrders:
    """Permutations of the units, (job, micro-batch) pairs, for forward and for backward blocks."""

    name = "job orders"

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
        of = self.unit_of
        key = np.where(self.is_forward, point.forward[of], point.backward[of])
        key[fills] += point.lead  # what fills the pipeline comes later
        rank = _ranked((fills, key, self.is_late), point.backwards)
        return self.dispatcher.listed(rank, point.active, point.backwards)

    def neighbour(self, rng: np.random.Generator, point: JobOrder) -> JobOrder:
        """A point that differs in one respect."""
        n = len(self.job)
        kind = int(rng.integers(10))
        if kind == 0:
            return point._replace(active=not point.active)
        if kind == 1:
            return point._replace(lead=int(rng.integers(-n // 2, n + 1)))
        a, b = rng.integers(n, size=2)
        if kind <= 4:  # both alike: a job takes another place in the array
            return point._replace(
                forward=_moved(point.forward, a, b, kind == 2),
                backward=_moved(point.backward, a, b, kind == 2),
            )
        if kind % 2:
            return point._replace(forward=_moved(point.forward, a, b, kind <= 7))
        return point._replace(backward=_moved(point.backward, a, b, kind <= 7))


class Mix(NamedTuple):
    """A point of `MicroBatches`."""

    group: tuple[int, int]  # micro-batches that go through a chunk in a row, forward and backward
    limit: IntArray  # per device: blocks in flight
    lead: IntArray  # per chunk: blocks by which backward comes first
    delay: IntArray  # per chunk: blocks by which weight gradients come last
    active: bool
    backwards: bool  # of the mirrored problem


class MicroBatches:
    """How the micro-batches of one job, which keep their order, flow through its pipeline.

    In groups of how many micro-batches the chunks of a device take turns (Megatron's interleaving:
    as many as devices), how many forward blocks a device may run ahead of its backward blocks
    (1F1B, ZB-H1 and ZB-H2: S - s or 2(S - s) - 1), by how many blocks backward comes first, and by
    how many weight gradients are put off.
    """

    name = "micro-batches"

    def __init__(self, graph: Schedule, seed: int) -> None:
        self.dispatcher, self.devices = Dispatcher(graph, seed), graph.n_resources
        device = graph.single_resource
        # a chunk is a stage on a device; Chimera's micro-batches have theirs on two
        self.chunk_of = np.zeros(graph.n_operations, np.int64)
        placed = np.flatnonzero(device >= 0)
        pairs, chunk = np.unique(
            np.stack([device, graph.stage])[:, placed], axis=1, return_inverse=True
        )
        self.chunk_of[placed] = chunk.ravel()
        self.place = pairs[0]
        self.number = np.zeros(graph.n_operations, np.int64)  # of the micro-batch on its chunk
        for c in range(len(self.place)):
            on = np.flatnonzero(self.chunk_of == c)
            self.number[on] = np.unique(graph.microbatch[on], return_inverse=True)[1].ravel()
        self.n = int(self.number.max()) + 1
        count = np.bincount(self.place, minlength=self.devices)
        first = np.cumsum(count) - count  # pairs are sorted by device, then by stage
        self.below = np.arange(len(self.place)) - first[self.place]
        self.above = count[self.place] - 1 - self.below
        self.chunks = int(count.max())
        self.is_forward = graph.kind == "F"
        self.is_late = np.isin(graph.kind, ("W", "U"))
        gradient = np.isin(graph.kind, ("B", "I"))
        self.forward: DispatchGraph = self.dispatcher.forward.with_slots(
            np.where(self.is_forward, device, -1), np.where(gradient, device, -1)
        )
        self.mirrored = self.forward.reversed()

    def starts(self) -> list[Mix]:
        """Points like GPipe, 1F1B, interleaved 1F1B, Hanayo, ZB-H1 and ZB-H2, in all modes."""
        behind = self.devices - 1 - np.arange(self.devices)  # S - s - 1
        everything = self.n * self.chunks
        late = (0, everything) if self.is_late.any() else (0,)
        points = []
        for group in sorted({1, min(self.n, self.devices)}):
            warm = 2 * behind + (self.chunks - 1) * group
            limits = (
                np.full(self.devices, everything),
                warm + 1,
                self.chunks * (behind + 1),
                self.chunks * (2 * behind + 1),
                np.full(self.devices, self.chunks * self.devices),
                np.full(self.devices, self.devices + 1 + (self.chunks - 1) * group),
            )
            leads = (np.full(len(self.place), everything), np.zeros(len(self.place), np.int64),
                     -1 - warm[self.place])  # fmt: skip
            for limit, lead, delay, active, backwards in product(
                limits, leads, late, (False, True), (False, True)
            ):
                point = Mix((group, group), np.clip(limit, 1, everything), lead,
                            np.full(len(self.place), delay), active, backwards)  # fmt: skip
                points.append(point)
        return points

    def listed(self, point: Mix) -> tuple[Csr, IntArray] | None:
        """Orders and starts of a point; None if it gets stuck."""
        from optsched.kernels.list_schedule import Mode, run

        graph = self.mirrored if point.backwards else self.forward
        mode = Mode.ACTIVE if point.active else Mode.NON_DELAY
        found = run(graph, self._priority(point), mode, slot_limit=point.limit)
        return self.dispatcher.completed(found, point.backwards)

    def neighbour(self, rng: np.random.Generator, point: Mix) -> Mix:
        """A point that differs in one respect."""
        kind = int(rng.integers(8))
        if kind <= 2:
            size = int(rng.integers(1, min(self.n, 2 * self.devices) + 1))
            forward, backward = point.group
            groups = ((size, backward), (forward, size), (size, size))
            return point._replace(group=groups[kind])
        if kind == 3:
            if rng.random() < 0.5:
                return point._replace(active=not point.active)
            return point._replace(backwards=not point.backwards)
        if kind <= 5:
            return point._replace(limit=np.maximum(_shifted(rng, point.limit, 3), 1))
        if kind == 6:
            return point._replace(lead=_shifted(rng, point.lead, self.n))
        return point._replace(delay=_shifted(rng, point.delay, self.n))

    def _priority(self, point: Mix) -> IntArray:
        """Rank of every operation: the smallest goes first."""
        chunk, mirrored = self.chunk_of, point.backwards
        ahead = self._turns(point.group[0], self.below)
        back = self._turns(point.group[1], self.above)
        lead, delay = point.lead[chunk], point.delay[chunk]
        if mirrored:  # there forward blocks drain the pipeline, and everything runs the other way
            key = np.where(self.is_forward, ahead, back + lead)
            key = -np.where(self.is_late, back + lead - delay, key)
        else:
            key = np.where(self.is_forward, ahead + lead, back)
            key = np.where(self.is_late, back + delay, key)
        return _ranked((self.is_forward != mirrored, key), mirrored)

    def _turns(self, group: int, rank: IntArray) -> IntArray:
        """Place of every block in its device's row of blocks of its kind."""
        whole, rest = np.divmod(self.number, group)
        turns: IntArray = (whole * self.chunks + rank[self.chunk_of]) * group + rest
        return turns


def _ranked(keys: tuple[Any, ...], backwards: bool) -> IntArray:
    """Rank by the last key, then those before it, then by number."""
    n = len(keys[0])
    number = -np.arange(n) if backwards else np.arange(n)
    rank = np.empty(n, np.int64)
    rank[np.lexsort((number, *keys))] = np.arange(n)
    return rank


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


def _shifted(rng: np.random.Generator, values: IntArray, most: int) -> IntArray:
    """All values, those from one on, or one value, changed by up to `most`."""
    k, way = int(rng.integers(len(values))), int(rng.integers(3))
    step = int(rng.integers(1, most + 1)) * (1 if rng.random() < 0.5 else -1)
    new = values.copy()
    new[(slice(None), slice(k, None), slice(k, k + 1))[way]] += step
    return new
