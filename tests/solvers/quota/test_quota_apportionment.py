"""Proportional shares: the kernels against fractions and enumeration, proofs, hostile input."""

from __future__ import annotations

import numpy as np
import pytest
from depth import depth
from hypothesis import given
from hypothesis import strategies as st
from quota_cases import all_shares, largest_remainder, real_shares, shares, webster

from optsched import InputError
from optsched_solvers import quota
from optsched_solvers.quota import remainders, units

ORACLES = {"largest_remainder": largest_remainder, "webster": webster}
METHODS = list(ORACLES)


@pytest.mark.parametrize("method", METHODS)
def test_thousands_of_cases(method: str) -> None:
    """The kernel gives the quotas of exact fractions, ties included, and proves them."""
    for s, budget, lo, hi in shares(depth(2000, 10_000), 0, seed=1):
        g, proof = quota.proportional(s, budget, lo, hi, method=method, certificate=True)
        assert g.tolist() == ORACLES[method](s, budget, lo, hi), (s, budget, lo, hi)
        assert proof.holds, (s, budget, lo, hi)


def test_nearest_of_all() -> None:
    """No vector of whole quotas is nearer to the real shares, by enumeration."""
    for s, budget, lo, hi in shares(400, 0, seed=2, jobs=4):
        q = real_shares(s, budget, lo, hi)
        assert sum(q) == min(budget, sum(hi))
        g, proof = quota.proportional(s, budget, lo, hi, certificate=True)
        least = min(
            sum(abs(a - b) for a, b in zip(one, q, strict=True))
            for one in all_shares(budget, lo, hi)
        )
        assert sum(abs(int(a) - b) for a, b in zip(g, q, strict=True)) == least
        assert proof.value == pytest.approx(float(least), abs=1e-9)


def test_webster_of_all() -> None:
    """Webster's quotas minimise sum g^2 / S (Balinski & Young), by enumeration."""
    for s, budget, lo, hi in shares(400, 1, seed=3, jobs=4):
        g = quota.proportional(s, budget, lo, hi, method="webster")
        cost = [
            sum(x * x / w for x, w in zip(one, s, strict=True))
            for one in all_shares(budget, lo, hi)
        ]
        assert sum(x * x / w for x, w in zip(g.tolist(), s, strict=True)) <= min(cost) + 1e-9


def test_slow_path_is_exact() -> None:
    """Clip-and-recompute in integers, which rounding errors alone would need, is right as well."""
    for s, budget, lo, hi in shares(3000, 0, seed=4):
        scores = np.array(s, np.int64) << 20
        low, high = np.array(lo), np.minimum(hi, budget)
        total, sums, share = (
            min(budget, int(high.sum())),
            np.zeros(2, np.int64),
            np.zeros(2, np.int64),
        )
        remainders.scored(scores, low, high, total, sums)
        if scores.sum() == 0:
            continue
        remainders._clip(scores, low, high, total, share)
        g = np.zeros(len(s), np.int64)
        rest = remainders._quotas(scores, low, high, total, share[0], share[1], g)
        assert rest >= 0
        if rest:
            remainders._give(scores, low, high, share[0], share[1], rest, g)
        assert g.tolist() == largest_remainder(s, budget, lo, hi)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["lognormal", "equal", "few", "wide", "zeros"])
def test_large_cases_prove_themselves(method: str, kind: str) -> None:
    """At 3,000 jobs the certificate holds and the budget is used."""
    rng = np.random.default_rng(5)
    n = 3000
    scores = {
        "lognormal": rng.lognormal(0, 2, n),
        "equal": np.full(n, 0.3),
        "few": rng.integers(1, 4, n),
        "wide": 10.0 ** rng.uniform(-300, 300, n),
        "zeros": rng.integers(0, 2, n),
    }[kind]
    lo = rng.integers(0, 3, n)
    hi = lo + rng.integers(0, 60, n)
    for budget in (int(lo.sum()), 9_001, 30_000, int(hi.sum()) - 1, int(hi.sum()) + 5):
        g, proof = quota.proportional(scores, budget, lo, hi, method=method, certificate=True)
        assert proof.holds
        assert g.sum() == min(budget, hi.sum())
        assert (lo <= g).all()
        assert (g <= hi).all()


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=8),
    st.integers(0, 40), st.integers(0, 3), st.integers(0, 9), st.sampled_from(METHODS),
)  # fmt: skip
def test_monotone_in_scores(s: list[int], extra: int, lo: int, width: int, method: str) -> None:
    """With equal bounds a larger score never gets fewer GPUs."""
    g = quota.proportional(s, lo * len(s) + extra, lo, lo + width, method=method)
    for i, j in [(i, j) for i in range(len(s)) for j in range(len(s)) if s[i] > s[j]]:
        assert g[i] >= g[j]


