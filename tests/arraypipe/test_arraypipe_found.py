"""What an outsider found: each once wrong, now exact or refused with a sentence."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import pytest
import torch
from arraypipe_models import adamw, build_model, data, loss, sgd, trainer
from depth import seeds
from runs import array_trainer, run
from torch import nn

from optsched import InputError
from optsched.arraypipe import Job, JobFailed, random_schedule
from optsched.arraypipe.checkpoint.folder import CheckpointFolder
from optsched.arraypipe.train_alone import differences, train_alone


class Counts(nn.Module):
    """Hands on a view of a buffer that its next forward changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x: Any) -> Any:
        """The input's part, and the live buffer."""
        self.seen.add_(x.detach().sum(0))
        return self.linear(x), self.seen[:]


class Adds(nn.Module):
    """Uses both."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, pair: Any) -> Any:
        """Shape (batch, 6) and (6,) to (batch, 4)."""
        x, seen = pair
        return self.linear(x * (1 + 0.01 * seen))


@seeds(2, 6)
def test_outputs_that_view_a_live_buffer(seed: int) -> None:
    """They are copied at the cut, because the next micro-batch changes the buffer."""
    jobs = [Job(0, 8, sgd, microbatches=4), Job(1, 8, adamw, microbatches=3, recompute=True)]
    array = array_trainer(
        lambda: nn.Sequential(Counts(), Adds()), data, jobs=jobs, stages=[1], loss=loss
    )
    result = run(array, random_schedule([4, 3], 2, seed=seed), 3, on_error="raise")
    for j in range(2):
        assert differences(result.trained[j], array.train_alone(j, 3)) == []


def test_hooks_that_would_never_be_called_are_refused() -> None:
    """A backward hook on the whole model, which no stage calls as a whole."""

    def hooked() -> nn.Sequential:
        model = build_model()
        model.register_full_backward_hook(lambda module, x, y: None)
        return model

    with pytest.raises(InputError, match=r"the model itself.* has backward hooks"):
        trainer([Job(0, 8, sgd)], build_model=hooked)


class LateBuffer(nn.Module):
    """Makes its buffer when it is first called."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", None)

    def forward(self, x: Any) -> Any:
        """Subtract the mean of the first batch."""
        if self.mean is None:
            self.mean = x.detach().mean(0)
        return x - self.mean


def test_buffers_made_in_forward_are_refused() -> None:
    """They would be in no checkpoint, and the rehearsal would have made them."""
    array = trainer(
        [Job(0, 8, sgd)], build_model=lambda: nn.Sequential(LateBuffer(), nn.Linear(6, 4)),
        stages=[1],
    )  # fmt: skip
    with pytest.raises(InputError, match="makes the buffer 'mean' of a LateBuffer"):
        run(array, random_schedule([1], 2), 1)


def test_parameters_that_share_memory_across_stages_are_refused() -> None:
    """Two Parameters on one storage cannot be told to be tied."""

    def twins() -> nn.Sequential:
        first, last = nn.Linear(6, 6), nn.Linear(6, 6)
        last.weight = nn.Parameter(first.weight.data.t())
        return nn.Sequential(first, last, nn.Linear(6, 4))

    with pytest.raises(InputError, match="share their memory and are in different stages"):
        trainer([Job(0, 8, sgd)], build_model=twins, stages=[1, 2])


