"""The order of choices of equal bandwidth, the same at every size of a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from optsched.bandwidth.topology.cluster import Cluster
    from optsched.bandwidth.topology.state import ClusterState


def order_of(state: ClusterState, gpus: Iterable[int]) -> tuple[int, ...]:
    """Domains used at every level from the top down, hosts, and hosts that were whole.

    Of choices of equal bandwidth the one with the least order wins; see `rules_of` for its parts.
    """
    cluster = state.cluster
    used = np.flatnonzero(cluster.counts(gpus))
    domains = cluster.network_levels.domain[:-1][::-1]
    whole = state.room[used] == cluster.sizes[used]
    return (*(len(np.unique(of[used])) for of in domains), len(used), int(whole.sum()))


def rules_of(cluster: Cluster) -> tuple[str, ...]:
    """Names of the parts of `order_of`."""
    domains = (f"fewest domains of {name}" for name in cluster.levels)
    return *domains, "fewest hosts", "fewest whole hosts"
