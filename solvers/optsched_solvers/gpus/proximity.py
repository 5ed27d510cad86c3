"""The rule of thumb of most schedulers: near GPUs first, by NUMA group, then host, then hosts."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from optsched.bandwidth.topology.cluster import Cluster


def proximity(cluster: Cluster, free: Iterable[int], k: int) -> tuple[int, ...]:
    """Choose k of the free GPUs, near each other; bandwidths play no part.

    In the NUMA group with most free GPUs if they fit, else on the host with most, else on hosts by
    falling number of free GPUs, whole; in a host free NUMA groups first. Ties: lowest ids.
    Ascending.
    """
    by_host: dict[int, list[int]] = {}
    for gpu in sorted(free):
        by_host.setdefault(int(cluster.host_of[gpu]), []).append(gpu)
    groups = [group for h, gpus in by_host.items() for group in _groups(cluster, h, gpus)]
    nearest = max(groups, key=len)
    if len(nearest) >= k:
        return tuple(nearest[:k])
    chosen: list[int] = []
    for h, gpus in sorted(by_host.items(), key=lambda item: (-len(item[1]), item[0])):
        chosen += on_host(cluster, h, gpus, k - len(chosen))
        if len(chosen) == k:
            break
    return tuple(sorted(chosen))


def on_host(cluster: Cluster, host: int, free: list[int], count: int) -> list[int]:
    """At most `count` of a host's free GPUs: entirely free NUMA groups first, then low ids."""
    if len(free) <= count:
        return free
    chosen: list[int] = []
    sizes = [len(group) for group in cluster.type(host).numa]
    for group, size in zip(_groups(cluster, host, free), sizes, strict=True):
        if len(group) == size and len(chosen) + size <= count:
            chosen += group
    taken = set(chosen)
    return chosen + [gpu for gpu in free if gpu not in taken][: count - len(chosen)]


def _groups(cluster: Cluster, host: int, free: list[int]) -> list[list[int]]:
    """The free GPUs of each NUMA group of a host, ascending."""
    first, usable = int(cluster.first[host]), set(free)
    return [
        sorted(first + i for i in group if first + i in usable) for group in cluster.type(host).numa
    ]
