"""Times and proofs of `optsched.plan.clear` on random clusters; ``--hosts 1000`` for larger ones.

Run: python benchmarks/plan/clear.py [--cases 20] [--hosts 200] [--time 10]
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from optsched import plan
from optsched.bandwidth import Cluster, ClusterState, Host, HostType
from optsched.bandwidth import Job as StateJob
from optsched.errors import Infeasible

GPUS = 8
LEAF, SPINE = 20, 100
"""Hosts of a leaf and of a spine."""


def cluster(hosts: int) -> Cluster:
    """Hosts of 8 GPUs under leaves and spines."""
    kind = HostType("h100", GPUS, links=None)
    return Cluster(
        tuple(Host(f"n{h:04d}", "h100", (f"spine{h // SPINE}", f"leaf{h // LEAF}"))
              for h in range(hosts)),
        (kind,), ("spine", "leaf"),
    )  # fmt: skip


def snapshot(hosts: int, load: float, seed: int) -> plan.ClusterSnapshot:
    """About 1.5 jobs a host until the load is reached, packed with some fragmentation."""
    rng, topology = random.Random(seed), cluster(hosts)
    free = {h: list(range(h * GPUS, (h + 1) * GPUS)) for h in range(hosts)}
    used, facts, held = 0, [], []
    while used < load * GPUS * hosts:
        size = rng.choices((1, 2, 4, 8, 16, 32, 64), (24, 24, 28, 18, 4, 1.5, 0.5))[0]
        pod = min(size, rng.choice((1, 2, 4, 8, 8)))
        level = rng.choice((None, None, "spine", "leaf", "host" if size <= GPUS else "leaf"))
        start = rng.randrange(hosts)
        width = {None: hosts, "spine": SPINE, "leaf": LEAF, "host": 1}[level]
        base = start // width * width
        domain = [h for h in range(base, min(base + width, hosts))]
        if level == "host":
            pod = size
        rng.shuffle(domain)
        domain.sort(key=lambda h: len(free[h]) < pod or rng.random() < 0.3)
        chosen: list[int] = []
        for h in domain:
            while len(free[h]) >= pod and len(chosen) < size:
                chosen += [free[h].pop() for _ in range(pod)]
        if len(chosen) < size:
            for gpu in chosen:
                free[gpu // GPUS].append(gpu)
            continue
        used += size
        name = f"j{len(facts)}"
        cost = size * rng.randint(1, 60)
        facts.append(plan.PlanJob(
            name=name, gpus=size, pod=pod, level=level, time_left=rng.randint(600, 86400),
            evict=None if rng.random() < 0.2 else 10 * cost,
            move=None if rng.random() < 0.15 else cost,
        ))  # fmt: skip
        held.append(StateJob(name, tuple(chosen)))
    idle = tuple(gpu for ids in free.values() for gpu in ids)
    return plan.ClusterSnapshot(ClusterState(topology, idle, tuple(held)), tuple(facts))


def main() -> None:
    """Print a row for every gang."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--hosts", type=int, default=200)
    parser.add_argument("--time", type=float, default=10.0)
    args = parser.parse_args()
    plan.clear(snapshot(20, 0.5, 0), plan.PlanJob(name="gang", gpus=8))  # imports
    every, busy, gaps = [], [], []
    print("GPUs level  proved  infeasible  median s  90 % s  worst s  worst gap")
    for gpus in (16, 64, 128):
        for level in ("leaf", "spine"):
            times, proved, none, worst = [], 0, 0, 0.0
            for seed in range(args.cases):
                load = 0.85 + 0.1 * seed / max(1, args.cases - 1)
                given = snapshot(args.hosts, load, seed)
                request = plan.PlanJob(name="gang", gpus=gpus, level=level, pod=GPUS)
                begin, before = time.perf_counter(), time.process_time()
                try:
                    found = plan.clear(given, request, time_limit=args.time)
                    good = found is not None and found.status == "optimal"
                    gap = 1.0 if found is None else (found.cost - found.bound) / max(1, found.cost)
                    if found is not None:
                        found.after()
                except Infeasible:
                    good, gap, none = True, 0.0, none + 1
                times.append(time.perf_counter() - begin)
                busy.append(time.process_time() - before)
                proved, worst = proved + good, max(worst, gap)
                gaps.append(gap)
            every += times
            ranked = sorted(times)
            print(f"{gpus:4} {level:6} {proved:3}/{args.cases:<3} {none:8} "
                  f"{statistics.median(ranked):11.2f} {ranked[int(0.9 * len(ranked))]:7.2f} "
                  f"{ranked[-1]:8.2f} {worst:8.1%}", flush=True)  # fmt: skip
    for name, seconds in (("seconds", every), ("CPU seconds", busy)):
        ranked = sorted(seconds)
        within = sum(one <= 2 for one in ranked) / len(ranked)
        print(
            f"{name}: median {statistics.median(ranked):.2f}, "
            f"95 % {ranked[int(0.95 * len(ranked))]:.2f}, worst {ranked[-1]:.2f}; "
            f"{within:.1%} of {len(ranked)} within 2"
        )
    print(f"gap at most {max(gaps):.1%}")


if __name__ == "__main__":
    main()
