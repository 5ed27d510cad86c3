"""`ArrayTrainer.fit`: from jobs and a dataset to trained models in one call."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from arraypipe_models import CUTS, adamw, build_model, exact, loss, model_alone, sgd
from runs import run
from torch import nn
from torch.utils.data import TensorDataset

from optsched import ArrayTrainer, InputError, RunConfig
from optsched.arraypipe import Callback, CsvLog, Job, random_schedule
from optsched.arraypipe.checkpoint.weights import read_weights
from optsched.arraypipe.evaluation import measure_of
from optsched.arraypipe.train_alone import NotIdentical, differences

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

    def on_start(self, fit: Any) -> None:
        """Note it."""
        self.fit = fit
        self.calls.append("start")

    def on_step(self, job: Job, iteration: int, loss: float) -> None:
        """Note it."""
        self.calls.append((self.fit.name(job), iteration))

    def on_evaluate(self, job: Job, iteration: int, value: float, model: nn.Module) -> None:
        """Note it."""
        assert not model.training
        self.values.append((self.fit.name(job), iteration, value))

    def on_end(self, job: Job) -> None:
        """Note it."""
        self.calls.append(self.fit.name(job))

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
    again = made.fit(jobs, 7, checkpoint=tmp_path, resume=True, config=QUICK)
    for j in range(2):
        found = differences(again.trained[j], made.train_alone(j, 7))
        assert all("loss of" in row or "iterations, alone" in row for row in found)
    given = run(made, by(2), 5)
    assert all(differences(a, b) == [] for a, b in zip(given.trained, result.trained, strict=True))


@pytest.mark.parametrize(("mode", "best"), [("min", 2), ("max", 4)])
def test_the_best_checkpoint_stays(tmp_path: Path, mode: Any, best: int) -> None:
    """Beside the newest ones, of which here one is kept."""
    values = {1: 3.0, 2: 1.0, 3: 2.0, 4: 5.0, 5: 2.5, 6: 2.5}
    seen: list[int] = []

    def value(model: nn.Module) -> float:
        seen.append(1)
        return values[len(seen)]

    config = RunConfig(check=0, verbose=False, every=1, keep=1, mode=mode)
    array().fit(jobs_of()[:1], 6, checkpoint=tmp_path, evaluate=value, config=config)
    left = {place.name for place in (tmp_path / "job0").iterdir() if place.is_dir()}
    assert left == {str(best), "6"}
    assert (tmp_path / "job0" / "best").read_text() == f"{best} {values[best]}\n"
    # judged the other way round from now on: the next value is the best so far
    values[7], other = 3.0, {"min": "max", "max": "min"}[mode]
    config = RunConfig(check=0, verbose=False, every=1, keep=1, mode=other)
    array().fit(jobs_of()[:1], 7, checkpoint=tmp_path, resume=True, evaluate=value, config=config)
    assert (tmp_path / "job0" / "best").read_text().startswith("7 3.0")


@pytest.mark.parametrize("memory", [None, 16_000])
def test_evaluation_changes_no_bit(memory: int | None) -> None:
    """With and without the same tensors; the values are those of the model at that iteration."""
    config = RunConfig(check=0, verbose=False, every=3, memory=memory)
    heard, made = Heard(), array()

    def restless(model: nn.Module) -> float:
        """Draws random numbers, changes the model, and tells its loss before."""
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
    assert memory is None or result.report.exposed_ns  # states have moved
    assert exact(made, result)
    for j in range(2):
        found = [(k, value) for name, k, value in heard.values if name == f"job{j}"]
        assert found == [(k, at(j, k + 1)) for k in (2, 5, 6)]


def test_evaluation_by_a_dataset() -> None:
    """The mean of the loss, or of a metric, over all samples."""
    found = []
    for evaluate in (DATA, (DATA, loss), (DATA, accuracy), torch.utils.data.DataLoader(DATA, 7)):
        heard = Heard()
        result = array().fit(
            jobs_of(1), 3, schedule=by(1), config=QUICK, callbacks=[heard], evaluate=evaluate
        )
        ((_, iteration, value),) = heard.values
        assert iteration == 2
        found.append(value)
    with torch.no_grad():
        output = result.models[0].eval()(DATA.tensors[0])
    assert found[0] == found[1] == pytest.approx(float(loss(output, DATA.tensors[1])))
    assert found[2] == pytest.approx(float(accuracy(output, DATA.tensors[1])))
    assert found[3] == pytest.approx(found[0])


def test_evaluation_by_the_loss_of_the_model() -> None:
    """Weighted by the labels that count, as in training; a batch without any changes nothing."""

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.layers(x)
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    x, labels = DATA.tensors[0], DATA.tensors[1].clone()
    labels[8:16] = labels[::3] = -100
    rows = [{"x": a, "labels": b} for a, b in zip(x, labels, strict=True)]
    heard, made = Heard(), ArrayTrainer(Tagger, rows, ["layers.1"])
    result = made.fit(jobs_of(1), 3, evaluate=rows, callbacks=[heard], config=QUICK)
    with torch.no_grad():
        assert heard.values[0][2] == pytest.approx(float(result.models[0](x, labels)["loss"]))


def test_a_check_without_memory_uses_a_small_model(capsys: Any) -> None:
    """One block per stage, if the whole does not fit."""

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(6))
            self.head = nn.Linear(6, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(self.blocks) == 6 and checking:
                raise torch.OutOfMemoryError("too much")
            for block in self.blocks:
                x = block(x).tanh()
            return self.head(x)

    checking: list[int] = []
    made = ArrayTrainer(Blocks, DATA, 2, loss)
    how: dict[str, Any] = {"schedule": random_schedule([1], 2)}
    checked = ArrayTrainer.check_exact

    def check(self: ArrayTrainer, steps: int) -> list[str]:
        checking.append(1)
        try:
            return checked(self, steps)
        finally:
            checking.clear()

    with patch.object(ArrayTrainer, "check_exact", check):
        made.fit(jobs_of(1), 2, config=RunConfig(), **how)
    assert "over 2 iterations of a model with one block per stage" in capsys.readouterr().err


def test_callbacks_and_queue() -> None:
    """More jobs than slots: one waits. A job that a callback gives takes a slot."""

    class Gives(Callback):
        given = False

        def next_job(self, ended: Job) -> Job | None:
            if self.given:
                return None
            self.given = True
            return Job(9, 8, sgd, name="late")

    heard, made = Heard(), array()
    jobs = [Job(k, 8, adamw) for k in range(3)]
    schedule = random_schedule([1, 1], 3, seed=2)
    result = made.fit(jobs, 3, schedule=schedule, callbacks=[heard, Gives()], config=QUICK)
    assert made.titles == ["job0", "job1", "job2", "late"]
    assert [job.name for job in result.jobs] == ["", "", "", "late"]
    assert {job.status for job in result.jobs} == {"done"}
    assert heard.calls[0] == "start" and heard.calls[-1] == "finish"
    for name in made.titles:
        own = [call for call in heard.calls if name in (call, call[0])]
        assert own == [(name, 0), (name, 1), (name, 2), name]
    assert exact(made, result)


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_run_log(tmp_path: Path, kind: str) -> None:
    """A row per loss and value; after a resume none twice."""
    path = tmp_path / f"logs/run.{kind}"
    config = RunConfig(check=0, verbose=False, every=2)
    rest: dict[str, Any] = {"schedule": by(2), "config": config, "evaluate": DATA}
    array().fit(jobs_of(), 3, checkpoint=tmp_path / "a", callbacks=[CsvLog(path)], **rest)
    with path.open("a", encoding="utf-8") as stream:  # a run that was killed without a checkpoint
        stream.write("job1,3,2.5,\n" if kind == "csv" else '{"job": "job1", "iteration": 3}\n{"job')
    array().fit(
        jobs_of(), 6, checkpoint=tmp_path / "a", resume=True, callbacks=[CsvLog(path)], **rest
    )
    text = path.read_text(encoding="utf-8")
    rows: list[Any] = (
        list(csv.DictReader(text.splitlines())) if kind == "csv"
        else [json.loads(line) for line in text.splitlines()]
    )  # fmt: skip
    for name in ("job0", "job1"):
        for key, expected in (("loss", range(6)), ("value", [1, 2, 3, 5])):
            own = [int(row["iteration"]) for row in rows if row["job"] == name and row.get(key)]
            assert sorted(own) == list(expected)


class Counter(nn.Module):
    """Keeps a number of its own, which is not a buffer."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Count."""
        Counter.calls += 1
        return x * (1 + Counter.calls)


