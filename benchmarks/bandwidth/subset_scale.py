"""GPU subsets of clusters of pods: time, proof and quality by size, idle and beside tenants.

python -m benchmarks.bandwidth.subset_scale [--states 21] [--gpus 32,64,256,1024] [--free 0.7]

Hosts of 8 GPUs, 4 a pod, a synthetic non-monotone network, factor 0.7, pods with one GPU 0. Free
GPUs are uniformly random. Tenants: `placed` on the hosts with most room; `scattered` as random GPUs
of a pod (one in five: of two pods side by side), all with the demand that they reach alone.
Bandwidth under contention is the model's; nobody has measured it.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.machine import machine
from optsched.bandwidth import synthetic
from optsched.bandwidth.bottleneck import BottleneckBandwidth
from optsched.bandwidth.flat import FlatSearch
from optsched.bandwidth.pod_search import choose_pods
from optsched.bandwidth.pod_tenants import relevant, values_beside_tenants
from optsched.bandwidth.pods import PodBandwidth
from optsched.bandwidth.proximity import proximity
from optsched.bandwidth.state import ClusterState

if TYPE_CHECKING:
    from collections.abc import Callable

    from optsched.bandwidth.cluster import Cluster
    from optsched.bandwidth.pod_search import PodChoice

WANTED = (8, 16, 32, 64, 128, 256)
PER_POD = 32
HEAD = (
    "gpus    k  tenants    jobs  median ms     max ms  exact %  worst gap %  nearest GPUs reach %"
)


def main() -> None:
    """Print one line for every size of cluster, request and kind of tenants."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--states", type=int, default=21)
    options.add_argument("--gpus", default="32,64,256,1024")
    options.add_argument("--free", type=float, default=0.7)
    given = options.parse_args()
    print(machine("numpy", "numba"))
    print(HEAD)
    for gpus in map(int, given.gpus.split(",")):
        model = pods(gpus)
        for kind in ("none", "placed", "scattered"):
            for k in WANTED:
                if k <= 0.6 * gpus:
                    measure(model, kind, k, given.states, given.free)
    print("\nflat, idle (patterns of k are listed once, then kept)")
    print("gpus    k  first ms  median ms     max ms")
    for gpus in map(int, given.gpus.split(",")):
        if gpus >= 128:
            for k in (16, 32, 48, 64):
                flat(gpus, k, given.states, given.free)


def measure(model: PodBandwidth, kind: str, k: int, states: int, share_free: float) -> None:
    """One line: the same seeds for every request."""
    times, gaps, near, jobs = [], [], [], []
    for seed in range(states + 1):  # the first one warms up
        state = STATES[kind](model.cluster, seed, share_free)
        demands = demand_of(model, state)
        state.masks, state.room, state.held  # noqa: B018  # what a scheduler keeps at hand
        found, seconds = timed(lambda s=state, d=demands: choose_pods(model, s, k, d))
        if not seed:
            continue
        times.append(seconds)
        gaps.append(found.upper_bound / max(found.value, 1) - 1 if not found.exact else 0.0)
        jobs.append(len(relevant(state, demands)))
        row = np.zeros((2, model.cluster.n_gpus), np.bool_)
        row[0, list(found.gpus)] = True
        row[1, list(proximity(model.cluster, state.free, k))] = True
        value, nearest = values_beside_tenants(model, state, row, demands).tolist()
        assert value == found.value, "the search and the definition disagree"
        near.append(nearest / value if value else 1.0)
    exact = sum(gap == 0 for gap in gaps) / len(gaps)
    print(
        f"{model.cluster.n_gpus:4} {k:4}  {kind:9} {statistics.mean(jobs):5.1f} "
        f"{statistics.median(times) * 1e3:10.3f} {max(times) * 1e3:10.3f} {exact * 100:8.0f} "
        f"{max(gaps) * 100:12.1f} {statistics.mean(near) * 100:21.0f}",
        flush=True,
    )


def flat(gpus: int, k: int, states: int, share_free: float) -> None:
    """One line of the search by patterns, by the line rate of the network (nothing measured)."""
    model = BottleneckBandwidth(synthetic.cluster("nvswitch", gpus // 8, seed=1))
    search = FlatSearch(model)
    times = []
    for seed in range(states):
        state = uniform(model.cluster, seed, share_free)
        found, seconds = timed(lambda s=state: search.choose(s, k))
        assert model.of(found.gpus) == found.value, "the search and the definition disagree"
        times.append(seconds)
    first, *others = times
    print(
        f"{gpus:4} {k:4} {first * 1e3:9.1f} {statistics.median(others) * 1e3:10.3f} "
        f"{max(others) * 1e3:10.3f}",
        flush=True,
    )


def timed(call: Callable[[], PodChoice]) -> tuple[PodChoice, float]:
    """An answer and its seconds."""
    begin = time.perf_counter()
    found = call()
    return found, time.perf_counter() - begin


@cache
def pods(gpus: int) -> PodBandwidth:
    """A cluster of alike pods with a network table that is not monotone."""
    cluster = synthetic.cluster("nvswitch", gpus // 8, seed=1, hosts_per_pod=4)

    def local(pod: Cluster) -> BottleneckBandwidth:
        return BottleneckBandwidth(pod).fit(synthetic.network(pod, seed=1))

    return PodBandwidth(local, cluster, 0.7, "zero")


def demand_of(model: PodBandwidth, state: ClusterState) -> list[int]:
    """What every job reaches alone."""
    rows = np.zeros((len(state.jobs), model.cluster.n_gpus), np.bool_)
    for row, job in zip(rows, state.jobs, strict=True):
        row[list(job.gpus)] = True
    return [int(value) for value in model.predict(rows)]


def uniform(cluster: Cluster, seed: int, share_free: float) -> ClusterState:
    """So many GPUs free, any of them; no jobs."""
    number = round(share_free * cluster.n_gpus)
    return ClusterState.with_free(
        cluster, random.Random(seed).sample(range(cluster.n_gpus), number)
    )


def scattered(cluster: Cluster, seed: int, share_free: float) -> ClusterState:
    """Jobs of 2 to 16 GPUs anywhere in a pod, or in two pods side by side."""
    rng = random.Random(seed)
    state = ClusterState.idle(cluster)
    n_pods = cluster.n_gpus // PER_POD
    least = round(share_free * cluster.n_gpus)
    while len(state.free) > least:
        first = rng.randrange(n_pods)
        last = first if rng.random() < 0.8 else min(first + 1, n_pods - 1)
        pool = [gpu for gpu in state.free if first <= gpu // PER_POD <= last]
        size = min(rng.choice([2, 4, 8, 16]), len(pool), len(state.free) - least)
        if size:
            state = state.take(rng.sample(pool, size), f"job{len(state.jobs)}")
    return state


STATES: dict[str, Callable[[Cluster, int, float], ClusterState]] = {
    "none": uniform,
    "placed": synthetic.tenants,
    "scattered": scattered,
}


if __name__ == "__main__":
    main()
