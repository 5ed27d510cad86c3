"""`ArrayTrainer.fit`: from jobs and a dataset to trained models in one call."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from arraypipe_models import CUTS, adamw, build_model, loss, sgd  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import TensorDataset  # noqa: E402

import optsched  # noqa: E402
from optsched import ArrayTrainer, InputError, RunConfig  # noqa: E402
from optsched.arraypipe import Callback, Job, random_schedule  # noqa: E402
from optsched.arraypipe.callbacks import (  # noqa: E402
    BestCheckpoint,
    EarlyStopping,
    OptunaPruning,
    RunLog,
    TensorBoard,
)
from optsched.arraypipe.evaluation import measure_of  # noqa: E402
from optsched.arraypipe.train_alone import NotIdentical, differences  # noqa: E402

pytestmark = pytest.mark.torch

QUICK = RunConfig(check=0, verbose=False)
DRAW = torch.Generator().manual_seed(0)
DATA = TensorDataset(torch.randn(50, 6, generator=DRAW), torch.randint(0, 4, (50,), generator=DRAW))


def array(**changes: Any) -> ArrayTrainer:
    """A trainer without jobs: dropout, batch normalisation, a layer that works in place."""
    return ArrayTrainer(build_model, DATA, stages=CUTS, loss=loss, **changes)


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

    def on_end(self, job: Job) -> Job | None:
        """Note it."""
        self.calls.append(self.fit.name(job))
        return None

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
    for j in range(2):
        assert differences(result.trained[j], made.train_alone(j, 5)) == []
        saved = torch.load(tmp_path / f"job{j}" / "5" / "model.pt", weights_only=True)
        assert all(torch.equal(saved[k], v) for k, v in result.models[j].state_dict().items())
    said = capsys.readouterr().err
    assert "measuring 3 stages of 2 jobs" in said
    assert re.search(r"predicted: .* a cycle, .* above the bound of", said)
    assert "checked: the bits of training alone, over 2 iterations" in said
    again = made.fit(jobs, 7, checkpoint=tmp_path, resume=True, config=QUICK)
    for j in range(2):
        found = differences(again.trained[j], made.train_alone(j, 7))
        assert all("loss of" in row or "iterations, alone" in row for row in found)
    given = made.run(by(2), 5)
    assert all(differences(a, b) == [] for a, b in zip(given.trained, result.trained, strict=True))


def test_lazy_names() -> None:
    """`import optsched` imports no torch; the names come from the executor."""
    code = "import sys, optsched; assert 'torch' not in sys.modules; optsched.Job; print(1)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert optsched.Job is Job and optsched.ArrayTrainer is ArrayTrainer


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
    told = f"{best} {values[best]}" + " highest" * (mode == "max")
    assert (tmp_path / "job0" / "best").read_text() == f"{told}\n"
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
        model, alone = build_model(), made.train_alone(j, steps)
        model.load_state_dict(alone.parameters | alone.buffers)
        with torch.no_grad():
            return float(loss(model.eval()(DATA.tensors[0]), DATA.tensors[1]))

    before = torch.get_rng_state()
    result = made.fit(
        jobs_of(), 7, schedule=by(2), config=config, callbacks=[heard], evaluate=restless
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert memory is None or result.report.exposed  # states have moved
    for j in range(2):
        assert differences(result.trained[j], made.train_alone(j, 7)) == []
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


def test_callbacks_and_queue() -> None:
    """More jobs than seats: one waits. A job that a callback gives takes a seat."""

    class Gives(Callback):
        given = False

        def on_end(self, job: Job) -> Job | None:
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
    for j in range(4):
        assert differences(result.trained[j], made.train_alone(j, 3)) == []


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_run_log(tmp_path: Path, kind: str) -> None:
    """A row per loss and value; after a resume none twice."""
    path = tmp_path / f"logs/run.{kind}"
    config = RunConfig(check=0, verbose=False, every=2)
    rest: dict[str, Any] = {"schedule": by(2), "config": config, "evaluate": DATA}
    array().fit(jobs_of(), 3, checkpoint=tmp_path / "a", callbacks=[RunLog(path)], **rest)
    with path.open("a", encoding="utf-8") as stream:  # a run that was killed without a checkpoint
        stream.write("job1,3,2.5,\n" if kind == "csv" else '{"job": "job1", "iteration": 3}\n{"job')
    array().fit(
        jobs_of(), 6, checkpoint=tmp_path / "a", resume=True, callbacks=[RunLog(path)], **rest
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


def test_early_stopping_and_best(tmp_path: Path) -> None:
    """A job ends when its value has not become better; the best model is kept."""
    values = iter([3.0, 1.0, 2.0, 2.0, 5.0])
    seen: list[Any] = []

    def evaluate(model: nn.Module) -> float:
        seen.append({k: v.clone() for k, v in model.state_dict().items()})
        return next(values)

    best = BestCheckpoint(tmp_path / "best")
    config = RunConfig(check=0, verbose=False, every=1)
    made = array()
    result = made.fit(
        jobs_of(1), 9, schedule=by(1), config=config, evaluate=evaluate,
        callbacks=[EarlyStopping(2), best], checkpoint=tmp_path / "all",
    )  # fmt: skip
    assert len(result.losses[0]) == 4 and made.jobs[0].status == "stopped"
    kept = torch.load(best.path("job0"), weights_only=True)
    assert (kept["iteration"], kept["value"]) == (1, 1.0)
    assert all(torch.equal(kept["model"][key], seen[1][key]) for key in seen[1])
    values = iter([1.5, 0.5])
    again = BestCheckpoint(tmp_path / "best")
    made.fit(
        jobs_of(1), 6, schedule=by(1), config=config, evaluate=evaluate, callbacks=[again],
        checkpoint=tmp_path / "all", resume=True,
    )  # fmt: skip
    assert torch.load(best.path("job0"), weights_only=True)["iteration"] == 5


def test_optuna_prunes() -> None:
    """What its pruner says ends the job; without values it hears losses."""
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(pruner=optuna.pruners.ThresholdPruner(upper=-1.0))
    trials = {"job0": study.ask()}
    pruning = OptunaPruning(trials)
    result = array().fit(jobs_of(2), 5, schedule=by(2), config=QUICK, callbacks=[pruning])
    assert pruning.pruned == {"job0"} and [len(row) for row in result.losses] == [1, 5]


def test_ctrl_c_returns_the_best_so_far() -> None:
    """The jobs end their iteration, and the result has what was trained."""

    class Interrupts(Callback):
        def on_step(self, job: Job, iteration: int, loss: float) -> None:
            if iteration == 2:
                os.kill(os.getpid(), signal.SIGINT)

    made = array()
    result = made.fit(jobs_of(), 99, schedule=by(2), config=QUICK, callbacks=[Interrupts()])
    for j, losses in enumerate(result.losses):
        assert 3 <= len(losses) < 9 and made.jobs[j].status == "stopped"
        assert differences(result.trained[j], made.train_alone(j, len(losses))) == []


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


def test_bad_input() -> None:
    """One sentence, and nothing is measured."""
    made, jobs = array(), jobs_of()
    made.profile = lambda *rest: pytest.fail("measured")  # type: ignore[method-assign]
    for changes, sentence in (
        ({"jobs": []}, "jobs: expected at least one"),
        ({"jobs": [7]}, r"jobs\[0\]: expected a Job, got 7"),
        ({"steps": 0}, "steps: expected an integer >= 1, got 0"),
        ({"schedule": 3}, "schedule: expected a Schedule or a plan"),
        ({"resume": True}, "checkpoint: expected a folder"),
        ({"callbacks": 5}, "callbacks: expected a list, got 5"),
        ({"callbacks": [print]}, r"callbacks\[0\]: expected a Callback, got <built-in"),
        ({"evaluate": 5}, "evaluate: expected a function of the model, a dataset, or"),
        ({"evaluate": torch.nn.Sequential()}, "evaluate: expected a function of the model, got a"),
        ({"evaluate": (DATA, 5)}, "evaluate: expected a function of the model, a dataset, or"),
        ({"schedule": by(2), "config": RunConfig(replan=True)}, "replan: expected no schedule"),
        ({"schedule": by(2), "callbacks": [BestCheckpoint("x")], "config": QUICK},
         "BestCheckpoint: expected fit to have evaluate"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=sentence):
            made.fit(**{"jobs": jobs, "steps": 2} | changes)  # type: ignore[arg-type]
    for broken, sentence in (
        ({"every": 0}, "every: expected an integer >= 1, got 0"),
        ({"check": -1}, "check: expected an integer >= 0, got -1"),
        ({"backend": "threads"}, "backend: expected one of inline, process"),
        ({"tied": "some"}, "tied: expected one of exact, sum"),
        ({"verbose": 1}, "verbose: expected True or False, got 1"),
        ({"devices": "cpu"}, "devices: expected a list"),
    ):
        with pytest.raises(InputError, match=sentence):
            RunConfig(**broken)  # type: ignore[arg-type]
    for make, sentence in (
        (lambda: EarlyStopping(0), "patience: expected an integer >= 1, got 0"),
        (lambda: EarlyStopping(1, "up"), "mode: expected one of min, max"),  # type: ignore[arg-type]
        (lambda: RunLog("run.txt"), r"RunLog: expected a .csv or .jsonl file"),
    ):
        with pytest.raises(InputError, match=sentence):
            make()
    with pytest.raises(InputError, match="jobs: expected at least one"):
        array().run(by(1), 2)


def test_tensorboard(tmp_path: Path) -> None:
    """It writes events; without the package one sentence says what to install."""
    try:
        import tensorboard  # noqa: F401
    except ImportError:
        with pytest.raises(optsched.OptschedError, match="pip install tensorboard"):
            TensorBoard(tmp_path)
        return
    array().fit(jobs_of(1), 2, schedule=by(1), config=QUICK, callbacks=[TensorBoard(tmp_path)])
    assert list(tmp_path.iterdir())


PROGRAM = """
import os, signal, sys, torch
sys.path.insert(0, {tests!r})
torch.set_num_threads(1)
from test_arraypipe_fit import DATA, array, jobs_of
from optsched import RunConfig
from optsched.arraypipe import Callback
from optsched.arraypipe.callbacks import RunLog

