"""The bound from one job's lap: never above the optimum, and what proves single-job periods."""

from __future__ import annotations

import numpy as np
from depth import seeds

import optsched
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


def test_free_order_and_single_blocks_make_no_claim() -> None:
    """There the longest chain says what this one could."""
    assert optsched.JobArray([[1, 1]], [[1, 1]], objective="period").bounds()["lap"] == 0
    free = optsched.JobArray(
        [[1]], [[1]], micro_batches=3, microbatch_order="free", objective="period"
    )
    assert free.bounds()["lap"] == 0
