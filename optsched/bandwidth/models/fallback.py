"""Bandwidths within a host that are not all measured: from links, and from some runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from optsched.bandwidth.models.prior import host_rates
from optsched.bandwidth.topology.intra import MOST_BY_SUBSET, IntraTable, subset_sizes
from optsched.bandwidth.topology.links import NVLINK_RATE, SELF, link_rate
from optsched.bandwidth.topology.products import product_of
from optsched.bandwidth.topology.rates import MOST, kilobytes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from optsched.bandwidth.models.measurements import Measurement
    from optsched.bandwidth.models.model import Which
    from optsched.bandwidth.topology.cluster import Cluster, HostType
    from optsched.model.schedule import IntArray

DOUBT: Final = 3.0
"""A fallback may be off by this factor either way: links do not show protocols and drivers."""


def best_rings(kind: HostType) -> IntArray:
    """Fallback for `IntraTable.values`: the best ring over a subset, as fast as its weakest link.

    The type has links. Above 16 GPUs a host: by count, as fast as the weakest link of all.
    """
    n, links = kind.gpus, kind.links
    assert links is not None
    if n > MOST_BY_SUBSET:
        rate = min(link_rate(link) for row in links for link in row if link != SELF)
        values = np.full(n + 1, kilobytes("links", rate), np.int64)
        values[:2] = 0
        return values
    rate_of = np.array(
        [[0 if i == k else kilobytes("links", link_rate(links[i][k])) for k in range(n)]
         for i in range(n)]
    )  # fmt: skip
    values = np.zeros(1 << n, np.int64)
    for rate in sorted({int(rate) for rate in rate_of.reshape(-1) if rate}):
        values[_ringed(rate_of >= rate)] = rate
    return values


def assumptions(
    cluster: Cluster, measured: Collection[int] = (), *, across: bool = False
) -> Iterator[str]:
    """List what is assumed of links and network cards that are unknown, a sentence each.

    `measured`: types with runs on one host; `across`: whether runs across hosts are measured.
    """
    kinds = [(t, cluster.types[t]) for t in sorted(set(cluster.type_of))]
    for t, kind in kinds:
        if kind.gpus > 1 and kind.links is None and kind.intra is None and t not in measured:
            product = product_of(kind.name)
            hint = "" if product is None else f" (by its name: {product.way})"
            yield (
                f"links within host type {kind.name} are unknown: assumed at least as good as the "
                f"network; --topo or measurements settle it{hint}"
            )
    for _, kind in kinds:
        if kind.nic_rate is None and kind.nics and cluster.n_hosts > 1 and not across:
            yield (
                f"the rate of network cards of host type {kind.name} is unknown: assumed 50 GB/s "
                "at most, and no faster than links within hosts; --nic-rate or measurements settle "
                "it"
            )
        product = product_of(kind.name)
        alone = [h for h in cluster.hosts if h.type == kind.name and not h.machines]
        if product is not None and product.rack and len(alone) > 1:
            yield (
                f"NVLink between hosts of type {kind.name} is not counted: cards join them; label "
                "nvidia.com/gpu.clique of nodes, or Slurm's blocks, say which hosts it joins"
            )


def measured_types(cluster: Cluster, rows: Iterable[Measurement]) -> set[int]:
    """Types of hosts on one of which a run was measured."""
    types = set(cluster.type_of)
    found = [(row, _types_of(cluster, row)) for row in rows if not row.censored]
    return {t for row, of in found if row.pattern[0] > 1 for t in types & of}


def intra_estimate(
    cluster: Cluster, kind: int, rows: Iterable[Measurement], which: Which = "value"
) -> IntArray:
    """Bandwidths within a host of a type: its table, else fallbacks, corrected by some runs.

    Unknown links limit nothing (few hosts never look worse than many). Measured subsets have their
    median, others the fallback times the median of measured / fallback at the nearest size.
    """
    host_type, rows = cluster.types[kind], tuple(rows)
    n, unknown = host_type.gpus, host_type.links is None
    if host_type.intra is not None:
        return host_type.intra.values
    if unknown:
        across = max((row.value for row in rows if len(row.pattern) > 1), default=0)
        most = max(2 * int(host_rates(cluster).max()), 2 * across, kilobytes("links", NVLINK_RATE))
        base = np.full(n + 1, min(most, MOST - 1), np.int64)
        base[:2] = 0
    else:
        base = best_rings(host_type)
    by_subset = len(base) == 1 << n and n > 1
    sizes = subset_sizes(n) if by_subset else np.arange(n + 1)
    found: dict[int, list[int]] = {}
    for row in rows:
        if not row.censored and kind in _types_of(cluster, row):
            keys = [row.pattern[0]]
            if by_subset and row.gpus:
                keys = [sum(1 << gpu for gpu in row.gpus[0][1])]
            elif by_subset:
                keys = np.flatnonzero(sizes == row.pattern[0]).tolist()
            for key in keys:
                found.setdefault(key, []).append(row.value)
    known = {key: int(np.median(values)) for key, values in found.items()}
    spread = {"value": 1.0, "low": 1 / DOUBT, "high": DOUBT}[which]
    if unknown and not known and which == "low":
        spread = 1.0  # robust choices too take links for no worse than the network
    estimate = base * _factors(base, sizes, known) * spread
    values = np.minimum(np.rint(estimate), MOST - 1).astype(np.int64)
    values[list(known)] = list(known.values())
    return values


def best_within(cluster: Cluster, rows: Iterable[Measurement]) -> IntArray:
    """By count the best bandwidth, kB/s, of so many GPUs on one host of the cluster."""
    best, rows = np.zeros(int(cluster.sizes.max()) + 1, np.int64), tuple(rows)
    for t in set(cluster.type_of):
        by_count = IntraTable(cluster.types[t].gpus, intra_estimate(cluster, t, rows)).by_count
        best[: len(by_count)] = np.maximum(best[: len(by_count)], by_count)
    return best


def _types_of(cluster: Cluster, row: Measurement) -> set[int]:
    """Types of hosts on which a run on one host can have been; none if it was across hosts."""
    if len(row.pattern) > 1:
        return set()
    if row.gpus:
        return {cluster.type_of[cluster.host_index(row.gpus[0][0])]}
    return {t for t, kind in enumerate(cluster.types) if row.pattern[0] <= kind.gpus}


def _factors(base: IntArray, sizes: IntArray, known: dict[int, int]) -> npt.NDArray[np.float64]:
    """Measured / fallback of the nearest size that was measured, by key."""
    ratios: dict[int, list[float]] = {}
    for key, value in known.items():
        if base[key]:
            ratios.setdefault(int(sizes[key]), []).append(value / int(base[key]))
    by_count = np.ones(int(sizes.max()) + 1)
    for count in range(2, len(by_count)):
        if ratios:
            nearest = min(ratios, key=lambda other: (abs(other - count), other))
            by_count[count] = float(np.median(ratios[nearest]))
    return np.asarray(by_count[sizes])


def _ringed(near: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Which subsets have a ring through all their GPUs (Held & Karp 1962, by subset).

    `near[i, k]`: whether two GPUs may follow each other; shape of the answer (2^n,).
    """
    n = len(near)
    neighbours, masks, sizes = near @ (1 << np.arange(n)), np.arange(1 << n), subset_sizes(n)
    lowest = masks & -masks
    ends = np.where(sizes == 1, masks, 0)  # where a path can end that began at the lowest GPU
    for size in range(2, n + 1):
        those = masks[sizes == size]
        for last in range(n):
            end = 1 << last
            part = those[(those & end != 0) & (lowest[those] != end)]
            reached = ends[part ^ end] & neighbours[last] != 0
            ends[part[reached]] |= end
    first = np.zeros(1 << n, np.int64)
    first[1:] = neighbours[np.log2(lowest[1:]).astype(np.int64)]
    return np.asarray((sizes >= 2) & (ends & first != 0))
