"""Checkpoints: plain to load, exact to resume, whole or absent."""

from __future__ import annotations

import shutil
import threading
import time
import warnings
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import runs
import torch
from arraypipe_lives import Halves
from arraypipe_models import adamw, build_model, sgd, trainer
from depth import seeds
from torch import nn

from optsched import InputError
from optsched.arraypipe import Job, JobFailed, random_schedule
from optsched.arraypipe import trainer as trainer_module
from optsched.arraypipe.checkpoint import files as checkpoint_files
from optsched.arraypipe.checkpoint import folder as checkpoint
from optsched.arraypipe.model import optimizers
from optsched.arraypipe.train_alone import Trained, differences

if TYPE_CHECKING:
    from pathlib import Path


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
    result = runs.run(trainer(JOBS), random_schedule(**ORDER), 3, checkpoint=tmp_path)
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


def test_a_run_goes_on_while_a_thread_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job has one checkpoint in its hands at a time; the end of the run waits for the last."""
    honest, going = checkpoint.write_folder, threading.Semaphore(0)
    begun, steps = [], []

    def write_folder(target: Path, contents: Any) -> None:
        begun.append(target.name)
        assert going.acquire(timeout=60)
        honest(target, contents)

    def on_step(job: Job, iteration: int, loss: float) -> None:
        steps.append((iteration, len(list((tmp_path / "first").glob("[0-9]")))))
        if iteration:  # behind the boundary that is being written
            going.release()

    monkeypatch.setattr(checkpoint, "write_folder", write_folder)
    going_on = trainer(JOBS[:1])
    threading.Timer(0.5, going.release, (9,)).start()
    runs.run(
        going_on,
        random_schedule([1], 3),
        4,
        checkpoint=tmp_path,
        checkpoint_every=1,
        on_step=on_step,
    )
    assert (1, 0) in steps  # no checkpoint was there, and the next iteration had its loss
    assert begun == ["1", "2", "3", "4"]
    assert (tmp_path / "first" / "latest").read_text() == "4\n"
    assert not [t for t in threading.enumerate() if t.name.startswith("optsched-checkpoint")]


def test_a_job_that_leaves_its_seat_has_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`refill` may tell others that it has ended; a kill right after must not lose its model."""
    honest = checkpoint.write_folder

    def write_folder(target: Path, contents: Any) -> None:
        time.sleep(0.2)
        honest(target, contents)

    there = []

    def refill(ended: Job) -> None:
        there.append((tmp_path / (ended.name or "job1") / "latest").read_text())

    monkeypatch.setattr(checkpoint, "write_folder", write_folder)
    jobs = [JOBS[0], Job(4, 8, sgd)]
    runs.run(trainer(jobs), random_schedule([1, 1], 3), 2, checkpoint=tmp_path, refill=refill)
    assert there == ["2\n", "2\n"]


@pytest.mark.parametrize("last", [False, True])
def test_what_the_thread_raises_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: bool
) -> None:
    """At the next checkpoint of the job, or at the end; those before it stay."""
    honest = checkpoint.write_folder

    def write_folder(target: Path, contents: Any) -> None:
        if target.name == ("4" if last else "2"):
            raise InputError("checkpoint: the disk is full")
        honest(target, contents)

    steps = []
    monkeypatch.setattr(checkpoint, "write_folder", write_folder)
    with pytest.raises(InputError, match="the disk is full"):
        runs.run(trainer(JOBS[:1]), 
            random_schedule([1], 3), 4, checkpoint=tmp_path, checkpoint_every=1,
            on_step=lambda job, iteration, loss: steps.append(iteration),
        )  # fmt: skip
    assert max(steps) == (3 if last else 2)
    assert (tmp_path / "first" / "latest").read_text() == ("3\n" if last else "1\n")
    assert not [t for t in threading.enumerate() if t.name.startswith("optsched-checkpoint")]