def test_refuses_what_is_not_exact() -> None:
    """Nothing is trained; the sentence says how to go on."""
    made = ArrayTrainer(
        lambda: nn.Sequential(nn.Linear(6, 4), Counter()), DATA, stages=[1], loss=loss
    )
    jobs = [Job(0, 8, adamw), Job(1, 8, adamw)]
    with pytest.raises(NotIdentical, match=r"RunConfig\(check=0\) would train it all the same"):
        made.fit(jobs, 3, config=RunConfig(verbose=False))


def fitted(**changes: Any) -> Any:
    """A call of `fit`, with other arguments."""
    return lambda made: made.fit(**{"jobs": jobs_of(), "steps": 2} | changes)


class Returns(Callback):
    """Gives the job that has ended again."""

    def next_job(self, ended: Job) -> Any:
        """The same job."""
        return ended


REFUSED: list[tuple[Any, str]] = [
    (fitted(jobs=[]), "jobs: expected at least one"),
    (fitted(jobs=[7]), r"jobs\[0\]: expected a Job, got 7"),
    (fitted(steps=0), "steps: expected an integer >= 1, got 0"),
    (fitted(schedule=3), "schedule: expected a Schedule or a plan"),
    (fitted(resume=True), "checkpoint: expected a folder"),
    (fitted(config={"every": 3}), "config: expected a RunConfig, got"),
    (fitted(callbacks=5), "callbacks: expected a list, got 5"),
    (fitted(callbacks=[print]), r"callbacks\[0\]: expected a Callback, got <built-in"),
    (fitted(evaluate=5), "evaluate: expected a function of the model, a dataset, or"),
    (fitted(evaluate=nn.Sequential()), "evaluate: expected a function of the model, got a"),
    (fitted(evaluate=(DATA, 5)), "evaluate: expected a function of the model, a dataset, or"),
    (fitted(schedule=by(2), config=RunConfig(replan=True)), "replan: expected the JobArray"),
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
    (fitted(evaluate=lambda model: "low"), "evaluate: expected a number of the function, got"),
    (fitted(evaluate=(DATA, lambda x, y: None)), "evaluate: expected a number of the metric, got"),
    (lambda _: ArrayTrainer(build_model, DATA, stages=2, loss=nn.MSELoss), "loss: expected a func"),
    (lambda _: CsvLog("run.txt"), r"CsvLog: expected a .csv or .jsonl file"),
    (lambda made: run(made, by(1), 2), "jobs: expected at least one"),
]


