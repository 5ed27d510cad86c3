"""Sweeps: exact, pruned, refilled, failed, interrupted, resumed; what the study is told."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna
import pytest
import torch
from arraypipe_models import CUTS, build_model, data, loss, model_alone, sgd
from depth import few_examples, half
from hypothesis import given
from hypothesis import strategies as st
from optuna.trial import TrialState

from optsched import InputError, MissingExtra
from optsched.arraypipe import ArrayTrainer, Job, random_schedule
from optsched.arraypipe.checkpoint.weights import read_weights
from optsched.arraypipe.sweep.sweep import ArraySweep, SweepResult
from optsched.arraypipe.train_alone import differences, train_alone

if TYPE_CHECKING:
    from collections.abc import Sequence


optuna.logging.set_verbosity(optuna.logging.WARNING)
make_trainer = ArrayTrainer(build_model, data, stages=CUTS, loss=loss).with_jobs
NAMES = ("4", "6")
STEPS = 6


def suggest(trial: Any) -> Job:
    """A learning rate and a batch size; every trial has its own seed."""
    lr = trial.suggest_float("lr", 1e-4, 1e-1, log=True)
    size = trial.suggest_categorical("size", [6, 8])
    return Job(trial.number, size, lambda named: torch.optim.AdamW(named, lr=lr))


class Numbered(optuna.samplers.RandomSampler):
    """Random search whose state is the number of the trial alone."""

    def sample_independent(self, study: Any, trial: Any, name: str, distribution: Any) -> Any:
        """Seeded anew for every trial."""
        random = optuna.samplers.RandomSampler(seed=trial.number)
        return random.sample_independent(study, trial, name, distribution)


def study_of(pruner: Any = None, direction: str = "minimize", **given: Any) -> Any:
    """A study whose trials have random parameters by their numbers, in whatever process."""
    return optuna.create_study(
        sampler=Numbered(), pruner=pruner or optuna.pruners.NopPruner(),
        direction=direction, **{"study_name": "sweep", **given},
    )  # fmt: skip


class Doomed(optuna.pruners.BasePruner):
    """Prunes trials of these numbers at a rung."""

    def __init__(self, rung: int, numbers: Sequence[int]) -> None:
        self.rung, self.numbers = rung, numbers

    def prune(self, study: Any, trial: Any) -> bool:
        """By number alone."""
        return trial.last_step == self.rung and trial.number in self.numbers


def states(study: Any) -> list[str]:
    """State of every trial."""
    return [trial.state.name for trial in study.trials]


def assert_alone(result: SweepResult, make: Any = suggest) -> None:
    """Every trial has the bits of training it alone for as many iterations as it has losses."""
    for row in result.trials:
        job = make(optuna.trial.FixedTrial(row.trial.params, row.trial.number))
        alone = train_alone(build_model, job, NAMES, loss, data, len(row.losses))
        assert row.trained is not None
        assert differences(row.trained, alone) == []
        assert row.losses == alone.losses


def test_trials_are_exact_pruned_and_refilled() -> None:
    """Seven trials on three seats, two pruned at their rungs: all have the bits of alone."""
    study = study_of(Doomed(2, [1, 4]))
    result = ArraySweep(make_trainer, study, suggest, 3, STEPS, iter([4, 2])).run(7)
    assert "".join(state[0] for state in states(study)) == "CPCCPCC"
    assert [len(row.losses) for row in result.trials] == [6, 2, 6, 6, 2, 6, 6]
    assert_alone(result)
    for row in result.trials:
        reported = {t: math.fsum(row.losses[:t]) / t for t in (2, 4) if t <= len(row.losses)}
        assert row.trial.intermediate_values == reported
        wanted = reported[2] if row.trial.state == TrialState.PRUNED else sum(row.losses) / 6
        assert row.trial.value == pytest.approx(wanted, rel=1e-15)
    assert result.run is not None and len(result.run.models) == 7
    assert result.best is not None and result.best.trial.number == study.best_trial.number
    assert result.best.model is result.run.models[study.best_trial.number]
    assert [row.job.status for row in result.trials[:2]] == ["done", "stopped"]


@few_examples
@given(
    width=st.integers(1, 4),
    n_trials=st.integers(1, 7),
    rung=st.integers(1, 3),
    doomed=st.sets(st.integers(0, 6)),
    order=st.none() | st.integers(0, 99),
)
def test_any_sweep_is_exact(
    width: int, n_trials: int, rung: int, doomed: set[int], order: int | None
) -> None:
    """Whatever the width, the order and the prunes: as many trials as asked, each as if alone."""
    schedule = None if order is None else random_schedule([1] * width, 3, seed=order)
    study = study_of(Doomed(rung, sorted(doomed)))
    sweep = ArraySweep(make_trainer, study, suggest, width, 4, [rung], schedule=schedule)
    result = sweep.run(n_trials)
    wanted = ["PRUNED" if k in doomed else "COMPLETE" for k in range(n_trials)]
    assert states(study) == wanted
    assert [len(r.losses) for r in result.trials] == [4 if w[0] == "C" else rung for w in wanted]
    assert result.run is not None  # seats that nobody takes are left out of the order
    blocks = 2 * 3 * sum(len(row.losses) for row in result.trials)
    assert schedule is None or doomed or result.run.trace.n_operations == blocks
    assert_alone(result)


def test_optuna_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the module says what to install."""
    own = "optsched.arraypipe.sweep.sweep"
    for name in [name for name in sys.modules if name.startswith("optuna") or name == own]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(MissingExtra, match=r'pip install "\.\[sweep\]"'):
        import_module(own)


