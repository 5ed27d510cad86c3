"""Local search on how the micro-batches of one job flow through its pipeline.

Micro-batches of one job are alike and keep their order, so what is left to decide is how every
device mixes its blocks. A point says in groups of how many micro-batches the chunks of a device
take turns (Megatron's interleaving: as many as devices), how many forward blocks a device may run
ahead of its backward blocks (1F1B, ZB-H1 and ZB-H2: S - s or 2(S - s) - 1), by how many blocks
backward comes first, by how many weight gradients are put off, and the list scheduler's mode. The
hand-made schedules are among the first points; its value is the list schedule's makespan.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optsched_solvers.shop.late_acceptance import NOTHING, walk
from optsched_solvers.shop.rules import Dispatcher, is_pipeline

if TYPE_CHECKING:
    from optsched.model.schedule import IntArray, Rows, Schedule
    from optsched.solving.monitor import Monitor
    from optsched_solvers.shop.list_schedule import DispatchGraph


class _Point(NamedTuple):
    group: tuple[int, int]  # micro-batches that go through a chunk in a row, forward and backward
    limit: IntArray  # per device: blocks in flight
    lead: IntArray  # per chunk: blocks by which backward comes first
    delay: IntArray  # per chunk: blocks by which weight gradients come last
    active: bool
    backwards: bool  # of the mirrored problem


def fits(graph: Schedule) -> bool:
    """Whether the graph is the pipeline of one job with several micro-batches."""
    alone = len(np.unique(graph.job)) == 1 and not graph.iteration.any()
    return alone and is_pipeline(graph) and bool(graph.microbatch.any())


def improve(
    graph: Schedule,
    monitor: Monitor,
    *,
    seed: int,
    iterations: int | None = None,
    seconds: float = float("inf"),
    patience: int | None = None,
) -> int:
    """Search from the best of the hand-made rules; returns the number of list schedules made.

    Parameters
    ----------
    graph
        One that `fits`.
    monitor
        Takes every improvement, and stops the search.
    seed
        Same seed and number of iterations, same schedules.
    iterations, seconds, patience
        List schedules in all, time, and list schedules in a row without a new best point.
    """
    pipeline = _Pipeline(graph, seed)
    rng = np.random.default_rng(seed)
    starts = pipeline.starts()
    if iterations is not None:  # half of them for the walk; which ones, the seed decides
        kept = np.sort(rng.permutation(len(starts))[: max(1, iterations // 2)])
        starts = [starts[k] for k in kept.tolist()]

    def value(point: _Point) -> int:
        found = pipeline.listed(point)
        if found is None:
            return NOTHING
        end = int((found[1] + graph.duration).max(initial=0))
        if monitor.objective is None or end < monitor.objective:
            monitor.incumbent(found[0], end, "micro-batches")
        return end

    return walk(
        starts, value, partial(pipeline.neighbour, rng), monitor,
        iterations=iterations, seconds=seconds, patience=patience,
    )  # fmt: skip


class _Pipeline:
    """What all list schedules of one job share."""

    def __init__(self, graph: Schedule, seed: int) -> None:
        self.graph = graph
        self.dispatcher = Dispatcher(graph, seed)
        self.devices = graph.n_resources
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
        self.forward: DispatchGraph = self.dispatcher.forward._replace(
            slot_in=np.where(self.is_forward, device, -1), slot_out=np.where(gradient, device, -1)
        )
        self.mirrored = self.forward.reversed()

    def listed(self, point: _Point) -> tuple[Rows, IntArray] | None:
        """Orders and starts of a point; None if it gets stuck."""
        from optsched_solvers.shop.list_schedule import run as list_schedule

        arrays = self.mirrored if point.backwards else self.forward
        found = list_schedule(
            arrays, self.priority(point), active=point.active, slot_limit=point.limit
        )
        return self.dispatcher.completed(found, point.backwards)

    def priority(self, point: _Point) -> IntArray:
        """Rank of every operation: the smallest goes first."""
        chunk, mirrored = self.chunk_of, point.backwards
        ahead, back = (
            self._turns(point.group[0], self.below),
            self._turns(point.group[1], self.above),
        )
        lead, delay = point.lead[chunk], point.delay[chunk]
        if mirrored:  # there forward blocks drain the pipeline, and everything runs the other way
            key = np.where(self.is_forward, ahead, back + lead)
            key = -np.where(self.is_late, back + lead - delay, key)
        else:
            key = np.where(self.is_forward, ahead + lead, back)
            key = np.where(self.is_late, back + delay, key)
        number = np.arange(len(key)) * (-1 if mirrored else 1)
        rank = np.empty(len(key), np.int64)
        rank[np.lexsort((number, self.is_forward != mirrored, key))] = np.arange(len(key))
        return rank

    def starts(self) -> list[_Point]:
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
                point = _Point((group, group), np.clip(limit, 1, everything), lead,
                               np.full(len(self.place), delay), active, backwards)  # fmt: skip
                points.append(point)
        return points

    def neighbour(self, rng: np.random.Generator, point: _Point) -> _Point:
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

    def _turns(self, group: int, rank: IntArray) -> IntArray:
        """Place of every block in its device's row of blocks of its kind."""
        whole, rest = np.divmod(self.number, group)
        turns: IntArray = (whole * self.chunks + rank[self.chunk_of]) * group + rest
        return turns


def _shifted(rng: np.random.Generator, values: IntArray, most: int) -> IntArray:
    """All values, those from one on, or one value, changed by up to `most`."""
    k, way = int(rng.integers(len(values))), int(rng.integers(3))
    step = int(rng.integers(1, most + 1)) * (1 if rng.random() < 0.5 else -1)
    new = values.copy()
    new[(slice(None), slice(k, None), slice(k, k + 1))[way]] += step
    return new
