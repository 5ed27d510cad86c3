"""Max-min shares: the kernels against progressive filling, enumeration, and hostile input."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest
from depth import depth
from hypothesis import given
from hypothesis import strategies as st
from quota_cases import all_entries, all_shares, filled, shares, tables

from optsched import InputError
from optsched_solvers import quota
from optsched_solvers.quota import climbing, lexicographic, units


def test_thousands_of_cases() -> None:
    """The kernel gives what progressive filling in fractions gives, and proves it."""
    for w, budget, lo, hi in shares(depth(2000, 10_000), 1, seed=1):
        g, proof = quota.max_min(w, budget, lo, hi, certificate=True)
        assert g.tolist() == filled(w, budget, lo, hi), (w, budget, lo, hi)
        assert proof.holds, (w, budget, lo, hi)


def test_best_of_all() -> None:
    """No vector of quotas has a lexicographically larger sorted vector of levels."""
    for w, budget, lo, hi in shares(400, 1, seed=2, jobs=4):
        g, proof = quota.max_min(w, budget, lo, hi, certificate=True)
        best = max(
            sorted(Fraction(x, y) for x, y in zip(one, w, strict=True))
            for one in all_shares(budget, lo, hi)
        )
        assert sorted(Fraction(x, y) for x, y in zip(g.tolist(), w, strict=True)) == best
        assert proof.value == pytest.approx(float(best[0]))


def test_rest_is_lexicographic_not_by_id() -> None:
    """Of two jobs without GPUs the lighter one rises higher by the only GPU."""
    assert quota.max_min([2, 1], 1, 0, 9).tolist() == [0, 1]
    assert quota.max_min([1, 1], 1, 0, 9).tolist() == [1, 0]
    assert quota.max_min([2, 4, 1, 4], 5, 0, 9).tolist() == [1, 2, 1, 1]


@pytest.mark.parametrize("kind", ["lognormal", "equal", "few", "wide"])
def test_large_cases_prove_themselves(kind: str) -> None:
    """At 3,000 jobs the certificate holds and the budget is used."""
    rng = np.random.default_rng(3)
    n = 3000
    weights = {
        "lognormal": rng.lognormal(0, 2, n),
        "equal": np.full(n, 0.3),
        "few": rng.integers(1, 4, n),
        "wide": 10.0 ** rng.uniform(-300, 300, n),
    }[kind]
    lo = rng.integers(0, 3, n)
    hi = lo + rng.integers(0, 60, n)
    for budget in (int(lo.sum()), 9_001, 30_000, int(hi.sum()) - 1, int(hi.sum()) + 5):
        g, proof = quota.max_min(weights, budget, lo, hi, certificate=True)
        assert proof.holds
        assert g.sum() == min(budget, hi.sum())


def test_equal_floats_of_unequal_fractions() -> None:
    """Levels that no float can tell apart are ordered by exact products."""
    w = np.array([2**32 - 1, 2**32 - 3, 2**32 - 5], np.int64)
    units_left = np.array([2**30 - 1] * 3, np.int64)
    owner, tied = np.arange(3), np.arange(3)
    units._sort(w, owner, units_left, tied, 1, 0, 1)
    assert tied.tolist() == sorted(range(3), key=lambda j: Fraction(2**30 - 1, int(w[j])))
    a, b = 2**30 - 1, 2**30 - 2  # a / (2**32 - 1) and b / (2**32 - 5) differ by 2**-62 or so
    near = [(x, y) for x in (a, b) for y in w.tolist()]
    for (x, u), (y, v) in [(p, q) for p in near for q in near]:
        said = units._before(u, x, 0, v, y, 1, 1, 0, 1)
        assert bool(said) == ((Fraction(x, u), u, 0) < (Fraction(y, v), v, 1))


def test_levels_that_no_float_tells_apart() -> None:
    """With weights near 2**32 and 2**30 GPUs the order of fractions decides, and is proved."""
    rng = np.random.default_rng(8)
    equal_floats = 0
    for _ in range(600):
        n = int(rng.integers(2, 6))
        w = 2**32 - rng.integers(0, 40, n)
        total = 2**30 - int(rng.integers(0, 9))
        lo, hi, found = np.zeros(n, np.int64), np.full(n, total), np.zeros(2)
        g, proof = quota.max_min(w, total, lo, hi, certificate=True)
        pairs = list(enumerate(zip(g, w, strict=True)))
        last = max((Fraction(int(x) - 1, int(y)), int(y), j) for j, (x, y) in pairs)
        first = min((Fraction(int(x), int(y)), int(y), j) for j, (x, y) in pairs)
        assert last < first
        assert proof.holds
        equal_floats += last[0] != first[0] and float(last[0]) == float(first[0])
        moved = g.copy()
        moved[last[2]] += 1
        moved[first[2]] -= 1
        if last[2] != first[2]:
            assert not units.smallest_taken(w, lo, hi, moved, total, 1, 0, 1, found)
    assert equal_floats > 5


def test_certificate_notices_a_moved_gpu() -> None:
    """The check refuses quotas in which one GPU has gone elsewhere."""
    w, lo, hi, price = np.array([3, 2, 2, 1]), np.zeros(4, np.int64), np.full(4, 9), np.zeros(2)
    g = quota.max_min(w, 13, 0, 9)
    assert units.smallest_taken(w, lo, hi, g, 13, 1, 0, 1, price)
    for a, b in [(a, b) for a in range(4) for b in range(4) if a != b]:
        moved = g.copy()
        moved[a] -= 1
        moved[b] += 1
        assert not units.smallest_taken(w, lo, hi, moved, 13, 1, 0, 1, price)


@given(
    st.lists(
        st.tuples(st.integers(1, 50), st.integers(0, 3), st.integers(0, 9)), min_size=1, max_size=8
    ),
    st.integers(0, 60),
)  # fmt: skip
def test_house_monotone(jobs: list[tuple[int, int, int]], extra: int) -> None:
    """One GPU more takes none from anybody."""
    w, lo = [job[0] for job in jobs], [job[1] for job in jobs]
    hi = [job[1] + job[2] for job in jobs]
    g = quota.max_min(w, sum(lo) + extra, lo, hi)
    assert (quota.max_min(w, sum(lo) + extra + 1, lo, hi) >= g).all()


@pytest.mark.parametrize("rise", ["strict", "any", "concave"])
def test_tables_by_enumeration(rise: str) -> None:
    """Ten thousand tables in all: sorted levels are the best of all vectors, and proved."""
    for ptr, value, lo, spare in tables(3400, seed=4, rise=rise):
        levels = value - (value.min() if rise == "concave" else 0)
        if rise == "concave":
            levels = np.concatenate(
                [np.maximum.accumulate(levels[a:b]) for a, b in itertools.pairwise(ptr)]
            )
        g, proof = quota.max_min_table(ptr, levels, lo, int(lo.sum()) + spare, certificate=True)
        taken = g - lo
        assert taken.sum() <= spare
        best = max(
            sorted(levels[ptr[:-1] + np.array(one)].tolist()) for one in all_entries(ptr, spare)
        )
        assert sorted(levels[ptr[:-1] + taken].tolist()) == best, (ptr, levels, spare)
        assert proof.holds
        assert proof.value == best[0]


def test_linear_tables_agree_with_weights() -> None:
    """Tables of g * (common multiple) / w give the same levels as weights."""
    for w, budget, lo, hi in shares(1000, 1, seed=5):
        if max(w) > 5:
            continue
        value = [60 * g // w[j] for j in range(len(w)) for g in range(lo[j], hi[j] + 1)]
        ptr = np.concatenate([[0], np.cumsum([b - a + 1 for a, b in zip(lo, hi, strict=True)])])
        assert quota.max_min_table(ptr, value, lo, budget).tolist() == filled(w, budget, lo, hi)


def test_jumping_tables_need_a_search() -> None:
    """Lifting two of three jobs: which two decides whether the third GPU is of use."""
    rows = [[0, 0, 5], [0, 4], [0, 4, 4, 9]]
    ptr = np.array([0, 3, 5, 9])
    value = np.concatenate(rows)
    doubtful = 0
    for spare in range(8):
        taken, active, base = (np.zeros(3, np.int64) for _ in range(3))
        facts = np.zeros(3, np.int64)
        climbing.climb(ptr, value, spare, taken, active, base, facts)
        doubtful += facts[climbing.EXACT] == 0
        g = quota.max_min_table(ptr, value, 0, spare)
        best = max(
            sorted(value[ptr[:-1] + np.array(one)].tolist()) for one in all_entries(ptr, spare)
        )
        assert sorted(value[ptr[:-1] + g].tolist()) == best
    assert doubtful > 0


def test_too_large_a_search_is_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the work limit the quotas are feasible and the certificate does not hold."""
    monkeypatch.setattr(lexicographic, "MOST_WORK", 0)
    ptr, value = np.array([0, 3, 5, 9]), np.array([0, 0, 5, 0, 4, 0, 4, 4, 9])
    said = []
    for spare in range(8):
        g, proof = quota.max_min_table(ptr, value, 0, spare, certificate=True)
        assert g.sum() <= spare
        said.append(proof.holds)
    assert not all(said)
    assert said[0]


