"""The least period of given orders, against plain-Python oracles and hostile input."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rolling_problems import circular_orders, random_orders

from optsched import CyclicOrder, InputError, JobArray, Schedule
from optsched.kernels.cycle_ratio import cycle_time
from optsched.model.schedule import Arcs, Csr, Resource
from optsched.testing.random_problems import random_rolling

if TYPE_CHECKING:
    from random import Random

Edge = tuple[int, int, int, int]


def edges_of(graph: Schedule, rows: list[list[int]], offset: list[int]) -> list[Edge]:
    """(tail, head, start-to-start weight, tokens) of everything that waits."""
    edges = []
    for i, k, lag, distance in zip(*(c.tolist() for c in graph.arcs), strict=True):
        edges.append((i, k, int(graph.duration[i]) + lag, distance + offset[k] - offset[i]))
    for row in rows:
        for at, i in enumerate(row):
            last = at + 1 == len(row)
            k = row[0] if last else row[at + 1]
            edges.append((i, k, int(graph.duration[i]) + graph.setup(i, k), int(last)))
    return edges


def positive(n: int, edges: list[Edge], period: int) -> bool:
    """Whether some cycle weighs more than its tokens allow: Bellman-Ford."""
    far = [0] * n
    for _ in range(n + 1):
        before = list(far)
        for i, k, weight, tokens in edges:
            far[k] = max(far[k], far[i] + weight - tokens * period)
        if far == before:
            return False
    return True


def lawler(n: int, edges: list[Edge]) -> int | None:
    """Least period by bisection; None for a deadlock."""
    high = max(1, sum(weight for _, _, weight, _ in edges))
    # a cycle that no period satisfies has no token, or a debt of tokens: give each arc a weight
    if positive(n, [(i, k, (n + 1) * -tokens + 1, 0) for i, k, _, tokens in edges], 0):
        return None
    low = 1
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if positive(n, edges, middle) else (low, middle)
    return low


@given(st.randoms(use_true_random=False), st.sampled_from([random_orders, circular_orders]))
def test_equals_lawler(rng: Random, orders: Any) -> None:
    """Period and starts of any orders, or a cycle that really cannot be."""
    graph = random_rolling(rng, 3, 3).graph()
    rows, offset = orders(rng, graph, -1) if orders is random_orders else orders(rng, graph)
    edges = edges_of(graph, rows.to_lists(), offset.tolist())
    expected = lawler(graph.n_operations, edges)
    if expected is None:
        with pytest.raises(CyclicOrder) as caught:
            cycle_time(graph, rows, offset)
        cycle = caught.value.cycle
        assert len(set(cycle)) == len(cycle)
        fewest: dict[tuple[int, int], int] = {}
        for i, k, _, tokens in edges:
            fewest[i, k] = min(tokens, fewest.get((i, k), tokens))
        assert sum(fewest[pair] for pair in zip(cycle, (*cycle[1:], cycle[0]), strict=True)) <= 0
        return
    found = cycle_time(graph, rows, offset)
    assert found.period == expected
    assert (found.start >= 0).all()
    shifted = offset - found.late
    for i, k, weight, tokens in edges:
        if (i, k) in zip(graph.arcs.tail.tolist(), graph.arcs.head.tolist(), strict=True):
            continue  # a machine arc's tokens follow from the shift below
        ahead = tokens - found.late[k] + found.late[i]
        assert found.start[k] >= found.start[i] + weight - ahead * found.period
    for i, k, lag, distance in zip(*(c.tolist() for c in graph.arcs), strict=True):
        ahead = distance + shifted[k] - shifted[i]
        end = found.start[i] + graph.duration[i] + lag
        assert ahead >= 0 and found.start[k] >= end - ahead * found.period
    if found.critical:
        fewest = {}
        for i, k, weight, tokens in edges:
            fewest[i, k] = max(weight - tokens * expected, fewest.get((i, k), -(10**9)))
        around = zip(found.critical, (*found.critical[1:], found.critical[0]), strict=True)
        total = sum(fewest[pair] for pair in around)
        assert total <= 0  # and one time unit less would be too little:
        assert positive(graph.n_operations, edges, expected - 1)


def test_by_hand() -> None:
    """Two operations on one machine and a distant arc, every ratio computed on paper."""
    graph = Schedule(
        resources=(Resource("gpu"),),
        duration=np.array([3, 4]),
        op_resources=Csr.of([[0], [0]]),
        arcs=Arcs.of([(0, 1, 13), (1, 0, 0, 3)]),
        period=1,
    )
    assert cycle_time(graph).period == 7  # (16 + 4) / 3, rounded up
    assert cycle_time(graph, Csr.of([[0, 1]])).period == 20
    assert cycle_time(graph, Csr.of([[0, 1]]), np.array([0, 2])).period == 7  # 3 + 4
    assert cycle_time(graph, Csr.of([[1, 0]]), np.array([0, 2])).period == 10  # (16 + 4) / 2


def test_deadlock_in_words() -> None:
    """Device, blocks, jobs and stages are named, and the cycle is a shortest one."""
    array = JobArray([[1, 1], [1, 1]], [[2, 2], [2, 2]], objective="period")
    # gpu1 begins with B of job 0, which waits for F of job 0 behind it
    with pytest.raises(CyclicOrder) as caught:
        array.evaluate_orders([[0, 4, 3, 7], [2, 1, 5, 6]])
    assert sorted(caught.value.cycle) == [1, 2]
    assert "gpu1: B(job 0, stage 1) before F(job 0, stage 1)" in str(caught.value)
    assert "by an arc F(job 0, stage 1) before B(job 0, stage 1)" in str(caught.value)
    assert array.evaluate_orders([[3, 0, 4, 7], [2, 1, 5, 6]], [0, 0, 1, 1, 0, 0, 0, 0]) > 0


HOSTILE: dict[str, tuple[Any, Any, str]] = {
    "too few rows": ([[0, 3, 4, 7]], None, "expected 2 rows"),
    "a doubled block": ([[0, 3, 4, 7, 7], [1, 2, 5, 6]], None, "operation 7 appears twice"),
    "a float": ([[0, 3, 4, 7.0], [1, 2, 5, 6]], None, "expected an integer, got 7.0"),
    "offsets too short": (None, [0] * 7, "offsets: expected 8 integers"),
    "huge offsets": (None, [0] * 7 + [2**62], "offsets[7]: expected -2^53..2^53"),
    "far apart": (None, [0, 2**53] * 4, f"{2**53} cycles earlier"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile(case: str) -> None:
    """One sentence that names the field."""
    rows, offsets, message = HOSTILE[case]
    array = JobArray([[1, 1], [1, 1]], [[2, 2], [2, 2]], objective="period")
    with pytest.raises(InputError, match=re.escape(message)):
        array.evaluate_orders([[0, 3, 4, 7], [1, 2, 5, 6]] if rows is None else rows, offsets)