def test_the_storage_is_touched_at_rungs_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither read nor written between the beginning of a trial, its rungs, and its end."""
    calls: list[str] = []
    for name in dir(optuna.storages.InMemoryStorage):
        method = getattr(optuna.storages.InMemoryStorage, name)
        if name.startswith(("get_", "set_", "create_")):

            def counted(*given: Any, name: str = name, method: Any = method, **more: Any) -> Any:
                calls.append(name)
                return method(*given, **more)

            monkeypatch.setattr(optuna.storages.InMemoryStorage, name, counted)
    touched: list[bool] = []

    def hear(job: Job, iteration: int, value: float) -> None:
        touched.append(bool(calls))
        calls.clear()

    study = study_of(Doomed(2, [1]))
    ArraySweep(make_trainer, study, suggest, 1, STEPS, [2, 4]).run(3, on_step=hear)
    whole = [True, True, False, True, False, False]  # asked, first rung, -, second rung, -, -
    assert touched == [*whole, *whole[:2], *whole]


@pytest.mark.parametrize(
    "pruner",
    [
        optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2),
        optuna.pruners.HyperbandPruner(min_resource=1, max_resource=STEPS, reduction_factor=2),
        optuna.pruners.MedianPruner(n_startup_trials=2),
    ],
    ids=["asha", "hyperband", "median"],
)
@pytest.mark.parametrize("direction", ["minimize", "maximize"])
def test_pruners(pruner: Any, direction: str) -> None:
    """Optuna's pruners stop some trials at rungs; the best is the study's, the bits are right."""
    study = study_of(pruner, direction)
    sweep = ArraySweep(make_trainer, study, suggest, 3, STEPS, [1, 2, 4], value=last)
    result = sweep.run(8)
    assert {"COMPLETE", "PRUNED"} == set(states(study))
    for row in result.trials:
        pruned = row.trial.state == TrialState.PRUNED
        assert len(row.losses) in ((1, 2, 4) if pruned else (STEPS,))
        assert row.trial.value == row.losses[-1]
    assert result.best is not None and result.best.trial.number == study.best_trial.number
    assert_alone(result)


def last(job: Job, losses: Sequence[float]) -> float:
    """The newest loss."""
    return losses[-1]


HELD_OUT = [next(data(Job(99, 8, sgd), 7))]


def held_out_loss(model: Any) -> float:
    """Of one batch that no trial trains on."""
    with torch.no_grad():
        return float(loss(model(HELD_OUT[0][0]), HELD_OUT[0][1]))


def value_alone(row: Any, done: int) -> float:
    """What `held_out_loss` gives for a trial trained alone for so many iterations."""
    job = suggest(optuna.trial.FixedTrial(row.trial.params, row.trial.number))
    return held_out_loss(model_alone(train_alone(build_model, job, NAMES, loss, data, done)))


def test_trials_are_judged_by_an_evaluation() -> None:
    """At rungs and at the end the study gets the value of the model, and no bit is changed."""
    study = study_of(Doomed(2, [1, 3]))
    sweep = ArraySweep(make_trainer, study, suggest, 2, STEPS, [2, 4], evaluate=held_out_loss)
    stop = lambda job, t, x: job.name == "trial4" and t == 2 and job.stop()  # noqa: E731
    result = sweep.run(6, on_step=stop)
    assert "".join(state[0] for state in states(study)) == "CPCPCC"
    assert [len(row.losses) for row in result.trials] == [6, 2, 6, 2, 3, 6]
    assert_alone(result)
    for row in result.trials:
        reached = [rung for rung in (2, 4) if rung <= len(row.losses)]
        wanted = {rung: value_alone(row, rung) for rung in reached}
        assert row.trial.intermediate_values == wanted
        assert row.trial.value == value_alone(row, len(row.losses))
    assert result.best is not None and result.best.trial.number == study.best_trial.number


def failing(numbers: Sequence[int], how: str, others: Any = suggest) -> Any:
    """Jobs of which some trials fail in one of the ways there are."""

    def make(trial: Any) -> Job:
        job = others(trial)
        if trial.number not in numbers:
            return job
        if how == "forward":  # of one sample batch normalisation can make nothing
            return Job(job.seed, 1, job.optimizer)

        def optimizer(named: Any) -> Any:
            made = torch.optim.SGD(named, lr=-1 if how == "made" else 0.1)
            made.param_groups[0]["lr"] = math.nan
            return made

        return Job(job.seed, job.batch_size, optimizer)

    return make


@pytest.mark.parametrize(
    ("how", "numbers", "reason", "lengths"),
    [
        ("loss", (1, 3), "the loss is nan", 1),
        ("forward", (1,), "Expected more than 1 value", 0),  # it is replaced before the run
        ("made", (3,), "learning rate", 0),
    ],
)
def test_a_failed_trial_is_told_and_the_others_go_on(
    how: str, numbers: Sequence[int], reason: str, lengths: int
) -> None:
    """The reason is in the study; the next trial takes the seat."""
    study, make = study_of(), failing(numbers, how)
    result = ArraySweep(make_trainer, study, make, 2, 4, [2]).run(5)
    assert states(study) == ["FAIL" if k in numbers else "COMPLETE" for k in range(5)]
    for k in numbers:
        assert reason in study.trials[k].user_attrs["failure"]
        assert len(result.trials[k].losses) == lengths
    kept = tuple(row for row in result.trials if row.trial.number not in numbers)
    assert_alone(SweepResult(kept, result.best, result.run), make)


def test_a_refused_combination_is_pruned_and_counts() -> None:
    """`suggest` may raise TrialPruned; fewer jobs than seats are no trouble."""

    def picky(trial: Any) -> Job:
        job = suggest(trial)
        if trial.number in (0, 2):
            raise optuna.TrialPruned
        return job

    study = study_of()
    result = ArraySweep(make_trainer, study, picky, 3, 2).run(4)
    assert states(study) == ["PRUNED", "COMPLETE", "PRUNED", "COMPLETE"]
    assert [row.trial.number for row in result.trials] == [1, 3]
    assert [row.job.name for row in result.trials] == ["trial1", "trial3"]


def test_clipping_is_exact_whoever_takes_the_seat() -> None:
    """One of the first jobs clips: so may any later one, on any seat."""

    def clipping(trial: Any) -> Job:
        job = suggest(trial)
        norm = 0.1 if trial.number in (0, 3) else None
        return Job(job.seed, job.batch_size, job.optimizer, clip_norm=norm)

    assert_alone(ArraySweep(make_trainer, study_of(), clipping, 2, 3).run(4), clipping)


def test_the_first_interrupt_ends_the_iterations_and_tells() -> None:
    """Ctrl-C: no job begins another iteration, no trial stays unfinished, results are whole."""
    study = study_of()

    def press(job: Job, iteration: int, value: float) -> None:
        if (job.name, iteration) == ("trial2", 1):
            os.kill(os.getpid(), signal.SIGINT)

    result = ArraySweep(make_trainer, study, suggest, 2, 4).run(9, on_step=press)
    assert 3 <= len(study.trials) < 9
    assert set(states(study)) == {"COMPLETE", "FAIL"}
    assert study.trials[2].user_attrs == {"failure": "interrupted"}
    assert_alone(result)


@pytest.mark.parametrize("broken", [False, True])
def test_an_exception_leaves_no_trial_unfinished(
    monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    """What the caller's function raises comes out, whether the storage takes the end or not."""
    study = study_of()
    honest, refused = study._storage.set_trial_state_values, []

    def once(number: int, *rest: Any, **more: Any) -> Any:
        if broken and not refused:
            refused.append(number)
            raise OSError("the storage is away")
        return honest(number, *rest, **more)

    def stumble(job: Job, losses: Sequence[float]) -> float:
        monkeypatch.setattr(study._storage, "set_trial_state_values", once)
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        ArraySweep(make_trainer, study, suggest, 2, STEPS, [2], value=stumble).run(2)
    assert states(study) == ["RUNNING" if broken else "FAIL", "FAIL"]
    assert study.trials[1].user_attrs["failure"] == "RuntimeError: mine"


