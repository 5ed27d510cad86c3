"""How sweeps end: grids, exhaustive searches, `study.stop()`; all samplers and pruners."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import TYPE_CHECKING, Any

import optuna
import pytest
import torch
from optuna import pruners, samplers
from torch import nn

from optsched import InputError
from optsched.arraypipe import ArrayTrainer, Job
from optsched.arraypipe.sweep.sweep import ArraySweep, SweepResult

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

optuna.logging.set_verbosity(optuna.logging.ERROR)
pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
STEPS = 3
GRID = {"lr": [0.1, 0.01, 0.001], "momentum": [0.0, 0.5]}
POINTS = Counter(product(*GRID.values()))


def batches(job: Job, start: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The same one for ever."""
    while True:
        yield torch.ones(2, 1), torch.zeros(2, 1)


def build_model() -> nn.Module:
    """Two stages of two numbers."""
    return nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))


trainer = ArrayTrainer(build_model, batches, stages=2, loss=nn.functional.mse_loss).with_jobs


def job_of(trial: Any, **given: float) -> Job:
    """A job of these settings."""
    return Job(trial.number, 2, lambda named: torch.optim.SGD(named, **given))


def on_grid(trial: Any) -> Job:
    """A point of the grid."""
    return job_of(trial, **{key: trial.suggest_categorical(key, GRID[key]) for key in GRID})


def swept(study: Any, width: int, suggest: Any = on_grid, **more: Any) -> SweepResult:
    """A sweep without a number of trials, unless given."""
    run = {key: more.pop(key) for key in ("n_trials", "checkpoint", "resume") if key in more}
    return ArraySweep(trainer, study, suggest, width, STEPS, **more).run(**run)


def points(study: Any) -> Counter[tuple[float, ...]]:
    """How often every point of the grid was trained to its end."""
    done = [t for t in study.trials if t.state.name == "COMPLETE"]
    return Counter(tuple(t.params[key] for key in GRID) for t in done)


EXHAUSTIVE = {
    "grid": lambda: samplers.GridSampler(GRID),
    "brute force": lambda: samplers.BruteForceSampler(seed=0),
}


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", EXHAUSTIVE)
def test_every_point_is_trained_once(kind: str, width: int) -> None:
    """On fewer seats than points or on more; nothing is trained when the study goes on."""
    study = optuna.create_study(sampler=EXHAUSTIVE[kind]())
    result = swept(study, width)
    assert points(study) == POINTS and len(study.trials) == len(result.trials) == 6
    assert result.best is not None and result.best.trial.number == study.best_trial.number
    assert [len(row.losses) for row in result.trials] == [STEPS] * 6
    assert swept(study, width, n_trials=3).trials == () and len(study.trials) == 6
    with pytest.raises(RuntimeError):  # the study is as it was
        study.stop()


def test_branches_of_an_exhaustive_search() -> None:
    """A parameter that only some points have."""

    def suggest(trial: Any) -> Job:
        lr = trial.suggest_float("lr", 0.1, 0.2, step=0.1)
        return job_of(trial, lr=lr, momentum=trial.suggest_int("m", 0, 2) / 4 if lr < 0.15 else 0)

    study = optuna.create_study(sampler=samplers.BruteForceSampler(seed=1))
    swept(study, 3, suggest)
    found = Counter(tuple(t.params.values()) for t in study.trials)
    assert {(0.1, 0), (0.1, 1), (0.1, 2), (0.2,)} <= found.keys()
    assert {t.state.name for t in study.trials} == {"COMPLETE"}


@pytest.mark.parametrize("kind", EXHAUSTIVE)
def test_points_may_fail_or_be_refused(kind: str) -> None:
    """They count as tried; the last one too."""

    def suggest(trial: Any) -> Job:
        job = on_grid(trial)
        if trial.params["lr"] == 0.01:
            raise optuna.TrialPruned
        return job if trial.params["lr"] == 0.1 else job_of(trial, lr=float("inf"))

    study = optuna.create_study(sampler=EXHAUSTIVE[kind]())
    swept(study, 2, suggest)
    assert Counter(t.state.name for t in study.trials) == {"PRUNED": 2, "FAIL": 2, "COMPLETE": 2}


@pytest.mark.parametrize("kind", EXHAUSTIVE)
def test_a_grid_goes_on_from_its_folder(kind: str, tmp_path: Path) -> None:
    """Two trials in every call, until there is none left; no point twice."""
    log = samplers, optuna.storages.journal.JournalFileBackend(str(tmp_path / "log"))
    for k in range(5):
        study = optuna.create_study(
            storage=optuna.storages.JournalStorage(log[1]), study_name="s", load_if_exists=True,
            sampler=EXHAUSTIVE[kind](),
        )  # fmt: skip
        result = swept(study, 3, n_trials=2 * (k + 1), checkpoint=tmp_path / "ck", resume=True)
        assert len(result.trials) == (2 if k < 3 else 0)
    assert points(study) == POINTS


PLACES = ("callback", "suggest", "value", "step", "sampler", "pruner")


