"""What measurements say about limits of the network: exact values, and values from below."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from optsched.bandwidth.models.measurements import by_pattern, median

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from optsched.bandwidth.models.gaussian import Floats
    from optsched.bandwidth.models.measurements import Measurement
    from optsched.bandwidth.topology.cluster import Cluster
    from optsched.model.schedule import IntArray

BINDING: Final = 0.98
"""Share of the bandwidth within a host from which on a run shows that host, not the network."""

Limits = dict[tuple[int, ...], int]


class Observations(NamedTuple):
    """What measurements say about limits of the network, kB/s by pattern."""

    known: Limits
    least: Limits
    """The limit is at least this: a host or other traffic held the run back."""
    settled: Limits
    """As `least`, and no host allows more, so that the limit does not matter any further."""


def observations(
    cluster: Cluster, rows: Iterable[Measurement], ceiling: Callable[[IntArray], Floats]
) -> Observations:
    """Sort measurements out; those of one host say nothing about the network.

    Parameters
    ----------
    cluster
        Its tables tell what a host allowed a run whose GPUs are known.
    rows
        The measurements, in any order.
    ceiling
        The most that the hosts allow of patterns, kB/s.
    """
    exact: list[Measurement] = []
    least: Limits = {}
    for row in rows:
        if len(row.pattern) < 2:
            continue
        if row.censored or _held_back(cluster, row):
            least[row.pattern] = max(least.get(row.pattern, 0), row.value)
        else:
            exact.append(row)
    known = {pattern: median(values) for pattern, values in by_pattern(exact).items()}
    least = {pattern: value for pattern, value in least.items() if pattern not in known}
    settled = {
        pattern: value
        for pattern, value in least.items()
        if value >= BINDING * ceiling(np.array([pattern]))[0]
    }
    return Observations(known, least, settled)


def _held_back(cluster: Cluster, row: Measurement) -> bool:
    """Whether a host of the run, rather than the network, explains its bandwidth."""
    limits = []
    for name, ids in row.gpus:
        kind = cluster.type(cluster.host_index(name))
        if kind.intra is not None and len(ids) >= 2:
            limits.append(kind.intra.of(sum(1 << gpu for gpu in ids)))
    return bool(limits) and row.value >= BINDING * min(limits)
