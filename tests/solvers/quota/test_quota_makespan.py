"""Makespan shares and admission: the kernels against enumeration, proofs, hostile input."""

from __future__ import annotations

import numpy as np
import pytest
from depth import depth
from hypothesis import given
from hypothesis import strategies as st
from quota_cases import all_entries, tables

from optsched import InputError
from optsched_solvers import quota
from optsched_solvers.quota.finish import _shortest


def test_thousands_of_cases() -> None:
    """No vector of quotas ends earlier; what is left shortens the longest jobs first."""
    for ptr, value, lo, spare in tables(depth(2000, 10_000), seed=1, rise="strict", jobs=3):
        times = value.max() - value
        g, proof = quota.makespan(ptr, times, lo, int(lo.sum()) + spare, certificate=True)
        mine = sorted(times[ptr[:-1] + g - lo].tolist(), reverse=True)
        best = min(
            sorted((times[p + k] for p, k in zip(ptr.tolist(), one, strict=False)), reverse=True)
            for one in all_entries(ptr, spare)
        )
        assert mine == best
        assert proof.holds
        assert proof.value == proof.bound == mine[0]


def test_times_that_stand_still() -> None:
    """Tables with sizes that do not help still give the shortest makespan, and the best rest."""
    for ptr, value, lo, spare in tables(1500, seed=2, rise="any"):
        times = value.max() - value
        g, proof = quota.makespan(ptr, times, lo, int(lo.sum()) + spare, certificate=True)
        best = min(
            sorted((times[p + k] for p, k in zip(ptr.tolist(), one, strict=False)), reverse=True)
            for one in all_entries(ptr, spare)
        )
        assert sorted(times[ptr[:-1] + g - lo].tolist(), reverse=True) == best
        assert (g - lo).sum() <= spare
        assert proof.holds


def test_the_rest_where_cheap_steps_are_not_best() -> None:
    """Two jobs end in no time instead of one."""
    rows = [[0], [2, 1], [2, 2, 0, 0], [2, 2, 1]]
    ptr = np.cumsum([0] + [len(row) for row in rows])
    times = np.concatenate(rows)
    g = quota.makespan(ptr, times, [1, 1, 2, 0], 6)
    assert sorted(times[ptr[:-1] + g - [1, 1, 2, 0]].tolist()) == [0, 0, 2, 2]


def test_too_much_work_for_the_rest() -> None:
    """Beyond the limit the makespan is the shortest all the same."""
    rng = np.random.default_rng(0)
    rows = [np.sort(rng.integers(0, 4, 30))[::-1] for _ in range(400)]
    ptr, times = np.arange(401) * 30, np.concatenate(rows)
    for budget in (600, 2000, 5000):
        g, proof = quota.makespan(ptr, times, 0, budget, certificate=True)
        assert proof.holds
        assert g.sum() <= budget


def test_certificate_notices_a_longer_makespan() -> None:
    """Quotas by which the longest job could end earlier prove nothing."""
    ptr, times = np.array([0, 3, 6]), np.array([12, 6, 4, 6, 3, 2])
    assert _shortest(ptr, times, 2, np.array([1, 1]), 6)
    assert _shortest(ptr, times, 2, np.array([2, 0]), 6)
    assert not _shortest(ptr, times, 2, np.array([0, 2]), 12)
    assert not _shortest(ptr, times, 2, np.array([2, 1]), 4)
    assert quota.makespan(ptr, times, 0, 2).tolist() == [1, 1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([0, 3], [5, 4, -1], 0, 4), "job 0: time -1"),
        (([0, 1, 3], [5, 4, 6], 1, 4), "job 1: time 6 with 2 GPUs is above 4 with 1"),
        (([0, 2], [2**62, 1], 0, 4), "job 0: time 4611686018427387904"),
        (([0, 2], [2.0, 1.0], 0, 4), "time: expected whole numbers"),
        (([0, 2], [np.inf, 1], 0, 4), "time: expected whole numbers"),
        (([0, 3], [2, 1], 0, 4), r"ptr: .* number of times\)"),
        (([0, 2], [2, 1], 5, 4), "5 GPUs of a budget of 4"),
        (([0, 2], [2, 1], 0, True), "budget"),
    ],
)
def test_hostile_input(arguments: tuple, words: str) -> None:
    """Every wrong argument is an InputError that names it."""
    with pytest.raises(InputError, match=words):
        quota.makespan(*arguments)


def first_fit(order: list[int], minimum: list[int], budget: int) -> list[bool]:
    """The rule, word by word."""
    admitted = [False] * len(minimum)
    for j in order:
        if minimum[j] <= budget:
            admitted[j], budget = True, budget - minimum[j]
    return admitted


@given(st.data())
def test_admission(data: st.DataObject) -> None:
    """First fit in the given order; smaller jobs may pass, and those left out stay out."""
    minimum = data.draw(st.lists(st.integers(0, 9), max_size=8))
    order = data.draw(st.permutations(range(len(minimum))))
    order = order[: data.draw(st.integers(0, len(order)))]
    budget = data.draw(st.integers(0, 30))
    admitted = quota.admit(order, minimum, budget)
    assert admitted.dtype == bool
    assert admitted.tolist() == first_fit(order, minimum, budget)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([0, 0], [1, 1], 4), "job 0 at place 1 is named twice"),
        (([2], [1, 1], 4), r"job 2 at place 0 is unknown: there are jobs 0\.\.1"),
        (([-1], [1, 1], 4), "job -1"),
        (([0], [-1], 4), "minimum -1"),
        (([0.0], [1], 4), "order"),
        (([True], [1], 4), "truth value"),
        (([0], [1], -4), "budget"),
    ],
)
def test_hostile_admission(arguments: tuple, words: str) -> None:
    """Every wrong argument is an InputError that names it."""
    with pytest.raises(InputError, match=words):
        quota.admit(*arguments)
