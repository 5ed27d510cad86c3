"""Checkpoints: loaded by anybody, exact to resume, complete or absent."""

from __future__ import annotations

import os
import shutil
import threading
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import runs
import torch
from arraypipe_lives import Halves, jobs_of, killed_before, same, saved_is_exact, use_folder
from arraypipe_models import adamw, build_model, data, sgd, trainer
from depth import few_examples, seeds
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import run
from safetensors.torch import load_file
from torch import nn

from optsched import InputError
from optsched.arraypipe import Job, random_schedule
from optsched.arraypipe.checkpoint import files as checkpoint_files
from optsched.arraypipe.checkpoint import folder as checkpoint
from optsched.arraypipe.checkpoint.files import numbered, train_files
from optsched.arraypipe.checkpoint.folder import CheckpointFolder
from optsched.arraypipe.checkpoint.weights import read_weights
from optsched.arraypipe.train_alone import Trained, differences

JOBS = [
    Job(0, 8, adamw, name="first"),
    Job(1, 8, sgd, recompute=True, microbatches=2),
    Job(2, 11, lambda p: torch.optim.NAdam(p)),
]
ORDER: Any = {"microbatches": [1, 2, 1], "n_stages": 3}
ONE = random_schedule([1], 3, update=[0], together=[0])


def same_state(a: Trained, b: Trained) -> list[str]:
    """Differences, without the losses (a resumed run has only the later ones)."""
    return differences(Trained(a.parameters, a.buffers, a.optimizer, ()),
                       Trained(b.parameters, b.buffers, b.optimizer, ()))  # fmt: skip


def files(folder: Path) -> set[str]:
    """All files below a folder."""
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


def train_of(place: Path) -> dict[str, Any]:
    """Optimizer states of all stages of a checkpoint."""
    rows = [torch.load(path, weights_only=True) for path in train_files(place)]
    return {name: state for row in rows for name, state in row["parameters"].items()}


def test_loads_into_the_unsplit_model(tmp_path: Path) -> None:
    """By our function, and by safetensors alone; the other files load with `weights_only`."""
    result = run(trainer(JOBS), random_schedule(**ORDER), 3, checkpoint=tmp_path)
    kinds = [f"{kind}-0000{k}-of-00003" for kind in ("model", "train") for k in (1, 2, 3)]
    names = [f"{name}.{'pt' if 'train' in name else 'safetensors'}" for name in kinds]
    names = ["3/model.safetensors.index.json", *(f"3/{name}" for name in names)]
    titles = ("first", "job1", "job2")
    assert files(tmp_path) == {f"{title}/{name}" for title in titles for name in names}
    for j, title in enumerate(titles):
        place, model = tmp_path / title / "3", build_model()
        state = {k: v for p in place.glob("*.safetensors") for k, v in load_file(p).items()}
        model.load_state_dict(state)
        assert all(torch.equal(value, state[key]) for key, value in read_weights(place).items())
        got = result.trained[j]
        for name, value in {**got.parameters, **got.buffers}.items():
            assert torch.equal(dict(model.state_dict())[name], value)
        saved = train_of(place)
        for name, moments in got.optimizer.items():
            for key, value in moments.items():
                found = torch.as_tensor(saved[name]["state"][key])
                assert torch.equal(found, torch.as_tensor(value))


