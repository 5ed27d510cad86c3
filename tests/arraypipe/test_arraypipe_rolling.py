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


@st.composite
def runs(draw: st.DrawFn) -> dict[str, Any]:
    """Jobs, a random rolling order, and iterations after which jobs are stopped."""
    jobs = draw(st.lists(rows(), min_size=1, max_size=3))
    steps = draw(st.integers(1, 6))
    return {
        "rows": jobs,
        "steps": steps,
        "multiplicity": [draw(st.integers(1, 2)) for _ in jobs],
        "place": draw(st.sampled_from([None, [0, 1, 0], [0, 0, 1]])),
        "block": draw(st.booleans()),
        "as_block": draw(st.booleans()),
        "stops": [draw(st.none() | st.integers(0, steps - 1)) for _ in jobs],
        "seed": draw(st.integers(0, 10**6)),
    }


def check(drawn: dict[str, Any]) -> None:
    """Run it; every job has the bits of training it alone for as many iterations."""
    n = len(drawn["rows"])
    together = any(row[6] is not None for row in drawn["rows"])
    mode = "global" if together else "block" if drawn["block"] else "fused"
    problem = JobArray(
        [[3, 2, 4]] * n, [[5, 4, 6]] * n, update=[[1, 1, 1]] * n, recompute=[[2, 2, 2]] * n,
        micro_batches=[row[3] for row in drawn["rows"]], multiplicity=drawn["multiplicity"],
        recompute_mode=tuple(row[4] for row in drawn["rows"]), update_mode=mode,
        recompute_as_block=drawn["as_block"], place=drawn["place"], objective="period",
    )  # fmt: skip
    schedule = random_rolling(problem, seed=drawn["seed"])
    array = trainer([job(row) for row in drawn["rows"]])
    stops = dict(zip(array.jobs, drawn["stops"], strict=True))

    def on_step(which: Job, iteration: int, loss: float) -> None:
        if iteration == stops[which]:
            which.stop()

    result = array.run(schedule, drawn["steps"], on_step=on_step, on_error="raise")
    assert verify(result.trace) == []
    for row, stop, trained in zip(drawn["rows"], drawn["stops"], result.trained, strict=True):
        done = drawn["steps"] if stop is None else stop + 1
        assert differences(trained, alone(row, done)) == []


@given(runs())
def test_rolling_orders_are_bit_identical(drawn: dict[str, Any]) -> None:
    """Offsets, several iterations of a job in a cycle, and stops at any iteration."""
    check(drawn)
