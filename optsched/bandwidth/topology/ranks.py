"""The order in which the processes of a job take its GPUs, as launchers read it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from optsched.bandwidth.topology.cluster import Cluster


def rank_order(cluster: Cluster, gpus: Iterable[int]) -> tuple[int, ...]:
    """Order global numbers by domain, host and id; domains and hosts with most GPUs first.

    So a ring in rank order, as NCCL makes it over hosts, leaves and enters every domain once.
    """
    chosen = sorted(gpus)
    domains = {gpu: cluster.hosts[cluster.host_of[gpu]].domains for gpu in chosen}
    depth = range(1, len(cluster.levels) + 1)
    inside = Counter(domains[gpu][:k] for gpu in chosen for k in depth)
    on_host = Counter(int(cluster.host_of[gpu]) for gpu in chosen)

    def place(gpu: int) -> tuple[object, ...]:
        above = [(-inside[domains[gpu][:k]], domains[gpu][k - 1]) for k in depth]
        host = int(cluster.host_of[gpu])
        return (*above, -on_host[host], host, gpu)

    return tuple(sorted(chosen, key=place))


def hostfile(cluster: Cluster, gpus: Iterable[int]) -> str:
    """One line a machine in rank order, as MPI reads it: ``n01 slots=4``."""
    ranks = cluster.by_machine(rank_order(cluster, gpus))
    return "".join(f"{name} slots={len(ids)}\n" for name, ids in ranks.items())


def visible_devices(cluster: Cluster, gpus: Iterable[int]) -> dict[str, str]:
    """Machine to its value of ``CUDA_VISIBLE_DEVICES``, in rank order."""
    ranks = cluster.by_machine(rank_order(cluster, gpus))
    return {name: ",".join(map(str, ids)) for name, ids in ranks.items()}
