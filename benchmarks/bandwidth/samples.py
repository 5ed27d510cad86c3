"""Which sets of GPUs to learn from and to test on: the published protocol, seeded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from optsched.errors import InputError
from optsched.io.values import integer

if TYPE_CHECKING:
    from optsched.bandwidth.models.model import Selection
    from optsched.bandwidth.topology.cluster import Cluster

SMALLEST: Final = 0.10
LARGEST: Final = 0.88
"""Share of the GPUs that a training sample takes, at least and at most."""
TEST: Final = 5
"""Test samples for every training sample."""


def training_samples(cluster: Cluster, n: int, seed: int = 0) -> Selection:
    """Half balanced splits over two to four hosts, half uniform subsets, all across hosts."""
    rng = _generator(cluster, n, seed, 0)
    total = cluster.n_gpus
    low, high = max(2, round(SMALLEST * total)), max(2, round(LARGEST * total))
    rows = np.zeros((n, total), np.bool_)
    for i in range(n):
        k = int(rng.integers(low, high + 1))
        chosen = _balanced(cluster, k, rng) if i % 2 == 0 else None
        if chosen is None:
            chosen = _uniform(cluster, k, rng)
        rows[i, chosen] = True
    return rows


def held_out_samples(cluster: Cluster, n: int, seed: int = 0) -> Selection:
    """Uniform subsets across hosts, each GPU in with a probability drawn from 0.1..0.9."""
    rng = _generator(cluster, n, seed, 1)
    rows = np.zeros((n, cluster.n_gpus), np.bool_)
    for i in range(n):
        while True:
            row = rng.random(cluster.n_gpus) < rng.uniform(0.1, 0.9)
            if len(set(cluster.host_of[row].tolist())) > 1:
                break
        rows[i] = row
    return rows


def _balanced(
    cluster: Cluster, k: int, rng: np.random.Generator
) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]] | None:
    """So many GPUs spread evenly over two to four hosts with room for them; None if none."""
    ways = []
    for m in range(2, min(4, cluster.n_hosts, k) + 1):
        roomy = np.flatnonzero(cluster.sizes >= -(-k // m))
        if len(roomy) >= m:
            ways.append((m, roomy))
    if not ways:
        return None
    m, roomy = ways[int(rng.integers(len(ways)))]
    chosen = []
    for place, h in enumerate(rng.permutation(roomy)[:m]):
        count = k // m + (place < k % m)
        local = rng.permutation(int(cluster.sizes[h]))[:count]
        chosen.append(int(cluster.first[h]) + local)
    return np.concatenate(chosen)


def _uniform(
    cluster: Cluster, k: int, rng: np.random.Generator
) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """So many GPUs on two hosts or more, each such set as likely as any other."""
    while True:
        chosen = rng.permutation(cluster.n_gpus)[:k]
        if len(set(cluster.host_of[chosen].tolist())) > 1:
            return chosen


def _generator(cluster: Cluster, n: int, seed: int, stream: int) -> np.random.Generator:
    integer("n", n, 0, 10**7)
    integer("seed", seed, 0, 2**63)
    if cluster.n_hosts < 2:
        raise InputError("samples: expected a cluster of at least two hosts")
    return np.random.default_rng((seed, stream))
