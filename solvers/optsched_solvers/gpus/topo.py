"""Greedy choice of GPUs by the weights of their links (the baseline `topo`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from optsched.bandwidth.topology.links import SELF, weight

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.bandwidth.topology.cluster import Cluster, HostType
    from optsched.model.schedule import IntArray


def nearest_links(cluster: Cluster, free: Sequence[int], k: int) -> tuple[int, ...]:
    """Choose GPUs on the fewest hosts, on them those with the nearest links to each other.

    If one host suffices, the host with the heaviest links; else hosts by falling number of free
    GPUs. From every GPU a greedy choice adds the GPU with the heaviest links; the heaviest of all
    is taken. Ties go to the lowest ids. Ascending.
    """
    by_host: dict[int, list[int]] = {}
    for gpu in free:
        h = int(cluster.host_of[gpu])
        by_host.setdefault(h, []).append(gpu - int(cluster.first[h]))
    tables = {t: _link_weights(cluster.types[t]) for t in set(cluster.type_of)}
    fitting = [h for h, local in by_host.items() if len(local) >= k]
    if fitting:
        picks = {h: greedy(tables[cluster.type_of[h]], by_host[h], k) for h in fitting}
        host = max(fitting, key=lambda h: (picks[h][0], -h))
        return tuple(int(cluster.first[host]) + i for i in picks[host][1])
    chosen: list[int] = []
    for h in sorted(by_host, key=lambda h: (-len(by_host[h]), h)):
        count = min(len(by_host[h]), k - len(chosen))
        _, local = greedy(tables[cluster.type_of[h]], by_host[h], count)
        chosen += [int(cluster.first[h]) + i for i in local]
        if len(chosen) == k:
            break
    return tuple(sorted(chosen))


def greedy(weights: IntArray, free: Sequence[int], count: int) -> tuple[int, list[int]]:
    """Summed link weight and local ids, ascending, of the heaviest greedy choice."""
    ids = list(free)
    if count == len(ids) or count == 1:
        some = ids[:count]
        return int(weights[np.ix_(some, some)].sum()) // 2, some
    near = weights[np.ix_(ids, ids)]
    best, heaviest = list(range(count)), -1
    for seed in range(len(ids)):
        total, chosen = 0, [seed]
        gain = near[seed].copy()
        gain[seed] = -1
        while len(chosen) < count:
            nearest = int(np.argmax(gain))
            total += int(gain[nearest])
            chosen.append(nearest)
            gain += near[nearest]
            gain[chosen] = -1
        chosen.sort()
        if total > heaviest or (total == heaviest and chosen < best):
            best, heaviest = chosen, total
    return heaviest, [ids[i] for i in best]


def _link_weights(kind: HostType) -> IntArray:
    table = np.zeros((kind.gpus, kind.gpus), np.int64)
    if kind.links is not None:
        for i, row in enumerate(kind.links):
            table[i] = [0 if link == SELF else weight(link) for link in row]
    return table
