"""Choices on rails: on several hosts the same local ids, so that rail switches join them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from optsched.bandwidth.topology.intra import MOST_BY_SUBSET, subset_sizes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from optsched.bandwidth.topology.policy import Policy
    from optsched.bandwidth.topology.state import ClusterState
    from optsched.model.schedule import IntArray


def on_rails(
    here: ClusterState, k: int, policy: Policy, within: Sequence[IntArray | None]
) -> Iterator[tuple[ClusterState, Policy]]:
    """States and policies that, together, have exactly the choices on rails.

    First one host by itself; then, for every set of local ids, the hosts on which it is free, and
    as many of them as give k GPUs. Sets that another replaces (same hosts, as fast) are left out.
    """
    most = min(policy.max_hosts or k, k)
    if policy.min_hosts == 1:
        yield here, replace(policy, max_hosts=1)
    if policy.required == "host":
        return
    cluster = here.cluster
    local = np.arange(cluster.n_gpus) - cluster.first[cluster.host_of]
    for mask, hosts in _sets(here, k, (max(2, policy.min_hosts), most), within):
        inside = np.isin(cluster.host_of, hosts) & (mask >> np.minimum(local, 62) & 1 == 1)
        outside = [gpu for gpu in here.free if not inside[gpu]]
        number = k // mask.bit_count()
        yield here.without(outside), replace(policy, min_hosts=number, max_hosts=number)


def _sets(
    here: ClusterState, k: int, number: tuple[int, int], within: Sequence[IntArray | None]
) -> list[tuple[int, IntArray]]:
    """Sets of local ids, as masks, and the hosts on which they are free."""
    cluster = here.cluster
    hosts = np.flatnonzero((cluster.sizes <= MOST_BY_SUBSET) & (here.room > 0))
    if not len(hosts):
        return []
    size = int(cluster.sizes[hosts].max())
    counts = subset_sizes(size)
    found: list[tuple[int, IntArray]] = []
    known = {t: values for t, values in enumerate(within) if values is not None}
    kinds = np.array(cluster.type_of)
    seen: dict[tuple[bytes, int], list[tuple[int, ...]]] = {}
    for mask in range(1, 1 << size):
        c = int(counts[mask])
        if k % c or not number[0] <= k // c <= number[1]:
            continue
        able = hosts[(here.masks[hosts] & mask) == mask]
        if len(able) < k // c:
            continue
        speed = tuple(
            int(known[t][mask if len(known[t]) > cluster.types[t].gpus + 1 else c])
            for t in np.unique(kinds[able]).tolist() if t in known
        )  # fmt: skip
        others = seen.setdefault((able.tobytes(), c), [])
        if any(all(a >= b for a, b in zip(one, speed, strict=True)) for one in others):
            continue
        others.append(speed)
        found.append((mask, able))
    return sorted(found, key=lambda one: (-len(one[1]), one[0]))
