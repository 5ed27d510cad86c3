"""The bound from put-off weight gradients: never above the optimum, and tight where room is."""

from __future__ import annotations

import numpy as np
import pytest
from depth import seeds

import optsched
from optsched.problems.jobarray.graph import build
from optsched.problems.jobarray.window import window_bound
from optsched.testing.brute_force import best_period


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
def test_never_above_the_optimum(seed: int) -> None:
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


def test_a_stage_on_two_devices_is_left_out() -> None:
    """Chimera's stages share the work of an iteration."""
    place = [[[0, 1], [1, 0]]]
    array = zero_bubble(2, 2, place=place, memory=[0, 0])
    once = build(array, array.recomputes)
    assert window_bound(once, np.arange(once.n_operations)) == 0