class Raises(nn.Module):
    """Raises in every forward if it is told to."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.fails = fails

    def forward(self, x: Any) -> Any:
        """The input as it is."""
        if self.fails:
            raise RuntimeError("out of luck")
        return x


def test_a_first_forward_that_raises_ends_its_job_alone() -> None:
    """The others are trained; only if all fail there is nothing to do."""

    def model(fails: bool) -> nn.Sequential:
        return nn.Sequential(nn.Linear(6, 4), Raises(fails))

    def jobs(*fails: bool) -> list[Job]:
        return [Job(j, 8, sgd, model={"fails": f}) for j, f in enumerate(fails)]

    array = trainer(jobs(False, True), build_model=model, stages=[1])
    result = run(array, random_schedule([1, 1], 2), 3)
    assert [job.status for job in array.jobs] == ["done", "failed"]
    assert "out of luck" in str(array.jobs[1].error)
    assert differences(result.trained[0], array.train_alone(0, 3)) == []
    with pytest.raises(JobFailed, match="out of luck"):
        run(trainer(jobs(True, True), build_model=model, stages=[1]), random_schedule([1, 1], 2), 3)


class Clock:
    """A microsecond passes whenever somebody looks; more is added by hand."""

    now = 0

    def __call__(self) -> int:
        """Nanoseconds."""
        self.now += 1000
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock by which blocks are measured: no load of the machine changes it."""
    found = Clock()
    monkeypatch.setattr(time, "perf_counter_ns", found)
    return found


def test_waiting_for_data_is_not_the_time_of_a_block(clock: Clock) -> None:
    """It is the host's: blocks are as long as they would be with quick data."""

    def slow(job: Job, start: int) -> Any:
        for pair in data(job, start):
            clock.now += 50_000_000
            yield pair

    result = run(trainer([Job(0, 8, sgd)], data=slow), random_schedule([1], 3), 4)
    assert 0 < result.trace.duration.sum() < 50_000_000
    assert result.report.wall_ns > 2 * 50_000_000  # the first batches are drawn before it begins


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"schedule": "x.schedule.json"}, r"Schedule\.read"),
        ({"checkpoint": 5}, "checkpoint: expected a folder"),
        ({"checkpoint": ""}, "checkpoint: expected a folder"),
        ({"timeout": float("nan")}, "timeout: expected seconds"),
        ({"resume": "yes"}, "resume: expected True or False"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_of_run_are_checked(arguments: dict[str, Any], sentence: str) -> None:
    """Each is refused before anything is trained, with its name and value."""
    given = {"schedule": random_schedule([1], 3), "steps": 1, **arguments}
    with pytest.raises(InputError, match=sentence):
        run(trainer([Job(0, 8, sgd)]), **given)


def test_memory_may_be_said_in_words() -> None:
    """As in advice and problems; nonsense is refused."""
    array = trainer([Job(0, 8, sgd)], memory="1GB")
    assert array.config.bytes == 2**30
    with pytest.raises(InputError, match="memory: expected bytes or a size"):
        trainer([Job(0, 8, sgd)], memory="much")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"memory": -5}, "memory: expected bytes per device, an integer >= 1, got -5"),
        ({"memory": True}, "memory: expected bytes per device, an integer >= 1, got True"),
        ({"memory": 1e9}, "memory: expected bytes per device"),
        ({"data": 7}, "data: expected a dataset, a DataLoader or a function"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_arguments_of_a_trainer_are_checked(arguments: dict[str, Any], sentence: str) -> None:
    """Before a model is built, with the sentence of a run."""
    built = []
    with pytest.raises(InputError, match=sentence):
        trainer([Job(0, 8, sgd)], build_model=lambda: built.append(1), **arguments)
    assert not built


@pytest.mark.parametrize("stages", [2.5, [2.5], [[]], "4"])
def test_stages_of_no_known_form(stages: Any) -> None:
    """Refused with the field's name."""
    with pytest.raises(InputError, match="stages"):
        trainer([Job(0, 8, sgd)], stages=stages)


@pytest.mark.parametrize("jobs", [7, [], [3], {}, Job(0, 8, sgd)])
def test_jobs_that_are_none(jobs: Any) -> None:
    """Also those of another trainer's model."""
    for make in (trainer, trainer([Job(0, 8, sgd)]).with_jobs):
        with pytest.raises(InputError, match="jobs"):
            make(jobs)


def test_a_problem_of_no_profile() -> None:
    """A path is read by `Profile.read`."""
    with pytest.raises(InputError, match=r"profile: expected a Profile, got 'p\.json'"):
        trainer([Job(0, 8, sgd)]).problem("p.json")  # type: ignore[arg-type]


@pytest.mark.parametrize(("microbatches", "stages"), [([], 2), ([0], 2), ([1], 0)])
def test_random_orders_of_nothing(microbatches: list[int], stages: int) -> None:
    """Named by the argument."""
    with pytest.raises(InputError, match=r"microbatches|n_stages"):
        random_schedule(microbatches, stages)


def test_the_reference_takes_the_cuts_of_the_trainer() -> None:
    """As names, and as indices: the same bits."""
    job = Job(0, 8, sgd)
    array = trainer([job])
    alone = array.train_alone(0, 2)
    for cuts in (array.cuts, [4, 6]):
        again = train_alone(array.build_model, job, cuts, array.loss, array.data, 2)
        assert differences(again, alone) == []


def test_devices_of_another_host_are_no_fault_of_a_trainer() -> None:
    """Whether a GPU is there is seen by the run that needs it."""
    array = trainer([Job(0, 8, sgd)], device="cuda:77")
    with pytest.raises(InputError, match="device: cuda:77 does not exist"):
        run(array, random_schedule([1], 3), 1)


@pytest.mark.parametrize("job", [7, 2, -1, True, "job0", None])
def test_the_reference_of_no_job(job: Any) -> None:
    """Jobs are known by their number."""
    array = trainer([Job(0, 8, sgd), Job(1, 8, sgd)])
    with pytest.raises(InputError, match=r"job: expected 0\.\.1, got"):
        array.train_alone(job, 2)
    with pytest.raises(InputError, match="steps: expected an integer >= 0, got -1"):
        array.train_alone(1, -1)


def test_what_build_model_raises_comes_through() -> None:
    """It is the caller's own error, with its traceback."""

    def broken(width: int = 12) -> nn.Module:
        if width != 12:
            raise ZeroDivisionError("mine")
        return nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4), nn.Linear(4, 4))

    with pytest.raises(ZeroDivisionError, match="mine"):
        trainer([Job(0, 8, sgd, model={"width": 1})], build_model=broken, stages=[1, 2])
    array = trainer(
        [Job(0, 8, sgd), Job(1, 8, sgd, model={"width": 1})], build_model=broken, stages=[1, 2]
    )
    with pytest.raises(ZeroDivisionError, match="mine"):
        run(array, random_schedule([1, 1], 3), 1)
    assert [job.status for job in array.jobs] == ["ready", "ready"]