@pytest.mark.parametrize(("call", "sentence"), REFUSED)
def test_bad_input(call: Any, sentence: str) -> None:
    """One sentence, and nothing is measured."""
    made: Any = array()
    made.profile = lambda *rest: pytest.fail("measured")
    with pytest.raises(InputError, match=sentence):
        call(made)


def launched(
    folder: Path, body: str, *words: object, ranks: int = 1
) -> subprocess.CompletedProcess[str]:
    """A program that has the names of this module, in one process or on ranks."""
    own = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})"
    (folder / "train.py").write_text(f"{own}\nfrom test_arraypipe_fit import *\n{body}")
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.run(
        [sys.executable, *start * (ranks > 1), str(folder / "train.py"), *map(str, words)],
        capture_output=True, text=True, timeout=200, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


KILLED = """
folder = sys.argv[1]

class Dies(Callback):
    def on_step(self, job, iteration, loss):
        if iteration == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)

result = array().fit(jobs_of(), 9, checkpoint=folder, resume=True, evaluate=DATA,
                     callbacks=[Dies(), CsvLog(folder + "/log.csv")],
                     config=RunConfig(every=1, timeout=60)).gather()
if result.trained:
    torch.save([[t.parameters, t.buffers] for t in result.trained], folder + "/end.pt")
print(result.report)
"""


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_killed_and_resumed(tmp_path: Path, ranks: int) -> None:
    """Killed, the same call goes on from the checkpoints and ends with the same bits.

    The log has every loss, and the values of the models at their iterations: on ranks of those
    checkpoints that were the newest when it was looked at.
    """
    codes = []
    for moment in (4, 99):
        done = launched(tmp_path, KILLED, tmp_path / "c", moment, ranks=ranks)
        codes.append(done.returncode)
    assert codes[0] and not codes[1], done.stderr
    made = array().with_jobs(jobs_of())
    for j, (parameters, buffers) in enumerate(torch.load(tmp_path / "c" / "end.pt")):
        alone = made.train_alone(j, 9)
        assert all(torch.equal(alone.parameters[k], v) for k, v in parameters.items())
        assert all(torch.equal(alone.buffers[k], v) for k, v in buffers.items())
        text = (tmp_path / "c" / "log.csv").read_text(encoding="utf-8").splitlines()
        rows = [row for row in csv.DictReader(text) if row["job"] == f"job{j}"]
        assert {int(row["iteration"]) for row in rows if row["loss"]} == set(range(9))
        values = {int(row["iteration"]): row["value"] for row in rows if row["value"]}
        assert 8 in values and (ranks > 1 or set(values) == set(range(9)))
        for iteration, value in values.items():
            model = model_alone(made.train_alone(j, iteration + 1))
            with torch.no_grad():
                found = measure_of(DATA, loss)(made.jobs[j], model, torch.device("cpu"))
            assert float(value) == found


OTHER_DATA = """
x = torch.randn(40, 6, generator=torch.Generator().manual_seed(int(os.environ["RANK"])))
dataset = TensorDataset(x, (x.sum(1) > 0).long())
try:
    trainer = ArrayTrainer(build_model, dataset, stages=CUTS, loss=loss)
    trainer.fit(jobs_of(), 2, config=RunConfig(timeout=60))
except InputError as error:
    print("refused:", error)
"""


def test_ranks_with_other_data_are_refused(tmp_path: Path) -> None:
    """Inputs are taken on one rank and targets on another: data without a seed are no data."""
    done = launched(tmp_path, OTHER_DATA, ranks=2)
    assert done.returncode == 0 and done.stdout.count("refused:") == 2, done.stderr
    assert done.stdout.count("rank 1 has another first batch of job job0 than rank 0") == 2


def test_refused_before_a_file_is_touched(tmp_path: Path) -> None:
    """Without resume, with fewer steps than are done, with an evaluation that raises."""
    log = tmp_path / "run.csv"
    how: dict[str, Any] = {"checkpoint": tmp_path / "c", "callbacks": [CsvLog(log)]}
    array().fit(jobs_of(), 3, config=QUICK, **how)
    before = log.read_bytes()
    assert before.count(b"\n") == 7
    with pytest.raises(InputError, match="already has checkpoints"):
        array().fit(jobs_of(), 3, **how)
    with pytest.raises(InputError, match="has already done 3 iterations, got 2"):
        array().fit(jobs_of(), 2, resume=True, **how)

    def broken(model: nn.Module) -> float:
        raise AttributeError("no such layer")

    with pytest.raises(InputError, match="evaluate: AttributeError: no such layer"):
        array().fit(jobs_of(), 5, resume=True, evaluate=broken, **how)
    assert log.read_bytes() == before


def test_jobs_that_came_later_keep_rows_on_resume(tmp_path: Path) -> None:
    """A job that a callback has given continues from its checkpoint, too."""

    class Gives(Callback):
        def next_job(self, ended: Job) -> Job | None:
            late = Job(7, 8, jobs_of()[0].optimizer, name="late")
            return late if ended.name != "late" else None

    for steps in (3, 5):
        array().fit(
            jobs_of()[:1], steps, schedule=by(1), checkpoint=tmp_path / "c", resume=True,
            config=QUICK, callbacks=[Gives(), CsvLog(tmp_path / "run.csv")],
        )  # fmt: skip
    rows = list(csv.DictReader((tmp_path / "run.csv").read_text().splitlines()))
    assert [int(r["iteration"]) for r in rows if r["job"] == "late" and r["loss"]] == [*range(5)]
