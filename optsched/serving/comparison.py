"""Compare routers on the same traces: means with intervals over seeds, and the Pareto front."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from optsched.errors import InputError
from optsched.serving.scenario import Scenario
from optsched.serving.simulator import simulate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from optsched.serving.core import Settings
    from optsched.serving.plan import Plan
    from optsched.serving.simulator import Run

MEASURES = ("accuracy", "mean_ms", "p99_ms", "joules_per_image", "cost_ms", "throughput_per_s")
"""Measures of a `Point`; accuracy and throughput are maximised, all others minimised."""

_MAXIMISED = ("accuracy", "throughput_per_s")


class Point(msgspec.Struct, frozen=True):
    """Measures of a router on a load: means over seeds, half widths of 95 % intervals.

    Latencies in ms, energy in J, cost in ms a request. Energy per image is that of all seeds
    divided by the images of all seeds.
    """

    load: str
    router: str
    seeds: int
    mean: dict[str, float]
    interval: dict[str, float]
    saturated: bool
    """Whether in any seed requests are completed long after the last arrival: then latencies
    measure the length of the trace, not the router."""


def compare(
    scenario: Scenario | Callable[[int], Scenario],
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
    scenario
        A scenario, or a function from a seed to a scenario, for arrivals that differ.
    routers
        By name, as for `simulate`.
    seeds
        Of arrivals and routers.
    plan, settings
        As for `simulate`.
    load
        Name of the load, for tables.
    on_point
        Called with every point.

    Returns
    -------
    list
        One point per router, in their order.
    """
    numbers = list(seeds)
    if not numbers or not routers:
        raise InputError("seeds, routers: expected at least one of each")
    traces = [scenario if isinstance(scenario, Scenario) else scenario(i) for i in numbers]
    if not all(trace.n_requests for trace in traces):
        raise InputError("scenario: a trace without requests has nothing to compare")
    found = []
    for name, router in routers.items():
        runs = [
            simulate(trace, router, plan=plan, settings=settings, seed=seed, log=False)
            for trace, seed in zip(traces, numbers, strict=True)
        ]
        found.append(_point(name, load or traces[0].name, runs))
        if on_point is not None:
            on_point(found[-1])
    return found


def front_of(points: Sequence[Point], x: str = "accuracy", y: str = "p99_ms") -> list[Point]:
    """Return the points that no other one dominates in both measures, saturated ones left out."""
    able = [point for point in points if not point.saturated]
    values = [[-p.mean[key] if key in _MAXIMISED else p.mean[key] for key in (x, y)] for p in able]
    return [
        point
        for point, (a, b) in zip(able, values, strict=True)
        if not any(c <= a and d <= b and (c, d) != (a, b) for c, d in values)
    ]


def _point(router: str, load: str, runs: Sequence[Run]) -> Point:
    table = np.array([_measures(run) for run in runs])
    mean = dict(zip(MEASURES, table.mean(axis=0).tolist(), strict=True))
    images = sum(run.summary.completed for run in runs)
    mean["joules_per_image"] = sum(run.summary.energy_j or 0.0 for run in runs) / max(images, 1)
    spread = table.std(axis=0, ddof=1) if len(runs) > 1 else 0 * table[0]
    half = _student(len(runs)) / math.sqrt(len(runs)) * spread
    interval = dict(zip(MEASURES, half.tolist(), strict=True))
    return Point(load, router, len(runs), mean, interval, any(map(_saturated, runs)))


def _measures(run: Run) -> list[float]:
    """Values of `MEASURES`."""
    summary, n = run.summary, max(run.summary.completed, 1)
    return [
        summary.accuracy or 0.0, summary.mean_ms or 0.0, summary.p99_ms or 0.0,
        (summary.energy_j or 0.0) / n, run.cost / 1e6 / n, summary.throughput_per_s or 0.0,
    ]  # fmt: skip


def _saturated(run: Run) -> bool:
    """Whether the last completion is 50 ms and 5 % of the trace after the last arrival."""
    last = int(run.scenario.arrival[-1])
    return bool((run.finish < 0).any()) or int(run.finish.max()) - last > max(0.05 * last, 5e7)


def _student(n: int) -> float:
    """97.5 % quantile of Student's t with n - 1 degrees of freedom (Cornish-Fisher)."""
    if n < 2:
        return 0.0
    z, v = 1.959964, n - 1
    exact = {1: 12.7062, 2: 4.3027, 3: 3.1824}
    return exact.get(v, z + (z**3 + z) / (4 * v) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v * v))
