"""Sequential execution, GPipe and 1F1B: their closed formulas, on one job and on several."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_problems import random_array

from optsched import JobArray, Schedule, verify
from optsched.errors import InputError
from optsched.pipelines.orders import bubble, gpipe, one_f_one_b, sequential

if TYPE_CHECKING:
    from random import Random

SIZES = [(1, 1), (1, 3), (2, 2), (3, 8), (4, 4), (8, 3), (8, 32)]


def uniform(stages: int, micro_batches: int, f: int = 2, b: int = 5) -> JobArray:
    """One job of equal stages."""
    return JobArray([[f] * stages], [[b] * stages], micro_batches=micro_batches, activation=1)


def peaks(schedule: Schedule) -> list[int]:
    """Most activations held on each device."""
    assert schedule.sequences is not None
    change = schedule.acquire - schedule.free
    return [int(np.cumsum(change[row]).max()) for row in schedule.sequences.to_lists()]


@pytest.mark.parametrize(("stages", "m"), SIZES)
def test_gpipe(stages: int, m: int) -> None:
    """(m + S - 1)(f + b); bubble (S-1)/(m+S-1); every activation is held."""
    schedule = gpipe(uniform(stages, m))
    assert verify(schedule) == []
    assert schedule.makespan == (m + stages - 1) * 7
    assert bubble(schedule) == pytest.approx((stages - 1) / (m + stages - 1))
    assert peaks(schedule) == [m] * stages


@pytest.mark.parametrize(("stages", "m"), SIZES)
def test_one_f_one_b(stages: int, m: int) -> None:
    """The makespan of GPipe with min(m, S - s) activations on stage s."""
    schedule = one_f_one_b(uniform(stages, m))
    assert verify(schedule) == []
    assert schedule.makespan == (m + stages - 1) * 7
    assert peaks(schedule) == [min(m, stages - s) for s in range(stages)]


@pytest.mark.parametrize(("stages", "m"), SIZES)
def test_sequential(stages: int, m: int) -> None:
    """M times the whole pipeline: m S (f + b); one activation; bubble (S-1)/S."""
    schedule = sequential(uniform(stages, m))
    assert verify(schedule) == []
    assert schedule.makespan == m * stages * 7
    assert bubble(schedule) == pytest.approx((stages - 1) / stages)
    assert peaks(schedule) == [1] * stages


@pytest.mark.parametrize("build", [gpipe, one_f_one_b, sequential])
def test_jobs_follow_each_other_like_micro_batches(build: object) -> None:
    """Three jobs of two micro-batches take as long as one job of six."""
    array = JobArray([[2] * 3] * 3, [[5] * 3] * 3, micro_batches=2, activation=1)
    assert build(array).makespan == build(uniform(3, 6)).makespan  # type: ignore[operator]


@settings(deadline=None, max_examples=40)
@given(st.randoms(use_true_random=False), st.sampled_from([gpipe, one_f_one_b, sequential]))
def test_every_option_gives_a_schedule(rng: Random, build: object) -> None:
    """Updates, recompute blocks, weight blocks, micro-batches: complete orders, no deadlock."""
    array = random_array(rng).replace(memory=None)
    if array.place != tuple(range(array.n_stages)):
        with pytest.raises(InputError, match="stage v on device v"):
            build(array)  # type: ignore[operator]
        return
    schedule = build(array)  # type: ignore[operator]
    assert verify(schedule) == []
    assert schedule.makespan >= array.lower_bound()


def test_memory_is_left_to_the_verifier() -> None:
    """GPipe's activations do not fit; 1F1B's do."""
    array = uniform(3, 8).replace(memory=[3, 2, 1])
    assert {v.kind for v in verify(gpipe(array))} == {"memory"}
    assert verify(one_f_one_b(array)) == []
