"""Routers side by side: means with intervals over seeds, and the Pareto front."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from optsched.errors import InputError
from optsched.problems.routing import Routing
from optsched.serving.simulator import simulate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from optsched.problems.routing.plan import Plan
    from optsched.serving.core import Settings
    from optsched.serving.simulator import Run

MEASURES = ("accuracy", "mean_ms", "p99_ms", "joules_per_image", "cost_ms", "throughput_per_s")
"""Of a `Point`; accuracy and throughput are better when high, all others when low."""

_HIGH = ("accuracy", "throughput_per_s")
_LATE = 0.05
_SOON = 50_000_000  # ns
"""A trace whose last request is done later than this after its end is saturated."""


class Point(msgspec.Struct, frozen=True):
    """A router on a load: means over seeds, and half the width of their 95 % intervals.

    Latencies in ms, energy in J, cost in ms a request; energy per image is that of all seeds by
    the images of all seeds.
    """

    load: str
    router: str
    seeds: int
    mean: dict[str, float]
    interval: dict[str, float]
    saturated: bool
    """Whether in any seed requests were left long after the last arrival, so that latencies say
    how long one waited, not how good the router is."""


def pareto(
    problem: Routing | Callable[[int], Routing],
    routers: Mapping[str, Any],
    *,
    seeds: Iterable[int] = range(16),
    plan: Plan | None = None,
    settings: Settings | None = None,
    load: str = "",
    on_point: Callable[[Point], object] | None = None,
) -> list[Point]:
    """Simulate every router on the same traces.

    Parameters
    ----------
    problem
        A scenario, or a function that makes one of a seed: then arrivals differ between seeds.
    routers
        By name, as for `simulate`.
    seeds
        Of arrivals and routers.
    plan, settings
        As for `simulate`.
    load
        Name of the load, for tables.
    on_point
        Called with every point as it comes.

    Returns
    -------
    list
        A point a router, in their order.
    """
    given = list(seeds)
    if not given or not routers:
        raise InputError("seeds, routers: expected at least one of each")
    traces = [problem if isinstance(problem, Routing) else problem(seed) for seed in given]
    if not all(trace.n_requests for trace in traces):
        raise InputError("problem: a trace without requests has nothing to compare")
    found = []
    for name, router in routers.items():
        runs = [
            simulate(trace, router, plan=plan, settings=settings, seed=seed, log=False)
            for trace, seed in zip(traces, given, strict=True)
        ]
        found.append(point_of(name, load or traces[0].name, runs))
        if on_point is not None:
            on_point(found[-1])
    return found


def point_of(router: str, load: str, runs: Sequence[Run]) -> Point:
    """The means of several runs of one router."""
    rows = [_measures(run) for run in runs]
    mean = {key: float(np.mean([row[key] for row in rows])) for key in MEASURES}
    images = sum(run.summary.completed for run in runs)
    mean["joules_per_image"] = sum(run.summary.energy_j or 0.0 for run in runs) / max(images, 1)
    half = _student(len(rows)) / math.sqrt(len(rows))
    interval = {
        key: half * float(np.std([row[key] for row in rows], ddof=1)) if len(rows) > 1 else 0.0
        for key in MEASURES
    }
    return Point(load, router, len(rows), mean, interval, any(map(_saturated, runs)))


def front_of(points: Sequence[Point], x: str = "accuracy", y: str = "p99_ms") -> list[Point]:
    """The points, saturated ones left out, that no other one beats in both measures."""
    able = [point for point in points if not point.saturated]
    values = [[-p.mean[key] if key in _HIGH else p.mean[key] for key in (x, y)] for p in able]
    return [
        point
        for point, (a, b) in zip(able, values, strict=True)
        if not any(c <= a and d <= b and (c, d) != (a, b) for c, d in values)
    ]


def _measures(run: Run) -> dict[str, float]:
    summary, n = run.summary, max(run.summary.completed, 1)
    return {
        "accuracy": summary.accuracy or 0.0,
        "mean_ms": summary.mean_ms or 0.0,
        "p99_ms": summary.p99_ms or 0.0,
        "joules_per_image": (summary.energy_j or 0.0) / n,
        "cost_ms": run.cost / 1e6 / n,
        "throughput_per_s": summary.throughput_per_s or 0.0,
    }


def _saturated(run: Run) -> bool:
    arrival = run.problem.arrival
    late = int(run.finish.max()) - int(arrival[-1])
    return bool((run.finish < 0).any()) or late > max(_LATE * int(arrival[-1]), _SOON)


def _student(n: int) -> float:
    """The 97.5 % quantile of Student's t with n - 1 degrees of freedom (Cornish-Fisher)."""
    if n < 2:
        return 0.0
    z, v = 1.959964, n - 1
    exact = {1: 12.7062, 2: 4.3027, 3: 3.1824}
    return exact.get(v, z + (z**3 + z) / (4 * v) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v * v))
