"""What a regression sees of a pattern: inputs, trend, and what is expected beforehand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from optsched.bandwidth.models.prior import host_rates, line_rate
from optsched.bandwidth.topology.rates import MOST

if TYPE_CHECKING:
    from optsched.bandwidth.models.gaussian import Floats
    from optsched.bandwidth.topology.cluster import Cluster
    from optsched.model.schedule import IntArray

LARGEST: Final = 8
"""So many of the largest counts are inputs, besides sums over all."""

MEANS: Final = ("bent", "line_rate")
"""What the limits may deviate from: the line rate of `prior`, also held smoothly below what hosts
allow."""

TRENDS: Final = (0.5, 0.5, 0.5, 0.2)
"""How far the rate, its powers of network cards, ring factor and imbalance may be off.

With powers of 1, 1 and 0 that is the line rate, with 0, 0 and 0 a constant, as latency makes it.
"""

_SHARPNESS: Final = 4  # of the smooth minimum


def mean(name: str, cluster: Cluster, rows: IntArray, ceiling: Floats) -> Floats:
    """Logs of the limits of patterns across hosts that are expected before any is measured.

    Parameters
    ----------
    name
        One of `MEANS`.
    cluster, rows
        Patterns as falling counts with zeros behind, shape (n, m).
    ceiling
        What the hosts allow of each, kB/s.
    """
    rate = np.maximum(line_rate(cluster, rows), 1.0)
    if name == "line_rate":
        return np.asarray(np.log(rate))
    return np.asarray(np.log(rate) - np.log1p((rate / ceiling) ** _SHARPNESS) / _SHARPNESS)


def inputs(cluster: Cluster, rows: IntArray) -> tuple[Floats, Floats]:
    """Inputs of about 1, shape (n, d), and regressors of the trend, shape (n, 4).

    The inputs are GPUs, hosts, least count, spread (all as logs), hosts that are used whole, odd
    counts, and the largest counts themselves.
    """
    hosts = cluster.n_hosts
    columns = min(LARGEST, hosts)
    largest = np.zeros((len(rows), columns))
    there = min(columns, rows.shape[1])
    largest[:, :there] = rows[:, :there]
    used = rows > 0
    n, m = rows.sum(axis=1), used.sum(axis=1)
    least = np.where(used, rows, MOST).min(axis=1)
    whole = rows == int(cluster.sizes.max())
    seen = np.column_stack([
        np.log(n) / 2, np.log(m), np.log(least), np.log(rows[:, 0] / least),
        whole.sum(axis=1) / hosts, (rows % 2).sum(axis=1) / hosts, np.log1p(largest),
    ])  # fmt: skip
    ring = np.log((n - 1) / n * m / (m - 1))
    cards = np.log(np.maximum(line_rate(cluster, rows), 1.0)) - ring
    typical = np.log(np.maximum(1.0, host_rates(cluster)[1:])).mean()
    trend = np.column_stack([np.ones(len(rows)), cards - typical, ring, np.log(rows[:, 0] / least)])
    return seen, trend * np.array(TRENDS)
