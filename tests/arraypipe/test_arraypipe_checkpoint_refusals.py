"""What is not resumed or written: other models, settings and optimizers, damaged files, folders."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from arraypipe_models import adamw, build_model, sgd, trainer
from runs import run
from test_arraypipe_checkpoint import JOBS, ORDER, files, same_state
from torch import nn

from optsched import InputError
from optsched.arraypipe import Job, JobFailed, random_schedule
from optsched.arraypipe.checkpoint import files as checkpoint_files


class Kind(int):
    """No plain value: `torch.load(weights_only=True)` would not read it."""


def built(p: float = 0.3, shape: Any = (), kind: Any = None, width: int = 12) -> nn.Sequential:
    """The tiny model with another dropout rate; `shape` and `kind` change nothing."""
    model = build_model(width)
    model[2].p = float(p)
    return model


def without_norm(**given: Any) -> nn.Sequential:
    """The same, its first normalisation left out."""
    return nn.Sequential(*(layer for k, layer in enumerate(built(**given)) if k != 1))


SCHEDULE = random_schedule([1], 3)
MODEL = {"p": 0.1, "shape": [1, (2, None), {"a": float("nan")}], "kind": Kind(3)}


def resume(folder: Path, steps: int = 4, resume: bool = True, **changes: Any) -> Any:
    """Go on with a job of other settings, or another model."""
    build = changes.pop("build_model", built)
    settings = {"seed": 0, "batch_size": 8, "optimizer": adamw, "model": MODEL, **changes}
    array = trainer([Job(**settings)], build_model=build)
    return run(array, SCHEDULE, steps, checkpoint=folder, resume=resume)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint after two iterations."""
    folder = tmp_path_factory.mktemp("written")
    resume(folder, 2)
    train = torch.load(folder / "job0" / "2" / "train.pt", weights_only=True)
    assert train["model"].keys() == {"p", "shape"} and train["model_other"] == ["kind"]
    return folder


def plain_adamw(**settings: Any) -> Any:
    """A maker of AdamW with other settings than `adamw`."""
    return lambda named: torch.optim.AdamW(named, **{"lr": 1e-2, "weight_decay": 0.1, **settings})


def model(**changes: Any) -> dict[str, Any]:
    """Other arguments of the model; `...`: not given."""
    return {"model": {k: v for k, v in {**MODEL, **changes}.items() if v is not ...}}


OTHERS: list[tuple[dict[str, Any], str]] = [
    ({"resume": False}, "already has checkpoints"),
    ({"steps": 1}, "has already done 2 iterations"),
    ({"seed": 1}, "seed 0, the job has 1"),
    ({"batch_size": 9}, "batch_size 8, the job has 9"),
    # another model is named by its own tensor, not by what the optimizer has of it
    ({"build_model": lambda **given: built(**given, width=13)}, "'0.weight' is"),
    ({"build_model": without_norm},
     "model.pt: (the model has no '1.weight'|the checkpoint has no '2.weight'); it belongs to an"),
    # arguments of the model have to be what they were, as far as they can be kept
    (model(p=0.6), r"was written with model\['p'\] 0.1, the job has 0.6"),
    (model(p=...), r"model\['p'\] 0.1, the job has '\(not set\)'"),
    (model(p="0.1"), "0.1, the job has '0.1'"),
    (model(shape=[1, (3, None), {"a": float("nan")}]), r"model\['shape'\] \[1, \(2, None\)"),
    (model(shape=[1, (2, None), {"b": float("nan")}]), r"model\['shape'\] \[1, \(2, None\)"),
    # class and settings of the optimizer, also where nothing is left to do
    *(({"optimizer": sgd, "steps": steps},
       r"class 'torch.optim.adamw.AdamW' for '0.weight', the job has 'torch.optim.sgd.SGD'")
      for steps in (2, 4)),
    ({"optimizer": plain_adamw(lr=0.1)}, r"setting 'lr' 0.01 for '0.weight', the job has 0.1"),
    ({"optimizer": plain_adamw(lr=torch.tensor(0.01))},
     r"'lr' 0.01 for '0.weight', the job has tensor\(0.01"),
    ({"optimizer": plain_adamw(weight_decay=0.0)}, r"'weight_decay' 0.1 for '0.weight', the job h"),
    ({"optimizer": plain_adamw(betas=(0.9, 0.9))}, r"'betas' \(0.9, 0.999\) for '0.weight', the"),
    ({"optimizer": plain_adamw(amsgrad=True)}, r"'amsgrad' False for '0.weight', the job has True"),
    ({"optimizer": lambda named: adamw([p for p in named if p[0] != "0.bias"])},
     r"does not train '0.bias'"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "sentence"), OTHERS)
