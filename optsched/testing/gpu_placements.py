"""Small random GPU placements for the solver checks, and their optimum by brute force."""

from __future__ import annotations

import random
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from optsched.bandwidth.models.model import CountModel, UnmeasuredPattern, alone, unlimited
from optsched.bandwidth.placement.problem import GpuPlacement
from optsched.bandwidth.topology.cluster import Cluster, Host, HostType
from optsched.bandwidth.topology.intra import IntraTable
from optsched.bandwidth.topology.policy import Policy
from optsched.bandwidth.topology.state import ClusterState, Job

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.bandwidth.models.model import Which
    from optsched.model.schedule import IntArray

_POLICIES = (
    Policy(), Policy(), Policy(required="rack"), Policy(balance="even"), Policy(max_hosts=2),
    Policy(max_per_host=2), Policy(exclude=("n0",)), Policy(same_type=True),
)  # fmt: skip


class RandomBandwidth(CountModel):
    """Bandwidths drawn from a seed: one for every pattern and every subset of a host type."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.cluster, self.seed = cluster, seed

    def network(self, patterns: IntArray, which: Which = "value") -> IntArray:
        """Limit of every row of falling counts."""
        limit = unlimited(patterns)
        for i in np.flatnonzero(~alone(patterns)).tolist():
            rng = random.Random(f"{self.seed} {[c for c in patterns[i].tolist() if c]}")
            limit[i] = rng.randint(3, 60) * 9_000_001
        return limit

    def intra_of(self, kind: int, which: Which = "value") -> IntArray | None:
        """Table of the host type."""
        intra = self.cluster.types[kind].intra
        return None if intra is None else intra.values


def random_placement(rng: random.Random, sizes: Sequence[int], name: str = "") -> GpuPlacement:
    """Draw a placement with running jobs on hosts of these sizes in two racks."""
    kinds = {n: HostType(f"t{n}", n, intra=IntraTable(n, _subset_values(rng, n))) for n in sizes}
    racks = len(sizes) // 2 or 1
    hosts = [Host(f"n{i}", f"t{n}", (f"r{i // racks}",)) for i, n in enumerate(sizes)]
    cluster = Cluster(tuple(hosts), tuple(kinds.values()), ("rack",))
    gpus = rng.sample(range(cluster.n_gpus), cluster.n_gpus)
    n_free = rng.randint(max(1, len(gpus) // 3), len(gpus))
    free, busy = gpus[:n_free], gpus[n_free:]
    half = len(busy) // 2
    parts = [part for part in (busy[:half], busy[half:]) if part]
    jobs = [Job(f"j{i}", tuple(part), rng.choice([None, 0])) for i, part in enumerate(parts)]
    return GpuPlacement(
        ClusterState(cluster, tuple(free), tuple(jobs)),
        RandomBandwidth(cluster, rng.getrandbits(30)),
        rng.randint(1, n_free), policy=rng.choice(_POLICIES), name=name,
    )  # fmt: skip


def tiny_placements(n: int) -> list[GpuPlacement]:
    """Draw placements on up to nine GPUs."""
    found = []
    for seed in range(n):
        rng = random.Random(seed)
        sizes = [rng.randint(1, 4) for _ in range(rng.randint(1, 3))]
        found.append(random_placement(rng, sizes[: 3 if sum(sizes) < 10 else 2], f"GPUs {seed}"))
    return found


def best_placement(problem: GpuPlacement) -> int | None:
    """Optimal objective over all subsets of free GPUs; None if no choice is feasible."""
    best = None
    for chosen in combinations(problem.state.free, problem.k):
        if problem.faults(chosen):
            continue
        try:
            value = -problem.share(chosen).value
        except UnmeasuredPattern:
            continue
        best = value if best is None else min(best, value)
    return best


def _subset_values(rng: random.Random, n: int) -> list[int]:
    return [rng.randint(2, 40) * 10_000_000 for _ in range(1 << n)]
