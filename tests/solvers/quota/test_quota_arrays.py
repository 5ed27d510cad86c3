"""Shares and tables: against fractions, greedies, enumeration; proofs; hostile input."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from depth import depth
from hypothesis import given
from hypothesis import strategies as st
from quota_cases import (
    all_entries,
    all_shares,
    filled,
    largest_remainder,
    real_shares,
    shares,
    tables,
    webster,
)

from optsched import InputError
from optsched_solvers import quota


def by_webster(*given: Any) -> tuple[np.ndarray, quota.Certificate]:
    """Webster's rule as one function."""
    return quota.proportional(*given, method="webster")


RULES: dict[str, tuple[Any, Any, int]] = {
    "max_min": (quota.max_min, filled, 1),
    "largest_remainder": (quota.proportional, largest_remainder, 0),
    "webster": (by_webster, webster, 0),
}
"""Function, oracle, smallest score."""
NAMES = list(RULES)


# by weights


@pytest.mark.parametrize("name", NAMES)
def test_thousands_of_cases(name: str) -> None:
    """The kernel gives the quotas of exact fractions, ties included, and proves them."""
    rule, oracle, least = RULES[name]
    for s, budget, lo, hi in shares(depth(2000, 10_000), least, seed=1):
        g, proof = rule(s, budget, lo, hi)
        assert g.tolist() == oracle(s, budget, lo, hi), (s, budget, lo, hi)
        assert proof.holds, (s, budget, lo, hi)


def test_best_of_all() -> None:
    """No vector of quotas is better, by enumeration and by the definition of each rule."""
    for w, budget, lo, hi in shares(400, 1, seed=2, jobs=4):
        every = list(all_shares(budget, lo, hi))
        g, proof = quota.max_min(w, budget, lo, hi)
        best = max(sorted(map(Fraction, one, w)) for one in every)
        assert sorted(map(Fraction, g.tolist(), w)) == best
        assert proof.value == pytest.approx(float(best[0]))

        q = real_shares(w, budget, lo, hi)
        g, proof = quota.proportional(w, budget, lo, hi)
        apart = [sum(abs(a - b) for a, b in zip(one, q, strict=True)) for one in [g, *every]]
        assert apart[0] == min(apart[1:])
        assert proof.value == pytest.approx(float(apart[0]), abs=1e-9)

        g, _ = by_webster(w, budget, lo, hi)  # least sum g^2 / S (Balinski & Young)
        cost = [sum(Fraction(int(x) ** 2, y) for x, y in zip(one, w, strict=True))
                for one in [g, *every]]  # fmt: skip
        assert cost[0] == min(cost[1:])


JOBS = st.lists(
    st.tuples(st.integers(1, 50), st.integers(0, 3), st.integers(0, 9)), min_size=1, max_size=8
)


@given(JOBS, st.integers(0, 60))
def test_house_monotone(jobs: list[tuple[int, int, int]], extra: int) -> None:
    """One GPU more takes none from anybody; of equal bounds a larger score gets no less."""
    s, lo = [job[0] for job in jobs], [job[1] for job in jobs]
    hi = [job[1] + job[2] for job in jobs]
    budget = sum(lo) + extra
    for rule in (quota.max_min, by_webster):
        assert (rule(s, budget + 1, lo, hi)[0] >= rule(s, budget, lo, hi)[0]).all()
    for rule in (quota.proportional, by_webster):
        g, _ = rule(s, len(s) + extra, 1, 9)
        assert all(g[i] >= g[j] for i, x in enumerate(s) for j, y in enumerate(s) if x > y)


def test_extremes_of_size() -> None:
    """The largest budget, scores of 32 bits and maxima of 63 bits neither overflow nor err."""
    for rule, _, _ in RULES.values():
        g, proof = rule([2**32, 2**32 - 1, 1], 2**30, 0, 2**63 - 1)
        assert proof.holds
        assert g.sum() == 2**30


