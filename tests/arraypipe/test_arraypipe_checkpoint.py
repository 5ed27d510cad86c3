"""Checkpoints: plain to load, exact to resume, whole or absent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from arraypipe_models import adamw, build_model, sgd, trainer  # noqa: E402
from torch import nn  # noqa: E402

from optsched import InputError  # noqa: E402
from optsched.arraypipe import Job, JobFailed, checkpoint, random_schedule  # noqa: E402
from optsched.train_alone import Trained, differences  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.torch

JOBS = [
    Job(0, 8, adamw, name="first"),
    Job(1, 8, sgd, recompute=True, microbatches=2),
    Job(2, 11, lambda p: torch.optim.NAdam(p)),
]
ORDER: Any = {"microbatches": [1, 2, 1], "n_stages": 3}


def same_state(a: Trained, b: Trained) -> list[str]:
    """Differences, the losses apart (a resumed run has only the later ones)."""
    return differences(Trained(a.parameters, a.buffers, a.optimizer, ()),
                       Trained(b.parameters, b.buffers, b.optimizer, ()))  # fmt: skip


def files(folder: Path) -> set[str]:
    """All files below a folder."""
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


def test_loads_into_the_plain_unsplit_model(tmp_path: Path) -> None:
    """`model.pt` is a state dict of `build_model()`; both files load with `weights_only`."""
    result = trainer(JOBS).run(random_schedule(**ORDER), 3, checkpoint=tmp_path)
    expected = {f"{job}/{name}" for job in ("first", "job1", "job2")
                for name in ("latest", "3/model.pt", "3/train.pt")}  # fmt: skip
    assert files(tmp_path) == expected
    for j, title in enumerate(("first", "job1", "job2")):
        model = build_model()
        place = tmp_path / title / (tmp_path / title / "latest").read_text().strip()
        model.load_state_dict(torch.load(place / "model.pt", weights_only=True))
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, result.trained[j].parameters[name])
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer, result.trained[j].buffers[name])
        train = torch.load(place / "train.pt", weights_only=True)
        assert (train["iteration"], train["seed"]) == (3, j)
        for name, state in result.trained[j].optimizer.items():
            for key, value in state.items():
                assert torch.equal(
                    torch.as_tensor(train["parameters"][name]["state"][key]), torch.as_tensor(value)
                )


@pytest.mark.parametrize("update", [(), (0, 1, 2)])
def test_every_checkpoint_is_an_iteration_boundary(tmp_path: Path, update: Any) -> None:
    """In rolling execution stages run ahead; what is written is still one moment of the job."""
    array = trainer(JOBS)
    array.run(
        random_schedule(**ORDER, update=update, seed=3), 4, checkpoint=tmp_path, checkpoint_every=1
    )
    for steps in (1, 2, 3, 4):
        for j, title in enumerate(array.titles):
            alone = array.train_alone(j, steps)
            saved = torch.load(tmp_path / title / str(steps) / "model.pt", weights_only=True)
            for name, value in {**alone.parameters, **alone.buffers}.items():
                assert torch.equal(saved[name], value)


@pytest.mark.parametrize("seed", range(3))
def test_resume_continues_bit_by_bit(tmp_path: Path, seed: int) -> None:
    """Stop and go on, with another order, equals going through."""
    array = trainer(JOBS)
    array.run(random_schedule(**ORDER, seed=seed), 2, checkpoint=tmp_path)
    second = trainer(JOBS).run(
        random_schedule(**ORDER, seed=seed + 9, update=[0], recompute=[2]),
        5,
        checkpoint=tmp_path,
        resume=True,
    )
    for j in range(3):
        alone = array.train_alone(j, 5)
        assert same_state(second.trained[j], alone) == []
        assert second.losses[j] == alone.losses[2:]
    again = trainer(JOBS).run(random_schedule(**ORDER), 5, checkpoint=tmp_path, resume=True)
    assert again.losses == ((), (), ())
    assert same_state(again.trained[0], array.train_alone(0, 5)) == []


def test_jobs_resume_from_different_iterations(tmp_path: Path) -> None:
    """Every job goes on from its own latest checkpoint, or from its seed."""
    array = trainer(JOBS)
    array.run(random_schedule(**ORDER), 3, checkpoint=tmp_path, checkpoint_every=1)
    (tmp_path / "first" / "latest").write_text("1\n")
    (tmp_path / "job2" / "latest").unlink()
    result = trainer(JOBS).run(random_schedule(**ORDER), 4, checkpoint=tmp_path, resume=True)
    assert [len(row) for row in result.losses] == [3, 1, 4]
    for j in range(3):
        assert same_state(result.trained[j], array.train_alone(j, 4)) == []


class Ticking(nn.Module):
    """A counter that is not part of the state dict, and scales the output."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ticks", torch.zeros(()), persistent=False)

    def forward(self, x: Any) -> Any:
        """Scaled input."""
        self.ticks = self.ticks + 1
        return x / self.ticks