@given(
    st.lists(
        st.tuples(st.integers(0, 50), st.integers(0, 3), st.integers(0, 9)), min_size=1, max_size=8
    ),
    st.integers(0, 60),
)  # fmt: skip
def test_webster_is_house_monotone(jobs: list[tuple[int, int, int]], extra: int) -> None:
    """One GPU more takes none from anybody."""
    s, lo = [job[0] for job in jobs], [job[1] for job in jobs]
    hi = [job[1] + job[2] for job in jobs]
    budget = sum(lo) + extra
    g = quota.proportional(s, budget, lo, hi, method="webster")
    more = quota.proportional(s, budget + 1, lo, hi, method="webster")
    assert (more >= g).all()


def test_alabama_paradox() -> None:
    """Largest remainders take a GPU from the third job when the cluster grows by one."""
    s = [6, 6, 2]
    assert quota.proportional(s, 10, 0, 10).tolist() == [4, 4, 2]
    assert quota.proportional(s, 11, 0, 11).tolist() == [5, 5, 1]
    assert quota.proportional(s, 10, 0, 10, method="webster").tolist() == [5, 4, 1]
    assert quota.proportional(s, 11, 0, 11, method="webster").tolist() == [5, 5, 1]


@pytest.mark.parametrize("method", METHODS)
def test_zero_scores(method: str) -> None:
    """Zero scores get what is left when all others are at their maximum, equally; all zero too."""
    assert quota.proportional([5, 0, 0], 10, 0, 4, method=method).tolist() == [4, 3, 3]
    assert quota.proportional([5, 0, 0], 4, 0, 4, method=method).tolist() == [4, 0, 0]
    assert quota.proportional([0, 0, 0], 7, 0, 4, method=method).tolist() == [3, 2, 2]
    assert quota.proportional([], 7, 0, 4, method=method).tolist() == []
    assert quota.proportional([0.0, -0.0], 2, 0, 4, method=method).tolist() == [1, 1]


@given(
    st.lists(st.integers(0, 2**20), min_size=1, max_size=6),
    st.integers(-900, 900),
    st.integers(0, 40),
)
def test_scale_of_scores_does_not_matter(s: list[int], power: int, budget: int) -> None:
    """Scores times a power of two share alike, however large or small."""
    scaled = np.ldexp(np.array(s, float), power)
    for method in METHODS:
        a = quota.proportional(s, budget, 0, 9, method=method)
        assert a.tolist() == quota.proportional(scaled, budget, 0, 9, method=method).tolist()


def test_extremes_of_size() -> None:
    """The largest budget, scores of 32 bits and maxima of 63 bits neither overflow nor err."""
    top, most = 2**30, 2**63 - 1
    for method in METHODS:
        g, proof = quota.proportional(
            [2**32, 2**32 - 1, 1], top, 0, most, method=method, certificate=True
        )
        assert proof.holds
        assert g.sum() == top
        if method == "largest_remainder":
            assert g.tolist() == largest_remainder([2**32, 2**32 - 1, 1], top, [0] * 3, [top] * 3)
        g, proof = quota.proportional(
            [1, 2**40], top, [0, top], most, method=method, certificate=True
        )
        assert g.tolist() == [0, top]
        assert proof.holds


