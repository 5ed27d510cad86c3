"""`ArrayTrainer.fit`: from jobs and a dataset to trained models in one call."""

from __future__ import annotations

import csv
import random
import re
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from arraypipe_models import CUTS, adamw, build_model, exact, loss, model_alone, sgd
from runs import run
from torch import nn
from torch.utils.data import TensorDataset

from optsched import ArrayTrainer, InputError, JobArray, RunConfig
from optsched.arraypipe import Callback, CsvLog, Job, random_schedule
from optsched.arraypipe.checkpoint.weights import read_weights
from optsched.arraypipe.events import measure_of
from optsched.arraypipe.train_alone import NotIdentical, differences

if TYPE_CHECKING:
    from pathlib import Path

QUICK = RunConfig(check=0, verbose=False)
DRAW = torch.Generator().manual_seed(0)
DATA = TensorDataset(torch.randn(50, 6, generator=DRAW), torch.randint(0, 4, (50,), generator=DRAW))


def array() -> ArrayTrainer:
    """A trainer without jobs: dropout, batch normalisation, a layer that works in place."""
    return ArrayTrainer(build_model, DATA, CUTS, loss)


def jobs_of(count: int = 2) -> list[Job]:
    """Siblings; the second has micro-batches, clips and a scheduler."""
    scheduler = partial(torch.optim.lr_scheduler.StepLR, step_size=2)
    first = Job(0, 8, adamw), Job(1, 6, sgd, microbatches=2, clip_norm=1.0, scheduler=scheduler)
    return [*first, *(Job(k, 8, adamw) for k in range(2, count))][:count]


def by(count: int) -> Any:
    """A schedule of the first jobs."""
    return random_schedule(
        [1, 2, 1][:count], 3, seed=1, update=[1][: count - 1], together=[1][: count - 1]
    )


class Heard(Callback):
    """Notes all that it is told."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.values: list[tuple[str, int, float]] = []

    def on_start(self, jobs: Any, steps: int, resumes: bool) -> None:
        """Note it."""
        self.calls.append("start")

    def on_step(self, job: Job, iteration: int, loss: float) -> None:
        """Note it."""
        self.calls.append((job.title, iteration))

    def on_evaluate(self, job: Job, iteration: int, value: float, model: nn.Module) -> None:
        """Note it."""
        assert not model.training
        self.values.append((job.title, iteration, value))

    def on_end(self, job: Job) -> None:
        """Note it."""
        self.calls.append(job.title)

    def on_finish(self) -> None:
        """Note it."""
        self.calls.append("finish")


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A metric."""
    return (output.argmax(1) == target).float().mean()


def test_from_jobs_to_models(capsys: Any, tmp_path: Path) -> None:
    """Measured, solved, checked, trained to the bits of training alone, saved; and said."""
    made, jobs = array(), jobs_of()
    result = made.fit(jobs, 5, checkpoint=tmp_path)
    assert made.jobs == tuple(jobs)
    assert exact(made, result)
    for j in range(2):
        saved = read_weights(tmp_path / f"job{j}" / "5")
        assert all(torch.equal(saved[k], v) for k, v in result.models[j].state_dict().items())
    said = capsys.readouterr().err
    assert "measuring 3 stages of 2 jobs" in said
    assert re.search(r"predicted: .* a cycle, .* above the bound of", said)
    assert "checked: the bits of training alone, over 2 iterations" in said
    assert re.search(r"one process runs all stages in turn: .* a cycle", said)
    again = made.fit(jobs, 7, checkpoint=tmp_path, resume=True, config=QUICK)
    for j in range(2):
        found = differences(again.trained[j], made.train_alone(j, 7))
        assert all("loss of" in row or "iterations, alone" in row for row in found)
    given = run(made, by(2), 5)
    assert all(differences(a, b) == [] for a, b in zip(given.trained, result.trained, strict=True))


def test_the_best_checkpoint_stays(tmp_path: Path) -> None:
    """Beside the newest ones, of which here one is kept; judged the other way round later."""
    values = [3.0, 1.0, 2.0, 5.0, 2.5, 2.5, 3.0]
    left = iter(values)

    def value(model: nn.Module) -> float:
        return next(left)

    config = RunConfig(check=0, verbose=False, every=1, keep=1)
    how: dict[str, Any] = {"schedule": by(1), "checkpoint": tmp_path, "evaluate": value}
    array().fit(jobs_of(1), 6, config=config, **how)
    place = tmp_path / "job0"
    assert {path.name for path in place.iterdir() if path.is_dir()} == {"2", "6"}
    assert (place / "best").read_text() == "2 1.0\n"
    array().fit(jobs_of(1), 7, resume=True, config=replace(config, mode="max"), **how)
    assert (place / "best").read_text().startswith("7 3.0")