def test_a_gpu_copies_behind_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Into page-locked memory of the same strides; the thread waits for the event after it."""
    seen: list[str] = []
    event = SimpleNamespace(synchronize=lambda: seen.append("waited"))
    checkpoint._Noted({}, event).wait()  # type: ignore[arg-type]
    checkpoint._Noted({}, None).wait()
    assert seen == ["waited"]
    monkeypatch.setattr(checkpoint_files, "page_locked_like", torch.empty_like)
    for value in (torch.rand(3, 4).t(), torch.rand(6, 4)[::2], torch.rand(3, 1).expand(3, 4)):
        copy = checkpoint_files.off_gpu(value)
        assert torch.equal(copy, value)
        assert copy.untyped_storage().nbytes() == 48
        assert copy.stride() == value.to("cpu", copy=True).stride()


@pytest.mark.parametrize("update", [(), (0, 1, 2)])
def test_every_checkpoint_is_an_iteration_boundary(tmp_path: Path, update: Any) -> None:
    """In rolling execution stages run ahead; what is written is still one moment of the job."""
    array = trainer(JOBS)
    runs.run(array, 
        random_schedule(**ORDER, update=update, seed=3), 4, checkpoint=tmp_path,
        checkpoint_every=1, keep=4,
    )  # fmt: skip
    for steps in (1, 2, 3, 4):
        for j, title in enumerate(array.titles):
            alone = array.train_alone(j, steps)
            saved = torch.load(tmp_path / title / str(steps) / "model.pt", weights_only=True)
            for name, value in {**alone.parameters, **alone.buffers}.items():
                assert torch.equal(saved[name], value)


@seeds(1, 3)
def test_resume_continues_bit_by_bit(tmp_path: Path, seed: int) -> None:
    """Stop and go on, with another order, equals going through."""
    array, folder = trainer(JOBS), tmp_path / str(seed)
    runs.run(array, random_schedule(**ORDER, seed=seed), 2, checkpoint=folder)
    second = runs.run(
        trainer(JOBS),
        random_schedule(**ORDER, seed=seed + 9, update=[0], recompute=[2]),
        5,
        checkpoint=folder,
        resume=True,
    )
    for j in range(3):
        alone = array.train_alone(j, 5)
        assert same_state(second.trained[j], alone) == []
        assert second.losses[j] == alone.losses[2:]
    again = runs.run(trainer(JOBS), random_schedule(**ORDER), 5, checkpoint=folder, resume=True)
    assert again.losses == ((), (), ())
    assert same_state(again.trained[0], array.train_alone(0, 5)) == []


def test_jobs_resume_from_different_iterations(tmp_path: Path) -> None:
    """Every job goes on from its own latest checkpoint, or from its seed."""
    array = trainer(JOBS)
    runs.run(array, random_schedule(**ORDER), 3, checkpoint=tmp_path, checkpoint_every=1, keep=3)
    (tmp_path / "first" / "latest").write_text("1\n")
    shutil.rmtree(tmp_path / "job2")
    result = runs.run(trainer(JOBS), random_schedule(**ORDER), 4, checkpoint=tmp_path, resume=True)
    assert [len(row) for row in result.losses] == [3, 1, 4]
    for j in range(3):
        assert same_state(result.trained[j], array.train_alone(j, 4)) == []


def test_the_trace_of_a_resumed_run_is_a_plan(tmp_path: Path) -> None:
    """Also where jobs have begun at different iterations; it trains other jobs exactly."""
    runs.run(
        trainer(JOBS), random_schedule(**ORDER), 3, checkpoint=tmp_path, checkpoint_every=1, keep=3
    )
    (tmp_path / "first" / "latest").write_text("1\n")
    run = runs.run(trainer(JOBS), random_schedule(**ORDER), 5, checkpoint=tmp_path, resume=True)
    array = trainer(JOBS)
    for document in (run.trace,):
        assert document.iteration.min() == 1 and document.iteration.max() == 4
        plan = array.plan(document)
        assert plan.copies == (4, 2, 2)
        result = runs.run(array, plan, 6)
        for j in range(3):
            assert differences(result.trained[j], array.train_alone(j, 6)) == []


def test_a_trace_without_a_complete_job_is_no_plan(tmp_path: Path) -> None:
    """The sentence says which job, and why a trace may have no block of it."""
    runs.run(trainer(JOBS), random_schedule(**ORDER), 2, checkpoint=tmp_path)
    for title in ("first", "job2"):
        shutil.rmtree(tmp_path / title)
    run = runs.run(trainer(JOBS), random_schedule(**ORDER), 2, checkpoint=tmp_path, resume=True)
    with pytest.raises(InputError, match=r"no block of job 1, but one of 2; a trace .* complete"):
        trainer(JOBS).plan(run.trace)


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
    runs.run(array, random_schedule([1], 3), 2, checkpoint=tmp_path)
    result = runs.run(
        trainer(JOBS[:1], **changes), random_schedule([1], 3), 4, checkpoint=tmp_path, resume=True
    )
    assert same_state(result.trained[0], array.train_alone(0, 4)) == []


def test_failure_leaves_complete_checkpoints_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When writing breaks off, the previous checkpoint is still the latest and nothing else is."""
    schedule = random_schedule(**ORDER)
    runs.run(trainer(JOBS), schedule, 2, checkpoint=tmp_path)
    before = files(tmp_path)
    honest = checkpoint_files.save

    def save(value: Any, path: Path) -> None:
        if path.name == "train.pt":
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        honest(value, path)

    monkeypatch.setattr(checkpoint_files, "save", save)
    with pytest.raises(InputError, match="No space left"):
        runs.run(trainer(JOBS), schedule, 3, checkpoint=tmp_path, resume=True)
    assert files(tmp_path) == before
    monkeypatch.undo()
    result = runs.run(trainer(JOBS), schedule, 3, checkpoint=tmp_path, resume=True)
    assert [len(row) for row in result.losses] == [1, 1, 1]


