"""Time per action of the process backend and of torch's 1F1B on the same work, in the same run.

Both train one model of equal stages with the same micro-batches by 1F1B, every rank in turn with
the other runtime. An action is a forward or a backward of one micro-batch on one stage. Ours also
draws the data, updates the weights, and could run any order of unequal jobs; torch's is given its
batch and steps one SGD optimizer. Takes about a minute on two idle cores.
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
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.machine import machine

if TYPE_CHECKING:
    from collections.abc import Iterator

BATCH = 8
"""Samples of a micro-batch."""


def build_model(ranks: int, width: int, depth: int) -> Any:
    """Equal stages of `depth` square layers each."""
    from torch import nn

    return nn.Sequential(
        *(
            nn.Sequential(
                *(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth))
            )
            for _ in range(ranks)
        )
    )


def ours(ranks: int, width: int, depth: int, parts: int, steps: int) -> float:
    """Seconds per action, by the times of the blocks."""
    import torch

    from optsched import JobArray, pipelines
    from optsched.arraypipe import ArrayTrainer, Job, RunConfig

    def data(job: Job, start: int) -> Iterator[tuple[Any, Any]]:
        x = torch.randn(job.batch_size, width)
        while True:
            yield x, x

    job = Job(0, BATCH * parts, lambda p: torch.optim.SGD(p, lr=1e-3), microbatches=parts)
    trainer = ArrayTrainer(
        lambda: build_model(ranks, width, depth), data,
        stages=[str(s) for s in range(1, ranks)], loss=torch.nn.functional.mse_loss,
    )  # fmt: skip
    schedule = pipelines.one_f_one_b(JobArray([[1] * ranks], [[2] * ranks], micro_batches=[parts]))
    config = RunConfig(backend="process", check=0, verbose=False)
    trace = trainer.fit([job], steps + 2, schedule=schedule, config=config).trace
    starts = np.sort(trace.start[np.isin(trace.kind, ("F", "B"))])
    first = 2 * ranks * 2 * parts  # blocks of two iterations: memory is allocated in them
    return float(trace.makespan - starts[first]) / 1e9 / (len(starts[first:]) / ranks)


def torch_1f1b(ranks: int, width: int, depth: int, parts: int, steps: int) -> float:
    """Seconds per action of `torch.distributed.pipelining.Schedule1F1B`."""
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank = dist.get_rank()
    part = build_model(ranks, width, depth)[rank]
    stage = PipelineStage(part, rank, ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, parts, loss_fn=torch.nn.functional.mse_loss)
    optimizer = torch.optim.SGD(part.parameters(), lr=1e-3)
    x = torch.randn(BATCH * parts, width)
    began = 0.0
    for step in range(steps + 2):
        if step == 2:  # shapes are exchanged in the first
            dist.barrier()
            began = time.perf_counter()
        optimizer.zero_grad()
        schedule.step(*([x] if rank == 0 else []), **({"target": x} if rank == ranks - 1 else {}))
        optimizer.step()
    dist.barrier()
    return (time.perf_counter() - began) / (steps * 2 * parts)


def rank_main(rank: int, ranks: int, store: str, options: dict[str, int]) -> None:
    """One rank: both runtimes in turn, `repeat` times; rank 0 prints the times."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    repeat = options.pop("repeat")
    rows = []
    for _ in range(repeat):
        dist.barrier()
        mine = ours(ranks, **options)
        dist.barrier()
        rows.append((mine, torch_1f1b(ranks, **options)))
    if rank == 0:
        print(json.dumps(rows), flush=True)
    dist.destroy_process_group()


def compared(ranks: int, **options: int) -> list[tuple[float, float]]:
    """Pairs (ours, torch's) of seconds per action."""
    with tempfile.TemporaryDirectory() as folder:
        this = "benchmarks.executor.process_backend"
        command = [sys.executable, "-m", this, "--options", json.dumps(options)]
        processes = [
            subprocess.Popen(
                [*command, f"--rank={rank}", f"--ranks={ranks}", f"--store={folder}/store"],
                stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True,
            )
            for rank in range(ranks)
        ]  # fmt: skip
        answers = [process.communicate(timeout=300)[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit("a rank has failed")
    return [(a, b) for a, b in json.loads(answers[0])]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("rank", -1), ("ranks", 2), ("steps", 40), ("parts", 8), ("repeat", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--store")
    parser.add_argument("--options")
    given = parser.parse_args()
    if given.rank >= 0:
        rank_main(given.rank, given.ranks, given.store, json.loads(given.options))
        return
    print(machine("torch", "numpy"))
    print("| ranks | width | layers a stage | ours, us | torch 1F1B, us | ratio |")
    print("|---|---|---|---|---|---|")
    for ranks in (2, 4):
        for width, depth in ((32, 1), (256, 4), (1024, 4)):
            rows = compared(
                ranks, width=width, depth=depth, parts=given.parts, steps=given.steps,
                repeat=given.repeat,
            )  # fmt: skip
            mine, theirs = (1e6 * statistics.median(column) for column in zip(*rows, strict=True))
            ratio = statistics.median(a / b for a, b in rows)
            print(
                f"| {ranks} | {width} | {depth} | {mine:.0f} | {theirs:.0f} | {ratio:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