WRONG = [
    (([1.0, 0.0], 4, 0, 4), "job 1: weight 0.0 .* > 0"),
    (([1.0, -2], 4, 0, 4), "job 1: weight -2.0"),
    (([1.0, float("nan")], 4, 0, 4), "job 1: weight nan"),
    (([-5e-324], 4, 0, 4), "job 0: weight -5e-324"),
    (([-0.0], 4, 0, 4), "job 0: weight -0.0"),
    (([1, 1], 4, [0, 3], [4, 2]), "job 1: minimum 3 is above maximum 2"),
    (([1, 1, 1], 4, [1, 3, 1], 4), "5 GPUs of a budget of 4"),
    (([True, 1], 4, 0, 4), "truth value"),
    (([1, 1], None, 0, 4), "budget"),
    (([1, 1], 4, "0", 4), "minimum"),
]


@pytest.mark.parametrize(("arguments", "words"), WRONG)
def test_hostile_input(arguments: tuple, words: str) -> None:
    """Every wrong argument is an InputError that names it."""
    with pytest.raises(InputError, match=words):
        quota.max_min(*arguments)


WRONG_TABLES = [
    (([0, 2], [1, 2, 3], 0, 4), "ptr: expected offsets from 0 to 3"),
    (([1, 3], [1, 2, 3], 0, 4), "ptr"),
    (([], [], 0, 4), "ptr"),
    (([0, 2, 2, 3], [1, 2, 3], 0, 4), "job 1: its row has no value"),
    (([0, 2, 1, 3], [1, 2, 3], 0, 4), "job 1: its row"),
    (([0, 3], [1, 3, 2], 2, 4), "job 0: level 2 at 4 GPUs is below 3 at 3"),
    (([0, 3], [1, 2, 2**62], 0, 4), "value: expected levels within"),
    (([0, 3], [1.0, 2.0, 3.0], 0, 4), "value: expected whole numbers"),
    (([0, 3], [1, 2, 3], 5, 4), "5 GPUs of a budget of 4"),
    (([0, 3], [1, 2, 3], -1, 4), "minimum -1"),
    (([0, 3], [1, 2, 3], [0, 0], 4), "minimum: expected 1"),
]


@pytest.mark.parametrize(("arguments", "words"), WRONG_TABLES)
def test_hostile_tables(arguments: tuple, words: str) -> None:
    """Every wrong table is an InputError that names the place."""
    with pytest.raises(InputError, match=words):
        quota.max_min_table(*arguments)


def test_no_jobs() -> None:
    """Nobody shares nothing."""
    assert quota.max_min([], 4, [], []).tolist() == []
    g, proof = quota.max_min_table([0], [], [], 4, certificate=True)
    assert g.tolist() == []
    assert proof.holds