def test_evaluation_changes_no_bit() -> None:
    """The values are those of the models at their iterations, also where states take turns."""
    config = RunConfig(check=0, verbose=False, every=3, memory=16_000)
    heard, made = Heard(), array()

    def restless(model: nn.Module) -> float:
        """Draws random numbers, changes the model, and returns its loss before."""
        torch.rand(7)
        with torch.no_grad():
            found = float(loss(model(DATA.tensors[0]), DATA.tensors[1]))
            for tensor in model.state_dict().values():
                tensor.zero_()
        return found

    def at(j: int, steps: int) -> float:
        """The value of the model trained alone."""
        with torch.no_grad():
            output = model_alone(made.train_alone(j, steps))(DATA.tensors[0])
            return float(loss(output, DATA.tensors[1]))

    before = torch.get_rng_state()
    result = made.fit(
        jobs_of(), 7, schedule=by(2), config=config, callbacks=[heard], evaluate=restless
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert result.report.exposed_ns  # states have moved
    assert exact(made, result)
    for j in range(2):
        found = [(k, value) for name, k, value in heard.values if name == f"job{j}"]
        assert found == [(k, at(j, k + 1)) for k in (2, 5, 6)]


class Tagger(nn.Module):
    """Returns its loss, in which some labels do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Logits and loss."""
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def test_values_are_means_over_a_dataset() -> None:
    """Of the loss or a metric over samples; of the model's loss over the labels that count."""
    model, (x, labels), cpu = build_model().eval(), DATA.tensors, torch.device("cpu")
    with torch.no_grad():
        expected = float(loss(model(x), labels)), float(accuracy(model(x), labels))
    loader = torch.utils.data.DataLoader(DATA, 7)
    for given, value in ((DATA, 0), ((DATA, loss), 0), ((DATA, accuracy), 1), (loader, 0)):
        with torch.no_grad():
            found = measure_of(given, loss)(jobs_of(1)[0], model, cpu)
        assert found == pytest.approx(expected[value])
    some = labels.clone()
    some[8:16] = some[::3] = -100
    rows = [{"x": a, "labels": b} for a, b in zip(x, some, strict=True)]
    tagger = Tagger()
    found = measure_of(rows, None)(jobs_of(1)[0], tagger, cpu)
    assert found == pytest.approx(float(tagger(x, some)["loss"]))


class Gives(Callback):
    """Gives one more job."""

    def __init__(self) -> None:
        self.late = [Job(9, 8, jobs_of(1)[0].optimizer, name="late")]

    def next_job(self, ended: Job) -> Job | None:
        """It, once."""
        return self.late.pop() if self.late else None


def test_callbacks_and_queue() -> None:
    """More jobs than slots: one waits. A job that a callback gives takes a slot."""
    heard, made = Heard(), array()
    jobs = [Job(k, 8, adamw) for k in range(3)]
    schedule = random_schedule([1, 1], 3, seed=2)
    result = made.fit(jobs, 3, schedule=schedule, callbacks=[heard, Gives()], config=QUICK)
    assert made.titles == ["job0", "job1", "job2", "late"]
    assert [job.name for job in result.jobs] == ["", "", "", "late"]
    assert {job.status for job in result.jobs} == {"done"}
    assert heard.calls[0] == "start" and heard.calls[-1] == "finish"
    for name in made.titles:
        calls = [call for call in heard.calls if name in (call, call[0])]
        assert calls == [(name, 0), (name, 1), (name, 2), name]
    assert exact(made, result)


def test_the_log_of_a_run(tmp_path: Path) -> None:
    """A row per loss and value, also of jobs that came later; a resume goes on with it."""
    path = tmp_path / "logs/run.csv"
    config = RunConfig(check=0, verbose=False, every=2)
    how: dict[str, Any] = {
        "schedule": by(2), "config": config, "evaluate": DATA, "checkpoint": tmp_path / "a",
    }  # fmt: skip
    array().fit(jobs_of(), 3, callbacks=[CsvLog(path), Gives()], **how)
    before = path.read_bytes()

    def broken(model: nn.Module) -> float:
        raise AttributeError("no such layer")

    checked = {"config": RunConfig(every=2, verbose=False), "callbacks": [CsvLog(path)]}
    for steps, change, sentence in (
        (3, {}, "already has checkpoints"),
        (2, {"resume": True}, "has already done 3 iterations, got 2"),
        (5, {"resume": True, "evaluate": broken}, "evaluate: AttributeError: no such layer"),
    ):
        with pytest.raises(InputError, match=sentence):  # and no file is touched
            array().fit(jobs_of(), steps, **{**how, **checked, **change})
    assert path.read_bytes() == before
    array().fit(jobs_of(), 6, resume=True, callbacks=[CsvLog(path), Gives()], **how)
    rows = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
    for name in ("job0", "job1", "late"):
        for key, expected in (("loss", range(6)), ("value", [1, 2, 3, 5])):
            found = [int(row["iteration"]) for row in rows if row["job"] == name and row.get(key)]
            assert sorted(found) == list(expected)


class Counter(nn.Module):
    """Keeps a number that is not a buffer."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Count."""
        Counter.calls += 1
        return x * (1 + Counter.calls)


class Noise(torch.utils.data.Dataset[Any]):
    """Adds noise of a generator that goes on."""

    draw = torch.Generator().manual_seed(0)

    def __len__(self) -> int:
        return 40

    def __getitem__(self, k: int) -> tuple[torch.Tensor, int]:
        """A noisy sample."""
        return torch.full((6,), float(k)) + torch.randn(6, generator=self.draw), k % 4


def globally(draw: Any) -> Any:
    """Batches that depend on global random numbers."""

    def batches(job: Job, start: int) -> Any:
        for k in range(start, 99):
            yield torch.full((8, 6), float(draw()) + k), torch.arange(8) % 4

    return batches


@pytest.mark.parametrize(
    ("layer", "data", "sentence"),
    [
        (Counter, DATA, "look for what build_model, a layer, the loss"),
        (nn.Tanh, Noise(), "the data of job job0 are others when they are read again"),
        (nn.Tanh, globally(np.random.rand), "the data of job job0 are others"),
        (nn.Tanh, globally(random.random), "the data of job job0 are others"),
    ],
)
def test_what_is_not_exact_is_refused(layer: Any, data: Any, sentence: str) -> None:
    """Nothing is trained; the sentence names the tensors and where to look."""
    made = ArrayTrainer(lambda: nn.Sequential(nn.Linear(6, 4), layer()), data, [1], loss)
    jobs, order = [Job(0, 8, adamw), Job(1, 8, adamw)], random_schedule([1, 1], 2)
    with pytest.raises(NotIdentical, match=rf"RunConfig\(check=0\) would train it .*{sentence}"):
        made.fit(jobs, 3, schedule=order, config=RunConfig(verbose=False))


def fitted(**changes: Any) -> Any:
    """A call of `fit`, with other arguments."""
    return lambda made: made.fit(**{"jobs": jobs_of(), "steps": 2} | changes)


class Returns(Callback):
    """Gives the job that has ended again."""

    def next_job(self, ended: Job) -> Any:
        """The same job."""
        return ended


OTHER = JobArray([[1, 1, 1]], [[1, 1, 1]], objective="period")
REFUSED: list[tuple[Any, str]] = [
    (fitted(jobs=[]), "jobs: expected at least one"),
    (fitted(jobs=[7]), r"jobs\[0\]: expected a Job, got 7"),
    (fitted(steps=0), "steps: expected an integer >= 1, got 0"),
    (fitted(schedule=3), "schedule: expected a Schedule or a plan"),
    (fitted(resume=True), "checkpoint: expected a folder"),
    (fitted(config={"every": 3}), "config: expected a RunConfig, got"),
    (fitted(config=RunConfig(replicas=2)), "replicas: needs ranks"),
    (fitted(callbacks=5), "callbacks: expected a list, got 5"),
    (fitted(callbacks=[print]), r"callbacks\[0\]: expected a Callback, got <built-in"),
    (fitted(evaluate=5), "evaluate: expected a function of the model, a dataset, or"),
    (fitted(evaluate=nn.Sequential()), "evaluate: expected a function of the model, a dataset, or"),
    (fitted(evaluate=(DATA, 5)), "evaluate: expected a function of the model, a dataset, or"),
    (fitted(evaluate=lambda model: "low"), "evaluate: ValueError: could not convert"),
    (fitted(schedule=by(2), config=RunConfig(replan=True)), "replan: expected the JobArray"),
    (fitted(config=RunConfig(replan=OTHER)), "replan: expected True or False without a schedule"),
    (fitted(schedule=by(2), config=RunConfig(replan=OTHER)), "is not one of this JobArray"),
    # it would be trained again as another one
    (
        fitted(schedule=by(2), config=QUICK, callbacks=[Returns()]),
        "next_job: expected a new Job or",
    ),
    (lambda _: RunConfig(every=0), "every: expected an integer >= 1, got 0"),
    (lambda _: RunConfig(check=-1), "check: expected an integer >= 0, got -1"),
    (lambda _: RunConfig(backend="threads"), "backend: expected one of inline, process"),
    (lambda _: RunConfig(verbose=1), "verbose: expected True or False, got 1"),
    (lambda _: RunConfig(device="gpu"), "device: 'gpu' is not a valid torch.device"),
    (lambda _: RunConfig(device="meta"), "device: expected cpu or cuda, got 'meta'"),
    (lambda _: RunConfig(mode="up"), "mode: expected one of min, max"),
    (lambda _: RunConfig(memory="much"), "memory: "),
    (lambda _: RunConfig(timeout=0.0), "timeout: expected"),
    (lambda _: ArrayTrainer(build_model, DATA, stages=2, loss=nn.MSELoss), "loss: expected a func"),
    (lambda made: run(made, by(1), 2), "jobs: expected at least one"),
]


@pytest.mark.parametrize(("call", "sentence"), REFUSED)
def test_bad_input(call: Any, sentence: str) -> None:
    """One sentence, and nothing is trained."""
    with pytest.raises(InputError, match=sentence):
        call(array())
