"""Blocks that sleep, one process a device: rolling beside the barrier, measured beside predicted.

    python -m benchmarks.executor.executor_sleep [--stages 8] [--jobs 19] [--forward 20]
        [--cycles 10]
                                        [--time 5] [--repeat 3] [--mixed]

A forward block sleeps `--forward` milliseconds, a backward block twice that (with `--mixed` one to
four times as long, job by job), so devices do not need cores. The same solver looks for the least
period and for the best single iteration, as long for the one as for the other; the latter is run
with all jobs waiting for each other. Both are run by the process backend, by turns. Periods are
slopes over the whole cycles of a run, medians over its repetitions.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import optsched
from benchmarks.machine import machine
from optsched import JobArray
from optsched.arraypipe import ArrayTrainer, Job

if TYPE_CHECKING:
    from collections.abc import Iterator

MODES = ("rolling", "barrier")
PATIENCE = 600.0
"""Seconds after which the ranks are given up."""


def main() -> None:
    """Solve, start one process a device, print what rank 0 measured."""
    if len(sys.argv) == 4 and sys.argv[1] == "rank":
        rank(int(sys.argv[2]), Path(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--jobs", type=int, default=19)
    parser.add_argument("--forward", type=int, default=20, help="milliseconds")
    parser.add_argument("--cycles", type=int, default=10)
    parser.add_argument("--time", type=float, default=5.0, help="seconds of a solve")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--mixed", action="store_true")
    parser.add_argument("--report", action="store_true", help="print the reports too")
    given = parser.parse_args()
    print(machine("torch"))
    times = naps(given.jobs, 1000 * given.forward, given.mixed)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        problem = [[f] * given.stages for f, _ in times], [[b] * given.stages for _, b in times]
        for mode, objective in zip(MODES, ("period", "makespan"), strict=True):
            array = JobArray(*problem, objective=objective)
            schedule = optsched.solve(array, time_limit=given.time).schedule
            assert schedule is not None
            schedule.write(place / f"{mode}.schedule.json")
        setting = {key: getattr(given, key) for key in ("stages", "cycles", "repeat")}
        (place / "setting.json").write_text(json.dumps(setting | {"times": times}))
        start(place, given.stages)
        rows = json.loads((place / "rows.json").read_text())
    load = sum(f + b for f, b in times)
    longest = given.stages * max(f + b for f, b in times)
    table(rows, 1000 * max(load, longest))
    if given.report:
        for mode in MODES:
            print(f"\n{mode}\n{rows[mode][-1]['text']}")


def naps(n_jobs: int, forward: int, mixed: bool) -> list[tuple[int, int]]:
    """Microseconds of forward and backward on every stage, per job."""
    draw = random.Random(0)
    scale = [draw.randint(1, 4) if mixed else 1 for _ in range(n_jobs)]
    return [(forward * k, 2 * forward * k) for k in scale]


def start(place: Path, ranks: int) -> None:
    """Run all ranks; end them all if one fails."""
    command = [sys.executable, "-m", "benchmarks.executor.executor_sleep", "rank"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen([*command, str(r), str(place)], env=environment) for r in range(ranks)
    ]
    deadline = time.monotonic() + PATIENCE
    try:
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes) or time.monotonic() > deadline:
                raise SystemExit("a rank has failed, or it took too long")
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(process.returncode for process in processes):
        raise SystemExit("a rank has failed")


def table(rows: dict[str, list[dict[str, Any]]], bound: int) -> None:
    """One line a mode, and how they compare; times in milliseconds a cycle."""
    print(f"bound: max(busiest device, longest chain) = {bound / 1e6:.1f} ms a cycle")
    print(f"{'':8} {'planned':>9} {'predicted':>9} {'replayed':>9} {'measured':>9}"
          f" {'to bound':>9} {'to prediction':>13} {'host, median':>13}")  # fmt: skip
    middle: dict[str, dict[str, float]] = {}
    for mode in MODES:
        keys = ("planned", "predicted", "replayed", "measured", "between")
        row = middle[mode] = {
            key: statistics.median(r[key] or 0 for r in rows[mode]) for key in keys
        }
        shown = " ".join(f"{row[key] / 1e6:9.1f}" for key in keys[:-1])
        print(
            f"{mode:8} {shown} {row['measured'] / bound - 1:9.1%} "
            f"{row['measured'] / row['predicted'] - 1:13.1%} {row['between'] / 1e3:10.0f} us"
        )
    pairs = zip(rows["barrier"], rows["rolling"], strict=True)
    ratios = [b["measured"] / r["measured"] for b, r in pairs]
    print(
        f"barrier / rolling: {statistics.median(ratios):.2f} "
        f"[{min(ratios):.2f} .. {max(ratios):.2f}] measured, "
        f"{middle['barrier']['predicted'] / middle['rolling']['predicted']:.2f} predicted"
    )


# one rank


def rank(number: int, place: Path) -> None:
    """Train by both schedules, in turns; rank 0 writes what it measured."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    setting = json.loads((place / "setting.json").read_text())
    dist.init_process_group(
        "gloo", init_method=f"file://{place}/store", rank=number, world_size=setting["stages"]
    )
    array = sleepers(setting["times"], setting["stages"])
    plans = {
        mode: array.plan(optsched.Schedule.read(place / f"{mode}.schedule.json")) for mode in MODES
    }
    rows: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
    for _ in range(setting["repeat"]):
        for mode in MODES:
            result = array.run(plans[mode], setting["cycles"], backend="process")
            period = result.report.period
            if number == 0 and period is not None:
                row = {key: getattr(period, f"{key}_ns") for key in
                       ("planned", "predicted", "replayed", "measured")}  # fmt: skip
                row |= {"between": result.report.between_ns, "text": str(result.report)}
                rows[mode].append(row)
    if number == 0:
        (place / "rows.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def sleepers(times: list[list[int]], n_stages: int) -> ArrayTrainer:
    """Jobs whose stages sleep."""

    def build_model(forward: int, backward: int) -> nn.Sequential:
        return nn.Sequential(*(Nap(forward, backward) for _ in range(n_stages)))

    def data(job: Job, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield torch.ones(1), torch.ones(1)

    jobs = [
        Job(j, 1, lambda p: torch.optim.SGD(p, lr=1e-6), model={"forward": f, "backward": b})
        for j, (f, b) in enumerate(times)
    ]
    return ArrayTrainer(
        build_model, data, jobs=jobs, stages=list(range(1, n_stages)), loss=nn.functional.mse_loss
    )


class Nap(nn.Module):
    """Multiplies by a weight, and sleeps so many microseconds in forward and backward."""

    def __init__(self, forward: int, backward: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.times = forward * 1e-6, backward * 1e-6

    def forward(self, x: Tensor) -> Tensor:
        """Sleep, then multiply."""
        slept: Tensor = _Sleep.apply(x, self.weight, *self.times)
        return slept


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, forward: float, backward: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.backward_time = backward
        time.sleep(forward)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        time.sleep(ctx.backward_time)
        return gradient * weight, (gradient * x).sum().reshape(1), None, None


if __name__ == "__main__":
    main()