def test_a_value_that_is_no_number_fails_the_trial() -> None:
    """NaN cannot be told; text is an error of the caller."""
    values: Any = {"nan": lambda job, x: math.nan, "text": lambda job, x: "low"}
    study = study_of()
    ArraySweep(make_trainer, study, suggest, 1, 1, value=values["nan"]).run(1)
    assert states(study) == ["FAIL"]
    with pytest.raises(InputError, match="value: expected a number for trial 1, got 'low'"):
        ArraySweep(make_trainer, study, suggest, 1, 1, value=values["text"]).run(1)


def test_a_timeout_begins_no_more_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials that run when the time is over are trained to their end."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def later(job: Job, iteration: int, value: float) -> None:
        now[0] += 10.0 * (job.name == "trial3" and iteration == 0)

    study = study_of()
    result = ArraySweep(make_trainer, study, suggest, 2, 2).run(timeout=5.0, on_step=later)
    assert 4 <= len(study.trials) <= 5
    assert set(states(study)) == {"COMPLETE"}
    assert all(len(row.losses) == 2 for row in result.trials)


MANY = optuna.create_study(directions=["minimize", "maximize"])
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"width": 0}, "width: expected an integer >= 1, got 0"),
    ({"steps": True}, "steps: expected an integer >= 1, got True"),
    ({"rungs": [7]}, r"rungs: expected an integer in 1\.\.6, got 7"),
    ({"rungs": [2, 4, 2]}, "rungs: expected each once, got 2 twice"),
    ({"suggest": None}, "suggest: expected a function, got None"),
    ({"trainer": "t.py"}, "trainer: expected an ArrayTrainer, or a function that makes one of job"),
    ({"study": None}, r"study: expected an optuna\.Study, got None"),
    ({"study": MANY}, "study: has 2 objectives, "),
    ({"schedule": "x.json"}, "schedule: expected a Schedule, got 'x.json'"),
    ({"schedule": random_schedule([1, 1], 3)}, "schedule: has 2 jobs, expected as many as the wid"),
    ({"n_trials": None}, "n_trials: expected a number of trials, or a timeout"),
    ({"n_trials": 0}, "n_trials: expected an integer >= 1, got 0"),
    ({"timeout": math.nan}, "timeout: expected seconds > 0, got nan"),
    ({"resume": True}, "checkpoint: expected a folder"),
    ({"backend": "threads"}, "backend: expected one of inline, process"),
]


