"""Jobs a second of every compiled policy.

python -m benchmarks.cluster.cluster_speed [--traces DIR] [--repeat 5]

Workloads: synthetic (Poisson, load .9 and 1.1) and, with traces, the 2000-job Philly slice on 64
GPUs and all Philly jobs with at most 64 GPUs on 512. Wall and CPU seconds of `simulate`, log
included, without reading; warm, median of the repeats.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.machine import machine
from optsched.cluster import Nodes, read_trace
from optsched.cluster.policies import get
from optsched.cluster.simulate import simulate
from optsched.cluster.workload.synthetic import synthetic

if TYPE_CHECKING:
    from optsched.cluster import Workload

POLICIES = [
    ("fifo", {}), ("sjf", {}), ("srtf", {}), ("las", {}), ("lucid", {}),
    ("fifo", {"backfill": "first_fit"}), ("fifo", {"backfill": "easy"}),
    ("sjf", {"backfill": "easy"}),
]  # fmt: skip


OTHERS = [
    ("elastic", {}), ("elastic", {"order": "sjf"}),
    ("elastic", {"order": "srtf", "clairvoyant": True, "preempt": "order"}), ("entropy", {}),
    ("time_to_target", {}), ("allocation", {}), ("allocation", {"objective": "goodput"}),
    ("sia", {}), ("lucid", {}), ("priority", {}), ("fair_share", {"variant": "code"}),
]  # fmt: skip
"""Simulated once, and only all Philly jobs."""


def main() -> None:
    """Print one line per workload and policy."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--traces", default=os.environ.get("OPTSCHED_TRACES"))
    options.add_argument("--repeat", type=int, default=5)
    given = options.parse_args()
    print(machine("numpy", "numba"))
    cases = [
        ("synthetic, load .9", synthetic(100_000, 0.9, 0, gpus=512), Nodes(64)),
        ("synthetic, load 1.1", synthetic(100_000, 1.1, 0, gpus=512), Nodes(64)),
    ]
    if given.traces:
        folder = Path(given.traces)
        week = read_trace(folder / "philly_week_2017-10-09.csv")[:2000]
        cases.append(("2000 Philly jobs", week, Nodes(8)))
        cases.append(("all Philly", read_trace(folder / "philly_full.csv", largest=64), Nodes(64)))
    else:
        print("no traces (--traces or OPTSCHED_TRACES): synthetic workloads only")
    if given.traces:
        for name, chosen in OTHERS:
            _, cpu, _ = timed(cases[-1][1], name, chosen, cases[-1][2], 1)
            print(f"all Philly, {label(name, chosen)}: CPU {cpu:.2f} s", flush=True)
    for what, workload, nodes in cases:
        print(f"{what}: {len(workload)} jobs, {nodes.total} GPUs")
        for name, chosen in POLICIES:
            wall, cpu, stays = timed(workload, name, chosen, nodes, given.repeat)
            print(
                f"{what}, {label(name, chosen)}: CPU {cpu:.2f} s, wall {wall:.2f} s, "
                f"{len(workload) / wall / 1e6:.2f} M jobs/s, {stays} stays",
                flush=True,
            )


def label(name: str, chosen: dict[str, Any]) -> str:
    """Return a policy with its options."""
    return " ".join([name, *map(str, chosen.values())])


def timed(
    workload: Workload, name: str, chosen: dict[str, str], nodes: Nodes, repeat: int
) -> tuple[float, float, int]:
    """Median wall and CPU seconds of one simulation after one to warm up, and its stays."""
    policy = get(name, **chosen)
    walls, cpus = [], []
    for i in range(repeat + 1):
        begin, used = time.perf_counter(), time.process_time()
        log = simulate(workload, policy, nodes, restart_cost=40).log
        if i:
            walls.append(time.perf_counter() - begin)
            cpus.append(time.process_time() - used)
    return statistics.median(walls), statistics.median(cpus), len(log.job)


if __name__ == "__main__":
    main()
