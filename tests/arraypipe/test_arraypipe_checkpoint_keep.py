"""Which checkpoints stay: the newest and the best, after any kill; damaged ones are refused."""

from __future__ import annotations

import shutil
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import runs
from arraypipe_lives import Halves, jobs_of, killed_before, same, saved_is_exact, use_folder
from arraypipe_models import trainer
from depth import few_examples
from hypothesis import given, settings
from hypothesis import strategies as st

from optsched import InputError
from optsched.arraypipe import random_schedule
from optsched.arraypipe.checkpoint.files import numbered, train_files
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
    for name in ("notes.txt", "01/model.pt", "1.old/train.pt", "0/train.pt", "0/x"):
        made.append(place / "job0" / name)
        made[-1].parent.mkdir(parents=True, exist_ok=True)
        made[-1].write_text(name)
    return made


def check_foreign(made: list[Path]) -> None:
    """They are as they were."""
    assert all(path.read_text() == str(path).split("job0/")[1] for path in made)


@pytest.mark.parametrize(("keep", "halves"), [(1, False), (2, True), (4, False)])
def test_the_newest_and_the_best_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: int, halves: bool
) -> None:
    """However many processes write; a value that is no number is the worst; only one marks."""
    made = foreign(tmp_path)
    values = [0.5, float("nan"), 0.25, 0.25, 0.75]
    use_folder(monkeypatch, marked(values, halves))
    train(tmp_path, keep=keep)
    newest = range(STEPS + 1 - keep, STEPS + 1)
    assert numbered(tmp_path / "job0") == sorted({*newest} if halves else {3, *newest})
    assert halves or (tmp_path / "job0" / "best").read_text() == "3 0.25\n"
    check_foreign(made)
    assert not list(tmp_path.rglob(".*"))
    values.append(0.125)
    train(tmp_path, STEPS + 1, keep=1)
    assert numbered(tmp_path / "job0") == [STEPS + 1]


# kills


def check_killed(place: Path, before: int) -> int:
    """The newest checkpoint is whole and no older than before, and so is the best; its number."""
    done = saved_is_exact(place, 0)
    assert done >= before
    if (place / "job0" / "best").exists():
        assert int((place / "job0" / "best").read_text().split()[0]) in numbered(place / "job0")
    return done


@settings(max_examples=settings().max_examples // 3)
@given(
    moments=st.lists(st.integers(3, 130), min_size=1, max_size=2),
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

    def run() -> None:
        use_folder(pytest.MonkeyPatch(), marked(values, halves))
        train(place, keep=keep)

    for moment in moments:
        killed_before(moment, run)
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


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints after each of three iterations."""
    place = tmp_path_factory.mktemp("three")
    train(place, 3, keep=3)
    return place


@few_examples
@given(
    name=st.sampled_from(["model-00002-of-00003.safetensors", "train-00001-of-00003.pt"]),
    cut=st.floats(0, 0.999),
    how=st.sampled_from(["cut", "zeros", "gone", "flip"]),
)
def test_damage_is_found(
    three: Path, tmp_path_factory: pytest.TempPathFactory, name: str, cut: float, how: str
) -> None:
    """And the one before is named, unless the bytes do not matter."""
    place = tmp_path_factory.mktemp("damage")
    shutil.copytree(three, place, dirs_exist_ok=True)
    path = place / "job0" / "3" / name
    whole = path.read_bytes()
    at = int(cut * len(whole))
    if how == "gone":
        path.unlink()
    elif how == "flip":
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :])
    else:
        path.write_bytes(whole[:at] + bytes(len(whole) - at) * (how == "zeros"))
    folder = CheckpointFolder(place, (), None)
    try:
        assert folder.latest("job0") == 3
        assert how in ("flip", "zeros") and "train" in name
    except InputError as error:
        assert "iteration 2 is complete: remove the newer folders" in str(error)
        shutil.rmtree(place / "job0" / "3")
        assert folder.latest("job0") == 2


def test_the_one_before_is_gone_on_from_when_the_damaged_one_is_removed(
    three: Path, tmp_path: Path
) -> None:
    """To the bits of a run without a break; with none that is whole, the sentence says so."""
    shutil.copytree(three, tmp_path, dirs_exist_ok=True)
    place = tmp_path / "job0"
    min((place / "3").glob("model-*")).write_bytes(b"half")
    with pytest.raises(InputError, match=r"job0/3: model-00001.*; iteration 2 is complete"):
        train(tmp_path)
    with pytest.raises(InputError, match="already has checkpoints"):
        train(tmp_path, resume=False)
    shutil.rmtree(place / "3")
    assert same(train(tmp_path).trained[0], 0, STEPS, start=2)
    for done in numbered(place):
        train_files(place / str(done))[0].write_bytes(b"half")
    with pytest.raises(InputError, match=r"job0/5: train-0.* cannot be read .* no older checkpoi"):
        train(tmp_path, 9)
