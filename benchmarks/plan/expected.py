"""How often the interval of an expected start holds, on simulated weeks of a trace.

Even rows of the trace are past jobs: their mean duration is the estimate of all jobs, and their
durations over this mean are the factors. Jobs of a week have sizes and, independently, durations
of odd rows, and arrive at random times.

Run: python benchmarks/plan/expected.py --trace philly_week.csv [--weeks 20]
"""

from __future__ import annotations

import argparse
import random
import time

import numpy as np

from optsched import cluster, plan
from optsched.plan.counts import Counts
from optsched.plan.expected import Forecast

POLICIES = ("fifo", "fifo:backfill=first_fit", "fifo:backfill=easy")
NODES, GPUS, WEEK, LOAD = 8, 8, 7 * 86400, 1.1
MOST = 2 * 86400
"""Longer jobs are stopped."""


def week(sizes: np.ndarray, durations: np.ndarray, mean: int, seed: int) -> cluster.Workload:
    """Jobs drawn from a trace, at random times of a week, until the load is reached."""
    rng, jobs, work = np.random.default_rng(seed), [], 0
    while work < LOAD * NODES * GPUS * WEEK:
        size, duration = int(rng.choice(sizes)), int(rng.choice(durations))
        work += size * duration
        jobs.append((int(rng.integers(WEEK)), size, duration))
    return cluster.Workload.of(
        [
            cluster.Job(
                name=f"j{k}", submit=submit, sizes=(size,), work=duration * cluster.WORK,
                estimate=mean * cluster.WORK, speedup=cluster.Table({1: 1.0, size: 1.0}),
            )
            for k, (submit, size, duration) in enumerate(sorted(jobs))
        ],
        time_unit="s",
    )  # fmt: skip


def arrivals(
    sizes: np.ndarray, durations: np.ndarray, mean: int, now: int, draw: int
) -> list[plan.PlanJob]:
    """Jobs of another week, made of past jobs, that arrive after the same moment of it."""
    work = week(sizes, durations, mean, [now, draw])
    soon = [(j, submit - now) for j, submit in enumerate(work.submit.tolist()) if submit > now]
    return [
        plan.PlanJob(
            name=f"later{j}", gpus=int(work.sizes_of(j)[0]), submit=now + after, priority=1,
            time_left=mean,
        )
        for j, after in soon
    ]  # fmt: skip


def main() -> None:
    """Print a row for every policy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", required=True)
    parser.add_argument("--weeks", type=int, default=20)
    parser.add_argument("--moments", type=int, default=4)
    parser.add_argument("--arrivals", type=int, default=0, help="draws of later arrivals")
    parser.add_argument("--policies", nargs="*", default=POLICIES)
    args = parser.parse_args()
    trace = cluster.read_trace(args.trace, largest=NODES * GPUS // 2)
    sizes = np.array([int(trace.sizes_of(j)[0]) for j in range(len(trace))])
    durations = np.minimum(trace.work // (cluster.WORK * sizes), MOST)
    past, true = np.maximum(durations[::2], 1), np.maximum(durations[1::2], 1)
    mean = round(past.mean())
    factors = past / mean
    print("policy                    starts  below  inside  above  median s  width s  CPU s")
    for policy in args.policies:
        below, inside, above, waits, widths = 0, 0, 0, [], []
        begin = time.process_time()
        for seed in range(args.weeks):
            work = week(sizes[1::2], true, mean, [seed])
            run = cluster.simulate(work, policy, cluster.Nodes(NODES, gpus=GPUS))
            first = run.log.start
            start = {}
            for j, at in zip(run.log.job.tolist(), first.tolist(), strict=True):
                start.setdefault(work.names[j], at)
            rng = random.Random(seed)
            for _ in range(args.moments):
                now = rng.randrange(WEEK // 7, WEEK)
                snapshot = plan.from_run(run, now)
                waiting = [job for job in snapshot.waiting if start[job.name] > now]
                if not waiting:
                    continue
                draws = {"factors": factors, "samples": 50, "seed": rng.randrange(9999)}
                later = [arrivals(sizes[::2], past, mean, now, k) for k in range(args.arrivals)]
                forecast = Forecast(Counts(snapshot), policy, draws, later)
                found = forecast.starts([], snapshot.waiting)
                for job in rng.sample(waiting, min(10, len(waiting))):
                    low, _, high = found[job.name]
                    after = start[job.name] - now
                    below, above = below + (after < low), above + (after > high)
                    inside += low <= after <= high
                    waits.append(after)
                    widths.append(high - low)
        n = max(1, below + inside + above)
        print(
            f"{policy:24} {n:7} {below / n:6.1%} {inside / n:7.1%} {above / n:6.1%} "
            f"{np.median(waits):9.0f} {np.median(widths):8.0f} "
            f"{time.process_time() - begin:6.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
