"""Which checkpoints stay: the newest and the best, after any kill; damaged ones are passed over."""

from __future__ import annotations

import shutil
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import runs
import torch
from arraypipe_lives import Halves, jobs_of, killed_before, same, saved_is_exact
from arraypipe_models import data, sgd, trainer
from hypothesis import given
from hypothesis import strategies as st

from optsched import InputError
from optsched.arraypipe import Job, RunConfig, random_schedule
from optsched.arraypipe import trainer as trainer_module
from optsched.arraypipe.callbacks import BestCheckpoint
from optsched.arraypipe.checkpoint.files import numbered
from optsched.arraypipe.checkpoint.folder import CheckpointFolder

if TYPE_CHECKING:
    from pathlib import Path


STEPS = 5
ORDER = random_schedule([1], 3, seed=2)


def marked(values: list[float], halves: bool) -> type[CheckpointFolder]:
    """A folder that is told of a value when the last stage has done an iteration."""
    if halves:
        return Halves

    class Marked(CheckpointFolder):
        def note(self, run: Any, stage: int, iteration: int) -> None:
            super().note(run, stage, iteration)
            seen.append(iteration)
            if seen.count(iteration) == len(run.stages):
                self.mark_best(run, iteration + 1, values[iteration])

    seen: list[int] = []

    return Marked


def train(place: Path, steps: int = STEPS, **given: Any) -> Any:
    """Go on, with a checkpoint after every iteration."""
    how = {"checkpoint": place, "checkpoint_every": 1, "resume": True, **given}
    return runs.run(trainer(jobs_of(1)), ORDER, steps, **how)


def foreign(place: Path) -> list[Path]:
    """Files of the user between ours, which nothing may change."""
    made = []
    for name in ("notes.txt", "01/model.pt", "1.old/train.pt", "0/model.pt", "0/train.pt", "0/x"):
        made.append(place / "job0" / name)
        made[-1].parent.mkdir(parents=True, exist_ok=True)
        made[-1].write_text(name)
    return made


def check_foreign(made: list[Path]) -> None:
    """They are as they were."""
    assert all(path.read_text() == str(path).split("job0/")[1] for path in made)


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("keep", [1, 2, 4])
def test_the_newest_and_the_best_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: int, halves: bool
) -> None:
    """However many processes write; a value that is no number is the worst; only one marks."""
    made = foreign(tmp_path)
    values = [0.5, float("nan"), 0.25, 0.25, 0.75]
    monkeypatch.setattr(trainer_module, "CheckpointFolder", marked(values, halves))
    train(tmp_path, keep=keep)
    newest = range(STEPS + 1 - keep, STEPS + 1)
    assert numbered(tmp_path / "job0") == sorted({*newest} if halves else {3, *newest})
    assert halves or (tmp_path / "job0" / "best").read_text() == "3 0.25\n"
    check_foreign(made)
    assert not list(tmp_path.rglob(".*"))
    values.append(0.125)
    train(tmp_path, STEPS + 1, keep=1)
    assert numbered(tmp_path / "job0") == [STEPS + 1]


