"""Compiled bounds: Jackson, Schrage and Carlier against simulation and permutations."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from random import Random

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st
from state_oracle import best_by_states

from optsched import JobShop
from optsched.model import bounds as core
from optsched.testing.random_problems import random_array, random_graph
from optsched_solvers.shop.proof.one_machine import (
    NOTHING,
    carlier,
    carlier_search,
    chain_bound,
    jackson_preemptive,
    machine_bound,
    one_machine_bound,
    schrage,
)

INSTANCES = Path(__file__).parents[3] / "instances" / "jobshop"

Jobs = list[tuple[int, int, int]]  # head, duration, delivery time

JOBS = st.lists(
    st.tuples(st.integers(0, 12), st.integers(0, 5), st.integers(-4, 12)), min_size=1, max_size=6
)


def columns(jobs: Jobs) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Heads, durations, and tails, which include the duration."""
    head, duration, delivery = np.array(jobs, np.int64).reshape(-1, 3).T.copy()
    return head, duration, delivery + duration


def value_of(jobs: Jobs, order: list[int] | tuple[int, ...]) -> int:
    """Makespan of one order, deliveries included; at least 0."""
    now = value = 0
    for j in order:
        now = max(now, jobs[j][0]) + jobs[j][1]
        value = max(value, now + jobs[j][2])
    return value


def by_permutations(jobs: Jobs) -> int:
    """Optimum of 1 | r_j, q_j | Cmax."""
    return min(value_of(jobs, order) for order in permutations(range(len(jobs))))


def check_one_machine(jobs: Jobs) -> None:
    """Jackson <= Carlier = the best permutation <= Schrage; every order is what it claims."""
    head, duration, tail = columns(jobs)
    optimum = by_permutations(jobs)
    assert jackson_preemptive(head, duration, tail) <= optimum
    found = carlier(head, duration, tail)
    assert found.optimal and found.value == found.lower_bound == optimum
    assert sorted(found.order) == list(range(len(jobs)))
    assert value_of(jobs, found.order.tolist()) == optimum
    upper, order = schrage(head, duration, tail)
    assert optimum <= upper == value_of(jobs, order.tolist())
    for limit in (1, 2, 3):
        cut = carlier(head, duration, tail, limit)
        assert cut.lower_bound <= optimum <= cut.value == value_of(jobs, cut.order.tolist())
        assert cut.optimal == (cut.value == cut.lower_bound)
    for target in (optimum - 1, optimum, optimum + 1):
        value, lower, _, _ = carlier_search(head, duration, tail, 10_000, target)
        assert lower <= optimum <= value
        assert (value < target) == (optimum < target) and (lower >= target) == (optimum >= target)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9), st.integers(-9, 60)), max_size=40))
def test_jackson_equals_the_core(jobs: Jobs) -> None:
    """The same number as in plain Python, which takes delivery times: tails without durations."""
    head, duration, tail = columns(jobs)
    expected = core.jackson_preemptive(head.tolist(), duration.tolist(), (tail - duration).tolist())
    assert jackson_preemptive(head, duration, tail) == expected


@given(JOBS)
def test_one_machine(jobs: Jobs) -> None:
    """Zero durations, ties and negative delivery times included."""
    check_one_machine(jobs)


def test_carlier_branches() -> None:
    """Carlier's own kind of example: Schrage starts a long job just before an urgent one."""
    jobs = [(0, 6, 1), (1, 2, 9), (2, 3, 4)]
    head, duration, tail = columns(jobs)
    assert schrage(head, duration, tail)[0] == 17
    assert carlier_search(head, duration, tail, 99, NOTHING)[3] > 1
    assert carlier(head, duration, tail).value == by_permutations(jobs) == 13
    limited = carlier(head, duration, tail, 1)
    assert limited.lower_bound <= 13 < limited.value and not limited.optimal


def test_hundreds_of_jobs_are_solved() -> None:
    """Carlier's method closes large random machines within a few thousand nodes."""
    rng = np.random.default_rng(5)
    for n in (50, 300):
        head, tail = rng.integers(0, 30 * n, n), rng.integers(0, 30 * n, n)
        duration = rng.integers(1, 99, n)
        found = carlier(head, duration, tail + duration)
        assert found.optimal and found.value >= jackson_preemptive(head, duration, tail + duration)


def test_huge_numbers_do_not_overflow() -> None:
    """Times of 2^50."""
    jobs = [(0, 2**50, 2**51), (2**49, 2**50, 2**52), (2**51, 1, 0)]
    check_one_machine(jobs)


def test_machine_bound_of_known_instances() -> None:
    """The bounds of the literature."""
    for name, expected in (("ft06", 52), ("ft10", 808), ("ft20", 1164)):
        graph = JobShop.read(INSTANCES / f"{name}.txt").graph()
        assert machine_bound(graph) == expected
        assert expected <= one_machine_bound(graph) <= 1165


def test_bounds_equal_those_of_the_core() -> None:
    """The same numbers from both; setups, lags, gangs, memory, windows."""
    for seed in range(300):
        graph = random_graph(Random(seed), 8)
        found = core.makespan_bounds(graph)
        parts = [found["chain"], found["one_machine"]]
        parts += [found["load"]] if graph.has_setups else []
        assert machine_bound(graph) == max(parts)
        assert chain_bound(graph) == found["chain"]


@given(st.randoms(use_true_random=False))
def test_one_machine_bound_is_a_bound(rng: Random) -> None:
    """Never above the optimum, never below Jackson's."""
    graph = random_graph(rng, 6) if rng.random() < 0.6 else random_array(rng, 2, 3).graph()
    assume(graph.n_operations <= 12)
    optimum = best_by_states(graph)
    for limit in (1, 1000):
        bound = one_machine_bound(graph, limit)
        assert machine_bound(graph) <= bound and (optimum is None or bound <= optimum)


def test_carlier_beats_jackson_on_a_graph() -> None:
    """One machine where nobody may be interrupted: the bound is the optimum."""
    shop = JobShop([[(0, 6), (1, 1)], [(0, 2), (2, 9)], [(0, 3), (3, 4)]], release=[0, 1, 2])
    assert machine_bound(shop.graph()) == 12
    assert one_machine_bound(shop.graph()) == 13 == best_by_states(shop.graph())
