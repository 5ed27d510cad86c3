"""Sia's choice of GPUs a job: our exact multiple choice beside its cvxpy + CBC formulation.

python -m benchmarks.cluster.quota_sia [--jobs 1000,4000] [--repeats 5] [--solver CBC|HIGHS]
                               [--peers DIR | --without-peer]

Tables as Sia's scheduler makes them: 18 sizes, two GPUs a job in all, costs
(goodput x restart factor / smallest goodput) ** -0.5 rounded to 2 decimals, and 1.1 for every job
that is left out; goodputs are random (Amdahl's law with noise). Costs are exact in hundredths, and
so is the comparison. The peer's formulation is that of the published simulator, one CBC thread, no
allowed gap; it runs in the environment DIR/sia (OPTSCHED_PEERS), made by

python -m venv DIR/sia; DIR/sia/bin/pip install cvxpy cylp highspy

CPU time of the call with all of its model building; medians over instances and repeats.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import machine
from optsched_solvers.quota.multiple_choice import choice

SIZES = np.array([1, 2, 4, *range(8, 65, 4)])
LEFT_OUT = 110
"""Hundredths."""


def main() -> None:
    """Print one line a number of jobs, and fail if an optimum differs."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--jobs", default="1000,4000", help="numbers of jobs")
    options.add_argument("--repeats", type=int, default=5, help="instances of each number")
    options.add_argument("--solver", choices=["CBC", "HIGHS"], default="CBC")
    peers = os.environ.get("OPTSCHED_PEERS")
    options.add_argument("--peers", type=Path, default=Path(peers) if peers else None)
    options.add_argument("--without-peer", action="store_true")
    given = options.parse_args()
    python = None
    if not given.without_peer:
        if given.peers is None:
            raise SystemExit("--peers DIR (or OPTSCHED_PEERS) is needed, or --without-peer")
        python = given.peers / "sia" / "bin" / "python"
        if not python.exists():
            raise SystemExit(f"{python}: not there; see --help for how to make it")
    print(machine("numpy", "numba"))
    wrong = 0
    for jobs in (int(part) for part in given.jobs.split(",")):
        costs = [table(jobs, seed) for seed in range(given.repeats)]
        ours = [solve(cost, 2 * jobs) for cost in costs]
        cpu = statistics.median(answer["cpu"] for answer in ours)
        worst = max(answer["cpu"] for answer in ours)
        line = f"{jobs} jobs: choice {1e3 * cpu:.2f} ms CPU (worst {1e3 * worst:.2f})"
        if python is not None:
            theirs, versions = ask(python, costs, 2 * jobs, given.solver)
            peer = statistics.median(answer["cpu"] for answer in theirs)
            equal = 0
            for cost, answer, other in zip(costs, ours, theirs, strict=True):
                equal += answer["cost"] == total(cost, np.array(other["quota"]), 2 * jobs)
            wrong += len(costs) - equal
            line += (
                f"; cvxpy + {given.solver} {1e3 * peer:.0f} ms CPU, {peer / cpu:.0f}x; the same "
                f"optimum in {equal} of {len(costs)} ({versions})"
            )
        print(line, flush=True)
    if wrong:
        raise SystemExit(f"{wrong} optima differ")


def table(jobs: int, seed: int) -> Any:
    """Costs in hundredths, jobs by sizes."""
    random = np.random.default_rng(seed)
    serial = random.uniform(0.005, 0.6, jobs)[:, None]
    noise = random.uniform(0.97, 1.03, (jobs, len(SIZES)))
    goodput = SIZES / (1 + serial * (SIZES - 1)) * noise
    restart, cost = np.ones((jobs, len(SIZES))), 30
    for j in np.flatnonzero(random.random(jobs) < 0.7):  # these hold GPUs and are old enough
        age, restarts = random.integers(cost, 20_000), random.integers(0, 6)
        restart[j] = max(age - restarts * cost, 0) / (age + cost)
        restart[j, random.integers(len(SIZES))] = 1
    relative = goodput * restart / goodput.min(axis=1, keepdims=True)
    with np.errstate(divide="ignore"):
        raised = np.round(relative**-0.5, decimals=2)
    return np.round(100 * np.minimum(raised, 1000)).astype(np.int64)


def solve(cost: Any, gpus: int) -> dict[str, Any]:
    """Median CPU time of five calls on a table, with building the arrays, and the optimum."""
    times = []
    for _ in range(6):
        begin = time.process_time()
        jobs = len(cost)
        value = np.zeros((jobs, len(SIZES) + 1), np.int64)
        value[:, 1:] = LEFT_OUT - cost
        size = np.tile(np.concatenate(([0], SIZES)), jobs)
        quota = choice(np.arange(jobs + 1) * (len(SIZES) + 1), size, value.ravel(), gpus)
        times.append(time.process_time() - begin)
    return {"cpu": statistics.median(times[1:]), "cost": total(cost, quota, gpus)}


def total(cost: Any, quota: Any, gpus: int) -> int:
    """What a choice costs in hundredths, recomputed from the table."""
    if quota.sum() > gpus:
        raise SystemExit(f"{quota.sum()} GPUs chosen, there are {gpus}")
    takes = np.flatnonzero(quota)
    left = LEFT_OUT * (len(cost) - len(takes))
    return int(left + cost[takes, np.searchsorted(SIZES, quota[takes])].sum())


def ask(python: Path, costs: list[Any], gpus: int, solver: str) -> tuple[list[Any], str]:
    """The peer's answers, from one process."""
    script = Path(__file__).resolve().parents[1] / "peers" / "run_sia.py"
    with tempfile.TemporaryDirectory() as folder:
        instances, request = Path(folder) / "costs.npz", Path(folder) / "request.json"
        answer = Path(folder) / "answer.json"
        arrays = {f"cost{k}": cost / 100 for k, cost in enumerate(costs)}
        np.savez(instances, sizes=SIZES, **arrays)
        request.write_text(json.dumps({
            "instances": str(instances), "count": len(costs), "gpus": gpus,
            "left_out": LEFT_OUT / 100, "solver": solver,
        }))  # fmt: skip
        done = subprocess.run(
            [str(python), str(script), str(request), str(answer)], stdout=sys.stderr, check=False
        )
        if done.returncode:
            raise SystemExit(f"{script.name}: exit code {done.returncode}")
        said = json.loads(answer.read_text())
        return said["answers"], said["versions"]


if __name__ == "__main__":
    main()