@pytest.mark.parametrize(("changes", "sentence"), WRONG)
def test_wrong_arguments(changes: dict[str, Any], sentence: str) -> None:
    """Refused with a sentence, before a trial is asked for."""
    study = study_of()
    given = {"trainer": make_trainer, "study": study, "suggest": suggest, "width": 3, "steps": 6}
    run = {"n_trials": 1, **changes}
    given |= {key: run.pop(key) for key in {*given, "rungs", "schedule"} & {*changes}}
    with pytest.raises(InputError, match=f"^{sentence}"):
        ArraySweep(**given).run(**run)
    assert study.trials == []


def test_a_trainer_lends_all_but_its_jobs() -> None:
    """A sweep takes a trainer, too, which keeps its jobs."""
    example = Job(99, 4, sgd, name="example")
    trainer = make_trainer([example])
    assert_alone(ArraySweep(trainer, study_of(), suggest, 2, 3).run(4))
    assert (trainer.jobs, trainer.titles, example.status) == ((example,), ["example"], "ready")
    with pytest.raises(InputError, match="jobs: expected at least one"):
        trainer.with_jobs([])


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"microbatches": 2}, r"trial 2 has 2 micro-batches, and the seat .* has 1"),
        ({"clip_norm": 0.5}, r"clips its gradients .* seat that is free has no update"),
        (None, "suggest: expected a Job for trial 2, got None"),
    ],
)
def test_jobs_that_do_not_fit_their_seat(settings: Any, sentence: str) -> None:
    """Whoever comes third is refused; no trial is left running."""

    def late(trial: Any) -> Any:
        job = suggest(trial)
        return job if trial.number < 2 else settings and replace(job, **settings)

    study = study_of()
    with pytest.raises(InputError, match=sentence):
        ArraySweep(make_trainer, study, late, 2, 1).run(3)
    assert states(study)[2] == "FAIL" and "RUNNING" not in states(study)


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
@pytest.mark.parametrize("ranks", [2, 4])
def test_several_ranks(tmp_path: Path, ranks: int) -> None:
    """The study is told as in one process, and the bits are those of alone."""
    script = str(Path(__file__).with_name("sweep_rank.py"))
    group = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(ranks), str(tmp_path)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    words = [process.communicate(timeout=300) for process in group]
    assert [process.returncode for process in group] == [0] * ranks, words
    answer = json.loads(words[0][0])
    trainer, jobs = ("OSError: no such data here", "OSError: no such range here")
    assert answer.pop("refused") == [
        [f"PeerLost: rank {ranks - 1}: {trainer}"] * (ranks - 1) + [trainer],
        [jobs] + [f"PeerLost: rank 0: {jobs}"] * (ranks - 1),
    ]
    assert answer == {
        "states": "PFCFPFCCC",
        "grid": [2] * 4,
        "lengths": [2, 0, 6, 1, 2, 0, 6, 6, 6],
        "interrupted": ["COMPLETE"] * 2 + ["RUNNING"] * 2,
        "resumed": ["COMPLETE"] * 5,
        "whole": [40] * 3,
    }


