"""Sweeps: exact, pruned, refilled, failed, interrupted, resumed; the states of the trials."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from importlib import import_module
from typing import TYPE_CHECKING, Any

import optuna
import pytest
import torch
from arraypipe_models import CUTS, build_model, data, loss, model_alone
from depth import few_examples
from hypothesis import given
from hypothesis import strategies as st

from optsched import InputError, MissingExtra
from optsched.arraypipe import (
    ArraySweep,
    ArrayTrainer,
    Callback,
    Job,
    RunConfig,
    SweepResult,
    random_schedule,
)
from optsched.arraypipe.train_alone import Trained, differences, train_alone

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


optuna.logging.set_verbosity(optuna.logging.WARNING)
trainer = ArrayTrainer(build_model, data, CUTS, loss)
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
    """Prunes trials of these numbers at a step."""

    def __init__(self, step: int, numbers: Sequence[int]) -> None:
        self.step, self.numbers = step, numbers

    def prune(self, study: Any, trial: Any) -> bool:
        """By number alone."""
        return trial.last_step == self.step and trial.number in self.numbers


class Hook(Callback):
    """Calls a function after every iteration."""

    def __init__(self, step: Callable[[Job, int, float], object]) -> None:
        self.step = step

    def on_step(self, job: Job, iteration: int, loss: float) -> None:
        """Call it."""
        self.step(job, iteration, loss)


def config(**more: Any) -> RunConfig:
    """Without checks and progress."""
    return RunConfig(check=0, verbose=False, **more)


def order(width: int = 2) -> Any:
    """A schedule of so many jobs."""
    return random_schedule([1] * width, 3, seed=3)


def states(study: Any) -> list[str]:
    """State of every trial."""
    return [trial.state.name for trial in study.trials]


def alone_of(row: Any, make: Any = suggest, names: Any = NAMES, steps: int = 0) -> Trained:
    """A trial trained alone for as many iterations as it has losses."""
    job = make(optuna.trial.FixedTrial(row.trial.params, row.trial.number))
    return train_alone(build_model, job, names, loss, data, steps or len(row.losses))


def assert_alone(result: SweepResult, make: Any = suggest) -> None:
    """Every trial has the bits of training it alone."""
    for row in result.trials:
        alone = alone_of(row, make)
        assert row.trained is not None
        assert differences(row.trained, alone) == []
        assert row.losses == alone.losses


def test_trials_are_exact_pruned_and_refilled() -> None:
    """Seven trials in three slots, two pruned, by a schedule that is solved for."""
    study = study_of(Doomed(2, [1, 4]))
    result = ArraySweep(trainer, study, suggest, 3, STEPS).run(7, config=config(every=2))
    assert "".join(state[0] for state in states(study)) == "CPCCPCC"
    assert [len(row.losses) for row in result.trials] == [6, 2, 6, 6, 2, 6, 6]
    assert_alone(result)
    for row in result.trials:
        means = {t: math.fsum(row.losses[:t]) / t for t in (2, 4, 6) if t <= len(row.losses)}
        assert row.trial.intermediate_values == means
        assert row.trial.value == pytest.approx(means[max(means)], rel=1e-15)
    assert result.run is not None and len(result.run.models) == 7
    assert result.best is not None and result.best.trial.number == study.best_trial.number
    assert result.best.model is result.run.models[study.best_trial.number]
    assert [row.job.status for row in result.trials[:2]] == ["done", "stopped"]


@few_examples
@given(
    width=st.integers(1, 4),
    n_trials=st.integers(1, 7),
    every=st.integers(1, 3),
    doomed=st.sets(st.integers(0, 6)),
)
def test_any_sweep_is_exact(width: int, n_trials: int, every: int, doomed: set[int]) -> None:
    """Of any width and with any prunes: as many trials as given, each as if alone."""
    study = study_of(Doomed(every, sorted(doomed)))
    sweep = ArraySweep(trainer, study, suggest, width, 4)
    result = sweep.run(n_trials, schedule=order(width), config=config(every=every))
    expected = ["PRUNED" if k in doomed else "COMPLETE" for k in range(n_trials)]
    assert states(study) == expected
    lengths = [4 if state[0] == "C" else every for state in expected]
    assert [len(row.losses) for row in result.trials] == lengths
    assert_alone(result)


def test_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Optuna the module raises `MissingExtra`."""
    module = "optsched.arraypipe.sweep"
    for name in [name for name in sys.modules if name.startswith("optuna") or name == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(MissingExtra, match=r'pip install "\.\[sweep\]"'):
        import_module(module)


def held_out_loss(model: Any) -> float:
    """Loss of one batch that no trial trains on."""
    x, y = next(data(Job(99, 8, lambda named: torch.optim.SGD(named)), 7))
    with torch.no_grad():
        return float(loss(model(x), y))


def test_trials_are_judged_by_an_evaluation() -> None:
    """The study gets the values of the models, and no bit is changed."""
    study = study_of(Doomed(2, [1, 3]), "maximize")
    stop = Hook(lambda job, t, x: job.name == "trial4" and t == 2 and job.stop())
    result = ArraySweep(trainer, study, suggest, 2, STEPS).run(
        6, schedule=order(), evaluate=held_out_loss, callbacks=[stop], config=config(every=2)
    )
    assert "".join(state[0] for state in states(study)) == "CPCPCC"
    assert result.best is not None and result.best.trial.number == study.best_trial.number
    assert [len(row.losses) for row in result.trials][4:] == [3, 6]
    assert_alone(result)
    for row in result.trials:
        for done, value in row.trial.intermediate_values.items():
            assert value == held_out_loss(model_alone(alone_of(row, steps=done)))
        assert row.trial.value == row.trial.intermediate_values[row.trial.last_step]


def failing(numbers: Sequence[int], how: str, others: Any = suggest) -> Any:
    """Jobs of which some trials fail."""

    def make(trial: Any) -> Job:
        job = others(trial)
        if trial.number not in numbers:
            return job
        if how == "forward":  # batch normalisation refuses one sample
            return Job(job.seed, 1, job.optimizer)

        def optimizer(named: Any) -> Any:
            made = torch.optim.SGD(named, lr=0.1)
            made.param_groups[0]["lr"] = math.nan
            return made

        return Job(job.seed, job.batch_size, optimizer)

    return make


@pytest.mark.parametrize(
    ("how", "numbers", "reason", "lengths"),
    [
        ("loss", (1, 3), "the loss is nan", 1),
        ("forward", (1,), "Expected more than 1 value", 0),
        ("forward", (0, 1), "Expected more than 1 value", 0),  # all that come first
    ],
)
def test_a_failed_trial_and_the_others_go_on(
    how: str, numbers: Sequence[int], reason: str, lengths: int
) -> None:
    """The reason is in the study; the next trial takes the slot."""
    study, make = study_of(), failing(numbers, how)
    result = ArraySweep(trainer, study, make, 2, 4).run(5, schedule=order(), config=config())
    assert states(study) == ["FAIL" if k in numbers else "COMPLETE" for k in range(5)]
    for k in numbers:
        assert reason in study.trials[k].user_attrs["failure"]
        assert len(result.trials[k].losses) == lengths
    kept = tuple(row for row in result.trials if row.trial.number not in numbers)
    assert_alone(SweepResult(kept, result.best, result.run), make)


def test_a_refused_combination_is_pruned_and_counts() -> None:
    """`suggest` may raise TrialPruned; fewer jobs than slots are no trouble."""

    def picky(trial: Any) -> Job:
        job = suggest(trial)
        if trial.number in (0, 2):
            raise optuna.TrialPruned
        return job

    study = study_of()
    result = ArraySweep(trainer, study, picky, 3, 2).run(4, schedule=order(3), config=config())
    assert states(study) == ["PRUNED", "COMPLETE", "PRUNED", "COMPLETE"]
    assert [row.job.name for row in result.trials] == ["trial1", "trial3"]


def test_an_exhaustive_sampler_tries_every_point_once() -> None:
    """In more slots than divide their number."""

    def on_grid(trial: Any) -> Job:
        lr = trial.suggest_categorical("lr", [1e-3, 1e-2, 1e-1])
        return Job(0, trial.suggest_int("size", 6, 7), lambda p: torch.optim.SGD(p, lr=lr))

    study = study_of()
    study.sampler = optuna.samplers.GridSampler({"lr": [1e-3, 1e-2, 1e-1], "size": [6, 7]})
    result = ArraySweep(trainer, study, on_grid, 4, 2).run(6, schedule=order(4), config=config())
    points = {(row.trial.params["lr"], row.trial.params["size"]) for row in result.trials}
    assert len(result.trials) == len(points) == 6
    assert set(states(study)) == {"COMPLETE"}


def test_stop_timeout_and_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """After `study.stop()`, the time limit or Ctrl-C no trial is begun; others end as they do."""
    study = study_of()
    stop = Hook(lambda job, t, x: study.stop() if job.name == "trial2" else None)
    sweep = ArraySweep(trainer, study, suggest, 2, 2)
    given: dict[str, Any] = {"schedule": order(), "config": config()}
    assert 3 <= len(sweep.run(9, callbacks=[stop], **given).trials) <= 4
    assert len(sweep.run(2, **given).trials) == 2  # another call begins trials again
    assert set(states(study)) == {"COMPLETE"}

    now, study = [0.0], study_of()
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: now[0])
        late = Hook(lambda job, t, x: now.append(now.pop() + 10.0 * (job.name == "trial3")))
        sweep = ArraySweep(trainer, study, suggest, 2, 2)
        sweep.run(timeout=5.0, callbacks=[late], **given)
    assert 4 <= len(study.trials) <= 5 and set(states(study)) == {"COMPLETE"}

    study = study_of()
    press = Hook(
        lambda job, t, x: (job.name, t) == ("trial2", 1) and os.kill(os.getpid(), signal.SIGINT)
    )
    result = ArraySweep(trainer, study, suggest, 2, 40).run(9, callbacks=[press], **given)
    assert len(study.trials) < 9
    assert study.trials[2].user_attrs == {"failure": "interrupted"}
    assert_alone(result)