class Dies(Callback):
    def on_step(self, job, iteration, loss):
        if iteration == int(sys.argv[1]):
            os.kill(os.getpid(), signal.SIGKILL)

result = array().fit(jobs_of(), 9, checkpoint={folder!r}, resume=True, evaluate=DATA,
                     callbacks=[Dies(), RunLog({folder!r} + "/log.csv")],
                     config=RunConfig(every=1, timeout=60))
if result.trained:
    torch.save([[t.parameters, t.buffers] for t in result.trained], {folder!r} + "/end.pt")
print(result.report)
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_and_resumed(tmp_path: Path, ranks: int) -> None:
    """Killed twice, the same call goes on from the checkpoints and ends with the same bits.

    The log has every loss, and the values of the models at their iterations: on ranks of those
    checkpoints that were the newest when it was looked at.
    """
    script = tmp_path / "train.py"
    script.write_text(PROGRAM.format(tests=str(Path(__file__).parent), folder=str(tmp_path / "c")))
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    codes = []
    for moment in (3, 6, 99):
        done = subprocess.run(
            [*command, str(script), str(moment)], capture_output=True, text=True, timeout=200,
            check=False, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        codes.append(done.returncode)
    assert codes[0] and codes[1] and not codes[2], done.stderr
    made = array(jobs=jobs_of())
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
            model, alone = build_model(), made.train_alone(j, iteration + 1)
            model.load_state_dict(alone.parameters | alone.buffers)
            with torch.no_grad():
                found = measure_of(DATA, loss)(made.jobs[j], model.eval(), torch.device("cpu"))
            assert float(value) == found


OTHER_DATA = """
import os, sys
sys.path.insert(0, {tests!r})
import torch
from torch.utils.data import TensorDataset
from test_arraypipe_fit import *

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
    script = tmp_path / "train.py"
    script.write_text(OTHER_DATA.format(tests=str(Path(__file__).parent)))
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         str(script)], capture_output=True, text=True, timeout=200, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.count("refused:") == 2, done.stderr
    assert done.stdout.count("rank 1 has another first batch of job job0 than rank 0") == 2


@pytest.mark.parametrize("given", [5, "the same"])
def test_what_takes_a_seat_is_a_new_job(given: Any) -> None:
    """A job that has ended would be trained again as another one."""

    class Gives(Callback):
        def on_end(self, job: Job) -> Any:
            return job if given == "the same" else given

    with pytest.raises(InputError, match="on_end: expected a new Job or None"):
        array().fit(jobs_of(1), 2, config=QUICK, callbacks=[Gives()])
    with pytest.raises(InputError, match="config: expected a RunConfig, got"):
        array().fit(jobs_of(1), 2, config={"every": 3})  # type: ignore[arg-type]


def test_refused_before_a_file_is_touched(tmp_path: Path) -> None:
    """Without resume, with fewer steps than are done, with an evaluation that raises."""
    log = tmp_path / "run.csv"
    how: dict[str, Any] = {"checkpoint": tmp_path / "c", "callbacks": [RunLog(log)]}
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


def test_jobs_that_came_later_keep_rows_and_best_on_resume(tmp_path: Path) -> None:
    """A job that a callback has given is known to be resumed, too."""
    values = iter([5.0, 4.0, 3.0, 9.0, 9.0, 9.0, 9.0])

    class Gives(Callback):
        def on_end(self, job: Job) -> Job | None:
            return Job(7, 8, jobs_of()[0].optimizer, name="late") if job.name != "late" else None

    def call(steps: int) -> None:
        array().fit(
            jobs_of()[:1], steps, schedule=by(1), checkpoint=tmp_path / "c", resume=True,
            evaluate=lambda model: next(values), config=QUICK,
            callbacks=[Gives(), RunLog(tmp_path / "run.csv"), BestCheckpoint(tmp_path / "best")],
        )  # fmt: skip

    call(3)
    best = torch.load(tmp_path / "best" / "late.best.pt", weights_only=True)
    assert best["value"] == 4.0
    values = iter([3.0, 9.0, 9.0])
    call(5)
    again = torch.load(tmp_path / "best" / "late.best.pt", weights_only=True)
    assert (again["value"], again["iteration"]) == (4.0, best["iteration"])
    rows = list(csv.DictReader((tmp_path / "run.csv").read_text().splitlines()))
    assert [int(r["iteration"]) for r in rows if r["job"] == "late" and r["loss"]] == [*range(5)]
