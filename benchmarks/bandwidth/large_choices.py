"""`LargeSearch` by size of the cluster: time, proof and bound, flat or with two levels, with jobs.

python -m benchmarks.bandwidth.large_choices [--states 10] [--begin 5000] [--gpus 256,1024,4096]
    [--free 0.7] [--deadline 0.005] [--values FILE]

Hosts of 8 GPUs at the line rate of their network cards: `flat`, or `levels` with 16 hosts a leaf,
8 leaves a spine and factors 1, 0.8 and 0.5. Jobs: none (any GPUs are free); `placed` on the hosts
with most free GPUs; `scattered` over four hosts side by side (one in five: eight), each with the
demand that it reaches alone. Times are CPU time with demands. Contention is the model's, nobody
measured it. `--values`: compare with another search's choices, a list of objects with kind, hosts,
cseed, seed, free, tenants, k, value and exact.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.machine import machine
from optsched.bandwidth import synthetic
from optsched.bandwidth.models.bottleneck import BottleneckBandwidth
from optsched.bandwidth.models.contention import demands
from optsched.bandwidth.search.large import LargeSearch
from optsched.bandwidth.topology.cluster import Cluster, Host
from optsched.bandwidth.topology.state import ClusterState

if TYPE_CHECKING:
    from collections.abc import Callable

    from optsched.bandwidth.search.ask import Answer

REQUESTS = (12, 24, 48, 96, 128, 192, 256, 384)
SPAN = 32  # GPUs of the hosts side by side among which a job is scattered


def main() -> None:
    """Print one line for every kind and size of cluster and kind of jobs, or a comparison."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--states", type=int, default=10)
    options.add_argument("--begin", type=int, default=5000, help="first seed")
    options.add_argument("--gpus", default="256,1024,4096")
    options.add_argument("--free", type=float, default=0.7)
    options.add_argument("--deadline", type=float)
    options.add_argument("--values", type=Path)
    given = options.parse_args()
    print(machine("numpy", "numba"))
    if given.values is not None:
        compare(json.loads(given.values.read_text()), given.deadline)
        return
    print("model   gpus  jobs       median ms  90% ms  max ms  proved %  bound/value unproved")
    for name in ("flat", "levels"):
        for gpus in map(int, given.gpus.split(",")):
            for jobs, make in STATES.items():
                measure(name, gpus, jobs, make, given)


def measure(name: str, gpus: int, jobs: str, make: Any, given: argparse.Namespace) -> None:
    """One line: every request on the same states."""
    times, open_gaps, proved = [], [], []
    model = model_of("nvswitch", gpus // 8, 1, name == "levels")
    for seed in range(given.begin, given.begin + given.states):
        state = make(model.cluster, seed, given.free)
        for k in [k for k in REQUESTS if k <= 0.6 * len(state.free)]:
            found, took = timed(model, state, k, given.deadline)
            times.append(took)
            proved.append(found.exact)
            if not found.exact:
                open_gaps.append(found.upper_bound / max(found.value, 1))
    print(
        f"{name:6} {gpus:5}  {jobs:9} {np.median(times):10.2f} {np.quantile(times, 0.9):7.2f} "
        f"{max(times):7.2f} {100 * np.mean(proved):9.1f} {np.mean(open_gaps or [1.0]):21.2f}",
        flush=True,
    )


def compare(rows: list[dict[str, Any]], deadline: float | None) -> None:
    """Print the ratio to stored values, of all and of those that were not proved."""
    keys = ("kind", "hosts", "cseed", "tenants", "seed", "free")
    ratios, bounds, times, hard = [], [], [], []
    for key, some in groupby(rows, key=lambda row: [row[name] for name in keys]):
        kind, hosts, cseed, jobs, seed, free = key
        model = model_of(kind if isinstance(kind, str) else tuple(kind), hosts, cseed)
        state = STATES[jobs](model.cluster, seed, free)
        for row in some:
            found, took = timed(model, state, row["k"], deadline)
            ratios.append(found.value / max(1, row["value"]))
            bounds.append(found.upper_bound / max(1, found.value))
            times.append(took)
            hard.append(not row["exact"])
    for what, at in (("all", np.ones(len(hard), bool)), ("not proved before", np.array(hard))):
        if at.any():
            ratio, bound, took = (np.array(one)[at] for one in (ratios, bounds, times))
            print(
                f"{what}: {at.sum()} requests, value {ratio.mean():.3f} times in the mean, worst "
                f"{ratio.min():.3f}, best {ratio.max():.2f}; bound {bound.mean():.2f} times the "
                f"value; median {np.median(took):.2f} ms, most {took.max():.2f} ms"
            )


def timed(
    model: BottleneckBandwidth, state: ClusterState, k: int, deadline: float | None
) -> tuple[Answer, float]:
    """The choice, and its CPU time in ms with the demands of the jobs."""
    search = search_of(model)
    begin = time.thread_time()
    until = None if deadline is None else time.monotonic() + deadline
    found = search.choose(state, k, demands(model, state, "heavy"), None, until)
    took = 1e3 * (time.thread_time() - begin)
    assert found is not None
    return found, took


@cache
def search_of(model: BottleneckBandwidth) -> LargeSearch:
    """The search on a model, its kernels compiled."""
    search = LargeSearch(model)
    state = scattered(model.cluster, 0, 0.7)
    search.choose(state, model.cluster.n_gpus // 3, demands(model, state, "heavy"))
    return search


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


STATES: dict[str, Callable[[Cluster, int, float], ClusterState]] = {
    "none": uniform, "placed": synthetic.tenants, "scattered": scattered,
}  # fmt: skip


if __name__ == "__main__":
    main()
