"""Times of `optsched.plan.plan` on random clusters.

Run: python benchmarks/plan/plan.py [--seeds 5]
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

import msgspec
from clear import GPUS, snapshot

from optsched import plan, verify


def case(hosts: int, load: float, waiting: int, seed: int) -> plan.ClusterSnapshot:
    """A cluster of `clear.py` with groups, priorities and waiting requests."""
    rng, given = random.Random(seed), snapshot(hosts, load, seed)
    jobs = [
        msgspec.structs.replace(
            job, group=rng.choice("abc"), priority=rng.choice((10, 20)),
            elapsed=rng.randint(0, 9999),
        )
        for job in given.jobs
    ]  # fmt: skip
    for k in range(waiting):
        gpus = rng.choice((1, 2, 4, 8, 16, 32, 64))
        jobs.append(plan.PlanJob(
            name=f"w{k}", gpus=gpus, pod=min(gpus, rng.choice((1, GPUS))),
            level=rng.choice((None, "leaf", "spine")), group=rng.choice("abc"),
            priority=rng.choice((10, 20, 30)), submit=k, time_left=rng.randint(600, 20000),
        ))  # fmt: skip
    return plan.ClusterSnapshot(given.state, tuple(jobs), {"a": round(hosts * GPUS * 0.32)})


def main() -> None:
    """Print a row for every size of cluster."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    seeds = parser.parse_args().seeds
    print("GPUs  running  waiting  median s  worst s  CPU s  starts  worst gap")
    for hosts, load, waiting in ((8, 0.6, 20), (200, 0.92, 50)):
        plan.plan(case(hosts, load, waiting, 0))  # loads kernels
        times, cpu, gaps, starts, running = [], [], [], 0, 0
        for seed in range(seeds):
            given = case(hosts, load, waiting, seed)
            begin, before = time.perf_counter(), time.process_time()
            found = plan.plan(given)
            times.append(time.perf_counter() - begin)
            cpu.append(time.process_time() - before)
            assert not verify(found.schedule)
            gaps.append(found.gap)
            starts, running = starts + len(found.starts), running + len(given.running)
        print(
            f"{hosts * GPUS:4} {running / seeds:8.0f} {waiting:8} {statistics.median(times):9.2f} "
            f"{max(times):8.2f} {statistics.median(cpu):6.2f} {starts / seeds:7.1f} "
            f"{max(gaps):10.1%}"
        )


if __name__ == "__main__":
    main()