# sweeps that were broken off


def journal(path: Path) -> Any:
    """A study on disk, made or loaded."""
    backend = optuna.storages.journal.JournalFileBackend(str(path / "journal.log"))
    return study_of(
        Doomed(4, [1]), storage=optuna.storages.JournalStorage(backend), load_if_exists=True
    )


def sweep_in(path: Path, **given: Any) -> tuple[SweepResult, Any]:
    """Five trials on two seats with checkpoints in a folder, as far as it goes."""
    study = journal(path)
    sweep = ArraySweep(make_trainer, study, suggest, 2, STEPS, [2, 4])
    return sweep.run(5, checkpoint=path / "ckpt", checkpoint_every=2, **given), study


def assert_whole(path: Path, reference: Any) -> None:
    """The study has the trials of an undisturbed sweep, and checkpoints with the bits of alone."""
    trials = journal(path).trials
    assert [t.state for t in trials] == [t.state for t in reference.trials]
    assert [t.params for t in trials] == [t.params for t in reference.trials]
    assert [t.intermediate_values for t in trials] == [
        t.intermediate_values for t in reference.trials
    ]
    assert [t.value for t in trials] == [t.value for t in reference.trials]
    for trial in trials:
        job = suggest(optuna.trial.FixedTrial(trial.params, trial.number))
        place = path / "ckpt" / f"trial{trial.number}"
        if trial.state == TrialState.PRUNED and not (place / "latest").exists():
            continue  # a prune is told at once, and a kill may come before its checkpoints
        done = int((place / "latest").read_text())
        assert done == STEPS if trial.state == TrialState.COMPLETE else done in (2, 4)
        alone = train_alone(build_model, job, NAMES, loss, data, done)
        model = read_weights(place / str(done))
        whole = {**alone.parameters, **alone.buffers}
        assert all(torch.equal(model[name], whole[name]) for name in model)


