"""Learning-rate schedules and numbers of NumPy in elastic jobs: exact over restarts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

pytest.importorskip("torch")
import torch
import training_cases as cases
from torch import nn, optim
from torch.optim import lr_scheduler as schedulers
from training_cases import alone, job, member
from training_settings import FLOATS, INTEGERS, OPTIMIZERS, SCHEDULERS

from optsched import InputError
from optsched.elastic import TrainingJob, read_checkpoint
from optsched.elastic.workers import Order

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from optsched.elastic.training import Member

STEPS = -(-cases.SAMPLES // 20)  # of a pass, whatever the workers


def passes(
    one: TrainingJob, folder: Path, factors: Sequence[Any], begin: int = 0, fresh: bool = False
) -> Member:
    """Train passes in this process, the learning rates times these; `fresh`: begin anew in each."""
    found = member(one, folder, begin)
    for number, factor in enumerate(factors, begin):
        if fresh and number:
            found = member(one, folder, number)
        found.train(Order(number, [len(found.data[0])], [one.batch_size], factor))
    return found


def test_micro_factor_and_schedule_compose(tmp_path: Path) -> None:
    """The factor multiplies the rate of the schedule, and does not add up in it."""
    one = job("a", model=cases.net, sizes=(1,), scheduler=cases.warm_up)
    factors = (1.0, 1.7, 0.3)
    for fresh in (False, True):
        found = passes(one, tmp_path / str(fresh), factors, fresh=fresh)
        model, optimizer, _ = alone(one, [1, 1, 1], factors)
        assert found.optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
        for key, value in model.state_dict().items():
            assert torch.equal(found.model.state_dict()[key], value)


def hooked(parameters: Any) -> Any:
    """A hook changes the learning rate after every step."""
    found = optim.SGD(parameters, lr=np.float64(0.1))

    def halve(optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5

    found.register_step_post_hook(halve)
    return found


def test_a_hook_is_not_undone(tmp_path: Path) -> None:
    """A learning rate that the optimizer or its hook changes stays changed over passes."""
    one = job("a", sizes=(1,), optimizer=hooked)
    for fresh, factor in ((False, 1.0), (False, 2.0), (True, 2.0)):
        found = passes(one, tmp_path / f"{fresh}-{factor}", (factor, factor), fresh=fresh)
        assert found.optimizer.param_groups[0]["lr"] == 0.1 * 0.5 ** (2 * STEPS)


def matrices() -> nn.Module:
    """Some optimizers take matrices only."""
    layers = nn.Linear(6, 4, bias=False), nn.Tanh(), nn.Linear(4, 3, bias=False)
    return nn.Sequential(*layers).double()


def kinds() -> dict[str, dict[str, Any]]:
    """A job for every spelling of a number, and some schedulers and optimizers.

    The executor's tests have all of them, with the same code for checkpoints.
    """
    rows: dict[str, dict[str, Any]] = {}
    for name, of in FLOATS.items():
        decay = {} if "tensor" in name else {"weight_decay": of(0.1)}
        rows[name] = {"optimizer": partial(cases.made, optim.Adamax, {"lr": of(0.01), **decay})}
        rows[name] |= {} if "tensor" in name else {"weight": of(0.5), "submit": of(0.0)}
    integers = [*INTEGERS.items()]
    for k, (name, make) in enumerate([*SCHEDULERS.items()][::3]):
        spelling, integer = integers[k % len(integers)]
        rows[f"{name}, integer {spelling}"] = {
            "scheduler": make, "seed": integer(3), "batch_size": integer(50),
            "priority": integer(3), "sizes": (integer(1),), "preemptible": np.True_,
        }  # fmt: skip
    for name, settings in [*OPTIMIZERS.items()][::3]:
        if kind := getattr(optim, name, None):
            settings = {"lr": np.float32(0.01), **settings}
            rows[name] = {"optimizer": partial(cases.made, kind, settings)}
    return rows


def test_every_kind_is_resumed_exactly(tmp_path: Path) -> None:
    """Two passes in one process, or one and a restart: the same bits, files included."""
    few = {"model": matrices, "data": partial(cases.data, 90), "sizes": (1,), "batch_size": 40}
    for k, (name, fields) in enumerate(kinds().items()):
        one = job(f"job {k}", **{**few, **fields})
        assert type(one.seed) is type(one.batch_size) is type(one.sizes[0]) is int
        factors = (np.float32(1.5), np.float64(0.7))
        files = []
        for fresh in (False, True):
            folder = tmp_path / f"{k}-{fresh}"
            passes(one, folder, factors, fresh=fresh)
            files.append(repr(read_checkpoint(folder / "checkpoint.pt", one.name)))
        assert files[0] == files[1], name
        assert "float32(" not in files[0]


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"scheduler": None}, "scheduler torch.*SequentialLR, the job has none"),
    ({"scheduler": cases.cosine}, "SequentialLR, the job has torch.optim.lr_scheduler.LambdaLR"),
    ({"scheduler": lambda o: schedulers.SequentialLR(o, [schedulers.StepLR(o, 2)] * 2, [7])},
     r"scheduler setting '_milestones' \[6\], the job has \[7\]"),
    ({"optimizer": partial(cases.made, optim.Adam, {"lr": 0.02})},
     r"optimizer setting 'lr' 0.01, the job has 0.02"),
    ({"optimizer": partial(cases.made, optim.SGD, {"lr": 0.01})}, "Adam, the job has torch"),
]  # fmt: skip


def test_other_settings_are_refused(tmp_path: Path) -> None:
    """A checkpoint keeps the rates of its schedule: others would have no effect."""
    one = job("a", sizes=(1,), scheduler=cases.warm_up)
    passes(one, tmp_path / "x", (1.0,))
    before = (tmp_path / "x" / "checkpoint.pt").read_bytes()
    for changes, sentence in CHANGES:
        with pytest.raises(InputError, match=sentence):
            member(replace(one, **changes), tmp_path / "x", 1)
    assert (tmp_path / "x" / "checkpoint.pt").read_bytes() == before
    one = job("a", sizes=(1,), optimizer=hooked)  # without a schedule they are taken
    passes(one, tmp_path / "y", (1.0,))
    for fields, expected in (({}, (0.5, 0.1 * 0.5**STEPS)), ({"lr": 0.2}, (0.5, 0.2))):
        found = member(replace(one, optimizer=partial(momentum, 0.5, **fields)), tmp_path / "y", 1)
        group = found.optimizer.param_groups[0]
        assert (group["momentum"], group["lr"]) == expected
    torch.save({"format": "optsched.elastic/2"}, tmp_path / "checkpoint.pt")
    with pytest.raises(InputError, match=r"is of format optsched.elastic/2, expected"):
        read_checkpoint(tmp_path / "checkpoint.pt", "a")


def momentum(value: float, parameters: Any, lr: float = 0.1) -> Any:
    """As `hooked`, otherwise set."""
    return optim.SGD(parameters, lr=lr, momentum=value)
