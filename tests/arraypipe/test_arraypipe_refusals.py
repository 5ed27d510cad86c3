"""What a trainer refuses, with field and value; what a run leaves behind."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from arraypipe_models import adamw, build_model, data, loss, sgd, trainer
from runs import array_trainer, run
from torch import nn

from optsched import InputError
from optsched.arraypipe import Job, random_schedule
from optsched.arraypipe.train_alone import differences


def twins() -> nn.Sequential:
    """Parameters of two stages on one storage."""
    first, last = nn.Linear(6, 6), nn.Linear(6, 6)
    last.weight = nn.Parameter(first.weight.data.t())
    return nn.Sequential(first, last, nn.Linear(6, 4))


def one(optimizer: Any = sgd, **settings: Any) -> Any:
    """A trainer of one job."""
    return trainer([Job(0, 8, optimizer)], **settings)


ONE = one()


def run_one(**options: Any) -> Any:
    """Train one job."""
    return run(ONE, **{"schedule": random_schedule([1], 3), "steps": 1, **options})


REFUSED: list[tuple[Any, str]] = [
    (lambda: one(build_model=twins, stages=[1, 2]), "share their memory and are in different st"),
    (lambda: run_one(schedule="x.schedule.json"), r"Schedule\.read"),
    (lambda: run_one(checkpoint=5), "checkpoint: expected a folder"),
    (lambda: run_one(checkpoint=""), "checkpoint: expected a folder"),
    (lambda: run_one(timeout=float("nan")), "timeout: expected seconds"),
    (lambda: run_one(resume="yes"), "resume: expected True or False"),
    (lambda: one(memory="much"), "memory: expected bytes or a size"),
    (lambda: one(memory=-5), r"memory: expected an integer in 1\.\.2\^53, got -5"),
    (lambda: one(memory=True), r"memory: expected an integer in 1\.\.2\^53, got True"),
    (lambda: one(memory=1e9), "memory: expected an integer"),
    (lambda: one(data=7), "data: expected a dataset, a DataLoader or a function"),
    *((lambda stages=stages: one(stages=stages), "stages") for stages in (2.5, [2.5], [[]], "4")),
    *((lambda make=make, jobs=jobs: make(jobs), "jobs")
      for make in (trainer, lambda jobs: ONE.with_jobs(jobs)) for jobs in (7, [], [3], {})),
    (lambda: ONE.problem("p.json"), r"profile: expected a Profile, got 'p\.json'"),
    (lambda: random_schedule([], 2), "microbatches"),
    (lambda: random_schedule([0], 2), "microbatches"),
    (lambda: random_schedule([1], 0), "n_stages"),
    # whether a GPU is there is seen by the run that needs it
    (lambda: run(one(device="cuda:77"), random_schedule([1], 3), 1), "cuda:77 does not exist"),
    *((lambda job=job: ONE.train_alone(job, 2), r"job: expected 0\.\.0, got")
      for job in (7, -1, True, "job0")),
    (lambda: ONE.train_alone(0, -1), "steps: expected an integer >= 0, got -1"),
]  # fmt: skip


def test_refusals() -> None:
    """Each with the name of the field and what is wrong."""
    for call, sentence in REFUSED:
        with pytest.raises(InputError, match=sentence):
            call()


def test_what_build_model_raises_comes_through() -> None:
    """It is the caller's own error, with its traceback."""

    def broken(width: int = 12) -> nn.Module:
        if width != 12:
            raise ZeroDivisionError("mine")
        return nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4), nn.Linear(4, 4))

    with pytest.raises(ZeroDivisionError, match="mine"):
        trainer([Job(0, 8, sgd, model={"width": 1})], build_model=broken, stages=[1, 2])
    array = trainer(
        [Job(0, 8, sgd), Job(1, 8, sgd, model={"width": 1})], build_model=broken, stages=[1, 2]
    )
    with pytest.raises(ZeroDivisionError, match="mine"):
        run(array, random_schedule([1, 1], 3), 1)
    assert [job.status for job in array.jobs] == ["ready", "ready"]


class Counts(nn.Module):
    """Hands on a view of a buffer that its next forward changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x: Any) -> Any:
        """The input's part, and the live buffer."""
        self.seen.add_(x.detach().sum(0))
        return self.linear(x), self.seen[:]


class Adds(nn.Module):
    """Uses both."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, pair: Any) -> Any:
        """Shape (batch, 6) and (6,) to (batch, 4)."""
        x, seen = pair
        return self.linear(x * (1 + 0.01 * seen))


def test_outputs_that_view_a_live_buffer() -> None:
    """They are copied at the cut, because the next micro-batch changes the buffer."""
    jobs = [Job(0, 8, sgd, microbatches=4), Job(1, 8, adamw, microbatches=3, recompute=True)]
    array = array_trainer(
        lambda: nn.Sequential(Counts(), Adds()), data, jobs=jobs, stages=[1], loss=loss
    )
    result = run(array, random_schedule([4, 3], 2, seed=1), 3, on_error="raise")
    for j in range(2):
        assert differences(result.trained[j], array.train_alone(j, 3)) == []


def test_nothing_of_a_run_stays_alive() -> None:
    """Models die with the result, without the collector of cycles, although a job has an error."""
    models: list[Any] = []

    def build() -> nn.Module:
        model = build_model()
        models.append(weakref.ref(model))
        return model

    def bad_data(job: Job, start: int) -> Any:
        for t, (x, y) in enumerate(data(job, start), start):
            yield x, y + 100 * (job.seed == 1 and t == 1)

    jobs = [Job(seed, 8, adamw) for seed in range(2)]
    array = trainer(jobs, build_model=build, data=bad_data)
    gc.collect()
    gc.disable()
    try:
        run(array, random_schedule([1, 1], 3), 3)
        assert [model() for model in models] == [None] * len(models)
    finally:
        gc.enable()
    assert jobs[0].error is None
    assert jobs[1].error is not None and jobs[1].error.__cause__ is not None
    (place,) = jobs[1].error.__cause__.__notes__
    assert "in cross_entropy" in place


def test_batches_of_a_job_that_has_ended_are_let_go() -> None:
    """Iterators may have processes behind them: those of ended jobs do not stay to the end."""
    open_iterators: set[int] = set()
    most = 0

    def counted(job: Job, start: int) -> Any:
        nonlocal most
        open_iterators.add(job.seed)
        most = max(most, len(open_iterators))
        try:
            yield from data(job, start)
        finally:
            open_iterators.discard(job.seed)

    later = [Job(seed, 8, sgd) for seed in range(2, 8)]
    array = trainer([Job(0, 8, sgd), Job(1, 8, sgd)], data=counted)
    run(array, random_schedule([1, 1], 3), 2, refill=lambda job: later.pop() if later else None)
    assert most <= 4
