"""Bandwidths within a host that are not all measured: from links, and from some runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from optsched.bandwidth.models.measurements import median
from optsched.bandwidth.models.prior import host_rates
from optsched.bandwidth.topology.intra import MOST_BY_SUBSET
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
"""A fallback may be off by this factor either way: links do not tell protocols and drivers."""


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
    """What is assumed of links and network cards that are unknown, a sentence each.

    Parameters
    ----------
    cluster
        Its types of hosts count, those without hosts aside.
    measured
        Types with runs on one host, see `measured_types`.
    across
        Whether runs across hosts are measured: then the network is known.
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
    found: set[int] = set()
    for row in rows:
        if len(row.pattern) == 1 and row.pattern[0] > 1 and not row.censored:
            types = set(cluster.type_of)
            if row.gpus:
                types = {cluster.type_of[cluster.host_index(row.gpus[0][0])]}
            found |= {t for t in types if row.pattern[0] <= cluster.types[t].gpus}
    return found


def _assumed(cluster: Cluster, gpus: int, rows: Iterable[Measurement]) -> IntArray:
    """By count, of a type whose links are unknown: more than the network gives any choice.

    So a choice of few hosts is never taken for worse than one of many.
    """
    across = max((row.value for row in rows if len(row.pattern) > 1), default=0)
    most = max(2 * int(host_rates(cluster).max()), 2 * across, kilobytes("links", NVLINK_RATE))
    values = np.full(gpus + 1, min(most, MOST - 1), np.int64)
    values[:2] = 0
    return values


def intra_estimate(
    cluster: Cluster, kind: int, rows: Iterable[Measurement], which: Which = "value"
) -> IntArray:
    """Bandwidths within a host of a type: its table, else fallbacks, corrected by some runs.

    If neither links nor a run on one host are known, they are assumed to limit nothing.

    Parameters
    ----------
    cluster
        Whose type it is.
    kind
        Position of the type.
    rows
        Measurements; those on one host of this type count. Subsets that were measured have their
        median, others the fallback times the median of measured / fallback over subsets of the
        nearest size.
    which
        The estimate, or an end of what it may be.
    """
    host_type, rows = cluster.types[kind], tuple(rows)
    if host_type.intra is not None:
        return host_type.intra.values
    unknown = host_type.links is None
    base = _assumed(cluster, host_type.gpus, rows) if unknown else best_rings(host_type)
    by_subset = len(base) == 1 << host_type.gpus and host_type.gpus > 1
    found: dict[int, list[int]] = {}
    for row in rows:
        if row.censored or len(row.pattern) != 1 or row.pattern[0] > host_type.gpus:
            continue
        count = row.pattern[0]
        if not row.gpus:
            keys = _of_size(host_type.gpus, count) if by_subset else [count]
        elif cluster.type_of[cluster.host_index(row.gpus[0][0])] != kind:
            continue
        else:
            keys = [sum(1 << gpu for gpu in row.gpus[0][1])] if by_subset else [count]
        for key in keys:
            found.setdefault(key, []).append(row.value)
    known = {key: median(values) for key, values in found.items()}
    estimate = base * _factors(host_type.gpus, base, known, by_subset)
    spread = {"value": 1.0, "low": 1 / DOUBT, "high": DOUBT}[which]
    if unknown and not known and which == "low":
        spread = 1.0  # robust choices too take links for no worse than the network
    values = np.minimum(np.rint(estimate * spread), MOST - 1).astype(np.int64)
    for key, value in known.items():
        values[key] = value
    return values


def _factors(
    n: int, base: IntArray, known: dict[int, int], by_subset: bool
) -> npt.NDArray[np.float64]:
    """Measured / fallback by key, taken from the nearest size that was measured."""
    ratios: dict[int, list[float]] = {}
    for key, value in known.items():
        if base[key]:
            count = key.bit_count() if by_subset else key
            ratios.setdefault(count, []).append(value / int(base[key]))
    by_count = np.ones(n + 1)
    if ratios:
        for count in range(2, n + 1):
            nearest = min(ratios, key=lambda other: (abs(other - count), other))
            by_count[count] = float(np.median(ratios[nearest]))
    if not by_subset:
        return by_count
    return np.asarray(by_count[[mask.bit_count() for mask in range(1 << n)]])


def _ringed(near: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Which subsets have a ring through all their GPUs (Held & Karp 1962, by subset).

    `near[i, k]`: whether two GPUs may follow each other; shape of the answer (2^n,).
    """
    n = len(near)
    neighbours = near @ (1 << np.arange(n))
    masks = np.arange(1 << n)
    sizes = np.array([mask.bit_count() for mask in range(1 << n)])
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


def _of_size(n: int, count: int) -> list[int]:
    return [mask for mask in range(1 << n) if mask.bit_count() == count]
