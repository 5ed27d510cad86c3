"""Bounds of the period from one job's lap and window: never above the optimum, often tight."""

from __future__ import annotations

import numpy as np
import pytest
from depth import seeds

import optsched
from optsched.problems.jobarray.bounds import window_bound
from optsched.problems.jobarray.graph import build
from optsched.testing.brute_force import best_period


def one_job(seed: int) -> optsched.JobArray:
    """One job of a few micro-batches, perhaps split, capped, with lags and updates."""
    draw = np.random.default_rng(seed)
    stages, micro_batches = int(draw.integers(1, 3)), int(draw.integers(2, 4))
    options: dict[str, object] = {}
    if stages * micro_batches <= 4 and draw.random() < 0.4:
        options["weight"] = draw.integers(1, 5, (1, stages))
    if draw.random() < 0.5:
        options |= {"activation": 1, "memory": draw.integers(1, 4, stages).tolist()}
    if draw.random() < 0.5:
        options["lag_forward"] = int(draw.integers(0, 3))
    if draw.random() < 0.5:
        options["lag_backward"] = int(draw.integers(-1, 3))
    if draw.random() < 0.5:
        options |= {
            "update": draw.integers(0, 7, (1, stages)),
            "update_mode": draw.choice(["fused", "none"]),
        }
    if stages * micro_batches <= 3 and "weight" not in options:
        options["multiplicity"] = int(draw.integers(1, 3))
    return optsched.JobArray(
        draw.integers(1, 5, (1, stages)),
        draw.integers(1, 5, (1, stages)),
        micro_batches=micro_batches,
        objective="period",
        **options,  # type: ignore[arg-type]
    )


@seeds(20, 80)
def test_never_above_the_optimum(seed: int) -> None:
    """Brute force knows the least period."""
    array = one_job(seed)
    best = best_period(array.graph())
    if not array.infeasibility():
        assert best is not None
        assert max(array.bounds().values()) <= best


def test_an_update_may_end_in_the_next_lap() -> None:
    """The gradient of stage 1 leaves before its update of 5: 9 is possible, not 10."""
    array = optsched.JobArray(
        [[1, 1]], [[1, 1]], update=[[0, 5]], micro_batches=2, objective="period"
    )
    assert array.lower_bound() == 9 == array.evaluate_orders([[0, 4, 3, 7], [1, 2, 5, 6]])


def test_a_lap_of_equal_stages_is_1f1b() -> None:
    """Two stages, three micro-batches, f = b = 1: load 6, chain 4 + 2, the lap (3 + 1) * 2."""
    array = optsched.JobArray([[1, 1]], [[1, 1]], micro_batches=3, objective="period")
    assert array.bounds()["lap"] == 8 == best_period(array.graph())


def test_only_what_must_be_done_in_the_lap_counts() -> None:
    """Weight gradients of the later stage run beside the next iteration (zero bubble)."""
    whole = optsched.JobArray([[1, 1]], [[2, 2]], micro_batches=3, objective="period")
    split = whole.replace(backward=[[1, 1]], weight=[[1, 1]])
    assert whole.bounds()["load"] == split.bounds()["load"] == split.bounds()["lap"] == 9
    assert whole.bounds()["lap"] == 12
    two = split.replace(micro_batches=2)
    assert two.bounds()["lap"] == best_period(two.graph()) == 7


def split_job(seed: int) -> optsched.JobArray:
    """One job with weight gradients that hold bytes, lags, perhaps updates."""
    draw = np.random.default_rng(seed)
    stages, micro_batches = ((1, 3), (2, 2), (1, 2))[draw.integers(3)]
    options: dict[str, object] = {}
    if draw.random() < 0.5:
        mode = draw.choice(["fused", "block", "global"] if stages == 1 else ["fused"])
        options |= {"update": draw.integers(0, 7, (1, stages)), "update_mode": mode}
    return optsched.JobArray(
        draw.integers(1, 5, (1, stages)),
        draw.integers(1, 5, (1, stages)),
        weight=draw.integers(1, 5, (1, stages)),
        lag_forward=int(draw.integers(0, 3)),
        lag_backward=int(draw.integers(0, 3)),
        micro_batches=micro_batches,
        activation=2,
        weight_memory=int(draw.integers(0, 3)),
        memory=draw.integers(2, 6, stages).tolist(),
        objective="period",
        **options,  # type: ignore[arg-type]
    )


@seeds(20, 60)
def test_the_window_is_never_above_the_optimum(seed: int) -> None:
    """Brute force knows the least period."""
    array = split_job(seed)
    once = build(array, array.recomputes)
    best = best_period(array.graph())
    assert best is not None
    assert window_bound(once, np.arange(once.n_operations)) <= best


def zero_bubble(stages: int, micro_batches: int, **changes: object) -> optsched.JobArray:
    """F = b = w = 1; stage s has room for 2(S - s) - 1 micro-batches, half of one until W."""
    fields: dict[str, object] = {
        "weight": [[1] * stages], "activation": 2, "weight_memory": 1,
        "memory": [2 * (2 * (stages - s) - 1) for s in range(stages)],
        "micro_batches": micro_batches, "objective": "period",
    }  # fmt: skip
    return optsched.JobArray([[1] * stages], [[1] * stages], **{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (3, 6), (4, 16), (8, 32)])
def test_without_room_the_last_stage_waits(stages: int, micro_batches: int) -> None:
    """It puts off one weight gradient: 2(S - 1) units without work, and a rule proves it."""
    array = zero_bubble(stages, micro_batches)
    found = optsched.solve(array, "dispatch", iterations=200)
    assert found.status == "optimal"
    assert found.objective == 3 * micro_batches + 2 * (stages - 1)


def test_room_for_weights_makes_the_bubble_vanish() -> None:
    """Each byte lets the last of three stages put off one weight gradient more."""
    bounds = [zero_bubble(3, 6, memory=[100, 100, room]).bounds()["lap"] for room in range(2, 8)]
    assert bounds == [22, 21, 20, 19, 18, 18]
