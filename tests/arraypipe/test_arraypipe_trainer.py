"""The trainer around the blocks: refusals, siblings that differ, what it leaves behind."""

from __future__ import annotations

import gc
import random
import warnings
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import runs
import torch
from arraypipe_models import adamw, build_model, data, exact, loss, sgd, trainer
from runs import array_trainer, run
from torch import nn

from optsched import InputError
from optsched.arraypipe import Job, random_schedule
from optsched.arraypipe.train_alone import differences

if TYPE_CHECKING:
    from pathlib import Path


JOBS = [Job(0, 8, adamw), Job(1, 8, sgd, recompute=True, microbatches=2)]
SCHEDULE = random_schedule([1, 2], 3, seed=2)


def test_global_state_is_what_it_was() -> None:
    """Random states, gradient mode, default type and threads are the same after a run."""
    torch.manual_seed(11)
    random.seed(12)
    np.random.seed(13)  # noqa: NPY002
    generator, python = torch.get_rng_state(), random.getstate()
    legacy = np.random.get_state()[1].tolist()  # type: ignore[index]  # noqa: NPY002
    threads = torch.get_num_threads()

    def greedy(job: Job, start: int) -> Any:
        for x, y in data(job, start):
            torch.set_default_dtype(torch.float64)
            random.random()
            yield x.float(), y

    with torch.no_grad():
        result = runs.run(trainer(JOBS, data=greedy), SCHEDULE, 2)
        assert not torch.is_grad_enabled()
    with torch.inference_mode():
        runs.run(trainer(JOBS), SCHEDULE, 1)
    assert result.losses[0][0] != result.losses[0][1]  # it did train
    assert torch.equal(torch.get_rng_state(), generator)
    assert random.getstate() == python
    assert np.random.get_state()[1].tolist() == legacy  # type: ignore[index]  # noqa: NPY002
    assert torch.get_default_dtype() == torch.float32
    assert torch.get_num_threads() == threads


class Dictionary(nn.Module):
    """Returns what cannot be sent."""

    def forward(self, x: Any) -> Any:
        """A dictionary."""
        return {"x": x}


X, Y = torch.zeros(8, 6), torch.zeros(8, dtype=torch.int64)


def always(pair: Any) -> Any:
    """A data function that always gives the same."""
    return lambda job, start: iter([pair] * 5)


def second(make: Any) -> dict[str, Any]:
    """Two jobs, the second with this optimizer."""
    return {"jobs": [JOBS[0], Job(1, 8, make, microbatches=2)]}


def layers(*makers: Any) -> dict[str, Any]:
    """A model of two layers of these kinds and a last one, each a stage."""
    kinds = (*makers, lambda: nn.Linear(6, 4))
    return {"build_model": lambda: nn.Sequential(*(make() for make in kinds)), "stages": [1, 2]}


QUARTERS = {"jobs": [Job(0, 8, sgd, microbatches=4)], "schedule": random_schedule([4], 3)}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no module": ({"build_model": lambda: 3}, "expected an nn.Module"),
    "lazy": (layers(nn.Tanh, lambda: nn.LazyLinear(6)), r"'1\.weight' of job job0 has no sh"),
    "names of jobs": ({"jobs": [Job(0, 8, sgd, name="job1"), JOBS[1]]}, "'job1' is also the name"),
    "one job": ({"jobs": JOBS[:1]}, "the schedule has 2 jobs, the trainer 1"),
    "other stages": ({"stages": [4]}, "3 stages, the model 2"),
    "other parts": ({"jobs": [JOBS[0], JOBS[0]]}, "job job1: the schedule has 2 micro-batches"),
    "no optimizer": (second(lambda named: 3), "no Optimizer|cannot be made"),
    "no pairs": (second(lambda ps: torch.optim.SGD([p for p in ps if p.requires_grad])),
                 r"list of \(name, parameter\) pairs, 12 of 12 with a gradient"),
    "no data": ({"data": lambda job, start: 3}, "expected an iterator"),
    "few samples": ({**QUARTERS, "data": always((X[:3], Y[:3]))},
                    "job0, iteration 0: 3 samples cannot be cut into 4"),
    "boundary": (layers(Dictionary, nn.ReLU), "output of stage 0 is a dict"),
    "no scalar": ({"loss": lambda out, y: out}, "one element"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, tmp_path: Any) -> None:
    """What does not fit or cannot be run exactly: a sentence, and no file is left."""
    changes, sentence = REFUSED[case]
    given = {"schedule": SCHEDULE, "steps": 2, "checkpoint": tmp_path / "ckpt", **changes}
    run = {key: given.pop(key) for key in ("schedule", "steps", "checkpoint")}
    with pytest.raises(InputError, match=sentence):
        runs.run(trainer(given.pop("jobs", JOBS), **given), **run)
    assert not list(tmp_path.rglob("*.pt"))


