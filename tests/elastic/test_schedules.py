"""Learning-rate schedules and numbers of NumPy in elastic jobs: exact over resizes and restarts."""

from __future__ import annotations

from collections import deque
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
from training_cases import Replay, alone, job, member, states
from training_settings import FLOATS, INTEGERS, OPTIMIZERS, SCHEDULERS

from optsched import InputError
from optsched.elastic import TrainingJob, read_checkpoint, run
from optsched.elastic.workers import Order

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from optsched.elastic.training import Member

STEPS = -(-cases.SAMPLES // 20)  # of a pass, whatever the workers


def cosine(optimizer: Any) -> Any:
    """A cosine by NumPy, over all passes."""
    return schedulers.LambdaLR(optimizer, lambda step: 0.5 * (1 + np.cos(np.pi * step / 20)))


def warm_up(optimizer: Any) -> Any:
    """Two schedules, one after the other, which changes in the middle of a pass."""
    first = schedulers.LinearLR(optimizer, 0.1, total_iters=6)
    return schedulers.SequentialLR(optimizer, [first, schedulers.StepLR(optimizer, 3, 0.5)], [6])


def plateau(optimizer: Any) -> Any:
    """Looks at the loss of every batch."""
    return schedulers.ReduceLROnPlateau(optimizer, factor=0.5, patience=1, threshold=0.1)


def bare(optimizer: Any) -> Any:
    """A schedule without a state."""
    return object()


def nested(optimizer: Any) -> Any:
    """A schedule with an object in its state."""
    found = schedulers.StepLR(optimizer, 2)
    found.after = schedulers.StepLR(optimizer, 2)  # type: ignore[attr-defined]
    return found


def test_equals_a_plain_loop(tmp_path: Path) -> None:
    """On one worker to the bit, over resizes to 1e-12, in a run that ended in between.

    Jobs whose state no checkpoint can keep fail, and they alone.
    """
    quotas = {"one": [1, 1, 1], "warm": [1, 2, 1], "loss": [2, 1, 2], "bad": [1]}
    quotas |= {"late": [1], "bare": [1]}
    makers = {"one": cosine, "warm": warm_up, "loss": plateau, "bad": nested}
    jobs = [
        job(name, model=cases.net, passes=3, scheduler=makers.get(name))
        for name in quotas if name not in ("late", "bare")
    ]  # fmt: skip
    bad = [
        jobs.pop(), job("late", optimizer=partial(made, Late, {"lr": 0.1})),
        job("bare", scheduler=bare),
    ]  # fmt: skip
    run([replace(j, passes=1) for j in jobs + bad], 3, Replay(quotas), folder=tmp_path)
    found = run(jobs + bad, 3, Replay(quotas), folder=tmp_path, resume=True)
    assert {*found.failed} == {"bad", "late", "bare"}
    assert "checkpoint of job bad: scheduler" in found.failed["bad"]
    assert "a StepLR cannot be kept" in found.failed["bad"]
    assert "odd: a deque cannot be kept" in found.failed["late"]
    assert "a object, has no state_dict" in found.failed["bare"]
    assert all(found.quotas[one.name] == quotas[one.name] for one in jobs)
    assert not any(found.records[name] for name in found.failed)
    for one in jobs:
        (state,) = states(tmp_path, one.name)
        model, optimizer, _ = alone(one, quotas[one.name])
        rate = state["optimizer"]["param_groups"][0]["lr"]
        assert type(rate) is float
        assert rate == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
        assert rate != 0.01
        for key, value in model.state_dict().items():
            if one.name == "one":
                assert torch.equal(state["model"][key], value)
            assert torch.allclose(state["model"][key], value, rtol=0, atol=1e-12), key


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
    one = job("a", model=cases.net, sizes=(1,), scheduler=warm_up)
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


def made(kind: Any, settings: dict[str, Any], parameters: Any) -> Any:
    """An optimizer."""
    return kind(parameters, **settings)


def kinds() -> dict[str, dict[str, Any]]:
    """A job for every spelling of a number, scheduler and optimizer."""
    rows: dict[str, dict[str, Any]] = {}
    for name, of in FLOATS.items():
        decay = {} if "tensor" in name else {"weight_decay": of(0.1)}
        rows[name] = {"optimizer": partial(made, optim.Adamax, {"lr": of(0.01), **decay})}
        rows[name] |= {} if "tensor" in name else {"weight": of(0.5), "submit": of(0.0)}
    integers = [*INTEGERS.items()]
    for k, (name, make) in enumerate(SCHEDULERS.items()):
        spelling, integer = integers[k % len(integers)]
        rows[f"{name}, integer {spelling}"] = {
            "scheduler": make, "seed": integer(3), "batch_size": integer(50),
            "priority": integer(3), "sizes": (integer(1),), "preemptible": np.True_,
        }  # fmt: skip
    assert len(SCHEDULERS) >= len(INTEGERS)
    for name, settings in OPTIMIZERS.items():
        if kind := getattr(optim, name, None):
            rows[name] = {"optimizer": partial(made, kind, {"lr": np.float32(0.01), **settings})}
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


class Late(optim.SGD):
    """An object comes into its state with the first step."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step."""
        super().step()
        self.state[self.param_groups[0]["params"][0]]["odd"] = deque()


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"scheduler": None}, "scheduler torch.*SequentialLR, the job has none"),
    ({"scheduler": cosine}, "SequentialLR, the job has torch.optim.lr_scheduler.LambdaLR"),
    ({"scheduler": lambda o: schedulers.SequentialLR(o, [schedulers.StepLR(o, 2)] * 2, [7])},
     r"scheduler setting '_milestones' \[6\], the job has \[7\]"),
    ({"optimizer": partial(made, optim.Adam, {"lr": 0.02})},
     r"optimizer setting 'lr' 0.01, the job has 0.02"),
    ({"optimizer": partial(made, optim.SGD, {"lr": 0.01})}, "Adam, the job has torch"),
]  # fmt: skip


def test_other_settings_are_refused(tmp_path: Path) -> None:
    """A checkpoint keeps the rates of its schedule: others would have no effect."""
    one = job("a", sizes=(1,), scheduler=warm_up)
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
