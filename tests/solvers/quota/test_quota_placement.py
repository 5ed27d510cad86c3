"""Placement: quotas against all placements."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from optsched.problems.quota.answer import Quotas
from optsched_solvers.quota.placement import place_quotas


def legal(
    quota: list[int], free: list[int], locality: list[int], placed: list[dict[int, int]]
) -> bool:
    """Whether a complete placement respects capacities and localities."""
    used = [sum(job.get(n, 0) for job in placed) for n in range(len(free))]
    if any(u > f for u, f in zip(used, free, strict=True)):
        return False
    for g, where, job in zip(quota, locality, placed, strict=True):
        if sum(job.values()) != g or any(c <= 0 for c in job.values()):
            return False
        if where == 1 and g <= max(free) and len(job) > 1:
            return False
        if where == 2 and sum(c < free[n] for n, c in job.items()) > (1 if len(job) > 1 else 9):
            return False
    return True


def splits(g: int, nodes: int) -> list[dict[int, int]]:
    """All ways of putting g GPUs on nodes."""
    ways = [ways for ways in product(range(g + 1), repeat=nodes) if sum(ways) == g]
    return [{n: c for n, c in enumerate(way) if c} for way in ways]


def measure(
    placed: list[dict[int, int]], held: list[dict[int, int]], quota: list[int]
) -> tuple[int, int]:
    """Nodes spanned, GPUs moved."""
    moved = 0
    for g, job, before in zip(quota, placed, held, strict=True):
        kept = sum(min(c, before.get(n, 0)) for n, c in job.items())
        moved += min(g, sum(before.values())) - kept
    return sum(len(job) for job in placed), moved


def solve(
    quota: list[int], free: list[int], held: list[dict[int, int]], locality: list[int]
) -> tuple[list[dict[int, int]], int]:
    """`place_quotas` on dictionaries."""
    flat = [(j, n, c) for j, job in enumerate(held) for n, c in job.items()]
    now = Quotas.of(len(held), *np.array(flat, np.int64).reshape(-1, 3).T)
    found, failed = place_quotas(*(np.array(x, np.int64) for x in (quota, free)), now,
                                 np.array(locality, np.int64))  # fmt: skip
    rows: list[dict[int, int]] = [{} for _ in quota]
    for j, n, c in zip(found.rows.tolist(), found.node.tolist(), found.count.tolist(), strict=True):
        rows[j][n] = c
    assert all(list(row) == sorted(row) for row in rows)
    return rows, failed


def random_plan(
    random: np.random.Generator, jobs: int, nodes: int
) -> tuple[list[int], list[int], list[dict[int, int]], list[int]]:
    """Quotas that fit in sum, and present placements that fit as well."""
    free = random.integers(1, 5, nodes).tolist()
    left, held = list(free), []
    for _ in range(jobs):
        job: dict[int, int] = {}
        for n in range(nodes):
            take = int(random.integers(0, left[n] + 1)) if random.random() < 0.4 else 0
            if take:
                job[n] = take
                left[n] -= take
        held.append(job)
    quota = [int(random.integers(0, 5)) for _ in range(jobs)]
    while sum(quota) > sum(free):
        quota[int(np.argmax(quota))] -= 1
    return quota, free, held, random.integers(0, 3, jobs).tolist()


def test_quotas_against_all_placements() -> None:
    """Legal; `any` never fails; seldom fails or spans more where all placements are known."""
    random = np.random.default_rng(1)
    feasible = failed_any = missed = wider = moved_more = 0
    for _ in range(400):
        quota, free, held, locality = random_plan(random, 3, 3)
        _, failed = solve(quota, free, held, [0] * 3)
        failed_any += failed >= 0
        options = [
            [way for way in splits(g, 3) if all(c <= free[n] for n, c in way.items())]
            for g in quota
        ]
        good = [
            list(ways) for ways in product(*options) if legal(quota, free, locality, list(ways))
        ]
        placed, failed = solve(quota, free, held, locality)
        if failed < 0:
            assert legal(quota, free, locality, placed)
        if not good:
            assert failed >= 0
            continue
        feasible += 1
        if failed >= 0:
            missed += 1
            continue
        best = min(measure(ways, held, quota) for ways in good)
        mine = measure(placed, held, quota)
        assert mine >= best
        wider += mine[0] > best[0]
        moved_more += mine[0] == best[0] and mine[1] > best[1]
    assert failed_any == 0
    assert feasible > 250
    assert missed <= 0.01 * feasible
    assert wider <= 0.01 * feasible
    assert moved_more <= 0.04 * feasible


@given(st.integers(0, 10**6))
def test_quotas_stay_where_they_are(seed: int) -> None:
    """Jobs on one node each with unchanged quotas do not move."""
    random = np.random.default_rng(seed)
    free = random.integers(1, 9, 6)
    left, held = free.copy(), []
    for _ in range(8):
        n = int(random.integers(6))
        take = int(random.integers(0, left[n] + 1))
        left[n] -= take
        held.append({n: take} if take else {})
    quota = [sum(job.values()) for job in held]
    locality = random.integers(0, 3, 8).tolist()
    placed, failed = solve(quota, free.tolist(), held, locality)
    assert failed == -1
    assert placed == held