def test_a_thread_writes_while_the_run_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One checkpoint of a job at a time; the end of the run waits for the last."""
    honest, going = checkpoint.CheckpointFolder._write, threading.Semaphore(0)
    begun, steps = [], []

    def write(self: Any, run: Any, done: int, noted: Any) -> None:
        begun.append(done)
        assert going.acquire(timeout=60)
        honest(self, run, done, noted)

    def on_step(job: Job, iteration: int, loss: float) -> None:
        steps.append((iteration, len(list((tmp_path / "first").glob("[0-9]")))))
        if iteration:  # after the boundary that is being written
            going.release()

    monkeypatch.setattr(checkpoint.CheckpointFolder, "_write", write)
    threading.Timer(0.5, going.release, (9,)).start()
    how: Any = {"checkpoint": tmp_path, "checkpoint_every": 1, "on_step": on_step}
    run(trainer(JOBS[:1]), ONE, 4, **how)
    assert (1, 0) in steps  # no checkpoint was complete, and the next iteration had its loss
    assert begun == [1, 2, 3, 4]
    assert numbered(tmp_path / "first") == [3, 4]
    assert not [t for t in threading.enumerate() if t.name.startswith("optsched-checkpoint")]


@pytest.mark.parametrize("last", [False, True])
def test_errors_of_the_thread_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: bool
) -> None:
    """At the next checkpoint of the job, or at the end; earlier ones stay, half ones go."""
    honest = checkpoint_files.torch.save

    def save(value: Any, stream: Any) -> None:
        if isinstance(value, dict) and value.get("iteration") == (4 if last else 2):
            stream.write(b"half")
            raise OSError(28, "No space left on device")
        honest(value, stream)

    monkeypatch.setattr(checkpoint_files.torch, "save", save)
    with pytest.raises(InputError, match="No space left"):
        run(trainer(JOBS[:1]), ONE, 4, checkpoint=tmp_path, checkpoint_every=1)
    monkeypatch.undo()
    done = 3 if last else 1
    assert numbered(tmp_path / "first")[-1] == done
    assert not [t for t in threading.enumerate() if t.name.startswith("optsched-checkpoint")]
    result = run(trainer(JOBS[:1]), ONE, 5, checkpoint=tmp_path, resume=True)
    assert len(result.losses[0]) == 5 - done
    assert not list(tmp_path.rglob(".*"))


def test_every_checkpoint_is_an_iteration_boundary(tmp_path: Path) -> None:
    """Stages run ahead, and states are in slots; what is written is one moment of the job."""
    jobs = [Job(s, 8, adamw, microbatches=1 + s % 2, recompute=True) for s in range(3)]
    array = trainer(jobs, memory=16_000)  # of six states on the first device two fit
    order = random_schedule(**ORDER, place=[0, 1, 0], seed=3)
    run(array, order, 4, checkpoint=tmp_path, checkpoint_every=1, keep=4)
    for steps in (1, 2, 3, 4):
        for j, title in enumerate(array.titles):
            alone, saved = array.train_alone(j, steps), read_weights(tmp_path / title / str(steps))
            for name, value in {**alone.parameters, **alone.buffers}.items():
                assert torch.equal(saved[name], value)


@seeds(1, 3)
def test_resume_continues_bit_by_bit(tmp_path: Path, seed: int) -> None:
    """Each job from its newest checkpoint, with another order, equals training without a stop."""
    array, folder = trainer(JOBS), tmp_path / str(seed)
    how: Any = {"checkpoint": folder, "checkpoint_every": 1, "keep": 3}
    run(array, random_schedule(**ORDER, seed=seed), 3, **how)
    for removed in ("first/3", "first/2", "job2"):
        shutil.rmtree(folder / removed)
    order = random_schedule(**ORDER, seed=seed + 9, update=[0], recompute=[2])
    second = run(trainer(JOBS), order, 5, checkpoint=folder, resume=True)
    for j, start in enumerate((1, 3, 0)):
        alone = array.train_alone(j, 5)
        assert same_state(second.trained[j], alone) == []
        assert second.losses[j] == alone.losses[start:]
    again = run(trainer(JOBS), random_schedule(**ORDER), 5, checkpoint=folder, resume=True)
    assert again.losses == ((), (), ())
    assert same_state(again.trained[0], array.train_alone(0, 5)) == []


class Ticking(nn.Module):
    """A counter that is not part of the state dict, and an object that is."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ticks", torch.zeros(()), persistent=False)
        self.extra = {"name": "a"}

    def get_extra_state(self) -> Any:
        """What `state_dict` has of it."""
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        """Restore it."""
        self.extra = state

    def forward(self, x: Any) -> Any:
        """Scaled input."""
        self.ticks = self.ticks + 1
        return x / self.ticks