def test_failed_job_keeps_earlier_checkpoints(tmp_path: Path) -> None:
    """A job that diverges stops the run; what was complete before can be resumed."""
    wild = Job(0, 8, lambda p: torch.optim.SGD(p, lr=1e30))
    with pytest.raises(JobFailed):
        runs.run(
            trainer([wild]),
            random_schedule([1], 3),
            20,
            checkpoint=tmp_path,
            checkpoint_every=1,
            on_error="raise",
        )
    done = int((tmp_path / "job0" / "latest").read_text())
    assert done >= 1
    torch.load(tmp_path / "job0" / str(done) / "train.pt", weights_only=True)
    assert not list(tmp_path.rglob(".tmp-*"))


# every kind of state that a job can have


class Echo(nn.Module):
    """Linear layers and batch statistics; the head uses the weights of the first layer again."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6)
        self.middle, self.last = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.head = nn.Linear(6, 4)
        if tied:
            self.last.weight = self.first.weight

    def forward(self, x: Any) -> Any:
        """Class scores."""
        x = torch.tanh(self.norm(self.first(x)))
        return self.head(torch.relu(self.last(torch.relu(self.middle(x)))))


CUTS = ["middle", "last"]


class Rows(Echo):
    """The same, called one after the other."""

    def forward(self, x: Any) -> Any:
        """Class scores."""
        for part in (self.first, self.norm, self.middle, self.last, self.head):
            x = part(x)
        return x


def grouped(named: Any) -> Any:
    """Momentum SGD with a smaller learning rate for vectors; one or two groups per stage."""
    rows = [(p.dim() == 1, p) for _, p in named]
    return torch.optim.SGD(
        [{"params": [p for small, p in rows if small is which], "lr": 0.01 if which else 0.1}
         for which in (False, True) if any(small is which for small, _ in rows)],
        momentum=0.9,
    )  # fmt: skip


def warmed(optimizer: Any) -> Any:
    """Two schedulers one after the other."""
    schedulers = torch.optim.lr_scheduler
    first = schedulers.ConstantLR(optimizer, 0.5, 2)
    return schedulers.SequentialLR(
        optimizer, [first, schedulers.ExponentialLR(optimizer, 0.7)], [3]
    )


def milestones(optimizer: Any) -> Any:
    """Smaller steps from the second and the third iteration on."""
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2], 0.5)


def plateau(optimizer: Any) -> Any:
    """Looks at the loss, and reacts at once."""
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)


RICH: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "scheduler": ({"scheduler": warmed, "optimizer": grouped}, {}),
    "milestones": ({"scheduler": milestones, "precision": "fp64"}, {}),
    "plateau": ({"scheduler": plateau}, {}),
    "clip": ({"clip_norm": 0.1, "microbatches": 2}, {"build_model": Rows, "stages": CUTS}),
    "bf16": ({"precision": "bf16", "scheduler": warmed}, {}),
    "bf16 tied": ({"precision": "bf16"}, {"build_model": Rows, "stages": CUTS}),
    "tied": ({"microbatches": 2}, {"build_model": Rows, "stages": CUTS}),
    "own forward": ({"recompute": True}, {"build_model": Echo, "stages": CUTS}),
}


@pytest.mark.parametrize("case", RICH)
def test_every_kind_of_state_is_resumed(tmp_path: Path, case: str) -> None:
    """Schedulers, masters, ties: written, loaded plainly, and gone on from to the same bits."""
    settings, changes = RICH[case]
    rows = [{"optimizer": adamw, **settings}, {"optimizer": sgd, **settings}]
    jobs = [Job(seed, 8, **row) for seed, row in enumerate(rows)]
    array = trainer(jobs, **changes)
    order: Any = {
        "microbatches": [job.microbatches for job in jobs], "n_stages": 3, "update": [0, 1],
        "together": [0, 1],
    }  # fmt: skip
    runs.run(array, random_schedule(**order), 2, checkpoint=tmp_path)
    saved = torch.load(tmp_path / "job0" / "2" / "model.pt", weights_only=True)
    model = changes.get("build_model", build_model)()
    assert list(saved) == list(model.state_dict())
    model.to(next(iter(saved.values())).dtype).load_state_dict(saved)
    again = trainer(jobs, **changes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = runs.run(
            again, random_schedule(**order, seed=3), 5, checkpoint=tmp_path, resume=True
        )
    for j in range(2):
        assert same_state(result.trained[j], array.train_alone(j, 5)) == []


@pytest.mark.parametrize("stages", [[4], [4, 6, 8], [7, 8]])
@pytest.mark.parametrize("case", ["scheduler", "bf16", "plateau"])
def test_resume_with_other_cuts(tmp_path: Path, case: str, stages: list[int]) -> None:
    """Without random layers the stages do not matter; a warning tells what would."""

    def plain() -> nn.Sequential:
        layers = [layer for layer in build_model() if not isinstance(layer, nn.Dropout)]
        return nn.Sequential(*layers, nn.Linear(4, 4), nn.ReLU())

    jobs = [Job(0, 8, **{"optimizer": adamw, **RICH[case][0]})]
    array = trainer(jobs, build_model=plain, stages=[2, 5])
    runs.run(array, random_schedule([1], 3, update=[0], together=[0]), 2, checkpoint=tmp_path)
    other = trainer(jobs, build_model=plain, stages=stages)
    with pytest.warns(UserWarning, match="cut at other modules; if the model draws random"):
        result = runs.run(
            other,
            random_schedule([1], len(stages) + 1, update=[0], together=[0]),
            5,
            checkpoint=tmp_path,
            resume=True,
        )
    assert same_state(result.trained[0], array.train_alone(0, 5)) == []


OTHER_SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"precision": "fp64"}, "precision fp32, the job has fp64"),
    ({"clip_norm": 1.0}, "clip_norm None, the job has 1.0"),
    ({"scheduler": None}, "SequentialLR, the job has none"),
    ({"scheduler": milestones}, "SequentialLR, the job has .*MultiStepLR"),
    ({"scheduler": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.ConstantLR(o, 0.5, 2),
            torch.optim.lr_scheduler.ExponentialLR(o, 0.6)], [3])}, "setting '_schedulers'"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "sentence"), OTHER_SETTINGS)
def test_resume_with_other_settings_is_refused(tmp_path: Path, change: Any, sentence: str) -> None:
    """What changes the bits of a job must be what it was."""
    settings: dict[str, Any] = {"optimizer": adamw, "scheduler": warmed}
    schedule = random_schedule([1], 3, update=[0], together=[0])
    runs.run(trainer([Job(0, 8, **settings)]), schedule, 2, checkpoint=tmp_path)
    with pytest.raises(InputError, match=sentence):
        runs.run(
            trainer([Job(0, 8, **{**settings, **change})]),
            schedule,
            3,
            checkpoint=tmp_path,
            resume=True,
        )


def test_slots_and_views_leave_no_trace_in_the_files(tmp_path: Path) -> None:
    """Weights that are views of something larger are saved alone."""
    flat = torch.zeros(10**5)
    copy = checkpoint_files.copied({"a": [flat[5:8].t()], "b": (1, "x")})
    assert copy["a"][0].untyped_storage().nbytes() == 12
    assert copy["b"] == (1, "x")
    checkpoint_files.save(copy, tmp_path / "x.pt")
    assert (tmp_path / "x.pt").stat().st_size < 10**4


def test_states_that_take_turns_in_slots_are_saved(tmp_path: Path) -> None:
    """Under a limit of memory a stage is copied while it is in its slot."""
    order: Any = {"microbatches": [1, 2, 1], "n_stages": 3, "place": [0, 1, 0]}
    jobs = [Job(s, 8, adamw, microbatches=1 + s % 2, recompute=True) for s in range(3)]
    array = trainer(jobs, memory=16_000)  # of six states on the first device two fit
    runs.run(array, random_schedule(**order), 3, checkpoint=tmp_path, checkpoint_every=1, keep=3)
    for j in range(3):
        for steps in (1, 2, 3):
            alone = array.train_alone(j, steps)
            saved = torch.load(tmp_path / f"job{j}" / str(steps) / "model.pt", weights_only=True)
            for name, value in {**alone.parameters, **alone.buffers}.items():
                assert torch.equal(saved[name], value)
    result = runs.run(array, random_schedule(**order), 5, checkpoint=tmp_path, resume=True)
    for j in range(3):
        assert same_state(result.trained[j], array.train_alone(j, 5)) == []


# several processes


def leaves(value: Any, path: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], Any]:
    """Everything in nested dictionaries, by its path."""
    if not isinstance(value, dict):
        return {path: value}
    return {k: v for key, inner in value.items() for k, v in leaves(inner, (*path, key)).items()}


@pytest.mark.parametrize("stop", [False, True])
def test_processes_leave_the_files_that_one_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: bool
) -> None:
    """Stages meet in the folder; what a killed run has left there is not taken for them."""

    def on_step(job: Job, t: int, loss: float) -> None:
        if stop and t == 2:
            jobs[job.seed == 0].stop()  # another one, at a moment of its own

    jobs = [Job(0, 8, adamw, scheduler=warmed, precision="bf16"), Job(1, 8, sgd)]
    order: Any = {"microbatches": [1, 1], "n_stages": 3, "seed": 5}
    given: Any = {"checkpoint_every": 2, "on_step": on_step}
    runs.run(trainer(jobs), random_schedule(**order), 5, checkpoint=tmp_path / "one", **given)
    monkeypatch.setattr(trainer_module, "CheckpointFolder", Halves)
    two = tmp_path / "two"
    (two / "job0" / ".parts-2").mkdir(parents=True)
    (two / "job0" / ".merging").mkdir()
    for stage in range(3):
        (two / "job0" / ".parts-2" / f"stage{stage}.pt").write_bytes(b"of before")
    runs.run(trainer(jobs), random_schedule(**order), 5, checkpoint=two, **given)
    assert files(two) == files(tmp_path / "one")
    assert not list(two.rglob(".*"))
    for name in files(two):
        if name.endswith(".pt"):
            one = leaves(torch.load(tmp_path / "one" / name, weights_only=True))
            assert one.keys() == leaves(torch.load(two / name, weights_only=True)).keys()
            for key, value in leaves(torch.load(two / name, weights_only=True)).items():
                assert optimizers.same(value, one[key]), f"{name}: {key}"