def test_levels_that_no_float_tells_apart() -> None:
    """With weights near 2**32 and 2**30 GPUs the order of fractions decides, and is proved."""
    rng = np.random.default_rng(8)
    equal_floats = 0
    for _ in range(600):
        n = int(rng.integers(2, 6))
        w = 2**32 - rng.integers(0, 40, n)
        g, proof = quota.max_min(w, 2**30 - int(rng.integers(0, 9)), 0, 2**30)
        pairs = list(enumerate(zip(g.tolist(), w.tolist(), strict=True)))
        last = max((Fraction(x - 1, y), y, j) for j, (x, y) in pairs)
        first = min((Fraction(x, y), y, j) for j, (x, y) in pairs)
        assert last < first
        assert proof.holds
        equal_floats += last[0] != first[0] and float(last[0]) == float(first[0])
    assert equal_floats > 5


@pytest.mark.parametrize("name", NAMES)
def test_certificates_notice_a_moved_gpu(name: str) -> None:
    """The check, made on the answer alone, refuses quotas in which one GPU has gone elsewhere."""
    for a, b in itertools.permutations(range(4), 2):
        g, proof = RULES[name][0]([3, 2, 2, 1], 13, 0, 9)
        g[a] -= 1
        g[b] += 1
        assert not proof.holds


# by tables


def test_large_tables() -> None:
    """With pivots from samples: proofs hold, ties included."""
    rng = np.random.default_rng(0)
    ptr = np.concatenate([[0], np.cumsum(rng.integers(1, 41, 2500))])
    lo = rng.integers(0, 3, 2500)
    levels = np.repeat(np.arange(2500), np.diff(ptr)) % 5 + np.arange(ptr[-1])
    for spare in (0, 1, 3000, 20_000, 45_000, 10**6):
        assert quota.max_min_table(ptr, levels, lo, int(lo.sum()) + spare)[1].holds


@pytest.mark.parametrize("rise", ["strict", "any"])
def test_levels_and_makespans_by_enumeration(rise: str) -> None:
    """The lowest level, and the makespan, are the best; all levels if that is proved."""
    proved = count = 0
    for ptr, value, lo, spare in tables(depth(1700, 5000), seed=4, rise=rise):
        every = [ptr[:-1] + np.array(one) for one in all_entries(ptr, spare)]
        g, proof = quota.max_min_table(ptr, value, lo, int(lo.sum()) + spare)
        best = max(sorted(value[one].tolist()) for one in every)
        assert (g - lo).sum() <= spare
        assert value[ptr[:-1] + g - lo].min() == best[0] == proof.value
        if proof.holds:
            assert sorted(value[ptr[:-1] + g - lo].tolist()) == best, (ptr, value, spare)
        proved, count = proved + proof.holds, count + 1
        times = value.max() - value
        g, proof = quota.makespan(ptr, times, lo, int(lo.sum()) + spare)
        assert times[ptr[:-1] + g - lo].max() == min(times[one].max() for one in every)
        assert proof.holds
        assert proof.value == proof.bound == times[ptr[:-1] + g - lo].max()
    assert proved == count if rise == "strict" else proved > 0.95 * count


def test_certificates_of_levels_notice_worse_answers() -> None:
    """Quotas by which the worst off could be better off prove nothing."""
    ptr, times = np.array([0, 3, 6]), np.array([12, 6, 4, 6, 3, 2])
    for taken, holds, lowest in (([1, 1], 1, 1), ([2, 0], 0, 1), ([0, 2], 0, 0), ([2, 1], 0, 0)):
        quotas, proof = quota.max_min_table(ptr, -times, 0, 2)
        quotas[:] = taken
        assert proof.holds == holds
        quotas, proof = quota.makespan(ptr, times, 0, 2)
        quotas[:] = taken
        assert proof.holds == lowest


# arguments

