"""Carlier's exact one-machine bound against permutations and searches over states."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st
from state_oracle import best_by_states

from optsched import JobShop
from optsched.model import bounds
from optsched.testing.random_problems import random_array, random_graph
from optsched_solvers.shop.proof.one_machine import carlier, one_machine_bound

if TYPE_CHECKING:
    from random import Random

INSTANCES = Path(__file__).parents[3] / "instances" / "jobshop"

Jobs = list[tuple[int, int, int]]  # head, duration, delivery time

JOBS = st.lists(
    st.tuples(st.integers(0, 12), st.integers(0, 5), st.integers(-4, 12)), min_size=1, max_size=6
)


def value_of(jobs: Jobs, order: list[int] | tuple[int, ...]) -> int:
    """Makespan of one order, deliveries included; at least 0."""
    now = value = 0
    for j in order:
        now = max(now, jobs[j][0]) + jobs[j][1]
        value = max(value, now + jobs[j][2])
    return value


@given(JOBS)
def test_one_machine(jobs: Jobs) -> None:
    """Equal to the best permutation; valid at every limit; zero durations, negative deliveries."""
    optimum = min(value_of(jobs, order) for order in permutations(range(len(jobs))))
    head, duration, delivery = np.array(jobs, np.int64).reshape(-1, 3).T.copy()
    for limit in (1, 2, 3, 20_000):
        found = carlier(head, duration, duration + delivery, limit)
        assert found.lower_bound <= optimum <= found.value == value_of(jobs, found.order.tolist())
        assert sorted(found.order) == list(range(len(jobs)))
        assert found.optimal == (found.value == found.lower_bound)
    assert found.optimal
    once = carlier(head, duration, duration + delivery, 1)  # at least Jackson's bound
    assert once.lower_bound >= bounds.jackson_preemptive(head, duration, duration + delivery)


def test_hundreds_of_jobs_are_solved() -> None:
    """Carlier's method closes large random machines within few nodes; times of 2^50 are exact."""
    rng = np.random.default_rng(5)
    for n in (50, 300):
        head, tail = rng.integers(0, 30 * n, n), rng.integers(0, 30 * n, n)
        duration = rng.integers(1, 99, n)
        assert carlier(head, duration, tail + duration).optimal
    large = np.array([0, 2**49, 2**51]), np.array([2**50, 2**50, 1])
    assert carlier(*large, large[1] + [2**51, 2**52, 0]).value == 2**49 + 2**50 + 2**52


@given(st.randoms(use_true_random=False))
def test_one_machine_bound_is_a_bound(rng: Random) -> None:
    """Never above the optimum, never below the bounds of plain Python."""
    graph = random_graph(rng, 6) if rng.random() < 0.6 else random_array(rng, 2, 3).graph()
    assume(graph.n_operations <= 12)
    optimum, found = best_by_states(graph), bounds.makespan_bounds(graph)
    for limit in (1, 1000):
        bound = one_machine_bound(graph, limit)
        assert max(found["chain"], found["one_machine"]) <= bound
        assert optimum is None or bound <= optimum


def test_known_bounds() -> None:
    """Bounds of the literature; one machine without preemption, where Jackson's bound is 12."""
    for name, expected in (("ft06", 52), ("ft10", 808), ("ft20", 1164)):
        graph = JobShop.read(INSTANCES / f"{name}.txt").graph()
        assert expected <= one_machine_bound(graph) <= 1165
    shop = JobShop([[(0, 6), (1, 1)], [(0, 2), (2, 9)], [(0, 3), (3, 4)]], release=[0, 1, 2])
    assert bounds.makespan_bounds(shop.graph())["one_machine"] == 12
    assert one_machine_bound(shop.graph()) == 13 == best_by_states(shop.graph())
