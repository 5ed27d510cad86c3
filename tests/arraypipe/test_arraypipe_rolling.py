"""Rolling schedules with offsets, multiplicities, settings and early stops: no bit differs."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from arraypipe_models import adamw, sgd, trainer  # noqa: E402
from arraypipe_plans import random_rolling  # noqa: E402
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from optsched import JobArray, verify  # noqa: E402
from optsched.arraypipe import Job  # noqa: E402
from optsched.arraypipe.train_alone import Trained, differences  # noqa: E402

pytestmark = pytest.mark.torch


def adam(named: Any) -> torch.optim.Optimizer:
    """Adam in its multi-tensor form, with AMSGrad."""
    return torch.optim.Adam(named, lr=3e-3, amsgrad=True, foreach=True)


def halving(optimizer: torch.optim.Optimizer) -> Any:
    """Half the learning rate after each iteration."""
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


MAKERS = {"sgd": sgd, "adam": adam, "adamw": adamw}
Settings = tuple[int, int, str, int, bool, str, "float | None", bool]


def job(row: Settings) -> Job:
    """A job with these settings."""
    seed, batch, maker, microbatches, recompute, precision, clip, scheduled = row
    return Job(
        seed, batch, MAKERS[maker], microbatches=microbatches, recompute=recompute,
        precision=precision, clip_norm=clip, scheduler=halving if scheduled else None,
    )  # fmt: skip


@cache
def alone(row: Settings, steps: int) -> Trained:
    """The reference, trained once."""
    return trainer([job(row)]).train_alone(0, steps)


@st.composite
def rows(draw: st.DrawFn) -> Settings:
    """Few values, so that references are used again."""
    return (
        draw(st.integers(0, 1)), draw(st.sampled_from([8, 11])), draw(st.sampled_from([*MAKERS])),
        draw(st.sampled_from([1, 2])), draw(st.booleans()),
        draw(st.sampled_from(["fp32", "fp32", "fp64", "bf16"])),
        draw(st.sampled_from([None, None, 0.05])), draw(st.booleans()),
    )  # fmt: skip


@given(st.data(), st.lists(rows(), min_size=1, max_size=3), st.integers(1, 6))
def test_rolling_orders_are_bit_identical(data: Any, jobs: list[Settings], steps: int) -> None:
    """Offsets, several iterations of a job in a cycle, and stops at any iteration."""

    def draw(*values: Any) -> Any:
        return data.draw(st.sampled_from(values))

    n = len(jobs)
    together = any(row[6] is not None for row in jobs)
    problem = JobArray(
        [[3, 2, 4]] * n, [[5, 4, 6]] * n, update=[[1, 1, 1]] * n, recompute=[[2, 2, 2]] * n,
        micro_batches=[row[3] for row in jobs], multiplicity=[draw(1, 2) for _ in jobs],
        recompute_mode=tuple(row[4] for row in jobs),
        update_mode="global" if together else draw("block", "fused"),
        recompute_as_block=draw(False, True), place=draw(None, [0, 1, 0], [0, 0, 1]),
        objective="period",
    )  # fmt: skip
    schedule = random_rolling(problem, seed=data.draw(st.integers(0, 10**6)))
    array = trainer([job(row) for row in jobs])
    last = [draw(None, *range(steps)) for _ in jobs]
    stops = dict(zip(array.jobs, last, strict=True))

    def on_step(which: Job, iteration: int, loss: float) -> None:
        if iteration == stops[which]:
            which.stop()

    result = array.run(schedule, steps, on_step=on_step, on_error="raise")
    assert verify(result.trace) == []
    for row, stop, trained in zip(jobs, last, result.trained, strict=True):
        done = steps if stop is None else stop + 1
        assert differences(trained, alone(row, done)) == []
