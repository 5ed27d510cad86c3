"""`LargeSearch` by size of the cluster: time, proof and bound, flat or with two levels, with jobs.

python -m benchmarks.bandwidth.large_choices [--states 10] [--begin 5000] [--gpus 256,1024,4096]
    [--free 0.7] [--deadline 0.005]

Hosts of 8 GPUs at the line rate of their cards: `flat`, or `levels` with leaves of 16 hosts, spines
of 8 leaves, factors 1, 0.8 and 0.5. Jobs: none; `placed` on the hosts with most free GPUs;
`scattered` over four hosts side by side (one in five: eight), with the demand that they reach
alone. CPU time with demands. Contention is that of the model, nobody measured it.
"""

from __future__ import annotations

import argparse
import random
import time
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.machine import machine
from optsched.bandwidth import synthetic
from optsched.bandwidth.models.bottleneck import BottleneckBandwidth
from optsched.bandwidth.models.contention import demands
from optsched.bandwidth.search.large import LargeSearch
from optsched.bandwidth.topology.cluster import Cluster, Host
from optsched.bandwidth.topology.state import ClusterState

if TYPE_CHECKING:
    from optsched.bandwidth.search.by_counts import Answer

REQUESTS = (12, 24, 48, 96, 128, 192, 256, 384)
SEARCHES: dict[BottleneckBandwidth, LargeSearch] = {}
SPAN = 32  # GPUs of the hosts side by side among which a job is scattered


def main() -> None:
    """Print one line for every kind and size of cluster and kind of jobs, or a comparison."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--states", type=int, default=10)
    options.add_argument("--begin", type=int, default=5000, help="first seed")
    options.add_argument("--free", type=float, default=0.7)
    options.add_argument("--gpus", default="256,1024,4096")
    options.add_argument("--deadline", type=float)
    given = options.parse_args()
    print(machine("numpy", "numba"))
    print("model   gpus  jobs       median ms  90% ms  max ms  proved %  bound/value unproved")
    for name in ("flat", "levels"):
        for gpus in map(int, given.gpus.split(",")):
            for jobs in STATES:
                measure(name, gpus, jobs, given)


def measure(name: str, gpus: int, jobs: str, given: argparse.Namespace) -> None:
    """One line: every request on the same states."""
    model = model_of("nvswitch", gpus // 8, 1, name == "levels")
    rows = []
    for seed in range(given.begin, given.begin + given.states):
        state = STATES[jobs](model.cluster, seed, given.free)
        for k in [k for k in REQUESTS if k <= 0.6 * len(state.free)]:
            found, took = timed(model, state, k, given.deadline)
            rows.append((took, found.exact, found.upper_bound / max(found.value, 1)))
    times, exact, gaps = np.array(rows).T
    gap = gaps[exact == 0].mean() if (exact == 0).any() else 1.0
    print(
        f"{name:6} {gpus:5}  {jobs:9} {np.median(times):10.2f} {np.quantile(times, 0.9):7.2f} "
        f"{max(times):7.2f} {100 * exact.mean():9.1f} {gap:21.2f}",
        flush=True,
    )


def timed(
    model: BottleneckBandwidth, state: ClusterState, k: int, deadline: float | None
) -> tuple[Answer, float]:
    """The choice, and its CPU time in ms with the demands of the jobs; kernels are compiled."""
    if model not in SEARCHES:
        SEARCHES[model] = LargeSearch(model)
        warm = scattered(model.cluster, 0, 0.5)
        SEARCHES[model].choose(warm, len(warm.free) // 2, demands(model, warm, "heavy"))
    begin = time.thread_time()
    until = None if deadline is None else time.monotonic() + deadline
    found = SEARCHES[model].choose(state, k, demands(model, state, "heavy"), None, until)
    assert found is not None
    return found, 1e3 * (time.thread_time() - begin)


@cache
def model_of(
    kind: str | tuple[str, ...], hosts: int, seed: int, levels: bool = False
) -> BottleneckBandwidth:
    """The line rate of a cluster, flat or with leaves and spines."""
    cluster = synthetic.cluster(kind, hosts, seed=seed)
    if levels:
        of = [(f"s{i // 128}", f"l{i // 16}") for i in range(hosts)]
        some = [Host(h.name, h.type, place) for h, place in zip(cluster.hosts, of, strict=True)]
        factors = {"leaf": 1.0, "spine": 0.8, "cluster": 0.5}
        cluster = Cluster(tuple(some), cluster.types, ("spine", "leaf"), factors=factors)
    return BottleneckBandwidth(cluster)


def uniform(cluster: Cluster, seed: int, free: float) -> ClusterState:
    """So many GPUs free, any of them; no jobs."""
    some = random.Random(seed).sample(range(cluster.n_gpus), round(free * cluster.n_gpus))
    return ClusterState.with_free(cluster, some)


def scattered(cluster: Cluster, seed: int, free: float) -> ClusterState:
    """Jobs of 2 to 16 GPUs anywhere on four hosts side by side, or on eight."""
    rng, state, spans = random.Random(seed), ClusterState.idle(cluster), cluster.n_gpus // SPAN
    least = round(free * cluster.n_gpus)
    while len(state.free) > least:
        first = rng.randrange(spans)
        last = first if rng.random() < 0.8 else min(first + 1, spans - 1)
        pool = [gpu for gpu in state.free if first <= gpu // SPAN <= last]
        size = min(rng.choice([2, 4, 8, 16]), len(pool), len(state.free) - least)
        if size:
            state = state.take(rng.sample(pool, size), f"job{len(state.jobs)}")
    return state


STATES = {"none": uniform, "placed": synthetic.tenants, "scattered": scattered}


if __name__ == "__main__":
    main()
