"""Placement of whole GPUs: rules against plain walks, quotas against all placements."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optsched.errors import InputError
from optsched_solvers.quota.placement import (
    best_fit,
    fgd,
    place_quotas,
    place_stream,
    whole_nodes,
    worst_fit,
)
from optsched_solvers.quota.placement_buckets import highest, lowest

if TYPE_CHECKING:
    from collections.abc import Callable

Placement = tuple[dict[int, int], ...]
"""Of every job the GPUs by node."""


def with_ends(random: np.random.Generator, tasks: int) -> list[int]:
    """Tasks that come in order, some of which go again somewhere later."""
    events: list[int] = []
    running: list[int] = []
    for i in range(tasks):
        events.append(i)
        running.append(i)
        while running and random.random() < 0.4:
            events.append(~running.pop(int(random.integers(len(running)))))
    return events


def plain_walk(
    free: list[int], gpus: list[int], events: list[int], key: Callable[[int, int], Any]
) -> list[int]:
    """Node of every task: the one with the smallest key of (free GPUs, node) that fits."""
    left, node = list(free), [-1] * len(gpus)
    for e in events:
        if e < 0:
            if node[~e] >= 0:
                left[node[~e]] += gpus[~e]
            continue
        fits = [n for n, f in enumerate(left) if f >= gpus[e]]
        if fits:
            node[e] = min(fits, key=lambda n: key(left[n], n))
            left[node[e]] -= gpus[e]
    return node


@pytest.mark.parametrize("nodes", [1, 3, 40, 1500])
def test_best_and_worst_fit(nodes: int) -> None:
    """Buckets give the same as a scan, with tasks that end, on many nodes too."""
    random = np.random.default_rng(nodes)
    for _ in range(3 if nodes > 1000 else 40):
        free = random.integers(0, 70 if nodes == 40 else 9, nodes).tolist()
        gpus = random.integers(1, 10, 4 * nodes + 5 if nodes < 1000 else 300).tolist()
        events = with_ends(random, len(gpus))
        assert best_fit(free, gpus, events=events).tolist() == plain_walk(
            free, gpus, events, lambda f, n: (f, n)
        )
        assert worst_fit(free, gpus, events=events).tolist() == plain_walk(
            free, gpus, events, lambda f, n: (-f, n)
        )


def test_bit_positions() -> None:
    """Lowest and highest bit of every word of one or two bits."""
    for a, b in product(range(32), range(32)):
        word = 1 << a | 1 << b
        assert lowest(word) == min(a, b)  # type: ignore[no-untyped-call]
        assert highest(word) == max(a, b)  # type: ignore[no-untyped-call]


def plain_whole(
    free: list[int], capacity: list[int], gpus: list[int], events: list[int]
) -> list[dict[int, int]]:
    """One node by best fit, else the largest idle node within the rest, and again."""
    left, placed = list(free), [dict[int, int]() for _ in gpus]
    for e in events:
        if e < 0:
            for n, c in placed[~e].items():
                left[n] += c
            placed[~e] = {}
            continue
        rest, mine = gpus[e], dict[int, int]()
        while rest:
            fits = [n for n, f in enumerate(left) if f >= rest]
            idle = [n for n, f in enumerate(left) if f == capacity[n] and 0 < f <= rest]
            if fits:
                n = min(fits, key=lambda n: (left[n], n))
            elif idle:
                n = min(idle, key=lambda n: (-left[n], n))
            else:
                break
            mine[n] = min(rest, left[n])
            left[n] -= mine[n]
            rest -= mine[n]
        if rest:
            for n, c in mine.items():
                left[n] += c
        else:
            placed[e] = mine
    return placed


def test_whole_nodes() -> None:
    """Every task as a plain walk places it; ended tasks keep their rows in the answer."""
    random = np.random.default_rng(3)
    several = 0
    for _ in range(300):
        capacity = random.choice([2, 4, 8], int(random.integers(1, 12)))
        free = np.where(random.random(len(capacity)) < 0.6, capacity, capacity // 2)
        gpus = random.choice([1, 2, 3, 8, 12, 20], 8)
        given_events = with_ends(random, 8)
        ptr, node, count = whole_nodes(free, capacity, gpus, events=given_events)
        arrived = [e for e in given_events if e >= 0]
        gone = {~e for e in given_events if e < 0}
        expected = plain_whole(free.tolist(), capacity.tolist(), gpus.tolist(), given_events)
        for i in arrived:
            mine = dict(zip(node[ptr[i] : ptr[i + 1]], count[ptr[i] : ptr[i + 1]], strict=True))
            several += len(mine) > 1
            if i not in gone:
                assert mine == expected[i]
            assert sum(mine.values()) in (0, gpus[i])
            parts = [c for n, c in mine.items() if c < capacity[n]]
            assert len(mine) < 2 or len(parts) < 2
    assert several > 50


def test_fgd_of_whole_gpus_prefers_what_nobody_can_use() -> None:
    """With tasks of 4 to come, single GPUs go to the node that cannot take a 4 anyway."""
    assert fgd([4, 3], [1], classes=[[4, 1]]).tolist() == [1]
    assert best_fit([4, 5], [1]).tolist() == [0]
    assert fgd([4, 5], [1], classes=[[4, 1]]).tolist() == [1]
    assert fgd([], [1]).tolist() == [-1]


# quotas onto nodes


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
    ptr = np.cumsum([0] + [len(job) for job in held])
    node, count = [n for job in held for n in job], [c for job in held for c in job.values()]
    to, where, how, failed = place_quotas(quota, free, ptr, node, count, locality)
    rows = [
        dict(zip(where[to[j] : to[j + 1]].tolist(), how[to[j] : to[j + 1]].tolist(), strict=True))
        for j in range(len(quota))
    ]
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


def test_quotas_shrink_in_place_and_spread_only_if_needed() -> None:
    """A smaller quota stays on its node; a large one takes the roomiest nodes."""
    assert solve([2], [8, 8], [{1: 4}], [0]) == ([{1: 2}], -1)
    assert solve([10], [4, 8, 8], [{}], [0]) == ([{0: 2, 1: 8}], -1)
    assert solve([5, 5], [8, 4], [{}, {}], [1, 1])[1] == 1
    assert solve([9], [8, 1, 4], [{}], [2]) == ([{0: 8, 1: 1}], -1)


def test_quotas_more_than_there_are() -> None:
    """The job that fails is named, and the others keep their places."""
    placed, failed = solve([4, 4, 4], [4, 4], [{0: 4}, {}, {1: 4}], [0, 0, 0])
    assert failed == 1
    assert placed == [{0: 4}, {}, {1: 4}]


def test_quotas_of_nobody() -> None:
    """No jobs, or no nodes."""
    assert solve([], [4], [], []) == ([], -1)
    assert solve([0], [], [{}], [0]) == ([{}], -1)
    assert solve([1], [], [{}], [0]) == ([{}], 0)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: best_fit([1, -1], [1]), r"free: entry 1 is negative \(-1\)"),
        (lambda: best_fit([1], [0]), "gpus: task 0 asks for no GPU"),
        (lambda: best_fit([1], [1.5]), "gpus: expected a one-dimensional array of integers"),
        (lambda: best_fit([1], [True]), "gpus: expected"),
        (lambda: best_fit([[1]], [1]), "free: expected a one-dimensional"),
        (lambda: best_fit([2**40], [1]), "free: entry 0 is above"),
        (lambda: worst_fit([1], [1], events=[0, 0]), "entry 1: task 0 comes twice"),
        (lambda: worst_fit([1], [1], events=[~0]), "entry 0: task 0 ends without having come"),
        (lambda: worst_fit([1], [1], events=[1]), "entry 0 is of task 1, there are 1"),
        (lambda: worst_fit([1], [1], events=[0.5]), "events: expected"),
        (lambda: whole_nodes([3], [2], [1]), "node 0 has 3 free GPUs, but a capacity of 2"),
        (lambda: whole_nodes([3], [], [1]), "capacity: has 0 entries, 1 are needed"),
        (lambda: fgd([63], [1]), "63 GPUs on a node, at most 62"),
        (lambda: fgd([3], [1], classes=[1]), "classes: expected shape"),
        (lambda: place_stream([[1000]], [500], "worst"), "rule: 'worst' is none of best_fit"),
        (lambda: place_stream([[1000]], [500], seed=-1), "seed: expected"),
        (lambda: place_quotas([1], [1], [0], [], [], [0]), "held_ptr: has 1 entries, 2 are needed"),
        (lambda: place_quotas([1], [1], [1, 1], [], [], [0]), "held_ptr: must begin with 0"),
        (lambda: place_quotas([1], [1], [0, 1], [1], [1], [0]), "held_node: 1 is no node"),
        (lambda: place_quotas([1], [1], [0, 1], [0], [], [0]), "held_count: has 0 entries"),
        (lambda: place_quotas([1], [1], [0, 0], [], [], [3]), "locality: 3 is none of"),
        (lambda: place_quotas([1, 1], [1], [0, 1, 0], [], [], [0, 0]), "row 1 ends at 0, before"),
        (lambda: place_quotas([-1], [1], [0, 0], [], [], [0]), "quota: entry 0 is negative"),
    ],
)
def test_refusals(call: Callable[[], object], said: str) -> None:
    """One sentence that names array, place and value."""
    with pytest.raises(InputError, match=said):
        call()