class Keeps(nn.Module):
    """Counts its calls in a plain number, a list and a plain tensor, and computes with them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen, self.level = 0, [0.0], torch.ones(6)
        self.view = torch.ones(1).expand(6)  # cannot be written to

    def forward(self, x: Any) -> Any:
        """Scale by what there was before."""
        self.calls += 1
        self.seen.append(float(self.calls))
        self.level.mul_(0.9)
        return x * self.view * (self.calls + sum(self.seen)) * self.level.clone()


def test_the_rehearsal_leaves_no_trace_in_plain_attributes() -> None:
    """Without recompute, a layer that keeps state of its own is trained as alone."""
    jobs = [Job(0, 8, sgd, microbatches=2), Job(1, 8, adamw)]
    array = trainer(
        jobs, build_model=lambda: nn.Sequential(nn.Linear(6, 6), Keeps(), nn.Linear(6, 4)),
        stages=[1, 2],
    )  # fmt: skip
    assert array.check_exact(3) == []


def test_optimizers_by_place_in_the_list_are_refused() -> None:
    """The first parameter of a stage is not the first of the model."""

    def layered(named: Any) -> torch.optim.Optimizer:
        rows = list(named)
        return torch.optim.SGD(
            [{"params": [p], "lr": 0.1 / (k + 1)} for k, (_, p) in enumerate(rows)]
        )

    with pytest.raises(InputError, match=r"gives '\d.weight' lr .* in the whole model"):
        trainer([Job(0, 8, layered)])


def test_a_step_hook_that_looks_across_tensors_is_refused() -> None:
    """A class that is known is tried all the same if it has backward hooks."""

    def clipped(named: Any) -> torch.optim.Optimizer:
        rows = [p for _, p in named]
        optimizer = torch.optim.SGD(rows, lr=0.1)
        optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(rows, 0.1) and None)
        return optimizer

    with pytest.raises(InputError, match="looks across tensors"):
        trainer([Job(0, 8, clipped)])


def test_writing_checkpoints_is_not_the_time_of_a_block(
    tmp_path: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job waits for its last checkpoint right after a block; the report calls it the host's."""
    settle = CheckpointFolder.settle

    def slow(folder: CheckpointFolder, job: int) -> None:
        clock.now += 50_000_000
        settle(folder, job)

    monkeypatch.setattr(CheckpointFolder, "settle", slow)
    array = trainer([Job(0, 8, sgd)])
    result = run(array, random_schedule([1], 3), 20, checkpoint=tmp_path / "c", checkpoint_every=1)
    assert 0 < result.trace.duration.sum() < 50_000_000
    assert result.report.wall_ns > 19 * 50_000_000


