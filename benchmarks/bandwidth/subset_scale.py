"""`Dispatcher.answer` by size of the cluster: time, proof and quality, flat or pods, with tenants.

python -m benchmarks.bandwidth.subset_scale [--states 21] [--begin 0] [--gpus 32,64,256,1024]
    [--free 0.7] [--deadline 0.05]

Hosts of 8 GPUs: `flat` at the line rate of network cards, or 4 a pod with a synthetic non-monotone
network, factor 0.7, pods with one GPU 0. Free GPUs are uniformly random. Tenants: `placed` on the
hosts with most room; `scattered` as random GPUs of four hosts side by side (one in five: of eight),
all with the demand that they reach alone. Every state is a new one, whose demands are worked out in
the time that is shown. Bandwidth under contention is the model's; nobody has measured it.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from functools import cache
from typing import TYPE_CHECKING

from benchmarks.machine import machine
from optsched.bandwidth import synthetic
from optsched.bandwidth.models.bottleneck import BottleneckBandwidth
from optsched.bandwidth.models.contention import demands, share
from optsched.bandwidth.models.pods import PodBandwidth
from optsched.bandwidth.search.dispatcher import Dispatcher
from optsched.bandwidth.topology.proximity import proximity
from optsched.bandwidth.topology.state import ClusterState

if TYPE_CHECKING:
    from collections.abc import Callable

    from optsched.bandwidth.models.model import BandwidthModel
    from optsched.bandwidth.topology.cluster import Cluster

WANTED = (8, 16, 32, 64, 96, 128, 256)
PER_POD = 32
HEAD = (
    "model gpus    k  tenants    median ms     max ms  proved %  worst gap %  nearest GPUs reach %"
)


def main() -> None:
    """Print one line for every kind and size of cluster, request and kind of tenants."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--states", type=int, default=21)
    options.add_argument("--begin", type=int, default=0, help="first seed")
    options.add_argument("--gpus", default="32,64,256,1024")
    options.add_argument("--free", type=float, default=0.7)
    options.add_argument("--deadline", type=float)
    given = options.parse_args()
    print(machine("numpy", "numba"))
    print(HEAD)
    for name, make in (("flat", flat), ("pods", pods)):
        for gpus in map(int, given.gpus.split(",")):
            for kind in STATES:
                for k in WANTED:
                    if k <= 0.6 * gpus:
                        measure(name, make(gpus), kind, k, given)


def measure(name: str, model: BandwidthModel, kind: str, k: int, given: argparse.Namespace) -> None:
    """One line: the same seeds for every request."""
    cluster, times, gaps, near = model.cluster, [], [], []
    fast = Dispatcher(cluster, model, traffic="heavy")
    for seed in range(given.begin, given.begin + given.states + 1):  # the first one warms up
        state = STATES[kind](cluster, seed, given.free)
        begin = time.perf_counter()
        found = fast.answer(state, k, given.deadline)
        took = time.perf_counter() - begin
        if seed == given.begin:
            continue
        times.append(took)
        gaps.append(0.0 if found.exact else found.upper_bound / max(found.value, 1) - 1)
        wanted = demands(model, state, "heavy")
        value = share(model, state, found.gpus, wanted).value
        assert value == found.value, "the search and the definition disagree"
        nearest = share(model, state, proximity(cluster, state.free, k), wanted).value
        near.append(nearest / value if value else 1.0)
    exact = sum(gap == 0 for gap in gaps) / len(gaps)
    print(
        f"{name:5} {cluster.n_gpus:4} {k:4}  {kind:9} "
        f"{statistics.median(times) * 1e3:10.3f} {max(times) * 1e3:10.3f} {exact * 100:9.0f} "
        f"{max(gaps) * 100:12.1f} {statistics.mean(near) * 100:21.0f}",
        flush=True,
    )


@cache
def flat(gpus: int) -> BottleneckBandwidth:
    """A cluster without pods, of which nothing is measured."""
    return BottleneckBandwidth(synthetic.cluster("nvswitch", gpus // 8, seed=1))


@cache
def pods(gpus: int) -> PodBandwidth:
    """A cluster of alike pods with a network table that is not monotone."""
    cluster = synthetic.cluster("nvswitch", gpus // 8, seed=1, hosts_per_pod=4)

    def local(pod: Cluster) -> BottleneckBandwidth:
        return BottleneckBandwidth(pod).fit(synthetic.network(pod, seed=1))

    return PodBandwidth(local, cluster, 0.7, "zero")


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
