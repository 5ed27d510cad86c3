"""Placement of Alibaba's GPU-sharing pods (openb): allocation ratio and seconds of every rule.

python -m benchmarks.cluster.quota_placement [--traces DIR] [--loads 1,1.1,1.2,1.3] [--seeds 10]

DIR (by default OPTSCHED_TRACES) holds openb_pods.csv and openb_nodes.csv. Pods are drawn from the
trace with replacement until they ask for `load` times all GPUs; none leaves. The allocation ratio
is the share of all GPUs that is taken at the end, mean over seeds. Pods constrain GPUs only: the
files have no CPU or memory demands of pods, so ratios are above those published for traces with
them. FGD expects the task classes of the trace. Seconds are CPU time, medians over seeds.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import machine
from optsched_solvers.quota.fragmentation import fragmentation, task_classes
from optsched_solvers.quota.placement_stream import RULES, place_stream


def main() -> None:
    """Print one row a load and rule, and how often FGD is at least best fit."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--traces", default=os.environ.get("OPTSCHED_TRACES"))
    options.add_argument("--loads", default="1,1.1,1.2,1.3")
    options.add_argument("--seeds", type=int, default=10)
    given = options.parse_args()
    if given.traces is None:
        raise SystemExit(
            "--traces DIR (or OPTSCHED_TRACES) is needed: openb_pods.csv, openb_nodes.csv"
        )
    pods, shares = read(Path(given.traces))
    classes, capacity = task_classes(pods), int(shares.sum())
    print(machine("numpy", "numba"))
    print(f"{len(pods)} pods in the trace, {len(shares)} nodes, {capacity // 1000} GPUs")
    for rule in RULES:
        place_stream(shares, pods[:50], rule, classes=classes)
    for load in (float(part) for part in given.loads.split(",")):
        ratios: dict[str, list[float]] = {rule: [] for rule in RULES}
        for rule in RULES:
            seconds, lost, number = [], [], []
            for seed in range(given.seeds):
                stream = sample(pods, load * capacity, seed)
                begin = time.process_time()
                placed = place_stream(shares, stream, rule, classes=classes, seed=seed)
                seconds.append(time.process_time() - begin)
                left = placed.free_shares
                ratios[rule].append(1 - int(left.sum()) / capacity)
                number.append(len(stream))
                expected = int(fragmentation(left, classes).sum()) / int(classes[:, 1].sum())
                lost.append(expected / capacity)
            print(
                f"load {load:.0%}, {rule:9}: allocation ratio {mean(ratios[rule])}, unusable by an "
                f"average task {100 * statistics.mean(lost):.2f} %, "
                f"{statistics.median(seconds):.3f} s for {statistics.median(number):.0f} pods"
            )
        both = zip(ratios["fgd"], ratios["best_fit"], strict=True)
        wins = sum(fgd >= best for fgd, best in both)
        print(f"load {load:.0%}: fgd (the default) >= best_fit in {wins} of {given.seeds}")


def read(folder: Path) -> tuple[Any, Any]:
    """Thousandths of a GPU of every pod in order of submission, and free shares of all nodes."""
    with (folder / "openb_pods.csv").open(newline="") as file:
        pods = [round(1000 * float(row["num_gpus"])) for row in csv.DictReader(file)]
    with (folder / "openb_nodes.csv").open(newline="") as file:
        gpus = np.array([int(row["gpu"]) for row in csv.DictReader(file)])
    return np.array(pods), np.where(np.arange(gpus.max()) < gpus[:, None], 1000, 0)


def sample(pods: Any, total: float, seed: int) -> Any:
    """Pods drawn with replacement while they ask for at most `total` thousandths."""
    random = np.random.default_rng(seed)
    drawn = pods[random.integers(0, len(pods), int(4 * total / pods.mean()))]
    return drawn[: int(np.searchsorted(np.cumsum(drawn), total, side="right"))]


def mean(ratios: list[float]) -> str:
    """Mean and standard error, in per cent."""
    error = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else 0.0
    return f"{100 * statistics.mean(ratios):.2f} +- {100 * error:.2f} %"


if __name__ == "__main__":
    main()
