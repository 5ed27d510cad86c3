"""Random shares, tables, and the slow answers that the quota kernels are compared with."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

Shares = tuple[list[int], int, list[int], list[int]]
"""Scores or weights, budget, minima, maxima."""


def shares(count: int, least: int, seed: int, jobs: int = 7) -> Iterator[Shares]:
    """Random small cases, with many ties, tight and loose budgets."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        n = int(rng.integers(1, jobs + 1))
        top = int(rng.choice([2, 5, 1000]))
        scores = rng.integers(least, top + 1, n)
        lo = rng.integers(0, 3, n)
        hi = lo + rng.integers(0, 8, n)
        yield scores.tolist(), int(lo.sum() + rng.integers(0, 18)), lo.tolist(), hi.tolist()


def tables(count: int, seed: int, rise: str, jobs: int = 4) -> Iterator[tuple]:
    """Random small tables (ptr, value, minimum, spare): "strict" or "any" rises."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        n = int(rng.integers(1, jobs + 1))
        scale = int(rng.choice([2, 4, 100]))
        rows = []
        for _ in range(n):
            size = int(rng.integers(1, 7))
            steps = rng.integers(1 if rise == "strict" else 0, scale + 1, size)
            steps[0] = rng.integers(0, 4)
            rows.append(np.cumsum(steps))
        ptr = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
        yield ptr, np.concatenate(rows), rng.integers(0, 3, n), int(rng.integers(0, 12))


def all_shares(budget: int, lo: list[int], hi: list[int]) -> Iterator[tuple[int, ...]]:
    """Every vector of quotas that uses min(budget, sum of hi)."""
    total = min(budget, sum(hi))
    for g in itertools.product(*[range(a, b + 1) for a, b in zip(lo, hi, strict=True)]):
        if sum(g) == total:
            yield g


def all_entries(ptr: np.ndarray, spare: int) -> Iterator[tuple[int, ...]]:
    """Every vector of entries of rows within a budget."""
    for taken in itertools.product(*[range(size) for size in np.diff(ptr).tolist()]):
        if sum(taken) <= spare:
            yield taken


def with_zero_rule(s: list[int], total: int, lo: list[int], hi: list[int]) -> Shares:
    """Scores of 0 get their minimum, or the rest equally when all others are at their maximum."""
    pairs = list(zip(s, lo, hi, strict=True))
    if sum(b if x else a for x, a, b in pairs) > total:
        return s, total, lo, hi
    return ([0 if x else 1 for x in s], total, [b if x else a for x, a, b in pairs], hi)


def real_shares(s: list[int], budget: int, lo: list[int], hi: list[int]) -> list[Fraction]:
    """clip(mu S, lo, hi) that adds up, by walking over all break points of mu."""
    s, total, lo, hi = with_zero_rule(s, min(budget, sum(hi)), lo, hi)

    def at(mu: Fraction) -> list[Fraction]:
        return [
            min(max(mu * x, Fraction(a)), Fraction(b)) for x, a, b in zip(s, lo, hi, strict=True)
        ]

    last = Fraction(0)
    breaks = {Fraction(b, x) for x, *ab in zip(s, lo, hi, strict=True) if x for b in ab}
    for mu in sorted(breaks):
        if sum(at(mu)) >= total:
            low, high = sum(at(last)), sum(at(mu))
            part = Fraction(0) if high == low else (total - low) / (high - low)
            return at(last + (mu - last) * part)
        last = mu
    return at(last)


def largest_remainder(s: list[int], budget: int, lo: list[int], hi: list[int]) -> list[int]:
    """Real shares rounded down, the rest to the largest fractions, ties by id."""
    q = real_shares(s, budget, lo, hi)
    g = [int(x) for x in q]
    order = sorted(range(len(s)), key=lambda j: (g[j] - q[j], j))
    for j in order[: min(budget, sum(hi)) - sum(g)]:
        g[j] += 1
    return g


def webster(s: list[int], budget: int, lo: list[int], hi: list[int]) -> list[int]:
    """GPUs one by one to the largest S / (2 g + 1), ties by id."""
    s, total, lo, hi = with_zero_rule(s, min(budget, sum(hi)), lo, hi)
    g = list(lo)
    while sum(g) < total:
        open_jobs = [j for j in range(len(s)) if g[j] < hi[j] and s[j]]
        g[min(open_jobs, key=lambda j: (Fraction(2 * g[j] + 1, s[j]), j))] += 1
    return g


def filled(w: list[int], budget: int, lo: list[int], hi: list[int]) -> list[int]:
    """GPUs one by one to the lowest level, then to the one it lifts highest, then by id."""
    g = list(lo)
    while sum(g) < min(budget, sum(hi)):
        open_jobs = [j for j in range(len(w)) if g[j] < hi[j]]
        g[min(open_jobs, key=lambda j: (Fraction(g[j], w[j]), w[j], j))] += 1
    return g
