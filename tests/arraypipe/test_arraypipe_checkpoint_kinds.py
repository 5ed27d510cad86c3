"""Every spelling of a number, every scheduler and optimizer of torch: resumed exactly, or named."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import runs
import torch
from arraypipe_models import data
from test_arraypipe_checkpoint import train_of
from torch import nn, optim
from torch.optim import lr_scheduler as schedulers
from training_settings import FLOATS, INTEGERS, OPTIMIZERS, SCHEDULERS, Half

from optsched.arraypipe import ArrayTrainer, Callback, Job, JobFailed, RunConfig, random_schedule
from optsched.arraypipe.checkpoint import files as checkpoint_files
from optsched.arraypipe.checkpoint.files import numbered
from optsched.arraypipe.train_alone import differences

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


def build(width: int = 4) -> nn.Sequential:
    """Two stages whose parameters are matrices: some optimizers take no other ones."""
    return nn.Sequential(nn.Linear(6, width, bias=False), nn.Tanh(), nn.Linear(width, 4, False))


def array_of(jobs: Sequence[Job]) -> ArrayTrainer:
    """A trainer of these jobs."""
    return ArrayTrainer(build, data, [2], nn.functional.cross_entropy).with_jobs(jobs)


def schedule_of(jobs: Sequence[Job]) -> Any:
    """An order in which all jobs update together with their own blocks, if they have to."""
    n = range(len(jobs))
    return random_schedule([1] * len(jobs), 2, update=n, together=n)


def adam(lr: Any = 0.01, **settings: Any) -> Any:
    """A maker of Adam, which divides by the learning rate."""
    return lambda named: optim.Adam(named, lr=lr, **settings)


def adamax(**settings: Any) -> Any:
    """A maker of Adamax, which takes numbers of any type (Adam: betas of two types)."""
    return lambda named: optim.Adamax(named, **settings)


def resumes_exactly(jobs: Callable[[], list[Job]], folder: Path) -> None:
    """Checkpoints after 2 of 4 iterations bring all jobs to the bits of 4 without a break."""
    made = jobs()
    schedule = schedule_of(made)
    runs.run(array_of(made), schedule, np.int64(2), checkpoint=folder, on_error="raise")  # type: ignore[arg-type]
    again, whole = array_of(jobs()), array_of(jobs())
    result = runs.run(again, schedule, 4, checkpoint=folder, resume=True, on_error="raise")
    expected = runs.run(whole, schedule, 4, checkpoint=folder / "whole", on_error="raise")
    for j, title in enumerate(again.titles):
        got, reference = result.trained[j], expected.trained[j]
        assert got.losses == reference.losses[2:], title
        a, b = (train_of(place / title / "4") for place in (folder, folder / "whole"))
        assert repr(a) == repr(b), title
        for name, value in reference.parameters.items():
            assert torch.equal(got.parameters[name], value), title
        assert differences(reference, whole.train_alone(j, 4)) == [], title


def numbers() -> list[Job]:
    """A job for every spelling: one of all real numbers, or one of all integers."""
    found = []
    for k, (name, of) in enumerate(FLOATS.items()):
        betas = (of(0.875), of(0.9375)) if "tensor" not in name else (0.875, 0.9375)
        decay = of(0.1) if "tensor" not in name else 0.1
        make = adamax(lr=of(0.01), betas=betas, weight_decay=decay, maximize=np.False_)
        found.append(Job(k, 4, make, f"real-{name.replace(' ', '_')}", clip_norm=of(0.25)))
    for name, integer in INTEGERS.items():
        found.append(
            Job(integer(3), integer(4), adam(), np.str_(f"int-{name.replace(' ', '_')}"),
                microbatches=integer(1), recompute=np.bool_(True), precision=np.str_("fp32"),
                model={"width": integer(4) if "tensor" not in name else 4})
        )  # fmt: skip
    return found


def test_every_spelling_of_a_number(tmp_path: Path) -> None:
    """Resumed with the bits of a run without a break, and of training alone."""
    jobs = numbers()
    assert len(jobs) >= 30
    resumes_exactly(numbers, tmp_path)
    rate = train_of(tmp_path / "real-single" / "4")["0.weight"]["settings"]["lr"]
    assert type(rate) is float
    assert rate == float(np.float32(0.01)) != 0.01
    assert type(jobs[-1].seed) is type(jobs[-1].batch_size) is int


def schedules() -> list[Job]:
    """A job for every scheduler, and one for every optimizer."""
    found = [
        Job(k, 4, adam(), name.replace(" ", "-"), scheduler=make)
        for k, (name, make) in enumerate(SCHEDULERS.items())
    ]
    for k, (name, settings) in enumerate(OPTIMIZERS.items()):
        if kind := getattr(optim, name, None):  # the oldest torch has no Muon

            def make(named: Any, kind: Any = kind, settings: Any = settings) -> Any:
                return kind(named, lr=np.float32(0.01), **settings)

            found.append(Job(k, 4, make, name, scheduler=SCHEDULERS["LambdaLR of float32"]))
    return found


def test_every_scheduler_and_optimizer(tmp_path: Path) -> None:
    """Of torch, with numbers of NumPy in their settings and states."""
    assert {*optim.lr_scheduler.__all__} <= {*SCHEDULERS, "LRScheduler"}
    known = {name for name in optim.__all__ if isinstance(getattr(optim, name), type)}
    assert known <= {*OPTIMIZERS, "Optimizer", "LBFGS", "SparseAdam"}
    resumes_exactly(schedules, tmp_path)


class Nested(schedulers.LRScheduler):
    """Keeps another scheduler in its state, as warm-ups in many projects do."""

    def __init__(self, optimizer: Any, **state: Any) -> None:
        self.__dict__.update(state or {"after": schedulers.StepLR(optimizer, 2)})
        super().__init__(optimizer)

    def get_lr(self) -> Any:
        """The same one."""
        return [group["lr"] for group in self.optimizer.param_groups]


class Late(Nested):
    """Its state is plain until the first step."""

    def step(self, *given: Any) -> None:
        """Remember the last rates."""
        super().step(*given)
        if self.last_epoch:
            self.seen = deque([0.1], 2)


class Bare:
    """A scheduler without a state."""

    def __init__(self, optimizer: Any) -> None:
        """Nothing to keep."""

    def step(self) -> None:
        """Do nothing."""


class Odd(optim.SGD):
    """Keeps an object in its state after so many steps."""

    after = 1

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step."""
        super().step()
        self.count = getattr(self, "count", 0) + 1
        for p in self.param_groups[0]["params"] if self.count >= self.after else ():
            self.state[p]["odd"] = {"inner": [deque()]}