@pytest.mark.parametrize(("width", "at"), [(1, 2), (2, 0), (4, 5)])
@pytest.mark.parametrize("place", PLACES)
def test_stop_lets_running_trials_end(place: str, width: int, at: int) -> None:
    """From wherever `stop` is called: what has begun is trained to its end, no more is begun."""
    begun_then: list[int] = []

    def stop(number: int) -> None:
        if number == at and not begun_then:
            begun_then.append(len(study.trials))
            study.stop()

    def suggest(trial: Any) -> Job:
        if place == "suggest":
            stop(trial.number)
        return job_of(trial, lr=trial.suggest_float("lr", 0.01, 0.1))

    def value(job: Job, losses: Any) -> float:
        if place == "value":
            stop(job.seed)
        return float(losses[-1])

    class Stops(samplers.RandomSampler):
        def after_trial(self, study: Any, trial: Any, state: Any, values: Any) -> None:
            stop(trial.number if place == "sampler" else -1)

    class Judges(pruners.NopPruner):
        def prune(self, study: Any, trial: Any) -> bool:
            stop(trial.number if place == "pruner" else -1)
            return False

    study = optuna.create_study(sampler=Stops(seed=0), pruner=Judges())
    callbacks = [lambda study, trial: stop(trial.number if place == "callback" else -1)]
    sweep = ArraySweep(trainer, study, suggest, width, STEPS, [1], value=value, callbacks=callbacks)
    result = sweep.run(9, on_step=lambda job, *_: stop(job.seed if place == "step" else -1))
    (begun,) = begun_then
    assert len(study.trials) == len(result.trials) == begun <= at + width
    assert all(len(row.losses) == STEPS for row in result.trials)
    assert {t.state.name for t in study.trials} == {"COMPLETE"}
    assert len(sweep.run(2).trials) == 2  # another call begins trials again


def test_most_trials() -> None:
    """Optuna's callback counts the trials of all runs."""
    study = optuna.create_study(sampler=samplers.RandomSampler(seed=0))
    seen: list[Any] = []
    callbacks = [optuna.study.MaxTrialsCallback(4), lambda study, trial: seen.append(trial)]
    swept(study, 2, callbacks=callbacks)
    assert 4 <= len(study.trials) <= 5  # the fifth had begun
    assert sorted(t.number for t in seen) == [*range(len(study.trials))]
    assert all(t.state.name == "COMPLETE" and t.value is not None for t in seen)


def test_wrong_callbacks() -> None:
    """Refused by name; and what would never end."""
    study = optuna.create_study()
    for wrong, said in (
        ("stop", r"callbacks: expected a list"),
        ([1], r"callbacks\[0\]: expected"),
    ):
        with pytest.raises(InputError, match=said):
            ArraySweep(trainer, study, on_grid, 1, STEPS, callbacks=wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="n_trials: expected a number of trials"):
        swept(study, 1)


SAMPLERS: dict[str, Any] = {
    "RandomSampler": lambda: samplers.RandomSampler(seed=0),
    "TPESampler": lambda: samplers.TPESampler(seed=0, n_startup_trials=2),
    "TPESampler, groups": lambda: samplers.TPESampler(
        seed=0, n_startup_trials=2, multivariate=True, group=True, constant_liar=True
    ),
    "GPSampler": lambda: samplers.GPSampler(seed=0, n_startup_trials=4),
    "QMCSampler": lambda: samplers.QMCSampler(seed=0),
    "NSGAIISampler": lambda: samplers.NSGAIISampler(seed=0, population_size=2),
    "NSGAIIISampler": lambda: samplers.NSGAIIISampler(seed=0, population_size=2),
    "PartialFixedSampler": lambda: samplers.PartialFixedSampler(
        {"momentum": 0.5}, samplers.RandomSampler(seed=0)
    ),
    "PartialFixedSampler, a grid": lambda: samplers.PartialFixedSampler({}, EXHAUSTIVE["grid"]()),
    "GridSampler": EXHAUSTIVE["grid"],
    "BruteForceSampler": EXHAUSTIVE["brute force"],
}
PRUNERS: dict[str, Any] = {
    "NopPruner": pruners.NopPruner,
    "MedianPruner": lambda: pruners.MedianPruner(n_startup_trials=1),
    "PercentilePruner": lambda: pruners.PercentilePruner(50.0, n_startup_trials=1),
    "SuccessiveHalvingPruner": lambda: pruners.SuccessiveHalvingPruner(1, reduction_factor=2),
    "HyperbandPruner": lambda: pruners.HyperbandPruner(1, STEPS, reduction_factor=2),
    "ThresholdPruner": lambda: pruners.ThresholdPruner(upper=0.1),
    "PatientPruner": lambda: pruners.PatientPruner(pruners.MedianPruner(1), patience=0),
    "WilcoxonPruner": lambda: pruners.WilcoxonPruner(n_startup_steps=1),
}


def test_the_tables_are_whole() -> None:
    """All of Optuna's, but the one that needs a package of its own, and base classes."""
    named = {name.partition(",")[0] for name in SAMPLERS} | PRUNERS.keys() | {"CmaEsSampler"}
    of_optuna = {*samplers.__all__, *pruners.__all__}
    assert named == {
        name
        for name in of_optuna
        if name.endswith(("Sampler", "Pruner")) and not name.startswith("Base")
    }


CASES = [
    *((name, "NopPruner") for name in SAMPLERS),
    *(("RandomSampler", name) for name in PRUNERS),
    ("GridSampler", "HyperbandPruner"),
    ("BruteForceSampler", "HyperbandPruner"),
]


@pytest.mark.parametrize(("sampler", "pruner"), CASES)
def test_samplers_and_pruners(sampler: str, pruner: str) -> None:
    """Seven trials of a grid of six, on two seats: all end in order."""
    study = optuna.create_study(sampler=SAMPLERS[sampler](), pruner=PRUNERS[pruner]())
    result = ArraySweep(trainer, study, on_grid, 2, STEPS, [1, 2]).run(7)
    ended = Counter(t.state.name for t in study.trials)
    assert ended.keys() <= {"COMPLETE", "PRUNED"}
    assert (result.best is None) == (ended["COMPLETE"] == 0)
    once = sampler in ("GridSampler", "BruteForceSampler")
    assert len(result.trials) == len(study.trials) == (6 if once else 7)