def test_optimizers_that_pick_by_place_are_refused() -> None:
    """The first tensor of every stage would be trained, instead of the first of the model."""

    def first(named: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [next(iter(named))[1]]}], lr=0.1)

    with pytest.raises(InputError, match="in its stage, but not in the whole model"):
        trainer([Job(0, 8, first)])


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_of_a_run_stays_alive(fails: bool) -> None:
    """Models die with the result, without the collector of cycles, although a job has an error."""
    models: list[Any] = []

    def build() -> nn.Module:
        model = build_model()
        models.append(weakref.ref(model))
        return model

    def bad_data(job: Job, start: int) -> Any:
        for t, (x, y) in enumerate(data(job, start), start):
            yield x, y + 100 * (fails and job.seed == 1 and t == 1)

    jobs = [Job(seed, 8, adamw) for seed in range(2)]
    array = trainer(jobs, build_model=build, data=bad_data)
    gc.collect()
    gc.disable()
    try:
        run(array, random_schedule([1, 1], 3), 3)
        assert [model() for model in models] == [None] * len(models)
    finally:
        gc.enable()
    assert [job.error is not None for job in jobs] == [False, fails]
    if fails:
        assert jobs[1].error is not None and jobs[1].error.__cause__ is not None
        (place,) = jobs[1].error.__cause__.__notes__
        assert "in cross_entropy" in place


def test_batches_of_a_job_that_has_ended_are_let_go() -> None:
    """Iterators may have processes behind them: those of ended jobs do not stay to the end."""
    open_iterators: set[int] = set()
    most = 0

    def counted(job: Job, start: int) -> Any:
        nonlocal most
        open_iterators.add(job.seed)
        most = max(most, len(open_iterators))
        try:
            yield from data(job, start)
        finally:
            open_iterators.discard(job.seed)

    later = [Job(seed, 8, sgd) for seed in range(2, 8)]
    array = trainer([Job(0, 8, sgd), Job(1, 8, sgd)], data=counted)
    run(array, random_schedule([1, 1], 3), 2, refill=lambda job: later.pop() if later else None)
    assert most <= 4


class Counting(nn.Module):
    """Adds what it sees to a buffer, and scales by it."""

    def __init__(self, seen: Any) -> None:
        super().__init__()
        self.register_buffer("seen", seen)

    def forward(self, x: Any) -> Any:
        """The same, scaled."""
        self.seen.add_(x.detach().mean())
        return x * (1 + self.seen)


def test_one_buffer_in_two_modules_is_one_in_the_recompute_too() -> None:
    """What the first has added is there when the second looks."""

    def build() -> nn.Module:
        seen = torch.zeros(())
        return nn.Sequential(
            nn.Linear(6, 12), Counting(seen), Counting(seen), nn.Tanh(), nn.Linear(12, 4)
        )

    array = trainer([Job(0, 8, sgd, recompute=True)], build_model=build, stages=[3])
    result = run(array, random_schedule([1], 2), 3)
    assert differences(result.trained[0], array.train_alone(0, 3)) == []