def test_another_job_is_refused(written: Path, changes: dict[str, Any], sentence: str) -> None:
    """With one sentence; no file changes."""
    before = files(written)
    with pytest.raises(InputError, match=sentence):
        resume(written, **changes)
    assert files(written) == before


@pytest.mark.parametrize(
    "changes",
    [{"shape": (1, [2, None], {"a": float("nan")})}, {"kind": Kind(4)}, {"kind": 3},
     {"kind": ...}, {"p": Kind(0)}],
)  # fmt: skip
def test_what_cannot_be_kept_is_not_compared(
    written: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """Arguments of the model that are no plain values; lists and tuples are alike."""
    shutil.copytree(written, tmp_path, dirs_exist_ok=True)
    assert len(resume(tmp_path, **model(**changes)).losses[0]) == 2


def torn(place: Path) -> None:
    """Half a file."""
    whole = (place / "model.pt").read_bytes()
    (place / "model.pt").write_bytes(whole[: len(whole) // 2])


def renamed(place: Path) -> None:
    """A folder that says another iteration than the file in it would be trained on wrongly."""
    place.rename(place.with_name("1"))
    (place.parent / "latest").write_text("1\n")


def pointing(text: str) -> Any:
    """The file of the newest iteration has this text."""
    return lambda place: (place.parent / "latest").write_text(text)


def saved(name: str, value: Any) -> Any:
    """A file has this value, or what is made of the value that it has."""

    def save(place: Path) -> None:
        whole = torch.load(place / name, weights_only=True)
        torch.save(value(whole) if callable(value) else value, place / name)
        if name == "model.pt":  # as if it had been written so
            field("model_checksum")(place)

    return save


def field(key: str, *value: str) -> Any:
    """A field of ``train.pt`` has another value, or is missing."""
    return saved("train.pt", lambda whole: {k: v for k, v in whole.items() if k != key}
                 | dict.fromkeys([key] * len(value), *value))  # fmt: skip


# other cuts or threads are warned of; the states alone tell the optimizer's class
TYPED = ("parameters", "buffers", "model", "iteration", "optimizer", "scheduler", "batch")
NEEDED = ("parameters", "buffers", "stages", "threads", "iteration", "batch")
DAMAGE: dict[str, tuple[Any, str]] = {
    "no number": (pointing("two"), "of an iteration"),
    "large number": (pointing("9" * 5000), "of an iteration"),
    "torn": (torn, "cannot be read"),
    "another model": (saved("model.pt", {"0.weight": torch.zeros(1)}), "checkpoint has no|'0.weig"),
    "a tensor missing": (
        saved("model.pt", lambda whole: {k: v for k, v in whole.items() if k != "1.weight"}),
        "the checkpoint has no '1.weight'",
    ),
    "no tensors": (saved("model.pt", lambda whole: dict.fromkeys(whole, "x")), "is damaged, or no"),
    "a list": (saved("train.pt", [1, 2]), "is not a checkpoint"),
    "renamed": (renamed, "was written after iteration 2"),
    **{f"wrong {key}": (field(key, "x"), "job0/2") for key in TYPED},
    **{f"no {key}": (field(key), "job0/2") for key in NEEDED},
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_a_sentence(written: Path, tmp_path: Path, case: str) -> None:
    """That names the folder or what is wrong in it."""
    shutil.copytree(written, tmp_path, dirs_exist_ok=True)
    damage, sentence = DAMAGE[case]
    damage(tmp_path / "job0" / "2")
    with pytest.raises(InputError, match=sentence):
        resume(tmp_path)


def test_resume_compares_what_optimizers_were_made_with(tmp_path: Path) -> None:
    """A class that changes its own settings can be resumed, to the same bits."""
    array = trainer([Job(0, 8, lambda named: Cooling(named, lr=0.1))])
    run(array, random_schedule([1], 3), 2, checkpoint=tmp_path)
    result = run(array, random_schedule([1], 3), 4, checkpoint=tmp_path, resume=True)
    again = run(array, random_schedule([1], 3), 5, checkpoint=tmp_path, resume=True)
    assert same_state(result.trained[0], array.train_alone(0, 4)) == []
    assert same_state(again.trained[0], array.train_alone(0, 5)) == []


def test_resume_with_other_threads_warns(tmp_path: Path) -> None:
    """Sums may be split otherwise by another number of threads: the user is told."""
    schedule = random_schedule([1], 3)
    run(trainer(JOBS[:1]), schedule, 1, checkpoint=tmp_path)
    torch.set_num_threads(2)
    try:
        with pytest.warns(UserWarning, match="was written with 1 threads, there are 2 now"):
            run(trainer(JOBS[:1]), schedule, 2, checkpoint=tmp_path, resume=True)
    finally:
        torch.set_num_threads(1)


def test_processes_may_prepare_at_the_same_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that tidies up takes away what the other one tries the folder with, or just not."""
    honest = Path.rmdir

    def rmdir(probe: Path) -> None:
        checkpoint_files.sweep(tmp_path)
        honest(probe)

    monkeypatch.setattr(Path, "rmdir", rmdir)
    checkpoint_files.check_writable(tmp_path)
    monkeypatch.undo()
    (tmp_path / ".tmp-x").mkdir()
    remove = checkpoint_files.shutil.rmtree

    def rmtree(entry: Path, **given: Any) -> None:
        remove(entry)
        remove(entry)

    monkeypatch.setattr(checkpoint_files.shutil, "rmtree", rmtree)
    checkpoint_files.sweep(tmp_path)
    monkeypatch.undo()
    assert not list(tmp_path.iterdir())


def test_unwritable_folder_is_refused_before_training(tmp_path: Path) -> None:
    """A folder that cannot be made is found out before the first step."""
    (tmp_path / "file").write_text("")
    steps: list[int] = []
    with pytest.raises(InputError, match="cannot be written"):
        run(
            trainer(JOBS),
            random_schedule(**ORDER),
            1,
            checkpoint=tmp_path / "file",
            on_step=lambda *a: steps.append(1),
        )
    assert not steps


class Cooling(torch.optim.SGD):
    """Halves its own learning rate after every step."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step."""
        super().step()
        for group in self.param_groups:
            group["lr"] /= 2


class Odd(torch.optim.SGD):
    """Keeps an object in its state."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step."""
        super().step()
        for p in self.param_groups[0]["params"]:
            self.state[p]["odd"] = frozenset()


def test_state_that_cannot_be_kept_is_named(tmp_path: Path) -> None:
    """An optimizer state that `weights_only` could not load is refused, not pickled."""
    with pytest.raises(JobFailed, match="odd: a frozenset cannot be kept"):
        run(
            trainer([Job(0, 8, lambda p: Odd(p, lr=0.1))]),
            random_schedule([1], 3),
            1,
            checkpoint=tmp_path,
        )
    assert not list(tmp_path.rglob("*.pt"))


class Counting(torch.optim.lr_scheduler.LRScheduler):
    """Keeps in its state how many parameters its optimizer has, other numbers on every stage."""

    def get_lr(self) -> Any:
        """Smaller with every step."""
        self.count = sum(len(group["params"]) for group in self.optimizer.param_groups)
        return [group["lr"] * 0.9 for group in self.optimizer.param_groups]


def test_a_scheduler_that_differs_between_stages_is_named(tmp_path: Path) -> None:
    """The state is kept once for all stages, so it must be the same on all of them."""
    sentence = r"the scheduler of job job0 has another 'count' on every stage, .*: 6 and 2"
    with pytest.raises(JobFailed, match=sentence):
        run(
            trainer([Job(0, 8, adamw, scheduler=lambda o: Counting(o))]),
            random_schedule([1], 3),
            1,
            checkpoint=tmp_path,
        )