def test_an_exception_leaves_no_trial_unfinished() -> None:
    """An exception of a callback is raised; the trials fail with it."""
    study = study_of()

    def stumble(job: Job, iteration: int, value: float) -> None:
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        ArraySweep(trainer, study, suggest, 2, STEPS).run(
            2, schedule=order(), callbacks=[Hook(stumble)], config=config()
        )
    assert states(study) == ["FAIL", "FAIL"]
    assert study.trials[1].user_attrs["failure"] == "RuntimeError: mine"


def test_killed_and_resumed(tmp_path: Path) -> None:
    """Killed, the same call continues unfinished trials; values and weights are as whole."""
    pytest.importorskip("sqlalchemy")
    how: dict[str, Any] = {"schedule": order(), "config": config(every=4)}

    def call(moment: int) -> Any:
        def die(job: Job, iteration: int, value: float) -> None:
            if (job.name, iteration) == ("trial2", moment):
                os.kill(os.getpid(), signal.SIGKILL)

        storage = f"sqlite:///{tmp_path}/study.db"
        study = study_of(Doomed(4, [1]), storage=storage, load_if_exists=True)
        sweep = ArraySweep(trainer, study, suggest, 2, 12)
        sweep.run(5, checkpoint=tmp_path / "ckpt", resume=True, callbacks=[Hook(die)], **how)
        return study

    if not (child := os.fork()):
        try:
            call(9)
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    study, whole = call(99), study_of(Doomed(4, [1]))
    ArraySweep(trainer, whole, suggest, 2, 12).run(5, **how)
    assert states(study) == states(whole)
    for one, other in zip(study.trials, whole.trials, strict=True):
        assert one.value == other.value
        assert one.intermediate_values == other.intermediate_values
    with pytest.raises(InputError, match="a sweep has been written to"):
        ArraySweep(trainer, study, suggest, 2, 12).run(9, checkpoint=tmp_path / "ckpt")


