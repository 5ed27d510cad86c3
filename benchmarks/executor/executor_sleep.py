"""Blocks that sleep, one process per device: the measured time of a cycle beside the predicted one.

    torchrun --nproc-per-node 8 -m benchmarks.executor.executor_sleep [--jobs 19] [--forward 20]
        [--cycles 10] [--time 5]

A forward block sleeps `--forward` milliseconds, a backward block twice that, so that devices do not
need cores.
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import optsched
from benchmarks.machine import machine
from optsched import JobArray
from optsched.arraypipe import ArrayTrainer, Job, RunConfig

if TYPE_CHECKING:
    from collections.abc import Iterator


def main() -> None:
    """Solve on rank 0, train on all ranks, print what rank 0 measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=19)
    parser.add_argument("--forward", type=int, default=20, help="milliseconds")
    parser.add_argument("--cycles", type=int, default=10)
    parser.add_argument("--time", type=float, default=5.0, help="seconds of the solve")
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    stages = dist.get_world_size()
    schedule: list[Any] = [None]
    if dist.get_rank() == 0:
        blocks = [[1000 * given.forward] * stages] * given.jobs
        array = JobArray(blocks, [[2 * t for t in row] for row in blocks], objective="period")
        schedule = [optsched.solve(array, time_limit=given.time).schedule]
    dist.broadcast_object_list(schedule)

    def build_model() -> nn.Sequential:
        return nn.Sequential(*(Nap(given.forward / 1000) for _ in range(stages)))

    jobs = [Job(j, 1, lambda p: torch.optim.SGD(p, lr=1e-6)) for j in range(given.jobs)]
    trainer = ArrayTrainer(
        build_model, data, stages=list(range(1, stages)), loss=nn.functional.mse_loss
    )
    config = RunConfig(check=0, verbose=False)
    result = trainer.fit(jobs, given.cycles, schedule=schedule[0], config=config)
    if dist.get_rank() == 0:
        work = 3 * given.forward * max(given.jobs, stages)
        print(machine("torch"))
        print(f"{given.jobs} jobs, {stages} ranks; load or longest chain: {work} ms a cycle")
        print(result.report)
    dist.destroy_process_group()


def data(job: Job, start: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The same batch for ever."""
    while True:
        yield torch.ones(1), torch.ones(1)


class Nap(nn.Module):
    """Multiply by a weight, and sleep in forward and backward."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.ones(1)), seconds

    def forward(self, x: Tensor) -> Tensor:
        """Sleep, then multiply."""
        product: Tensor = _Sleep.apply(x, self.weight, self.seconds)
        return product


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.seconds = seconds
        time.sleep(seconds)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        time.sleep(2 * ctx.seconds)
        return gradient * weight, (gradient * x).sum().reshape(1), None


if __name__ == "__main__":
    main()