def test_resume_keeps_buffers_outside_of_the_state_dict(tmp_path: Path) -> None:
    """Buffers that `state_dict` leaves out are restored too."""
    changes: Any = {
        "build_model": lambda: nn.Sequential(nn.Linear(6, 6), Ticking(), nn.Linear(6, 4)),
        "stages": [1, 2],
    }
    array = trainer(JOBS[:1], **changes)
    array.run(random_schedule([1], 3), 2, checkpoint=tmp_path)
    result = trainer(JOBS[:1], **changes).run(
        random_schedule([1], 3), 4, checkpoint=tmp_path, resume=True
    )
    assert same_state(result.trained[0], array.train_alone(0, 4)) == []


def test_failure_leaves_complete_checkpoints_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When writing breaks off, the previous checkpoint is still the latest and nothing else is."""
    schedule = random_schedule(**ORDER)
    trainer(JOBS).run(schedule, 2, checkpoint=tmp_path)
    before = files(tmp_path)
    honest = checkpoint._save

    def save(value: Any, path: Path) -> None:
        if path.name == "train.pt":
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        honest(value, path)

    monkeypatch.setattr(checkpoint, "_save", save)
    with pytest.raises(InputError, match="No space left"):
        trainer(JOBS).run(schedule, 3, checkpoint=tmp_path, resume=True)
    assert files(tmp_path) == before
    monkeypatch.undo()
    result = trainer(JOBS).run(schedule, 3, checkpoint=tmp_path, resume=True)
    assert [len(row) for row in result.losses] == [1, 1, 1]


def test_failed_job_keeps_earlier_checkpoints(tmp_path: Path) -> None:
    """A job that diverges stops the run; what was complete before can be resumed."""
    wild = Job(0, 8, lambda p: torch.optim.SGD(p, lr=1e30))
    with pytest.raises(JobFailed):
        trainer([wild]).run(random_schedule([1], 3), 20, checkpoint=tmp_path, checkpoint_every=1)
    done = int((tmp_path / "job0" / "latest").read_text())
    assert done >= 1
    torch.load(tmp_path / "job0" / str(done) / "train.pt", weights_only=True)
    assert not list(tmp_path.rglob(".tmp-*"))


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
    refused("cut at other modules", stages=[3, 6])
    refused("'0.weight' is", build_model=lambda: build_model(13))
    latest = tmp_path / "job0" / "latest"
    for text, sentence in (("two", "number of an iteration"), ("7", "no such file")):
        latest.write_text(text)
        refused(sentence)
    latest.write_text("2\n")
    model = tmp_path / "job0" / "2" / "model.pt"
    whole = model.read_bytes()
    model.write_bytes(whole[: len(whole) // 2])
    refused("cannot be read")
    torch.save({"0.weight": torch.zeros(1)}, model)
    refused("the checkpoint has no|'0.weight' is")
    torch.save([1, 2], tmp_path / "job0" / "2" / "train.pt")
    refused("is not a checkpoint")


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
    (lambda named: adamw(named[:1]), r"of the job does not train '0.bias'"),
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


def test_checkpoint_without_the_optimizer_field_is_resumed(tmp_path: Path) -> None:
    """A file of before that field: its settings are compared as they were saved."""
    schedule, place = random_schedule([1], 3), tmp_path / "job0" / "2" / "train.pt"
    array = trainer([Job(0, 8, adamw)])
    array.run(schedule, 2, checkpoint=tmp_path)
    train = torch.load(place, weights_only=True)
    made = train.pop("optimizer")
    assert made["0.weight"]["class"] == "torch.optim.adamw.AdamW"
    assert made["0.weight"]["settings"]["lr"] == 1e-2
    torch.save(train, place)
    for other in (sgd, plain_adamw(lr=0.1)):
        with pytest.raises(InputError, match=r"'lr' 0.01 for '0.weight', the job has 0.1"):
            trainer([Job(0, 8, other)]).run(schedule, 3, checkpoint=tmp_path, resume=True)
    result = array.run(schedule, 3, checkpoint=tmp_path, resume=True)
    assert same_state(result.trained[0], array.train_alone(0, 3)) == []


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