def swept(**changes: Any) -> Any:
    """A sweep with other arguments."""
    given: dict[str, Any] = {"trainer": trainer, "study": study_of(), "suggest": suggest}
    return ArraySweep(**{**given, "width": 2, "steps": 2, **changes})


REFUSED: list[tuple[Any, str]] = [
    (lambda: swept(suggest=5), "suggest: expected a function, got 5"),
    (lambda: swept(study=None), "study: expected an optuna.Study, got None"),
    (lambda: swept(width=0), "width: expected an integer >= 1, got 0"),
    (lambda: swept(steps=0), "steps: expected an integer >= 1, got 0"),
    (lambda: swept(study=optuna.create_study(directions=["minimize"] * 2)), "one objective, got 2"),
    (lambda: swept().run(), "n_trials: expected a number of trials, or a timeout"),
    (lambda: swept().run(0), "n_trials: expected an integer >= 1, got 0"),
    (lambda: swept().run(2, timeout=-1.0), "timeout: expected seconds"),
    (lambda: swept().run(2, resume=True), "checkpoint: expected a folder to resume from"),
    (lambda: swept(suggest=lambda t: 7).run(2), "suggest: expected a Job for trial 0, got 7"),
    (lambda: swept().run(2, schedule=order(3), config=config()), "the schedule has 3 jobs"),
]


@pytest.mark.parametrize(("call", "sentence"), REFUSED)
def test_bad_input(call: Any, sentence: str) -> None:
    """One sentence with field and value."""
    with pytest.raises(InputError, match=sentence):
        call()
