"""Trainers for the tests of the command line, good ones and bad ones; copied beside them."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from optsched.arraypipe import ArrayTrainer, Job, RunConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

torch.set_num_threads(1)


def build_model() -> nn.Sequential:
    """Two stages."""
    return nn.Sequential(
        nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)
    )


def trainer(
    change: Any = lambda job, t, x: x,
    jobs: int = 3,
    microbatches: int = 1,
    build: Any = build_model,
    loss: Any = nn.functional.cross_entropy,
) -> ArrayTrainer:
    """Jobs of several batch sizes; `change` is what becomes of the input of an iteration."""

    def batches(job: Job, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        for iteration in range(start, 10**9):
            draw = torch.Generator().manual_seed(1000 * job.seed + iteration)
            x = torch.randn(job.batch_size, 6, generator=draw)
            yield change(job, iteration, x), (x.sum(1) > 0).long()

    siblings = [Job(j, 8 * (1 + j), adamw, microbatches=microbatches) for j in range(jobs)]
    return ArrayTrainer(build, batches, [2], loss).with_jobs(siblings)


def adamw(named: Any) -> torch.optim.Optimizer:
    """The same for all jobs."""
    return torch.optim.AdamW(named, lr=1e-2)


def make_trainer() -> ArrayTrainer:
    """The good one."""
    return trainer()


def often() -> ArrayTrainer:
    """A checkpoint after every iteration."""
    made = trainer()
    return made.with_jobs(made.jobs, RunConfig(every=1))


def strict() -> ArrayTrainer:
    """One job whose micro-batches ascend."""
    return trainer(jobs=1, microbatches=3)


def two_jobs() -> ArrayTrainer:
    """Another array."""
    return trainer(jobs=2)


def not_finite() -> ArrayTrainer:
    """Job 1 fails in its fourth iteration."""
    return trainer(lambda job, t, x: x * float("nan") if (t, job.seed) == (3, 1) else x)


def raises() -> ArrayTrainer:
    """Raises everywhere."""
    raise KeyError("learning rate")


def raises_on_rank_0() -> ArrayTrainer:
    """The other ranks are not so far when that has failed."""
    if os.environ["RANK"] != "0":
        time.sleep(600)
    return raises()


def refuses() -> ArrayTrainer:
    """Gets a sentence from the library."""
    return trainer(jobs=0)


def wrong_loss() -> ArrayTrainer:
    """Its loss raises as soon as something is measured."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        raise ValueError("no such loss")

    return trainer(jobs=1, loss=loss)


def gives_a_number() -> int:
    """Returns no trainer."""
    return 3


def leaves() -> ArrayTrainer:
    """Ends the program."""
    raise SystemExit(4)


def bare() -> ArrayTrainer:
    """Has no jobs."""
    return ArrayTrainer(build_model, [], [2], nn.functional.cross_entropy)
