"""Schedulers with one value per parameter group, on stages that lack some of the groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from arraypipe_models import trainer
from runs import run
from torch import nn, optim

from optsched import InputError
from optsched.arraypipe import Job, random_schedule
from optsched.arraypipe.train_alone import differences

if TYPE_CHECKING:
    from pathlib import Path


STEPS = 5


def build_model() -> nn.Sequential:
    """Matrices at both ends, vectors in the middle: every cut lacks a group somewhere."""
    return nn.Sequential(
        nn.Linear(6, 12, bias=False), nn.Tanh(), nn.LayerNorm(12), nn.Tanh(), nn.LayerNorm(12),
        nn.Linear(12, 4, bias=False),
    )  # fmt: skip


def grouped(named: Any, make: Any = optim.SGD, **settings: Any) -> optim.Optimizer:
    """A group for every kind of parameter that there is, in the order in which they come."""
    groups: dict[int, dict[str, Any]] = {}
    for _, p in named:
        groups.setdefault(p.dim(), {"params": [], "lr": 0.05 * p.dim()})["params"].append(p)
    return make(list(groups.values()), lr=0.1, **settings)


def sgd(named: Any) -> optim.Optimizer:
    """Momentum."""
    return grouped(named, momentum=0.9)


def adamw(named: Any) -> optim.Optimizer:
    """Adam."""
    return grouped(named, optim.AdamW)


SCHEDULERS: dict[str, Any] = {
    "lambda": lambda o: optim.lr_scheduler.LambdaLR(o, [lambda t: 0.9**t, lambda t: 1 / (1 + t)]),
    "shorter": lambda o: optim.lr_scheduler.MultiplicativeLR(
        o, [lambda t: 0.5, lambda t: 0.8][: len(o.param_groups)]
    ),
    "cyclic": lambda o: optim.lr_scheduler.CyclicLR(o, [0.01, 0.02], [0.1, 0.3], step_size_up=2),
    "one cycle": lambda o: optim.lr_scheduler.OneCycleLR(o, [0.2, 0.03], total_steps=20),
    "plateau": lambda o: optim.lr_scheduler.ReduceLROnPlateau(
        o, factor=0.5, patience=0, threshold=0.5, min_lr=[0.04, 0.001]
    ),
    "exponential": lambda o: optim.lr_scheduler.ExponentialLR(o, 0.7),
    "chained": lambda o: optim.lr_scheduler.SequentialLR(
        o, [optim.lr_scheduler.ConstantLR(o, 0.3, 2), optim.lr_scheduler.StepLR(o, 1, 0.5)], [2]
    ),
}


def with_names(named: Any) -> optim.Optimizer:
    """The same groups, of (name, parameter) pairs."""
    groups: dict[int, dict[str, Any]] = {}
    for name, p in named:
        row = groups.setdefault(p.dim(), {"params": [], "lr": 0.05 * p.dim()})
        row["params"].append((name, p))
    return optim.SGD(list(groups.values()), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("cuts", [[1, 3], [2, 5], [4, 5]])
def test_every_group_has_its_own_rate(cuts: list[int]) -> None:
    """Bits of training alone, whichever groups a stage has, with names or without."""
    made, jobs = [{"optimizer": sgd}, {"optimizer": adamw, "precision": "bf16"}], []
    made.append({"optimizer": with_names})
    for k, scheduler in enumerate(SCHEDULERS.values()):
        jobs.append(Job(k, 8, scheduler=scheduler, **made[(k + cuts[0]) % 3]))  # type: ignore[arg-type]
    everyone = range(len(jobs))
    array = trainer(jobs, build_model=build_model, stages=cuts)
    schedule = random_schedule([1] * len(jobs), 3, update=everyone, together=everyone, seed=1)
    result = run(array, schedule, STEPS, on_error="raise")
    for j in everyone:
        assert differences(result.trained[j], array.train_alone(j, STEPS)) == []


def test_resume_on_other_cuts(tmp_path: Path) -> None:
    """A checkpoint of one cut goes on with another, whose stages lack other groups."""
    jobs = [Job(0, 8, sgd, scheduler=SCHEDULERS["chained"])]
    schedule = random_schedule([1], 3, update=[0], together=[0])
    first = trainer(jobs, build_model=build_model, stages=[2, 5])
    run(first, schedule, 2, checkpoint=tmp_path, on_error="raise")
    other = trainer(jobs, build_model=build_model, stages=[1, 4])
    with pytest.warns(UserWarning, match="cut at other modules"):
        result = run(other, schedule, STEPS, checkpoint=tmp_path, resume=True, on_error="raise")
    alone = first.train_alone(0, STEPS)
    for name_, tensor in alone.parameters.items():
        assert torch.equal(result.trained[0].parameters[name_], tensor), name_


def test_a_scheduler_that_no_number_of_groups_suits() -> None:
    """Its own error is in the sentence, also where the optimizer knows names."""
    jobs = [Job(0, 8, optim.Adagrad, scheduler=SCHEDULERS["one cycle"])]
    array = trainer(jobs, build_model=build_model, stages=[1, 3])
    with pytest.raises(InputError, match="the scheduler cannot be made"):
        run(array, random_schedule([1], 3), 1)


def head_and_body(named: Any) -> optim.Optimizer:
    """Two groups by name, as people write them: some stages have nothing of one."""
    rows = list(named)
    return optim.AdamW([
        {"params": [entry for entry in rows if not entry[0].startswith("5")], "lr": 1e-2},
        {"params": [entry for entry in rows if entry[0].startswith("5")], "lr": 1e-1},
    ])  # fmt: skip


def unfrozen(named: Any) -> optim.Optimizer:
    """What is not frozen, which is nothing on some stages."""
    return optim.Adagrad([p for _, p in named if p.requires_grad], lr=0.1)


@pytest.mark.parametrize("make", [head_and_body, unfrozen])
def test_stages_without_any_parameter_of_a_group(make: Any) -> None:
    """What torch makes of no parameters is the stage's concern, not the user's."""
    jobs = [Job(0, 8, make, microbatches=2, clip_norm=0.05), Job(1, 8, make, precision="bf16")]
    array = trainer(jobs, build_model=build_model, stages=[1, 3])
    schedule = random_schedule([2, 1], 3, update=range(2), together=[0], seed=2)
    result = run(array, schedule, STEPS, on_error="raise")
    for j in range(2):
        assert differences(result.trained[j], array.train_alone(j, STEPS)) == []
