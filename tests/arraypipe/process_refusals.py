"""What ranks refuse: wrong or different arguments, and a rank that cannot begin or end."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

import runs
from arraypipe_models import data, loss, sgd
from process_rows import CUTS, PROCESSES, build_model
from pytest import MonkeyPatch
from runs import array_trainer
from torch import nn

from optsched.arraypipe import Job, random_schedule
from optsched.arraypipe.checkpoint.folder import CheckpointFolder
from optsched.arraypipe.runtime.worker import Worker


def sentences(ranks: int, call: Any) -> list[str]:
    """Of every rank the error with which it ends."""
    sentence = "nothing"
    try:
        call()
    except (Exception, SystemExit) as error:
        sentence = f"{type(error).__name__}: {error}"
    found: list[Any] = [None] * ranks
    dist.all_gather_object(found, sentence)
    return found


def raises(error: BaseException) -> Any:
    """A function that does."""

    def wrong(*arguments: Any, **options: Any) -> Any:
        raise error

    return wrong


def refused(ranks: int) -> dict[str, list[str]]:
    """Ranks that differ, or of which rank 1 alone fails, before and after the training."""
    rank, place = dist.get_rank(), [0, 1, 0, 1]
    schedule = random_schedule([1, 1], 4, place=place, seed=8)
    built: list[int] = []

    def unreadable(job: Job, start: int) -> Any:
        for pair in data(job, start):
            if rank:
                raise OSError("no such batch here")
            yield pair

    def build() -> nn.Module:
        built.append(1)
        if rank and len(built) > 1:  # the trainer itself makes the first
            raise SystemExit("no such luck")
        return build_model()

    def with_rate(named: Any) -> Any:
        return torch.optim.SGD(named, lr=0.1 * (1 + rank))

    bad = raises(ValueError("no such optimizer here")) if rank else sgd
    cases: dict[str, dict[str, Any]] = {
        "optimizer": {"jobs": [Job(0, 8, sgd), Job(1, 8, bad)]},
        "exit": {"model": build},
        "batch": {"data": unreadable},
        "schedule": {"schedule": random_schedule([1, 1], 4) if rank else schedule},
        "folder": {"checkpoint": None if rank else "never_made"},
        "setting": {"jobs": [Job(0, 8, with_rate), Job(1, 8, sgd)]},
        "checkpoint": {"checkpoint": f"{sys.argv[1]}/full", "fails": CheckpointFolder},
        "end": {"fails": Worker},
    }
    found = {}
    for name, changes in cases.items():
        given: dict[str, Any] = {
            "model": build_model, "jobs": [Job(j, 8, sgd) for j in range(2)], "stages": CUTS,
            "loss": loss, "data": data, "schedule": schedule, "checkpoint": None, **changes,
        }  # fmt: skip
        order, folder, owner = (given.pop(k, None) for k in ("schedule", "checkpoint", "fails"))

        def train(given: Any = given, order: Any = order, folder: Any = folder) -> None:
            runs.run(array_trainer(**given), order, 2, checkpoint=folder, **PROCESSES)

        with MonkeyPatch.context() as patch:
            if owner and rank:
                patch.setattr(owner, "finish", raises(OSError("no space left")))
            found[name] = sentences(ranks, train)
    return found
