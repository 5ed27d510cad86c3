"""What is not resumed or written: other models, settings and optimizers, damaged files, folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from arraypipe_models import adamw, build_model, sgd, trainer  # noqa: E402
from test_arraypipe_checkpoint import JOBS, ORDER, files, same_state  # noqa: E402
from torch import nn  # noqa: E402

from optsched import InputError  # noqa: E402
from optsched.arraypipe import (  # noqa: E402
    ArrayTrainer,
    Job,
    random_schedule,
)
from optsched.arraypipe.checkpoint import files as checkpoint_files  # noqa: E402

pytestmark = pytest.mark.torch


def test_refused_resumes(tmp_path: Path) -> None:
    """Another job, another model, other cuts or a broken file: one sentence each."""
    jobs, schedule = [Job(0, 8, adamw)], random_schedule([1], 3)
    trainer(jobs).run(schedule, 2, checkpoint=tmp_path)

    def refused(sentence: str, steps: int = 4, resume: bool = True, **changes: Any) -> None:
        array = trainer(changes.pop("jobs", jobs), **changes)
        with pytest.raises(InputError, match=sentence):
            array.run(schedule, steps, checkpoint=tmp_path, resume=resume)

    refused("already has checkpoints", resume=False)
    refused("has already done 2 iterations", steps=1)
    refused("seed 0, the job has 1", jobs=[Job(1, 8, adamw)])
    refused("batch_size 8, the job has 9", jobs=[Job(0, 9, adamw)])
    refused("'0.weight' is", build_model=lambda: build_model(13))
    latest = tmp_path / "job0" / "latest"
    for text in ("two", "9" * 5000):
        latest.write_text(text)
        refused("of an iteration")
    latest.write_text("2\n")
    model = tmp_path / "job0" / "2" / "model.pt"
    whole = model.read_bytes()
    model.write_bytes(whole[: len(whole) // 2])
    refused("cannot be read")
    torch.save({"0.weight": torch.zeros(1)}, model)
    refused("the checkpoint has no|'0.weight' is")
    torch.save([1, 2], tmp_path / "job0" / "2" / "train.pt")
    refused("is not a checkpoint")


def without_norm(norm: bool = True) -> nn.Sequential:
    """The tiny model, its first normalisation left out or not."""
    return nn.Sequential(*(m for k, m in enumerate(build_model()) if norm or k != 1))


@pytest.mark.parametrize(
    ("written", "resumed", "sentence"),
    [
        (True, False, "the model has no '1.weight'|the checkpoint has no '2.weight'"),
        (False, True, "the checkpoint has no '1.weight'"),
    ],
)
def test_another_model_is_named_by_its_own_tensor(
    tmp_path: Path, written: bool, resumed: bool, sentence: str
) -> None:
    """Not by what the optimizer has of it; missing or unexpected."""
    schedule = random_schedule([1], 3)

    def array(norm: bool) -> ArrayTrainer:
        return trainer([Job(0, 8, sgd)], build_model=lambda: without_norm(norm))

    array(written).run(schedule, 2, checkpoint=tmp_path)
    with pytest.raises(InputError, match=rf"model.pt: ({sentence}); it belongs to another model"):
        array(resumed).run(schedule, 4, checkpoint=tmp_path, resume=True)


class Kind(int):
    """No plain value: `torch.load(weights_only=True)` would not read it."""


def dropping(p: float = 0.3, shape: Any = (), kind: Any = None) -> nn.Sequential:
    """The tiny model with another dropout rate; the other arguments change nothing."""
    model = build_model()
    model[2].p = float(p)
    return model


WRITTEN = {"p": 0.1, "shape": [1, (2, None), {"a": float("nan")}], "kind": Kind(3)}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"p": 0.6}, r"was written with model\['p'\] 0.1, the job has 0.6"),
        ({"p": ...}, r"model\['p'\] 0.1, the job has '\(not set\)'"),
        ({"p": "0.1"}, "0.1, the job has '0.1'"),
        ({"shape": [1, (3, None), {"a": float("nan")}]}, r"model\['shape'\] \[1, \(2, None\)"),
        ({"shape": [1, (2, None), {"b": float("nan")}]}, r"model\['shape'\] \[1, \(2, None\)"),
        ({"shape": (1, [2, None], {"a": float("nan")})}, ""),
        ({"kind": Kind(4)}, ""),
        ({"kind": 3}, ""),
        ({"kind": ...}, ""),
        ({"p": Kind(0)}, ""),
    ],
)
def test_resume_compares_plain_arguments_of_the_model(
    tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    """`Job.model` has to be what it was, as far as it can be kept."""

    def array(given: dict[str, Any]) -> ArrayTrainer:
        model = {key: value for key, value in given.items() if value is not ...}
        return trainer([Job(0, 8, adamw, model=model)], build_model=dropping)

    schedule, place = random_schedule([1], 3), tmp_path / "job0" / "2" / "train.pt"
    array(WRITTEN).run(schedule, 2, checkpoint=tmp_path)
    train = torch.load(place, weights_only=True)
    assert train["model"].keys() == {"p", "shape"} and train["model_other"] == ["kind"]
    other = array({**WRITTEN, **changes})
    if sentence:
        with pytest.raises(InputError, match=sentence):
            other.run(schedule, 4, checkpoint=tmp_path, resume=True)
    else:
        other.run(schedule, 4, checkpoint=tmp_path, resume=True)


@pytest.mark.parametrize(
    "key",
    ["parameters", "buffers", "model", "stages", "threads", "iteration", "optimizer", "scheduler",
     "batch"],
)  # fmt: skip
def test_damaged_fields_are_a_sentence(tmp_path: Path, key: str) -> None:
    """A field that is missing or has another type is told by the name of the folder."""
    jobs, schedule = [Job(0, 8, adamw)], random_schedule([1], 3)
    trainer(jobs).run(schedule, 2, checkpoint=tmp_path)
    place = tmp_path / "job0" / "2"
    whole = torch.load(place / "train.pt", weights_only=True)
    left = {k: v for k, v in whole.items() if k != key}
    for broken in ({**left, key: "x"}, left):
        if key in ("stages", "threads") and key in broken:
            continue  # other cuts or threads: warned of
        if key in ("optimizer", "scheduler", "model") and key not in broken:
            continue  # told by the states alone
        torch.save(broken, place / "train.pt")
        with pytest.raises(InputError, match="job0/2"):
            trainer(jobs).run(schedule, 4, checkpoint=tmp_path, resume=True)
    torch.save(whole, place / "train.pt")
    torch.save(dict.fromkeys(torch.load(place / "model.pt", weights_only=True), "x"),
               place / "model.pt")  # fmt: skip
    with pytest.raises(InputError, match="is damaged, or no checkpoint"):
        trainer(jobs).run(schedule, 4, checkpoint=tmp_path, resume=True)


def test_renamed_checkpoint_is_refused(tmp_path: Path) -> None:
    """A folder that says another iteration than the file in it would be trained on wrongly."""
    jobs, schedule = [Job(0, 8, adamw)], random_schedule([1], 3)
    trainer(jobs).run(schedule, 2, checkpoint=tmp_path)
    (tmp_path / "job0" / "2").rename(tmp_path / "job0" / "1")
    (tmp_path / "job0" / "latest").write_text("1\n")
    with pytest.raises(InputError, match="was written after iteration 2"):
        trainer(jobs).run(schedule, 4, checkpoint=tmp_path, resume=True)


def plain_adamw(**settings: Any) -> Any:
    """A maker of AdamW with other settings than `adamw`."""
    return lambda named: torch.optim.AdamW(named, **{"lr": 1e-2, "weight_decay": 0.1, **settings})


OTHER_OPTIMIZERS = [
    (sgd, r"class 'torch.optim.adamw.AdamW' for '0.weight', the job has 'torch.optim.sgd.SGD'"),
    (plain_adamw(lr=0.1), r"setting 'lr' 0.01 for '0.weight', the job has 0.1"),
    (plain_adamw(lr=torch.tensor(0.01)), r"'lr' 0.01 for '0.weight', the job has tensor\(0.01"),
    (plain_adamw(weight_decay=0.0), r"'weight_decay' 0.1 for '0.weight', the job has 0.0"),
    (plain_adamw(betas=(0.9, 0.9)), r"'betas' \(0.9, 0.999\) for '0.weight', the job has"),
    (plain_adamw(amsgrad=True), r"'amsgrad' False for '0.weight', the job has True"),
    (lambda named: adamw([p for p in named if p[0] != "0.bias"]), r"does not train '0.bias'"),
]  # fmt: skip


@pytest.mark.parametrize(("other", "sentence"), OTHER_OPTIMIZERS)
@pytest.mark.parametrize("steps", [2, 4])
def test_resume_with_another_optimizer_is_refused(
    tmp_path: Path, other: Any, sentence: str, steps: int
) -> None:
    """Class and settings are part of the job: others are named, and nothing is run."""
    jobs, schedule = [Job(1, 8, sgd), Job(0, 8, adamw, name="second")], random_schedule([1, 1], 3)
    trainer(jobs).run(schedule, 2, checkpoint=tmp_path)
    before, ran = files(tmp_path), []
    changed = [jobs[0], Job(0, 8, other, name="second")]
    with pytest.raises(InputError, match=f"of job second: .*{sentence}"):
        trainer(changed).run(
            schedule, steps, checkpoint=tmp_path, resume=True, on_step=lambda *a: ran.append(a)
        )
    assert not ran
    assert files(tmp_path) == before


def test_resume_compares_what_optimizers_were_made_with(tmp_path: Path) -> None:
    """A class that changes its own settings can be resumed, to the same bits."""
    array = trainer([Job(0, 8, lambda named: Cooling(named, lr=0.1))])
    array.run(random_schedule([1], 3), 2, checkpoint=tmp_path)
    result = array.run(random_schedule([1], 3), 4, checkpoint=tmp_path, resume=True)
    again = array.run(random_schedule([1], 3), 5, checkpoint=tmp_path, resume=True)
    assert same_state(result.trained[0], array.train_alone(0, 4)) == []
    assert same_state(again.trained[0], array.train_alone(0, 5)) == []


def test_resume_with_other_threads_warns(tmp_path: Path) -> None:
    """Sums may be split otherwise by another number of threads: the user is told."""
    schedule = random_schedule([1], 3)
    trainer(JOBS[:1]).run(schedule, 1, checkpoint=tmp_path)
    torch.set_num_threads(2)
    try:
        with pytest.warns(UserWarning, match="was written with 1 threads, there are 2 now"):
            trainer(JOBS[:1]).run(schedule, 2, checkpoint=tmp_path, resume=True)
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
        trainer(JOBS).run(
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
    with pytest.raises(InputError, match="odd: a frozenset cannot be kept"):
        trainer([Job(0, 8, lambda p: Odd(p, lr=0.1))]).run(
            random_schedule([1], 3), 1, checkpoint=tmp_path
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
    with pytest.raises(InputError, match=sentence):
        trainer([Job(0, 8, adamw, scheduler=lambda o: Counting(o))]).run(
            random_schedule([1], 3), 1, checkpoint=tmp_path
        )