@pytest.fixture(scope="module")
def reference() -> Any:
    """The study of an undisturbed sweep."""
    study = study_of(Doomed(4, [1]))
    ArraySweep(make_trainer, study, suggest, 2, STEPS, [2, 4]).run(5)
    return study


@pytest.mark.parametrize(
    ("name", "iteration", "press"),
    [
        *half([("trial0", 0, False), ("trial1", 2, False), ("trial1", 3, False)]),
        ("trial4", 5, False), ("trial2", 2, True),
    ],
)  # fmt: skip
def test_a_break_and_resume(
    tmp_path: Path, reference: Any, name: str, iteration: int, press: bool
) -> None:
    """After an exception or Ctrl-C unfinished trials go on from their checkpoints, and no other."""

    def stumble(job: Job, done: int, value: float) -> None:
        if (job.name, done) == (name, iteration):
            if not press:
                raise RuntimeError("stumbled")
            os.kill(os.getpid(), signal.SIGINT)

    with nullcontext() if press else pytest.raises(RuntimeError, match="stumbled"):
        assert_alone(sweep_in(tmp_path, on_step=stumble)[0])
    before = states(journal(tmp_path))
    assert "RUNNING" in before and "FAIL" not in before
    with pytest.raises(InputError, match=r"a sweep has been written to .* or resume=True"):
        sweep_in(tmp_path)
    result, _ = sweep_in(tmp_path, resume=True)
    assert_whole(tmp_path, reference)
    assert len(result.trials) == 5 - sum(state != "RUNNING" for state in before)
    again, study = sweep_in(tmp_path, resume=True)
    assert (again.trials, again.best, again.run) == ((), None, None)
    assert len(study.trials) == 5


def test_a_trial_at_its_last_rung_is_not_pruned_by_a_resume(tmp_path: Path) -> None:
    """One that had done all its steps completes, whatever a pruner thinks of its last value."""

    class Never(optuna.pruners.BasePruner):
        def prune(self, study: Any, trial: Any) -> bool:
            return (trial.last_step or 0) >= STEPS

    def stumble(job: Job, done: int, value: float) -> None:
        if done == STEPS - 1:
            raise RuntimeError("stumbled")

    study = study_of(Never())
    how: dict[str, Any] = {"checkpoint": tmp_path, "checkpoint_every": 2}
    sweep = ArraySweep(make_trainer, study, suggest, 1, STEPS, [2, STEPS])
    with pytest.raises(RuntimeError, match="stumbled"):
        sweep.run(1, on_step=stumble, **how)
    assert states(study) == ["RUNNING"] and STEPS in study.trials[0].intermediate_values
    sweep.run(1, resume=True, **how)
    assert states(study) == ["COMPLETE"]