SHARES = [
    (([1.0, -2], 4, 0, 4), "job 1: (weight|score) -2.0"),
    (([1.0, float("nan")], 4, 0, 4), "job 1: (weight|score) nan"),
    (([1, 1], 4, [0, 3], [4, 2]), "job 1: minimum 3 is above maximum 2"),
    (([1, 1, 1], 4, [1, 3, 1], 4), "5 GPUs of a budget of 4"),
    (([True, 1], 4, 0, 4), "truth value"),
    (([[1, 1]], 4, 0, 4), "one dimension"),
    (([1, 1], 4, [0, 0, 0], 4), "minimum: expected 2 values"),
    (([1, 1], None, 0, 4), "budget"),
    (([1, 1], 2**30 + 1, 0, 4), "budget"),
]


@pytest.mark.parametrize(("arguments", "words"), SHARES)
def test_hostile_shares(arguments: tuple, words: str) -> None:
    """Every wrong argument is an InputError that names it."""
    for rule, _, _ in RULES.values():
        with pytest.raises(InputError, match=words):
            rule(*arguments)
    for weight in (0.0, -0.0):
        with pytest.raises(InputError, match=f"job 0: weight {weight} .* > 0"):
            quota.max_min([weight], 4, 0, 4)
    with pytest.raises(InputError, match="method"):
        quota.proportional([1], 1, 0, 1, method="hare")


TABLES = [
    (([1, 3], [1, 2, 3], 0, 4), "ptr"),
    (([], [], 0, 4), "ptr"),
    (([0, 2, 2, 3], [1, 2, 3], 0, 4), "ptr: row 1 is empty"),
    (([0, 3], [1.0, 2.0, 3.0], 0, 4), "(value|time): expected whole numbers"),
    (([0, 3], [3, 3, 3], 5, 4), "5 GPUs of a budget of 4"),
    (([0, 2], [1, 1], 0, True), "budget"),
]
LEVELS = [
    (([0, 3], [1, 3, 2], 2, 4), "job 0: level 2 with 4 GPUs is below 3 with 3"),
    (([0, 3], [1, 2, 2**62], 0, 4), "job 0: level 4611686018427387904 is not in"),
]
TIMES = [
    (([0, 3], [5, 4, -1], 0, 4), "job 0: time -1"),
    (([0, 1, 3], [5, 4, 6], 1, 4), "job 1: time 6 with 2 GPUs is above 4 with 1"),
    (([0, 2], [2**62, 1], 0, 4), "job 0: time 4611686018427387904"),
]


def test_hostile_tables() -> None:
    """Every wrong table is an InputError that names the place; what fits is solved."""
    cases = ((quota.max_min_table, LEVELS), (quota.makespan, TIMES))
    for function, own in cases:
        for arguments, words in TABLES + own:
            with pytest.raises(InputError, match=words):
                function(*arguments)


# admission


@given(st.data())
def test_admission(data: st.DataObject) -> None:
    """First fit in the given order, word by word; those left out stay out."""
    minimum = data.draw(st.lists(st.integers(0, 9), max_size=8))
    order = data.draw(st.permutations(range(len(minimum))))
    order = order[: data.draw(st.integers(0, len(order)))]
    left = budget = data.draw(st.integers(0, 30))
    expected = [False] * len(minimum)
    for j in order:
        if minimum[j] <= left:
            expected[j], left = True, left - minimum[j]
    admitted = quota.admit(order, minimum, budget)
    assert admitted.dtype == bool
    assert admitted.tolist() == expected


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([0, 0], [1, 1], 4), "job 0 at place 1 is named twice"),
        (([2], [1, 1], 4), r"job 2 at place 0 is unknown: jobs are 0\.\.1"),
        (([0.0], [1], 4), "order"),
        (([0], [1], -4), "budget"),
    ],
)
def test_hostile_admission(arguments: tuple, words: str) -> None:
    """Every wrong argument is an InputError that names it."""
    with pytest.raises(InputError, match=words):
        quota.admit(*arguments)
