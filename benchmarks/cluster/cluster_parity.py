"""Lucid's timing: four reference lines, and every job against a simulator that really ticks.

python -m benchmarks.cluster.cluster_parity [--traces DIR] [--jobs 300]
        [--nodes 4,8,16,64] [--seeds 3]

The lines (2000 Philly jobs, 8 nodes of 8 GPUs) are those that Lucid's own simulator prints. The
tick simulator is ours (`tests/cluster/lucid_tick_oracle.py`, written from the rules, a second a
step); its slices are the first jobs of the trace, and with `--seeds` random slices.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from pathlib import Path

import numpy as np

from benchmarks.machine import machine
from optsched.cluster import Nodes, Workload, read_trace
from optsched.cluster.simulate import simulate

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "cluster"))

import lucid_tick_oracle

TRACE = "philly_week_2017-10-09.csv"
LINES = {
    "fifo": (209209.01, 202595.98, 1059407, 0),
    "sjf": (25056.54, 18443.52, 1097392, 0),
    "srtf": (17624.01, 10993.31, 1068244, 834),
    "las": (24063.54, 17444.77, 1027440, 237),
}
"""Mean JCT, mean time pending, makespan in seconds, and preemptions of Lucid's simulator."""


def main() -> None:
    """Print both comparisons; the exit status tells whether all agree."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--traces", default=os.environ.get("OPTSCHED_TRACES"))
    options.add_argument("--jobs", type=int, default=300, help="jobs of every slice that is ticked")
    options.add_argument("--nodes", default="4,8,16,64")
    options.add_argument("--seeds", type=int, default=3, help="random slices beside the first")
    given = options.parse_args()
    if given.traces is None:
        sys.exit(f"give --traces or OPTSCHED_TRACES: the folder with {TRACE}")
    print(machine("numpy", "numba"))
    path = Path(given.traces) / TRACE
    agree = lines(read_trace(path)[:2000])
    whole = read_trace(path)
    for seed in range(given.seeds + 1):
        first = random.Random(seed).randrange(len(whole) - given.jobs) if seed else 0
        for nodes in map(int, given.nodes.split(",")):
            agree &= ticked(whole, first, given.jobs, nodes)
    sys.exit(0 if agree else 1)


def lines(workload: Workload) -> bool:
    """The reference lines beside ours."""
    agree = True
    for policy, line in LINES.items():
        log = simulate(workload, policy, Nodes(8), timing="lucid").log
        jct = log.finished - workload.submit
        held = np.bincount(log.job, weights=log.end - log.start, minlength=len(jct))
        ours = (
            round(float(jct.mean()), 2), round(float((jct - held).mean()), 2),
            int(log.finished.max() - workload.submit[0]), int(log.preemptions.sum()),
        )  # fmt: skip
        agree &= ours == line
        print(f"{policy:5} ours {ours}  Lucid {line}  {'equal' if ours == line else 'DIFFERENT'}")
    return agree


def ticked(whole: Workload, first: int, jobs: int, nodes: int) -> bool:
    """Every job's end and preemptions against the tick simulator, on one slice."""
    chosen = [j for j in range(first, first + jobs) if whole.size[j] <= 8 * nodes]
    zero = int(whole.submit[chosen[0]])
    submit = [int(whole.submit[j]) - zero for j in chosen]
    gpus = [int(whole.size[j]) for j in chosen]
    duration = [int(whole.work[j] // whole.rate[j]) for j in chosen]
    workload = slice_of(submit, gpus, duration)
    agree, said = True, []
    for policy in LINES:
        log = simulate(workload, policy, Nodes(nodes), timing="lucid").log
        begin = time.process_time()
        ends, preemptions = lucid_tick_oracle.simulate(policy, submit, gpus, duration, nodes)
        took = time.process_time() - begin
        wrong = int(np.sum(log.finished != ends) + np.sum(log.preemptions != preemptions))
        agree &= wrong == 0
        said.append(f"{policy} {wrong} ({sum(preemptions)} preemptions, {took:.1f} s ticking)")
    print(f"jobs {first}..{first + jobs}, {nodes} nodes; jobs that differ: {', '.join(said)}")
    return agree


def slice_of(submit: list[int], gpus: list[int], duration: list[int]) -> Workload:
    """Rows as rigid jobs."""
    from optsched.cluster import Job

    return Workload.of(
        Job(name=str(i), submit=s, sizes=(g,), work=d * g * 10**6)
        for i, (s, g, d) in enumerate(zip(submit, gpus, duration, strict=True))
    )


if __name__ == "__main__":
    main()
