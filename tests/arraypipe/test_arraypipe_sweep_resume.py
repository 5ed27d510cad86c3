"""Sweeps that were broken off: interrupted, killed, resumed; what is left of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from depth import half

torch = pytest.importorskip("torch")
optuna = pytest.importorskip("optuna")

from arraypipe_models import build_model, data, loss  # noqa: E402
from optuna.trial import TrialState  # noqa: E402
from test_arraypipe_sweep import (  # noqa: E402
    NAMES,
    STEPS,
    Doomed,
    assert_alone,
    held_out_loss,
    make_trainer,
    states,
    study_of,
    suggest,
)

from optsched import InputError  # noqa: E402
from optsched.arraypipe.sweep.sweep import ArraySweep, SweepResult  # noqa: E402
from optsched.arraypipe.train_alone import train_alone  # noqa: E402

pytestmark = pytest.mark.torch

optuna.logging.set_verbosity(optuna.logging.WARNING)

if TYPE_CHECKING:
    from optsched.arraypipe import Job


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
        model = torch.load(place / str(done) / "model.pt", weights_only=True)
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
        "import test_arraypipe_sweep_resume as t\n"
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
