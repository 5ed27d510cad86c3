"""In which order the processes of a job take the GPUs it was given."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Final

from optsched.bandwidth.topology.links import weight

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from optsched.bandwidth.topology.cluster import Cluster

MOST_RINGED: Final = 16
"""GPUs of a host whose best ring is looked for."""


def rank_order(cluster: Cluster, gpus: Iterable[int]) -> tuple[int, ...]:
    """Hosts contiguous, grouped by domain, those with most GPUs first; rings within hosts.

    A ring's slowest link is as fast as can be; where links are unknown, local ids.

    Parameters
    ----------
    cluster
        Domains and links.
    gpus
        Global numbers.
    """
    on_host = {
        h: list(on) for h, on in groupby(sorted(gpus), key=lambda g: int(cluster.host_of[g]))
    }
    total: dict[tuple[str, ...], int] = {}
    for h, on in on_host.items():
        domains = cluster.hosts[h].domains
        for level in range(len(domains)):
            key = domains[: level + 1]
            total[key] = total.get(key, 0) + len(on)

    def place(h: int) -> tuple[object, ...]:
        domains = cluster.hosts[h].domains
        above = [(-total[domains[: k + 1]], domains[k]) for k in range(len(domains))]
        return (*above, -len(on_host[h]), h)

    order: list[int] = []
    for h in sorted(on_host, key=place):
        first = int(cluster.first[h])
        links = cluster.type(h).links
        local = [g - first for g in on_host[h]]
        order += [first + i for i in (local if links is None else ring(links, local))]
    return tuple(order)


def ring(links: Sequence[Sequence[str]], local: list[int]) -> list[int]:
    """The ids in the order of a ring whose slowest link is the fastest; of equals the lowest."""
    ids = sorted(local)
    if not 3 < len(ids) <= MOST_RINGED:
        return ids
    weights = sorted({weight(links[i][k]) for i in ids for k in ids if i != k}, reverse=True)
    for least in weights:
        near = {
            i: [k for k in ids if k != i and weight(links[i][k]) >= least] for i in ids
        }  # fmt: skip
        found = _hamiltonian(near, ids)
        if found:
            return found
    return ids


def _hamiltonian(near: dict[int, list[int]], ids: list[int]) -> list[int]:
    """A cycle through all ids along neighbours, the first in lexicographic order; or nothing.

    Dynamic programming over (visited, last): which can still be completed to a cycle.
    """
    n, at = len(ids), {i: b for b, i in enumerate(ids)}
    full = (1 << n) - 1
    edges = [sum(1 << at[k] for k in near[i]) for i in ids]
    if any(edge.bit_count() < 2 for edge in edges):
        return []
    dead: set[tuple[int, int]] = set()
    path = [0]

    def extend(visited: int, last: int) -> bool:
        if visited == full:
            return bool(edges[last] & 1)
        if (visited, last) in dead:
            return False
        for k in range(n):
            if edges[last] >> k & 1 and not visited >> k & 1:
                path.append(k)
                if extend(visited | 1 << k, k):
                    return True
                path.pop()
        dead.add((visited, last))
        return False

    return [ids[b] for b in path] if extend(1, 0) else []


def hostfile(cluster: Cluster, gpus: Iterable[int]) -> str:
    """One line a machine in rank order, as MPI reads it: ``n01 slots=4``."""
    ranks = cluster.by_machine(rank_order(cluster, gpus))
    return "".join(f"{name} slots={len(ids)}\n" for name, ids in ranks.items())


def visible_devices(cluster: Cluster, gpus: Iterable[int]) -> dict[str, str]:
    """Machine to its value of ``CUDA_VISIBLE_DEVICES``, in rank order."""
    ranks = cluster.by_machine(rank_order(cluster, gpus))
    return {name: ",".join(map(str, ids)) for name, ids in ranks.items()}