class Number(int):
    """An integer of a class of its own."""


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "nested": ({"scheduler": Nested}, "after: a StepLR cannot be kept"),
    "late": ({"scheduler": lambda o: Late(o, plain=1)}, "scheduler: seen: a deque"),
    "deque": ({"scheduler": lambda o: Nested(o, last=deque())}, "last: a deque"),
    "array": ({"scheduler": lambda o: Nested(o, table=[np.ones(3)])}, r"table\[0\]: a ndarray"),
    "function": ({"scheduler": lambda o: Nested(o, shape=lambda e: 1.0)}, "shape: a function"),
    "class": ({"scheduler": lambda o: Nested(o, a={"b": Number(3)})}, "a: b: a Number"),
    "lambda": ({"scheduler": lambda o: schedulers.LambdaLR(o, functor(deque()))}, "a deque"),
    "bare": ({"scheduler": Bare}, "a Bare, has no state_dict"),
    "state": ({"optimizer": lambda n: Odd(n, lr=0.1)}, r"odd: inner\[0\]: a deque"),
    "setting": ({"optimizer": lambda n: optim.SGD([{"params": n, "tag": deque()}], lr=0.1)},
                "tag: a deque"),
}  # fmt: skip


def functor(value: Any) -> Any:
    """A callable object with this state."""
    found = Half()
    found.value, found.kept = 1.0, value  # type: ignore[attr-defined, assignment]
    return found


class Counted(Callback):
    """Names of the jobs of all iterations."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def on_step(self, job: Job, iteration: int, loss: float) -> None:
        """Note it."""
        self.names.append(job.name)


def test_state_that_cannot_be_kept_costs_its_own_job(tmp_path: Path) -> None:
    """Found before the first iteration, by name; the others train on and are written."""
    jobs = [
        Job(0, 4, **{"optimizer": adam(), "name": name, **settings})
        for name, (settings, _) in REFUSED.items()
    ]
    jobs += [Job(1, 4, adam(), name) for name in ("good", "better")]
    counted = Counted()
    result = array_of(jobs).fit(
        jobs, 2, schedule=schedule_of(jobs), checkpoint=tmp_path, callbacks=[counted],
        config=RunConfig(verbose=False, check=0),
    )  # fmt: skip
    assert {*counted.names} == {"good", "better"}
    errors = {job.name: job.error for job in result.jobs}
    for name, (_, sentence) in REFUSED.items():
        with pytest.raises(JobFailed, match=sentence) as found:
            raise errors[name] or AssertionError(name)
        assert f"job {name}, stage 0, iteration 0: checkpoint" in str(found.value)
    assert {name for name in (*errors, "good", "better") if numbered(tmp_path / name)} == {
        "good", "better"
    }  # fmt: skip
    # without checkpoints they train
    again = runs.run(array_of(jobs[:-2]), schedule_of(jobs[:-2]), 2)
    assert [job.status for job in again.jobs] == ["done"] * len(REFUSED)


def test_state_that_comes_later_costs_its_own_job(tmp_path: Path) -> None:
    """What no trial shows ends the job at the checkpoint; the one before stays and is whole."""
    late = type("Later", (Odd,), {"after": 3})
    jobs = [Job(0, 4, lambda n: late(n, lr=0.1), "late"), Job(1, 4, adam(), "good")]
    run = runs.run(array_of(jobs), schedule_of(jobs), 5, checkpoint=tmp_path, checkpoint_every=1)
    assert [job.status for job in run.jobs] == ["failed", "done"]
    assert "iteration 2: checkpoint of job late" in str(jobs[0].error)
    assert (numbered(tmp_path / "late")[-1], numbered(tmp_path / "good")[-1]) == (2, 5)
    assert not checkpoint_files.damage(tmp_path / "late" / "2", {})


def test_scheduler_in_a_tensor_is_not_shared(tmp_path: Path) -> None:
    """A learning rate in one tensor for all stages and jobs is changed once an iteration."""
    rate = torch.tensor(0.1)
    jobs = [
        Job(j, 4, lambda n: optim.SGD(n, lr=rate),
            scheduler=lambda o: schedulers.ExponentialLR(o, 0.5))
        for j in range(2)
    ]  # fmt: skip
    array = array_of(jobs)
    result = runs.run(array, schedule_of(jobs), 3, checkpoint=tmp_path)
    assert float(rate) == pytest.approx(0.1)
    for j in range(2):
        assert differences(result.trained[j], array.train_alone(j, 3)) == []
    row = train_of(tmp_path / "job0" / "3")["0.weight"]
    assert float(row["settings"]["lr"]) == pytest.approx(0.0125)
