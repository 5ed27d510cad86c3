"""Local search on the orders in which jobs enter and drain a pipeline.

A point is a permutation of the micro-batches for forward blocks, one for backward blocks, how far
backward blocks come first, the list scheduler's mode, and whether it dispatches the time-mirrored
problem; its value is the list schedule's makespan. Long arrays have their optimum among these
points more often than not, and memory caps cost the search nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optsched_solvers.shop.late_acceptance import NOTHING, walk
from optsched_solvers.shop.rules import Dispatcher, Variant, is_pipeline

if TYPE_CHECKING:
    from optsched.model.schedule import IntArray, Schedule
    from optsched.solving.monitor import Monitor

STARTS = tuple(
    Variant(rule, active, backwards) for backwards in (False, True)
    for rule in ("valley", "b_first", "job_lpt", "job_spt") for active in (False, True)
)  # fmt: skip


class _Point(NamedTuple):
    forward: IntArray  # rank of every unit
    backward: IntArray
    lead: int  # units by which backward blocks come first
    active: bool
    backwards: bool  # of the mirrored problem, where forward blocks drain the pipeline


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
    dispatcher = Dispatcher(graph, seed)
    units = _units(graph)
    rng = np.random.default_rng(seed)

    def value(point: _Point) -> int:
        found = dispatcher.listed(_priority(graph, units, point), point.active, point.backwards)
        if found is None:
            return NOTHING
        end = int((found[1] + graph.duration).max(initial=0))
        if monitor.objective is None or end < monitor.objective:
            monitor.incumbent(found[0], end, "job orders")
        return end

    return walk(
        [_start(dispatcher, units, variant) for variant in STARTS],
        value,
        lambda point: _neighbour(rng, point, len(units.names)),
        monitor,
        iterations=iterations,
        seconds=seconds,
        patience=patience,
    )


class _Units(NamedTuple):
    """(job, micro-batch) pairs; the unit of each operation."""

    names: IntArray
    of: IntArray
    job: IntArray


def _units(graph: Schedule) -> _Units:
    pairs = np.stack([graph.job, graph.microbatch])
    names, of = np.unique(pairs, axis=1, return_inverse=True)
    return _Units(np.arange(names.shape[1]), of.ravel(), names[0])


def _start(dispatcher: Dispatcher, units: _Units, variant: Variant) -> _Point:
    """The point that stands for a job rule: backward blocks first, jobs in its order."""
    rank = dispatcher.job_rank(variant.rule)[units.job]
    order = np.empty(len(units.names), np.int64)
    order[np.argsort(rank, kind="stable")] = units.names
    return _Point(order, order, len(units.names), variant.active, variant.backwards)


def _priority(graph: Schedule, units: _Units, point: _Point) -> IntArray:
    forward = graph.kind == "F"
    late = np.isin(graph.kind, ("W", "U"))
    key = np.where(forward, point.forward[units.of], point.backward[units.of])
    key[forward != point.backwards] += point.lead  # what fills the pipeline comes later
    n = graph.n_operations
    number = -np.arange(n) if point.backwards else np.arange(n)
    rank = np.empty(n, np.int64)
    rank[np.lexsort((number, forward != point.backwards, key, late))] = np.arange(n)
    return rank


def _neighbour(rng: np.random.Generator, point: _Point, n: int) -> _Point:
    kind = int(rng.integers(10))
    if kind == 0:
        return point._replace(active=not point.active)
    if kind == 1:
        return point._replace(lead=int(rng.integers(-n // 2, n + 1)))
    if kind <= 4:  # both alike: a job takes another place in the array
        a, b = rng.integers(n, size=2)
        return point._replace(
            forward=_moved(point.forward, a, b, kind == 2),
            backward=_moved(point.backward, a, b, kind == 2),
        )
    a, b = rng.integers(n, size=2)
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