WRONG = [
    (([1.0, -1.0], 4, 0, 4), "job 1: score -1.0"),
    (([1.0, float("nan")], 4, 0, 4), "job 1: score nan"),
    (([float("inf")], 4, 0, 4), "job 0: score inf"),
    (([1, 1], 4, [0, 3], [4, 2]), "job 1: minimum 3 is above maximum 2"),
    (([1, 1], 4, [0, -3], 4), "job 1: minimum -3 is negative"),
    (([1, 1, 1], 4, [1, 3, 1], 4), "5 GPUs of a budget of 4 .*job 1 wants 3"),
    (([1, 1], 4, 2**62, 2**63 - 1), "minimum: all jobs together need 9223372036854775808"),
    (([1, 1], True, 0, 4), "budget"),
    (([1, 1], -1, 0, 4), "budget"),
    (([1, 1], 2**31, 0, 4), "budget"),
    (([1, 1], 2.5, 0, 4), "budget"),
    (([True, False], 4, 0, 4), "truth value"),
    ((np.array([True]), 4, 0, 4), "scores"),
    (([1, 1], 4, 0.5, 4), "minimum: expected whole numbers"),
    (([1, 1], 4, [0, 0, 0], 4), "minimum: expected 2 values"),
    (([[1, 1]], 4, 0, 4), "one dimension"),
    ((["a"], 4, 0, 4), "scores: expected numbers"),
    (([1, 1], 4, 0, 2**64), "maximum"),
    (([1, 1], 4, 0, np.uint64(2**63 + 1)), "maximum"),
    (([1, [2]], 4, 0, 4), "scores"),
]


@pytest.mark.parametrize(("arguments", "words"), WRONG)
def test_hostile_input(arguments: tuple, words: str) -> None:
    """Every wrong argument is an InputError that names it."""
    for method in METHODS:
        with pytest.raises(InputError, match=words):
            quota.proportional(*arguments, method=method)


def test_certificates_notice_a_moved_gpu() -> None:
    """The checks refuse quotas in which one GPU has gone elsewhere."""
    s, lo, hi = np.array([3, 2, 2, 1]) << 30, np.zeros(4, np.int64), np.full(4, 9)
    share, sums, spare = np.zeros(2, np.int64), np.zeros(2, np.int64), np.zeros(2)
    remainders.scored(s, lo, hi, 13, sums)
    g = np.zeros(4, np.int64)
    remainders.round_shares(s, lo, hi, 13, share, g)
    fair = np.zeros(4, np.int64)
    units.fill(s, lo, hi, sums, 13, 2, 1, 0, fair)
    assert remainders.nearest(s, lo, hi, g, 13, *share.tolist(), spare)
    assert units.smallest_taken(s, lo, hi, fair, 13, 2, 1, 0, spare)
    for a, b in [(a, b) for a in range(4) for b in range(4) if a != b]:
        for right, name in ((g, "nearest"), (fair, "smallest")):
            moved = right.copy()
            moved[a] -= 1
            moved[b] += 1
            if name == "nearest":
                assert not remainders.nearest(s, lo, hi, moved, 13, *share.tolist(), spare)
            else:
                assert not units.smallest_taken(s, lo, hi, moved, 13, 2, 1, 0, spare)


def test_unknown_method() -> None:
    """A method that does not exist is named."""
    with pytest.raises(InputError, match="method"):
        quota.proportional([1], 1, 0, 1, method="hare")


@given(st.data())
def test_continuous_shares(data: st.DataObject) -> None:
    """Real shares obey bounds and total, and are those of exact fractions."""
    n = data.draw(st.integers(1, 6))
    ints = st.integers(0, 20)
    s = data.draw(st.lists(ints, min_size=n, max_size=n))
    lo = data.draw(st.lists(ints, min_size=n, max_size=n))
    hi = [a + data.draw(ints) for a in lo]
    total = data.draw(st.integers(sum(lo), sum(hi)))
    q = quota.continuous_shares(s, total, lo, hi)
    assert q == pytest.approx([float(x) for x in real_shares(s, total, lo, hi)], abs=1e-9)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([1.0], 5, 0, 4), "total: expected 0 .*to 4"),
        (([1.0], float("nan"), 0, 4), "total"),
        (([-1.0], 1, 0, 4), "score"),
        (([1.0], 1, 3, 2), "above"),
        (([1.0], 1, 0, float("inf")), "maximum"),
    ],
)
def test_hostile_continuous_shares(arguments: tuple, words: str) -> None:
    """Totals out of reach and wrong numbers are refused."""
    with pytest.raises(InputError, match=words):
        quota.continuous_shares(*arguments)