def test_jobs_refused_when_made() -> None:
    """Settings of a job are checked."""
    for changes, sentence in (
        ({"seed": -1}, "seed"), ({"seed": 2**63}, "seed"), ({"batch_size": 0}, "batch_size"),
        ({"microbatches": 9}, "microbatches: expected an integer in 1..8, got 9"),
        ({"recompute": "no"}, "recompute: expected True or False, got .no"),
        ({"model": 5}, "model: expected arguments by name, got 5"),
        ({"init": 5}, "init: expected the path of a state dict, got 5"),
        ({"name": 5}, "name: expected letters"),
        ({"microbatches": True}, "microbatches"), ({"name": "../up"}, "name"),
        ({"optimizer": 3}, "optimizer"), ({"seed": np.bool_(True)}, "seed"),
        ({"batch_size": np.array(True)}, "batch_size"), ({"clip_norm": np.float32("nan")}, "clip"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=sentence):
            Job(**{"seed": 0, "batch_size": 8, "optimizer": sgd, **changes})


# siblings

SENTENCE = (
    r"job wide: '0.weight' is a parameter of shape \(13, 6\), in job job0 a parameter of shape "
    r"\(12, 6\); .* train this one in an array of its own"
)


def wide(seed: int = 1, **more: Any) -> Job:
    """A job with a larger model."""
    return Job(seed, 8, sgd, name="wide", model={"width": 13}, **more)


def test_other_shapes_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    """No job has been trained, no folder made; also of a job that waits for a slot."""
    array = trainer([Job(0, 8, adamw), wide()])
    with pytest.raises(InputError, match=SENTENCE):
        runs.run(array, random_schedule([1], 3), 2, checkpoint=tmp_path / "ckpt")
    assert not list(tmp_path.iterdir())


def test_a_refill_of_another_shape_fails_alone() -> None:
    """The next one takes the slot."""
    first, late = Job(0, 8, adamw), [wide(7), Job(8, 8, sgd, name="other")]
    array, (bad, _) = trainer([first]), late
    result = runs.run(
        array, random_schedule([1], 3), 3, refill=lambda job: late.pop(0) if late else None
    )
    assert bad.status == "failed" and "in an array of its own" in str(bad.error)
    assert array.titles == ["job0", "other"]
    assert exact(array, result)


@pytest.mark.parametrize("shared", [nn.Linear(12, 12), nn.BatchNorm1d(12, affine=False)])
def test_jobs_do_not_share_what_changes(shared: nn.Module) -> None:
    """They would train it in turn, which no schedule could make right."""
    array = trainer(
        [Job(0, 8, sgd), Job(1, 8, sgd)],
        build_model=lambda: nn.Sequential(nn.Linear(6, 12), shared, nn.Linear(12, 4)),
        stages=[1, 2],
    )
    with pytest.raises(InputError, match=r"jobs job0 and job1 have the same '1\..*new modules on"):
        runs.run(array, random_schedule([1, 1], 3), 2)


class Remembers(nn.Module):
    """Goes on with what is no buffer, of a kind; or stores caches that nothing goes on with."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.stats = kind, {"calls": 0}
        self.average = torch.zeros(())
        self.table: dict[int, Any] = {}

    def forward(self, x: Any) -> Any:
        """Use it."""
        if self.kind == "stats":
            self.stats["calls"] += 1
        elif self.kind == "average":
            self.average = self.average + x.detach().mean() + 1
        self.table[x.shape[0]] = torch.ones(x.shape[1])
        return x * (1 + self.stats["calls"] + self.average)


@pytest.mark.parametrize("kind", ["stats", "average", "caches"])
def test_checkpoints_warn_of_attributes(kind: str, tmp_path: Path) -> None:
    """Once, by name; not of caches, and not without checkpoints."""
    array = trainer(
        [Job(j, 8, sgd) for j in range(2)],
        build_model=lambda: nn.Sequential(nn.Linear(6, 6), Remembers(kind), nn.Linear(6, 4)),
        stages=[1],
    )
    order = random_schedule([1, 1], 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runs.run(array, order, 1)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        result = runs.run(array, order, 2, checkpoint=tmp_path)
    named = [str(one.message) for one in found if "no checkpoint keeps" in str(one.message)]
    assert len(named) == (kind != "caches")
    assert all(f"'{kind}' of Remembers '1'" in sentence for sentence in named)
    assert exact(array, result)  # the look at the first forward has changed nothing


# what is refused, and what a run leaves behind


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


REFUSED_ONE: list[tuple[Any, str]] = [
    (lambda: one(build_model=twins, stages=[1, 2]), "share their memory and are in different st"),
    (lambda: run_one(schedule="x.schedule.json"), r"Schedule\.read"),
    (lambda: run_one(checkpoint=""), "checkpoint: expected a folder"),
    (lambda: run_one(resume="yes"), "resume: expected True or False"),
    (lambda: one(memory=-5), r"memory: expected an integer in 1\.\.2\^53, got -5"),
    (lambda: one(memory=True), r"memory: expected an integer in 1\.\.2\^53, got True"),
    *((lambda stages=stages: one(stages=stages), "stages") for stages in (2.5, [2.5], [[]], "4")),
    *((lambda make=make, jobs=jobs: make(jobs), "jobs")
      for make in (trainer, lambda jobs: ONE.with_jobs(jobs)) for jobs in (7, [], [3], {})),
    (lambda: ONE.problem("p.json"), r"profile: expected a Profile, got 'p\.json'"),
    (lambda: random_schedule([], 2), "microbatches"),
    (lambda: random_schedule([0], 2), "microbatches"),
    (lambda: random_schedule([1], 0), "n_stages"),
    (lambda: run_one(backend="process"), "torchrun"),
    # whether a GPU is there is seen by the run that needs it
    (lambda: run(one(device="cuda:77"), random_schedule([1], 3), 1), "cuda:77 does not exist"),
    *((lambda job=job: ONE.train_alone(job, 2), r"job: expected 0\.\.0, got")
      for job in (7, -1, True, "job0")),
    (lambda: ONE.train_alone(0, -1), "steps: expected an integer >= 0, got -1"),
]  # fmt: skip


def test_refusals() -> None:
    """Each with the name of the field and what is wrong."""
    for call, sentence in REFUSED_ONE:
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
