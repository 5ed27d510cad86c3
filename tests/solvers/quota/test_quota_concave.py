"""Concave sums: heap and price search against a dynamic programme, proofs, hostile input."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from depth import depth
from quota_cases import tables

from optsched import InputError
from optsched_solvers import quota
from optsched_solvers.quota import marginals

SEARCHES = ["heap", "threshold"]


def programme(ptr: np.ndarray, value: np.ndarray, spare: int) -> int:
    """Largest sum within `spare` entries, by adding one row after the other."""
    best = np.zeros(spare + 1, np.int64)
    for a, b in zip(ptr[:-1].tolist(), ptr[1:].tolist(), strict=True):
        last = best
        best = last + value[a]
        for k in range(1, min(b - a, spare + 1)):
            best[k:] = np.maximum(best[k:], last[: spare + 1 - k] + value[a + k])
    return int(best[spare])


def greedy(ptr: np.ndarray, value: np.ndarray, spare: int) -> list[int]:
    """Entries one by one to the largest positive increment, ties by id."""
    rows = [value[a:b].tolist() for a, b in itertools.pairwise(ptr)]
    taken = [0] * len(rows)
    for _ in range(spare):
        gains = [
            row[k + 1] - row[k] if k + 1 < len(row) else 0
            for row, k in zip(rows, taken, strict=True)
        ]
        j = int(np.argmax(gains))
        if gains[j] <= 0:
            break
        taken[j] += 1
    return taken


def test_thousands_of_cases() -> None:
    """Both searches give the greedy's quotas, the programme's sum, and a proof."""
    for ptr, value, lo, spare in tables(depth(2000, 10_000), seed=1, rise="concave", jobs=5):
        expected, most = greedy(ptr, value, spare), programme(ptr, value, spare)
        for search in SEARCHES:
            g, proof = quota.concave_sum(
                ptr, value, lo, int(lo.sum()) + spare, method=search, certificate=True
            )
            assert (g - lo).tolist() == expected, (ptr, value, spare)
            assert value[ptr[:-1] + g - lo].sum() == most == proof.value == proof.bound
            assert proof.holds


def large(n: int, scale: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Concave tables of up to 40 entries."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(n):
        steps = np.sort(rng.integers(0, scale, rng.integers(1, 41)))[::-1]
        rows.append(np.cumsum(steps))
    ptr = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
    return ptr, np.concatenate(rows), rng.integers(0, 3, n)


@pytest.mark.parametrize("scale", [2, 30, 10**9])
def test_large_cases_agree(scale: int) -> None:
    """With pivots from samples, few and many ties, the searches agree and prove themselves."""
    for seed in range(3):
        ptr, value, lo = large(2500, scale, seed)
        for spare in (0, 1, 3000, 20_000, 45_000, 10**6):
            budget = int(lo.sum()) + spare
            one, proof = quota.concave_sum(ptr, value, lo, budget, method="heap", certificate=True)
            two, other = quota.concave_sum(
                ptr, value, lo, budget, method="threshold", certificate=True
            )
            assert (one == two).all()
            assert (quota.concave_sum(ptr, value, lo, budget) == one).all()
            assert proof.holds
            assert other.holds


def test_certificate_notices_a_moved_gpu() -> None:
    """The dual bound at the best price is above the sum if a GPU has gone elsewhere."""
    ptr, value = np.array([0, 4, 8, 12]), np.array([0, 9, 15, 18, 0, 8, 10, 11, 0, 5, 9, 12])
    proof = np.zeros(3, np.int64)
    taken = quota.concave_sum(ptr, value, 0, 5)
    assert marginals.dual_bound(ptr, value, 5, taken, proof)
    for a, b in [(a, b) for a in range(3) for b in range(3) if a != b]:
        moved = taken.copy()
        moved[a] -= 1
        moved[b] += 1
        assert not marginals.dual_bound(ptr, value, 5, moved, proof)
    assert not marginals.dual_bound(ptr, value, 5, taken + 1, proof)


def test_gpus_that_add_nothing_stay_unused() -> None:
    """Flat and falling tails are not entered."""
    assert quota.concave_sum([0, 4], [0, 3, 3, 1], 2, 10).tolist() == [3]
    assert quota.concave_sum([0, 1, 3], [5, 0, 1], 1, 3).tolist() == [1, 2]
    assert quota.concave_sum([0], [], [], 3).tolist() == []


WRONG = [
    (([0, 3], [0, 1, 3], 2, 4), "job 0: utilities 0, 1, 3 at 2, 3, 4 GPUs are not concave"),
    (([0, 1, 4], [7, 0, 1, 3], 0, 4), "job 1: utilities 0, 1, 3 at 0, 1, 2"),
    (([0, 2], [0, 2**61], 0, 4), "could overflow"),
    (([0, 2], [-(2**63), 0], 0, 4), "could overflow"),
    (([0, 2], [0, 2**59], 0, 2**30), None),
    (([0, 2], [0, 1.5], 0, 4), "whole numbers"),
    (([0, 2], [0, float("nan")], 0, 4), "whole numbers"),
    (([0, 2], [[0, 1]], 0, 4), "one dimension"),
    (([0, 2], [False, True], 0, 4), "truth value"),
    (([0, 2, 4], [0, 1, 0, 1], [3, 4], 4), "7 GPUs of a budget of 4"),
    (([0, 2], [0, 1], 0, float("inf")), "budget"),
    ((["0", "2"], [0, 1], 0, 4), "ptr"),
]


@pytest.mark.parametrize(("arguments", "words"), WRONG)
def test_hostile_input(arguments: tuple, words: str | None) -> None:
    """Every wrong argument is an InputError that names it; what fits is solved."""
    for search in SEARCHES:
        if words is None:
            assert quota.concave_sum(*arguments, method=search, certificate=True)[1].holds
            continue
        with pytest.raises(InputError, match=words):
            quota.concave_sum(*arguments, method=search)


def test_unknown_search() -> None:
    """A search that does not exist is named."""
    with pytest.raises(InputError, match="method"):
        quota.concave_sum([0, 1], [1], 0, 1, method="fast")


@pytest.mark.slow
def test_cpsat_agrees() -> None:
    """CP-SAT finds the same sums and the same lowest levels on 150 random tables."""
    cp_model = pytest.importorskip("ortools.sat.python.cp_model")
    for ptr, value, lo, spare in tables(150, seed=7, rise="concave", jobs=6):
        model = cp_model.CpModel()
        picks = [[model.new_bool_var("") for _ in range(a, b)] for a, b in itertools.pairwise(ptr)]
        for row in picks:
            model.add_exactly_one(row)
        model.add(sum(k * x for row in picks for k, x in enumerate(row)) <= spare)
        entries = [x for row in picks for x in row]
        model.maximize(sum(int(v) * x for v, x in zip(value, entries, strict=True)))
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        assert solver.solve(model) == cp_model.OPTIMAL
        g = quota.concave_sum(ptr, value, lo, int(lo.sum()) + spare)
        assert value[ptr[:-1] + g - lo].sum() == round(solver.objective_value)