def test_only_a_checkpoint_can_be_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of iterations that are not written are passed over."""
    monkeypatch.setattr(trainer_module, "CheckpointFolder", marked([1.0, 3.0, 0.0, 4.0], False))
    train(tmp_path, 4, checkpoint_every=2)
    assert (tmp_path / "job0" / "best").read_text() == "2 3.0\n"


@pytest.mark.parametrize("keep", [0, True, 1.5, None])
def test_wrong_numbers_to_keep(tmp_path: Path, keep: Any) -> None:
    """Refused before anything is made."""
    with pytest.raises(InputError, match=f"^keep: expected an integer >= 1, got {keep}"):
        train(tmp_path / "c", keep=keep)
    assert not (tmp_path / "c").exists()


# kills


def kill(moment: int, place: Path, keep: int, values: list[float], halves: bool) -> bool:
    """Train in a child that is killed before its n-th change of files; whether it came to that."""

    def run() -> None:
        trainer_module.CheckpointFolder = marked(values, halves)  # type: ignore[misc]
        train(place, keep=keep)

    return killed_before(moment, run)


def check_killed(place: Path, before: int) -> int:
    """The newest checkpoint is whole and no older than before, and so is the best; its number."""
    done = saved_is_exact(place, 0)
    assert done >= before
    if (place / "job0" / "best").exists():
        assert int((place / "job0" / "best").read_text().split()[0]) in numbered(place / "job0")
    return done


@given(
    moments=st.lists(st.integers(3, 130), min_size=1, max_size=3),
    keep=st.integers(1, 3),
    values=st.permutations([float(k) for k in range(STEPS)]),
    halves=st.booleans(),
)
def test_any_kills_leave_a_whole_checkpoint(
    tmp_path_factory: pytest.TempPathFactory,
    moments: list[int],
    keep: int,
    values: list[float],
    halves: bool,
) -> None:
    """Kills while older ones are removed too, one after the other; the rest is trained exactly."""
    place, done = tmp_path_factory.mktemp("kills"), 0
    made = foreign(place)
    for moment in moments:
        kill(moment, place, keep, values, halves)
        done = check_killed(place, done)
        check_foreign(made)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as of a damaged checkpoint
        result = train(place, keep=keep)
    assert same(result.trained[0], 0, STEPS, start=done)
    assert check_killed(place, done) == STEPS
    left = numbered(place / "job0")
    newest = range(STEPS + 1 - keep, STEPS + 1)
    assert set(newest) <= {*left, *range(done)} and len(left) <= keep + 1
    check_foreign(made)
    assert not list(place.rglob(".*"))


# damage


@given(
    name=st.sampled_from(["model.pt", "train.pt"]),
    cut=st.floats(0, 0.999),
    how=st.sampled_from(["cut", "zeros", "gone", "flip"]),
)
def test_a_damaged_newest_checkpoint_falls_back(
    tmp_path_factory: pytest.TempPathFactory, name: str, cut: float, how: str
) -> None:
    """To the one before, with a warning that says why; bytes that do not matter do not."""
    place = tmp_path_factory.mktemp("damage")
    train(place, 3)
    path = place / "job0" / "3" / name
    whole = path.read_bytes()
    at = int(cut * len(whole))
    if how == "gone":
        path.unlink()
    elif how == "flip":
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :])
    else:
        path.write_bytes(whole[:at] + bytes(len(whole) - at) * (how == "zeros"))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        result = train(place)
    sentences = [str(one.message) for one in told]
    start = 2 if sentences else 3
    assert same(result.trained[0], 0, STEPS, start=start)
    if start == 3:
        assert how in ("flip", "zeros")
        return
    assert f"{place}/job0/3: {name}" in sentences[0] and len(sentences) == 1
    assert "job job0 goes on from iteration 2" in sentences[0]
    assert numbered(place / "job0") == [4, 5]
    assert (place / "job0" / "3.damaged").is_dir()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(place, STEPS + 1)


def test_a_pointer_without_its_checkpoint(tmp_path: Path) -> None:
    """Somebody has taken it away: the one before is meant, if there is one."""
    train(tmp_path, 2)
    (tmp_path / "job0" / "latest").write_text("7\n")
    with pytest.warns(UserWarning, match=r"job0/7: model.pt: no such file; .* from iteration 2"):
        assert same(train(tmp_path).trained[0], 0, STEPS, start=2)
    for done in numbered(tmp_path / "job0"):
        (tmp_path / "job0" / str(done) / "train.pt").write_bytes(b"half")
    with pytest.raises(InputError, match=r"job0/5: train.pt cannot be read .* no older checkpoint"):
        train(tmp_path, 9)


@pytest.mark.parametrize("name", ["model.pt", "train.pt"])
def test_files_of_two_checkpoints_are_none(tmp_path: Path, name: str) -> None:
    """As a copy that was broken off leaves them: the one before is gone on from."""
    train(tmp_path, 3)
    shutil.copy(tmp_path / "job0" / "2" / name, tmp_path / "job0" / "3" / name)
    with pytest.warns(UserWarning, match="3: model.pt is not the one that train.pt was written"):
        assert same(train(tmp_path).trained[0], 0, STEPS, start=2)


def test_a_damaged_checkpoint_is_told_once(tmp_path: Path) -> None:
    """Also by `fit`, which looks at the folder before the run does."""
    config = RunConfig(every=1, check=0, verbose=False)
    trainer(jobs_of(1)).fit(jobs_of(1), 3, schedule=ORDER, checkpoint=tmp_path, config=config)
    (tmp_path / "job0" / "3" / "model.pt").write_bytes(b"half")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer(jobs_of(1)).fit(
            jobs_of(1), 4, schedule=ORDER, checkpoint=tmp_path, resume=True, config=config
        )
    assert ["goes on from iteration 2" in str(one.message) for one in told] == [True]


def test_checkpoints_without_a_pointer(tmp_path: Path) -> None:
    """Somebody has removed `latest`: the newest that is there is gone on from, or refused."""
    train(tmp_path, 3)
    (tmp_path / "job0" / "latest").unlink()
    with pytest.raises(InputError, match="already has checkpoints"):
        train(tmp_path, resume=False)
    assert same(train(tmp_path).trained[0], 0, STEPS, start=3)


def test_a_foreign_best_file_is_a_sentence(tmp_path: Path) -> None:
    """`<job>.best.pt` of somebody else, and a `best` of somebody else, which is passed over."""
    best = BestCheckpoint(tmp_path)
    config = RunConfig(every=1, check=0, verbose=False)

    def fit(steps: int) -> None:
        trainer(jobs_of(1)).fit(
            jobs_of(1), steps, schedule=ORDER, checkpoint=tmp_path, resume=True, callbacks=[best],
            evaluate=lambda model: 1.0, config=config,
        )  # fmt: skip

    fit(1)
    (tmp_path / "job0" / "best").write_text("of somebody else")
    fit(2)
    torch.save({"epoch": 3}, tmp_path / "job0.best.pt")
    best.best.clear()
    with pytest.raises(InputError, match=r"job0\.best\.pt: is no file of BestCheckpoint"):
        fit(3)


# data


def ignoring(job: Job, start: int) -> Any:
    """Begins anew whatever it is asked for."""
    return data(job, 0)


def by_the_global_state(job: Job, start: int) -> Any:
    """Other batches every time."""
    while True:
        yield torch.rand(8, 6), torch.randint(4, (8,))


def constant(job: Job, start: int) -> Any:
    """All there is in every batch."""
    while True:
        yield next(data(job, 0))


def rounded(job: Job, start: int) -> Any:
    """As another processor may round them."""
    for x, y in data(job, start):
        yield x * (1 + 1e-6 * (start > 0)), y


def no_number(job: Job, start: int) -> Any:
    """After a break the first input is none."""
    for x, y in data(job, start):
        yield x * (float("nan") if start else 1), y


def grown(job: Job, start: int) -> Any:
    """One sample more after a break."""
    for x, y in data(job, start):
        yield (x, y) if start == 0 else (x[1:], y[1:])


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize(
    ("batches", "what"),
    [
        (ignoring, r"part 0 has -?\d.* where it had "),
        (by_the_global_state, r"part 0 has .* where it had "),
        (no_number, "part 0 has nan where it had "),
        (grown, r"part 0 has shape \(7, 6\), not \(8, 6\)"),
    ],
)
def test_other_data_on_resume_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batches: Any, what: str, halves: bool
) -> None:
    """Nothing is trained; the sentence says what differs and what data must do."""
    if halves:
        monkeypatch.setattr(trainer_module, "CheckpointFolder", Halves)
    given: dict[str, Any] = {"checkpoint": tmp_path, "checkpoint_every": 2}
    runs.run(trainer([Job(0, 8, sgd)], data=batches), ORDER, 2, **given)
    steps: list[int] = []
    with pytest.raises(
        InputError, match=rf"job job0: data\(job, 1\) begins .* iteration 1 .*{what}"
    ):
        runs.run(
            trainer([Job(0, 8, sgd)], data=batches),
            ORDER,
            4,
            resume=True,
            on_step=lambda job, t, x: steps.append(t),
            **given,
        )
    assert steps == []


def test_data_that_are_the_same_are_gone_on_with(tmp_path: Path) -> None:
    """Equal batches, and one batch of data that ignore `start`, which are the right ones then."""
    runs.run(trainer([Job(0, 8, sgd)], data=rounded), ORDER, 2, checkpoint=tmp_path / "c")
    runs.run(
        trainer([Job(0, 8, sgd)], data=rounded), ORDER, 3, checkpoint=tmp_path / "c", resume=True
    )
    for name, batches, first in (("a", constant, 2), ("b", ignoring, 1)):
        array = trainer([Job(0, 8, sgd)], data=batches)
        runs.run(array, ORDER, first, checkpoint=tmp_path / name)
        result = runs.run(array, ORDER, 4, checkpoint=tmp_path / name, resume=True)
        alone = array.train_alone(0, 4)
        for key, value in result.trained[0].parameters.items():
            assert torch.equal(value, alone.parameters[key])
