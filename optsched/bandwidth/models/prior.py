"""What is expected of the network before any run across hosts, and what a regression sees."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from optsched.bandwidth.topology.links import SELF, link_rate
from optsched.bandwidth.topology.rates import KILOBYTES, MOST

if TYPE_CHECKING:
    from optsched.bandwidth.models.gaussian import Floats
    from optsched.bandwidth.topology.cluster import Cluster, HostType
    from optsched.model.schedule import IntArray

LARGEST: Final = 8
"""Number of the largest counts that are inputs, with sums over all."""

TRENDS: Final = (0.5, 0.5, 0.5, 0.2)
"""How far the rate, its powers of network cards, ring factor and imbalance may be off.

With powers of 1, 1 and 0 that is the line rate, with 0, 0 and 0 a constant, as latency makes it.
"""

LINE: Final = 0.1
"""By how much the line rate is off before anything is measured; a deviation of logs."""
WEIGHT: Final = 2
"""Measurements that `LINE` counts for."""


def host_rates(cluster: Cluster) -> Floats:
    """kB/s that c GPUs of one host bring to the network, by c from 0 to the largest host.

    A GPU has its share of the network cards, and at least one card. Where types differ the best
    counts: measuring corrects a limit that is too high, but sets with one too low would never be
    chosen. Cards of an unknown rate have 50 GB/s, but no pattern is faster than the slowest host by
    itself.
    """
    most = int(cluster.sizes.max())
    count = np.arange(most + 1)
    rates = np.zeros(most + 1)
    kinds = [cluster.types[t] for t in np.unique(cluster.type_of)]
    slowest = min(map(_slowest, kinds))
    for kind in kinds:
        cards = np.minimum(kind.nics, np.maximum(1.0, count * kind.nics / kind.gpus))
        brought = kind.nic_kilobytes * cards
        if kind.nic_rate is None:
            brought = np.minimum(brought, slowest / 2)  # of which the line rate is twice at most
        rates = np.maximum(rates, np.where(count <= kind.gpus, brought, 0.0))
    rates[0] = 0.0
    return rates


def _slowest(kind: HostType) -> float:
    """Least bandwidth within such a host that is measured, or that links stand for; kB/s."""
    if kind.intra is not None:
        known = kind.intra.values[kind.intra.values > 0]
    else:
        links = {link for row in kind.links or () for link in row if link != SELF}
        known = np.array([link_rate(link) * KILOBYTES for link in links])
    return float(known.astype(np.float64).min(initial=np.inf))


def line_rate(cluster: Cluster, patterns: IntArray) -> Floats:
    """kB/s of a hierarchical ring that the host with the fewest network cards holds back.

    ``T0(c) = min_h w_h * (n - 1)/n * m/(m - 1)`` for n GPUs on m hosts, w_h the `host_rates`;
    infinite on a single host, 0 for less than two GPUs. `patterns` are rows of falling counts.
    """
    given = np.asarray(patterns, np.int64)
    rates = host_rates(cluster)
    gpus, hosts = given.sum(axis=1), (given > 0).sum(axis=1)
    least = np.where(given > 0, rates[given], np.inf).min(axis=1, initial=np.inf)
    prior = np.full(len(given), np.inf)
    prior[gpus <= 1] = 0.0
    several = hosts >= 2
    n, m = gpus[several], hosts[several]
    prior[several] = least[several] * ((n - 1) / n) * (m / (m - 1))
    return prior


def inputs(cluster: Cluster, rows: IntArray) -> tuple[Floats, Floats]:
    """Inputs of about 1, shape (n, d), and regressors of the trend, shape (n, 4).

    The inputs are GPUs, hosts, least count, spread (all as logs), hosts that are used whole, odd
    counts, and the largest counts themselves.
    """
    hosts = cluster.n_hosts
    columns, used = min(LARGEST, hosts), rows > 0
    largest = np.pad(rows[:, :columns], ((0, 0), (0, max(0, columns - rows.shape[1]))))
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


def near_line_rate(
    expected: Floats, deviation: Floats, rate: Floats, seen: Floats, *, every: bool
) -> Floats:
    """Replace predictions by the scaled line rate as far as they are less sure than it.

    A search takes the unmeasured pattern that is overrated most, so where the process is not sure
    the order of line rates chooses better. If these are `every` pattern, those of one line rate
    keep the part of their differences that exceeds the doubt in them; else a prediction would
    depend on its batch. `expected`, `deviation`, `rate`: logs, shape (n,); `seen`: logs of measured
    / line rate.
    """
    scale = float(np.median(seen)) if len(seen) else 0.0
    freedom = WEIGHT + max(0, len(seen) - 1)
    error = (WEIGHT * LINE**2 + ((seen - scale) ** 2).sum()) / freedom
    share = 1 / (1 + (deviation**2 / error) ** 2)
    logs = share * expected + (1 - share) * (rate + scale)
    if not every:
        return np.asarray(logs)
    _, group = np.unique(np.round(rate, 9), return_inverse=True)
    weight, size = 1 / deviation**2, np.bincount(group)
    mean = (np.bincount(group, weight * logs) / np.bincount(group, weight))[group]
    spread, doubt = (np.bincount(group, x) / size for x in ((logs - mean) ** 2, deviation**2))
    kept = np.maximum(0.0, 1 - doubt / np.maximum(spread, 1e-12))  # James & Stein 1961
    kept[size == 1] = 1.0
    return np.asarray(mean + kept[group] * (logs - mean))
