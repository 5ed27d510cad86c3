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
from torch import optim
from torch.optim import lr_scheduler as schedulers
from training_cases import alone, job, member
from training_settings import FLOATS, INTEGERS

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


def test_numbers_of_any_spelling_are_resumed_exactly(tmp_path: Path) -> None:
    """Two passes in one process, or one and a restart: the same bits, files included.

    The executor's tests have schedulers and optimizers of all kinds, with the same checkpoints.
    """
    for k, (name, integer) in enumerate(INTEGERS.items()):
        of = [*FLOATS.values()][k % len(FLOATS)]
        one = job(
            f"job {k}", sizes=(integer(1),), seed=integer(3), batch_size=integer(50),
            priority=integer(3), preemptible=np.True_, submit=np.float32(0.0),
            optimizer=partial(cases.made, optim.Adamax, {"lr": of(0.01)}),
        )  # fmt: skip
        assert type(one.seed) is type(one.batch_size) is type(one.sizes[0]) is int
        files = []
        for fresh in (False, True):
            folder = tmp_path / f"{k}-{fresh}"
            passes(one, folder, (np.float32(1.5), np.float64(0.7)), fresh=fresh)
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
