"""What measurements say about the network: its limit by pattern, and the factors of its levels."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from optsched.bandwidth.models.measurements import MeasurementTable, by_pattern
from optsched.bandwidth.topology.levels import WHOLE, line
from optsched.bandwidth.topology.rates import MOST

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from optsched.bandwidth.models.measurements import Measurement
    from optsched.bandwidth.topology.cluster import Cluster
    from optsched.model.schedule import IntArray

    Predict = Callable[[Cluster, MeasurementTable, Sequence[Measurement]], IntArray]

BINDING: Final = 0.98
"""Share of the bandwidth of a host or uplink from which on a run shows that, not the network."""

LEAST_RUNS: Final = 3
"""Runs across a level from which a factor is fitted."""

Limits = dict[tuple[int, ...], int]


class Observations(NamedTuple):
    """Limits of the network by pattern, kB/s, as they are within a domain of the lowest level."""

    known: Limits
    least: Limits
    """The limit is at least this: a host, an uplink or other traffic held the run back."""


class LevelFit(NamedTuple):
    """Factor of a level, fitted to the runs across it."""

    level: str
    runs: int
    factor: float | None
    """Median of measured bandwidth over that without a factor; None for too few runs."""
    lowest: float
    highest: float


def observations(cluster: Cluster, rows: Iterable[Measurement]) -> Observations:
    """Limits of the network from measurements across hosts, divided by the factor of their level.

    Those that an intra table or an uplink explains are lower bounds.
    """
    exact: list[Measurement] = []
    least: Limits = {}
    for given in rows:
        if len(given.pattern) < 2:
            continue
        row = without_factor(cluster, given)
        if row.censored or _held_back(cluster, row):
            least[row.pattern] = max(least.get(row.pattern, 0), row.value)
        else:
            exact.append(row)
    known = {pattern: int(np.median(values)) for pattern, values in by_pattern(exact).items()}
    return Observations(known, {p: value for p, value in least.items() if p not in known})


def level_of(cluster: Cluster, row: Measurement) -> int:
    """Lowest level of which one domain holds a run; -1 if its hosts are unknown, or one."""
    if len(row.gpus) < 2:
        return -1
    domain = cluster.network_levels.domain[:, [cluster.host_index(name) for name, _ in row.gpus]]
    return int(np.argmax((domain == domain[:, :1]).all(axis=1)))


def fitted_factors(
    cluster: Cluster, table: MeasurementTable, predict: Predict
) -> tuple[Cluster, tuple[LevelFit, ...]]:
    """Fit the factors that are not given, from the second level upward; the cluster with them.

    A factor is the median of measured bandwidth over that of a model of the runs at lower levels,
    at most that of the level below. `predict` gives bandwidths of runs by a model without factors.
    """
    if not cluster.levels:
        return cluster, ()
    factors, found = dict(cluster.factors), []
    names = cluster.network_levels.names[: None if len(cluster.fabrics) == 1 else -1]
    flat = replace(cluster, factors=dict.fromkeys(names, 1.0))
    by_level: list[list[Measurement]] = [[] for _ in (*names, "unknown")]
    for row in table:
        by_level[level_of(cluster, row)].append(row)
    below, current = by_level.pop(), 1.0
    parts = cluster.network_levels.domain.max(axis=1)  # one less than domains
    for number, (name, rows) in enumerate(zip(names, by_level, strict=True)):
        exact = [row for row in rows if not row.censored]
        if number and name not in factors and parts[number] < parts[number - 1]:
            ratios = np.zeros(1)
            if len(exact) >= LEAST_RUNS:
                expected = predict(flat, table.with_rows(below), exact)
                ratios = np.array([row.value for row in exact]) / np.maximum(expected, 1)
                above = (cluster.factors.get(other, 0.0) for other in names[number:])
                least = max(1e-6, *above)  # factors do not rise with the level
                factors[name] = max(least, round(min(current, float(np.median(ratios))), 6))
            low, high = float(ratios.min()), float(ratios.max())
            found.append(LevelFit(name, len(exact), factors.get(name), low, high))
        current = min(current, factors.get(name, current))
        below = below + [_divided(row, round(current * WHOLE)) for row in rows]
    return replace(cluster, factors=factors), tuple(found)


def without_factor(cluster: Cluster, row: Measurement) -> Measurement:
    """A run as it is within a domain of the lowest level: the inverse of `Levels.limited`."""
    level = level_of(cluster, row)
    return row if level < 0 else _divided(row, int(cluster.network_levels.factor[level]))


def _divided(row: Measurement, factor: int) -> Measurement:
    """A run with the least value that a factor in millionths reduces to its value."""
    if factor >= WHOLE:
        return row
    return replace(row, value=min(-(-row.value * WHOLE // max(factor, 1)), MOST - 1))


def _held_back(cluster: Cluster, row: Measurement) -> bool:
    """Whether a host or an uplink of the run, rather than the network, explains its bandwidth."""
    limits = []
    for name, ids in row.gpus:
        kind = cluster.type(cluster.host_index(name))
        if kind.intra is not None and len(ids) >= 2:
            limits.append(kind.intra.of(sum(1 << gpu for gpu in ids)))
    if (level := level_of(cluster, row)) >= 0:
        gpus, hosts = np.array([sum(row.pattern)]), np.array([len(row.pattern)])
        limits.append(int(line(cluster.network_levels.uplink[[level]], gpus, hosts)[0]))
    return bool(limits) and row.value >= BINDING * min(limits)