def test_an_evaluated_trial_goes_on_after_a_crash(tmp_path: Path) -> None:
    """Also one whose last evaluation raised: the study gets the values of an undisturbed sweep."""
    calls = []

    def stumble(model: Any) -> float:
        calls.append(held_out_loss(model))
        if len(calls) == 3:  # after rungs 2 and 4
            raise RuntimeError("stumbled")
        return calls[-1]

    how: dict[str, Any] = {"checkpoint": tmp_path, "checkpoint_every": 2}
    study, whole = study_of(), study_of()
    with pytest.raises(RuntimeError, match="stumbled"):
        ArraySweep(make_trainer, study, suggest, 1, STEPS, [2, 4], evaluate=stumble).run(1, **how)
    assert states(study) == ["RUNNING"]
    sweep = ArraySweep(make_trainer, study, suggest, 1, STEPS, [2, 4], evaluate=held_out_loss)
    sweep.run(1, resume=True, **how)
    ArraySweep(make_trainer, whole, suggest, 1, STEPS, [2, 4], evaluate=held_out_loss).run(1)
    assert [t.value for t in study.trials] == [t.value for t in whole.trials]
    assert study.trials[0].intermediate_values == whole.trials[0].intermediate_values


def test_trials_of_others_are_left_alone(tmp_path: Path) -> None:
    """A running trial without a file in the folder belongs to another worker of the study."""
    foreign = journal(tmp_path).ask()
    sweep_in(tmp_path, resume=True)
    trials = journal(tmp_path).trials
    assert trials[foreign.number].state == TrialState.RUNNING
    assert len(trials) == 6


def test_damaged_and_foreign_files(tmp_path: Path) -> None:
    """A file that is none, and one of another study, are refused by name."""
    with pytest.raises(RuntimeError):
        sweep_in(tmp_path, on_step=lambda job, t, x: (_ for _ in ()).throw(RuntimeError))
    path = tmp_path / "ckpt" / "trial0.sweep.json"
    row = json.loads(path.read_text())
    for text, sentence in (
        ("[]", "trial0.sweep.json: is no file of a sweep"),
        (json.dumps({**row, "study": "x"}), "belongs to the study 'x', not to 'sweep'"),
        (json.dumps({**row, "format": "y"}), "format: expected 'optsched.sweep/1', got 'y'"),
    ):
        path.write_text(text)
        with pytest.raises(InputError, match=sentence):
            sweep_in(tmp_path, resume=True)


@pytest.mark.parametrize(
    "beat", [11, *(pytest.param(beat, marks=pytest.mark.slow) for beat in (3, 17))]
)
def test_kill_and_resume(tmp_path: Path, reference: Any, beat: int) -> None:
    """A process that is killed without warning loses at most the work since its checkpoints."""
    script = (
        "import os, sys; sys.path.insert(0, sys.argv[1])\n"
        "import torch; torch.set_num_threads(1)\n"
        "from pathlib import Path\n"
        "import test_arraypipe_sweep as t\n"
        "seen = []\n"
        "def die(job, iteration, loss):\n"
        "    seen.append(job)\n"
        "    if len(seen) == int(sys.argv[3]): os.kill(os.getpid(), 9)\n"
        "t.sweep_in(Path(sys.argv[2]), on_step=die)\n"
    )
    here = str(Path(__file__).parent)
    done = subprocess.run([sys.executable, "-c", script, here, str(tmp_path), str(beat)])
    assert done.returncode == -signal.SIGKILL
    sweep_in(tmp_path, resume=True)
    assert_whole(tmp_path, reference)
