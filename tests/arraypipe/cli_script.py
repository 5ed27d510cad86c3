"""Trainers for the tests of the command line, good ones and bad ones; copied beside them."""

from __future__ import annotations

import os
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from optsched.arraypipe import ArrayTrainer, Job

if TYPE_CHECKING:
    from collections.abc import Iterator

torch.set_num_threads(1)


def build_model() -> nn.Sequential:
    """Two stages."""
    return nn.Sequential(
        nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)
    )


def batches(job: Job, start: int) -> Iterator[tuple[Tensor, Tensor]]:
    """By seed and iteration."""
    for iteration in range(start, 10**9):
        draw = torch.Generator().manual_seed(1000 * job.seed + iteration)
        x = torch.randn(job.batch_size, 6, generator=draw)
        yield x, (x.sum(1) > 0).long()


def adamw(named: Any) -> torch.optim.Optimizer:
    """The same for all jobs."""
    return torch.optim.AdamW(named, lr=1e-2)


def trainer(data: Any = batches, jobs: int = 3) -> ArrayTrainer:
    """Three jobs of several batch sizes."""
    siblings = [Job(seed=j, batch_size=8 * (1 + j), optimizer=adamw) for j in range(jobs)]
    return ArrayTrainer(
        build_model, data, jobs=siblings, stages=[2], loss=nn.functional.cross_entropy
    )


def make_trainer() -> ArrayTrainer:
    """The good one."""
    return trainer()


def warns() -> ArrayTrainer:
    """Warns twice of the same, and once of something else, in two lines."""
    for text in ("odd", "odd", "even\nso"):
        warnings.warn(text, stacklevel=1)
        warnings.warn(text, stacklevel=2)
    return trainer()


def strict() -> ArrayTrainer:
    """One job whose micro-batches ascend."""
    job = Job(seed=0, batch_size=8, optimizer=adamw, microbatches=3)
    return ArrayTrainer(
        build_model, batches, jobs=[job], stages=[2], loss=nn.functional.cross_entropy
    )


def two_jobs() -> ArrayTrainer:
    """Another array."""
    return trainer(jobs=2)


def not_finite() -> ArrayTrainer:
    """Job 1 fails in its fourth iteration."""

    def data(job: Job, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        for t, (x, y) in enumerate(batches(job, start), start):
            yield (x * float("nan") if t == 3 and job.seed == 1 else x), y

    return trainer(data)


def dies() -> ArrayTrainer:
    """The process of rank 1 ends in the fourth iteration."""

    def data(job: Job, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        for t, pair in enumerate(batches(job, start), start):
            if os.environ.get("RANK") == "1" and t == 3:
                os.kill(os.getpid(), 9)
            yield pair

    return trainer(data)


def only_on_rank_1() -> ArrayTrainer:
    """Raises on one rank."""
    if os.environ.get("RANK") == "1":
        raise ValueError("not here")
    return trainer()


def late_on_rank_1() -> ArrayTrainer:
    """Raises on one rank when the other waits for it in a new group."""
    return _late("1")


def late_on_rank_0() -> ArrayTrainer:
    """The same, on the rank that has the store."""
    return _late("0")


def _late(rank: str) -> ArrayTrainer:
    waits, honest = Path("waits"), dist.new_group

    def new_group(*arguments: Any, **options: Any) -> Any:
        waits.touch()
        return honest(*arguments, **options)

    dist.new_group = new_group
    if os.environ.get("RANK") == rank:
        while not waits.exists():
            time.sleep(0.05)
        time.sleep(1)  # it may not wait in the store yet, and then this shows nothing
        raise ValueError("not here, late")
    return trainer()


def exits_on_rank_1() -> ArrayTrainer:
    """Ends the program on one rank when its jobs are made."""
    built = []

    def build() -> nn.Sequential:
        built.append(0)
        if os.environ.get("RANK") == "1" and len(built) > 1:  # the trainer makes the first
            raise SystemExit(5)
        return build_model()

    job = Job(seed=0, batch_size=8, optimizer=adamw)
    siblings = [job, replace(job, seed=1), replace(job, seed=2)]
    return ArrayTrainer(build, batches, jobs=siblings, stages=[2], loss=nn.functional.cross_entropy)


def first_batch_on_rank_1() -> ArrayTrainer:
    """No batch can be read on one rank."""

    def data(job: Job, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        for pair in batches(job, start):
            if os.environ.get("RANK") == "1":
                raise OSError("unreadable")
            yield pair

    return trainer(data)


def raises() -> ArrayTrainer:
    """Raises everywhere."""
    raise KeyError("learning rate")


def refuses() -> ArrayTrainer:
    """Gets a sentence from the library."""
    return ArrayTrainer(build_model, batches, jobs=[], stages=[2], loss=nn.functional.cross_entropy)


def wrong_loss() -> ArrayTrainer:
    """Its loss raises as soon as something is measured."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        raise ValueError("no such loss")

    return ArrayTrainer(build_model, batches, jobs=[Job(0, 8, adamw)], stages=[2], loss=loss)


def gives_a_number() -> int:
    """Returns no trainer."""
    return 3


def leaves() -> ArrayTrainer:
    """Ends the program."""
    raise SystemExit(4)


number = 5