def warmed(optimizer: Any, factor: float = 0.7) -> Any:
    """Two schedulers one after the other."""
    schedulers = torch.optim.lr_scheduler
    first, then = schedulers.ConstantLR(optimizer, 0.5, 2), schedulers.ExponentialLR
    return schedulers.SequentialLR(optimizer, [first, then(optimizer, factor)], [3])


class Model(nn.Sequential):
    """Of linear layers, a counter, and weights that the first and the last stage have."""

    def __init__(self) -> None:
        first, last = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        last.weight = first.weight
        super().__init__(first, nn.BatchNorm1d(6), Ticking(), nn.Linear(6, 6), last)
        self.append(nn.Linear(6, 4))


def test_every_kind_of_state_is_resumed(tmp_path: Path) -> None:
    """Schedulers, masters, tied weights, counters, objects: to the bits without a break."""
    jobs = [
        Job(0, 8, adamw, clip_norm=0.1, scheduler=warmed), Job(2, 8, sgd),
        Job(1, 8, adamw, precision="bf16", recompute=True, scheduler=warmed),
    ]  # fmt: skip
    array = trainer(jobs, build_model=Model, stages=[3, 4])
    order: Any = {"microbatches": [1] * 3, "n_stages": 3, "update": range(3), "together": range(3)}
    run(array, random_schedule(**order), 2, checkpoint=tmp_path)
    Model().load_state_dict(read_weights(tmp_path / "job0" / "2"), strict=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        order = random_schedule(**order, seed=3)
        result = run(trainer(jobs, build_model=Model, stages=[3, 4]), order, 5,
                     checkpoint=tmp_path, resume=True)  # fmt: skip
    for j in range(3):
        assert same_state(result.trained[j], array.train_alone(j, 5)) == []
    train = torch.load(train_files(tmp_path / "job0" / "2")[0], weights_only=True)
    assert train["extra"] == {"2._extra_state": {"name": "a"}}


def built(p: float = 0.3, width: int = 12, other: Any = None) -> nn.Sequential:
    """The tiny model with another dropout rate."""
    model = build_model(width)
    model[2].p = float(p)
    return model


def wider(**given: Any) -> nn.Sequential:
    """Another model."""
    return built(width=13)


def without_norm(**given: Any) -> nn.Sequential:
    """The same, without its first normalization."""
    return nn.Sequential(*(layer for k, layer in enumerate(built(**given)) if k != 1))


def without_bias(named: Any) -> Any:
    """An optimizer that trains fewer parameters."""
    return adamw([entry for entry in named if entry[0] != "0.bias"])


def adamw_of(**settings: Any) -> Any:
    """A maker of AdamW with other settings than `adamw`."""
    return lambda named: torch.optim.AdamW(named, **{"lr": 1e-2, "weight_decay": 0.1, **settings})


GIVEN: dict[str, Any] = {
    "seed": 0, "batch_size": 8, "optimizer": adamw, "scheduler": warmed, "model": {"p": 0.1},
}  # fmt: skip
OTHERS: list[tuple[dict[str, Any], str]] = [
    ({"resume": False}, "already has checkpoints"),
    ({"steps": 1}, "has already done 2 iterations"),
    ({"seed": 1}, "seed 0, the job has 1"),
    ({"clip_norm": 1.0}, "clip_norm None, the job has 1.0"),
    ({"build_model": wider}, r"'0.weight' has shape \(12, 6\), the model has \(13, 6\)"),
    ({"build_model": without_norm}, "the (model|checkpoint) has no '.*'; it belongs to another"),
    ({"model": {"p": 0.6}}, r"was written with model\['p'\] 0.1, the job has 0.6"),
    ({"model": {}}, r"model\['p'\] 0.1, the job has \(not set\)"),
    ({"optimizer": sgd}, r"optimizer of '0.bias' .*AdamW', the job has 'torch.optim.sgd.SGD'"),
    ({"optimizer": adamw_of(lr=0.1)}, r"'lr' of '0.bias' 0.005, the job has 0.05"),
    ({"optimizer": without_bias}, "was written with optimizer of '0.bias'"),
    ({"scheduler": None}, "with .*, the job has "),
    ({"scheduler": lambda o: warmed(o, 0.6)}, "scheduler setting '_schedulers'"),
]


def resume(folder: Path, steps: int = 4, resume: bool = True, **changes: Any) -> Any:
    """Continue with a job of other settings, or another model."""
    build = changes.pop("build_model", built)
    array = trainer([Job(**{**GIVEN, **changes})], build_model=build)
    return run(array, ONE, steps, checkpoint=folder, resume=resume)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint after two iterations."""
    folder = tmp_path_factory.mktemp("written")
    resume(folder, 2)
    return folder


@pytest.mark.parametrize(("changes", "sentence"), OTHERS)
def test_another_job_is_refused(written: Path, changes: dict[str, Any], sentence: str) -> None:
    """What changes the bits must be what it was; no file changes."""
    before = files(written)
    with pytest.raises(InputError, match=sentence):
        resume(written, **changes)
    assert files(written) == before


def test_a_folder_of_another_name_is_refused(written: Path, tmp_path: Path) -> None:
    """It would be trained on from another iteration."""
    shutil.copytree(written, tmp_path, dirs_exist_ok=True)
    (tmp_path / "job0" / "2").rename(tmp_path / "job0" / "1")
    with pytest.raises(InputError, match="after iteration 2; a folder must keep its name"):
        resume(tmp_path)


# data


def ignoring(job: Job, start: int) -> Any:
    """Begin anew at any iteration."""
    return data(job, 0)


def grown(job: Job, start: int) -> Any:
    """One sample more after the second iteration."""
    for x, y in data(job, start):
        yield (x, y) if start < 2 else (x[1:], y[1:])


@pytest.mark.parametrize("batches", [ignoring, grown])
def test_data_that_do_not_begin_at_an_iteration_are_refused(tmp_path: Path, batches: Any) -> None:
    """Nothing is trained; the sentence says what data must do."""
    array = trainer([Job(0, 8, sgd)], data=batches)
    run(array, ONE, 2, checkpoint=tmp_path)
    steps: list[int] = []
    sentence = r"job job0: data\(job, 2\) begins with another batch than the second of data\(job, 1"
    with pytest.raises(InputError, match=sentence):
        run(array, ONE, 4, checkpoint=tmp_path, resume=True, on_step=lambda *_: steps.append(1))
    assert steps == []


def test_other_data_are_noticed(tmp_path: Path) -> None:
    """By the last batch before the checkpoint; micro-batches are those of one batch."""
    jobs, order = [Job(0, 8, sgd, microbatches=2)], random_schedule([2], 3)
    run(trainer(jobs), order, 2, checkpoint=tmp_path)

    def other(job: Job, start: int) -> Any:
        return ((x + 1, y) for x, y in data(job, start))

    with pytest.warns(UserWarning, match="job job0: the batch of iteration 1 differs from that of"):
        run(trainer(jobs, data=other), order, 3, checkpoint=tmp_path, resume=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(trainer(jobs, data=other), order, 4, checkpoint=tmp_path, resume=True)


# frozen weights, transformers, PEFT


def half_frozen() -> nn.Sequential:
    """The tiny model; the first layer is the same in all jobs and not trained."""
    model = build_model()
    for p in model[0].parameters():
        nn.init.constant_(p.requires_grad_(False), 0.5)
    return model


def test_frozen_weights_are_written_once(tmp_path: Path) -> None:
    """Checkpoints of all jobs are complete, with links to one file; another base is refused."""
    jobs = [Job(s, 8, adamw) for s in range(3)]
    array = trainer(jobs, build_model=half_frozen)
    how: Any = {"checkpoint": tmp_path, "checkpoint_every": 1}
    result = run(array, random_schedule([1, 1, 1], 3), 3, **how)
    found = [*tmp_path.rglob("frozen-*")]
    assert len(found) == 6 and len({os.stat(path).st_ino for path in found}) == 1
    assert not list(tmp_path.rglob(".*"))
    for j in range(3):
        half_frozen().load_state_dict(read_weights(tmp_path / f"job{j}" / "3"))
        assert differences(result.trained[j], array.train_alone(j, 3)) == []
    again = trainer(jobs, build_model=half_frozen)
    result = run(again, random_schedule([1, 1, 1], 3), 5, checkpoint=tmp_path, resume=True)
    for j in range(3):
        assert same_state(result.trained[j], array.train_alone(j, 5)) == []

    def other() -> nn.Sequential:
        model = half_frozen()
        with torch.no_grad():
            model[0].weight.add_(1)
        return model

    with pytest.warns(UserWarning, match=r"frozen '0.weight' differ from the model of job job0"):
        run(trainer(jobs[:1], build_model=other), ONE, 6, checkpoint=tmp_path, resume=True)
    shutil.rmtree(tmp_path / "job0")  # begins with the other base
    changed = trainer(jobs, build_model=other)
    with pytest.raises(InputError, match=r"'0.weight' is frozen and shared with other jobs"):
        run(changed, random_schedule([1, 1, 1], 3), 7, checkpoint=tmp_path, resume=True)


def test_a_job_that_joins_links_the_frozen_weights(tmp_path: Path) -> None:
    """The file that all link stays until the run has ended."""
    late = [Job(2, 8, adamw, name="late")]

    def refill(ended: Job) -> Job | None:
        return late.pop() if late else None

    array = trainer([Job(s, 8, adamw) for s in range(2)], build_model=half_frozen)
    how: Any = {"checkpoint": tmp_path, "checkpoint_every": 1, "refill": refill}
    result = run(array, random_schedule([1, 1], 3), 3, **how)
    assert [job.status for job in result.jobs] == ["done"] * 3
    found = [*tmp_path.rglob("frozen-*")]
    assert len(found) == 6 and len({os.stat(path).st_ino for path in found}) == 1
    assert not list(tmp_path.rglob(".*"))


# which checkpoints stay: the newest and the best, after any kill


STEPS = 5
ORDER_KEEP = random_schedule([1], 3, seed=2)


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
    return runs.run(trainer(jobs_of(1)), ORDER_KEEP, steps, **how)


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


@pytest.mark.parametrize("when", ["before the name goes", "after the mark"])
def test_a_mark_while_another_rank_removes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """The best checkpoint that is named exists, or the one of before is named again."""
    folder: Any = SimpleNamespace(keep=1)
    for name in ("1", "2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / checkpoint_files.INDEX).touch()
    marks = partial(CheckpointFolder._mark, folder, tmp_path, 1, 0.5, True, tidy=False)
    if when == "before the name goes":
        rename = Path.rename

        def late(path: Path, target: Path) -> Path:
            if path.name == "1":
                monkeypatch.setattr(Path, "rename", rename)
                marks()
            return rename(path, target)

        monkeypatch.setattr(Path, "rename", late)
        CheckpointFolder._tidy(folder, tmp_path)
        assert numbered(tmp_path) == [1, 2] and (tmp_path / "best").read_text() == "1 0.5\n"
    else:
        write = checkpoint.replace_file

        def then_removed(path: Path, content: Any) -> None:
            write(path, content)
            assert (tmp_path / "best").read_text() == "1 0.5\n"
            shutil.rmtree(tmp_path / "1")

        monkeypatch.setattr(checkpoint, "replace_file", then_removed)
        marks()
        assert not (tmp_path / "best").exists()


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
