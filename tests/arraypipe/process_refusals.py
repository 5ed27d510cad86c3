"""What ranks refuse: wrong or different arguments, and a rank that cannot begin."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first optimizer would load it, in every rank
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

import runs
from arraypipe_models import data, loss, sgd
from process_rows import CUTS, PROCESSES, STEPS, Row, alone, build_model, compared, trainer
from pytest import MonkeyPatch
from runs import array_trainer
from torch import nn

from optsched import InputError
from optsched.arraypipe import Job, random_schedule
from optsched.arraypipe.checkpoint.folder import CheckpointFolder
from optsched.arraypipe.distributed.group import Stalled
from optsched.arraypipe.runtime.worker import Worker
from optsched.arraypipe.train_alone import differences

# what tests ask for; every rank runs it, the answer of rank 0 counts


def said(ranks: int, call: Any) -> list[tuple[str, float]]:
    """Of every rank the error with which it ends, and after how many seconds."""
    words, began = "nothing", time.monotonic()
    try:
        call()
    except (Exception, SystemExit) as error:
        words = f"{type(error).__name__}: {error}"
    everybody: list[Any] = [None] * ranks
    dist.all_gather_object(everybody, (words, time.monotonic() - began))
    return everybody


def raises(error: BaseException) -> Any:
    """A function that does."""

    def wrong(*arguments: Any, **options: Any) -> Any:
        raise error

    return wrong


def one_rank_cannot(ranks: int) -> dict[str, Any]:
    """Rank 1 alone fails before anything is trained, in several ways; then all train together."""
    rank = dist.get_rank()
    schedule = random_schedule([1, 1], 4, place=[0, 1, 0, 1], seed=8)
    rows = [Row(0), Row(1)]
    good: dict[str, Any] = {
        "model": build_model, "jobs": [row.job for row in rows], "stages": CUTS,
        "loss": loss, "data": data,
    }  # fmt: skip

    def batches(job: Job, start: int) -> Any:
        if rank and job.seed:
            raise OSError("no such file here")
        return data(job, start)

    def unreadable(job: Job, start: int) -> Any:
        for pair in data(job, start):
            if rank:
                raise OSError("no such batch here")
            yield pair

    def models(error: BaseException) -> Any:
        built: list[int] = []

        def build() -> nn.Module:
            built.append(1)
            if rank and len(built) > 1:  # the trainer itself makes the first
                raise error
            return build_model()

        return build

    optimizer = raises(ValueError("no such optimizer here")) if rank else sgd
    changed: dict[str, dict[str, Any]] = {
        "optimizer": {"jobs": [Job(0, 8, sgd), Job(1, 8, optimizer)]},
        "exit": {"model": models(SystemExit("no such luck"))},
        "data": {"data": batches},
        "batch": {"data": unreadable},
    }
    options: dict[str, dict[str, Any]] = {
        "schedule": {"schedule": random_schedule([1, 1], 4) if rank else schedule},
    }

    def trained(name: str) -> None:
        array = array_trainer(**good | changed.get(name, {}))
        runs.run(array, **{"schedule": schedule, "steps": 3} | PROCESSES | options.get(name, {}))

    bad = {name: partial(trained, name) for name in (*changed, *options)}
    found: dict[str, Any] = {
        name: [(words, seconds < 30) for words, seconds in said(ranks, call)]
        for name, call in bad.items()
    }
    result = runs.run(array_trainer(**good), schedule, STEPS, **PROCESSES)
    found["differences"] = compared(result, rows, [STEPS] * 2) if rank == 0 else []
    return found


def concluded(ranks: int) -> dict[str, Any]:
    """One rank alone fails after the last block, in several ways; then all train together."""
    rank, found = dist.get_rank(), {}
    schedule = random_schedule(
        [1, 1], 4, place=[0, 1, 0, 1] if ranks == 2 else [2, 1, 0, 3], seed=8
    )

    ways: dict[str, tuple[int, Any, str]] = {  # the rank that fails, and where
        "checkpoint": (1, CheckpointFolder, "finish"),
        "worker": (1, Worker, "finish"),
    }
    for name, (failing, owner, attribute) in ways.items():
        folder = {"checkpoint": f"{sys.argv[1]}/{name}"} if name == "checkpoint" else {}
        jobs = [Job(j, 8, sgd) for j in range(2)]
        array = array_trainer(build_model, data, jobs=jobs, stages=CUTS, loss=loss)
        with MonkeyPatch.context() as patch:
            if rank == failing:
                patch.setattr(owner, attribute, raises(OSError("no space left")))
            run = partial(runs.run, array, schedule, 2, **PROCESSES, **folder)
            found[name] = [words for words, _ in said(ranks, run)]
    rows = [Row(0), Row(1)]
    result = runs.run(trainer(rows), schedule, STEPS, **PROCESSES)
    found["differences"] = compared(result, rows, [STEPS] * 2) if rank == 0 else []
    return found


def used_up(ranks: int) -> dict[str, Any]:
    """Job 1 goes on from a checkpoint where its data end."""
    rows = [Row(0), Row(1)]
    schedule = random_schedule([1, 1], 4, place=[0, 1, 0, 1], seed=8)
    folder: dict[str, Any] = {"checkpoint": f"{sys.argv[1]}/used_up"}
    runs.run(trainer(rows), schedule, 2, **PROCESSES, **folder)

    def ending(job: Job, start: int) -> Any:
        return islice(data(job, start), max(0, (2 if job.seed else 4) - start))

    array = array_trainer(
        build_model, ending, jobs=[row.job for row in rows], stages=CUTS, loss=loss
    )
    result = runs.run(array, schedule, STEPS, resume=True, **PROCESSES, **folder)
    found = []
    if dist.get_rank() == 0:
        whole = alone(rows[0], STEPS)
        found = differences(result.trained[0], replace(whole, losses=whole.losses[2:]))
    return {
        "differences": found,
        "status": [job.status for job in array.jobs],
        "error": str(array.jobs[1].error),
    }


def absent(ranks: int) -> str:
    """Rank 1 has raised before it came to us: the others do not wait for ever, and say so."""
    said = "nothing"
    if not dist.get_rank():
        try:
            runs.run(
                trainer([Row(0)]),
                random_schedule([1], 4, place=[0, 1, 0, 1]),
                1,
                backend="process",
                timeout=0.5,
            )
        except Stalled as error:
            said = str(error)
    dist.barrier()
    return said


def refused(ranks: int) -> list[str]:
    """Sentences for what cannot be run on several ranks."""
    array = trainer([Row(0)])
    found = []
    only_on_rank_0 = {"checkpoint": "never_made"} if torch.distributed.get_rank() == 0 else {}
    here = random_schedule([1], 4, place=[0, 1, 0, 1])
    lr = 0.1 * (1 + torch.distributed.get_rank())
    other = Job(0, 8, lambda named: torch.optim.SGD(named, lr=lr))
    for given, schedule, more in (
        (array, random_schedule([1], 4), {}),
        (array, here, {"timeout": 0.0}),
        (array, here, only_on_rank_0),
        (array.with_jobs([other]), here, {}),
    ):
        try:
            runs.run(given, schedule, 1, **{**PROCESSES, **more})
        except InputError as error:
            found.append(str(error))
    return found
