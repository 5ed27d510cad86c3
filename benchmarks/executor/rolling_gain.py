"""What rolling gains over jobs that wait for each other: predicted from a profile, and measured.

    python -m benchmarks.executor.rolling_gain [--blocks 0.1 1 5] [--cycles 40] [--repeat 10]

Three jobs in two stages, one process a stage. A forward block sleeps so many milliseconds, a
backward block twice that, so devices do not need cores. For every length the profile is measured,
and problems are made of it with what a block costs beside its computation and without. Schedules of
the least period (rolling) and of one iteration (barrier) are run in turns; the shortest period of
each counts, which other work has disturbed least.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

import optsched
from benchmarks.executor.executor_sleep import sleepers
from benchmarks.machine import machine
from optsched.arraypipe.report.explain import predict

if TYPE_CHECKING:
    from optsched.arraypipe import ArrayTrainer, Profile

JOBS, STAGES = 3, 2
MODES = {"rolling": "period", "barrier": "makespan"}


def main() -> None:
    """One line a length of blocks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=float, nargs="+", default=[0.1, 1, 5], help="milliseconds")
    parser.add_argument("--cycles", type=int, default=40)
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.rank is not None:
        rank(given.rank)
        return
    print(machine("torch"))
    print("block     costs     gain: predicted without  with  measured   period / predicted")
    for block in given.blocks:
        print(line(block, given.cycles, given.repeat), flush=True)


def line(block: float, cycles: int, repeat: int) -> str:
    """Predict, run, compare."""
    times = [[round(1000 * block), round(2000 * block)]] * JOBS
    trainer = sleepers(times, STAGES)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        profile = trainer.profile()
    bare = replace(profile, device=msgspec.structs.replace(profile.device, block_overhead_ns=0))
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        without, known = (periods(trainer, one, place) for one in (bare, profile))
        setting = {"times": times, "cycles": cycles, "repeat": repeat}
        (place / "setting.json").write_text(json.dumps(setting))
        command = [
            sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={STAGES}",
            "-m", "benchmarks.executor.rolling_gain", "--rank", folder,
        ]  # fmt: skip
        done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
        if done.returncode:
            raise SystemExit("a rank has failed")
        rows = json.loads((place / "rows.json").read_text())
    found = {mode: min(rows[mode]) for mode in MODES}
    gains = [one["barrier"] / one["rolling"] for one in (without, known, found)]
    return (
        f"{block:4g} ms {profile.device.block_overhead_ns / 1e3:6.0f} us {gains[0]:24.2f} "
        f"{gains[1]:5.2f} {gains[2]:9.2f}   rolling {found['rolling'] / known['rolling']:.2f}, "
        f"barrier {found['barrier'] / known['barrier']:.2f}"
    )


def periods(trainer: ArrayTrainer, profile: Profile, place: Path) -> dict[str, float]:
    """Predicted nanoseconds a cycle of both schedules, which are written down."""
    found = {}
    for mode, objective in MODES.items():
        problem = profile.problem(objective=objective)
        schedule = optsched.solve(problem, time_limit=2).schedule
        assert schedule is not None
        schedule.write(place / f"{mode}.schedule.json")
        found[mode] = predict(trainer.plan(schedule)).period_ns
    return {key: float(value) for key, value in found.items()}


def rank(place: Path) -> None:
    """Train by both schedules, in turns; rank 0 writes what it measured."""
    import torch.distributed as dist

    setting = json.loads((place / "setting.json").read_text())
    dist.init_process_group("gloo")
    trainer = sleepers(setting["times"], STAGES)
    plans = {
        mode: trainer.plan(optsched.Schedule.read(place / f"{mode}.schedule.json"))
        for mode in MODES
    }
    rows: dict[str, list[float]] = {mode: [] for mode in MODES}
    for _ in range(setting["repeat"]):
        for mode in MODES:
            result = trainer.run(plans[mode], setting["cycles"], backend="process")
            period = result.report.period if dist.get_rank() == 0 else None
            if period is not None and period.measured_ns is not None:
                rows[mode].append(period.measured_ns)
    if dist.get_rank() == 0:
        (place / "rows.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
