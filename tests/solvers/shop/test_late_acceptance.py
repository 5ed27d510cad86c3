"""The local search on job orders: correct, reproducible, never worse than its first rules."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import optsched
from optsched import JobArray, JobShop, verify
from optsched.model.graph import scheduled
from optsched.solving.limits import Limits
from optsched.solving.monitor import Monitor
from optsched.testing.random_problems import random_array
from optsched_solvers.shop.late_acceptance import JobOrders, improve


def array_of(jobs: int, stages: int, seed: int, **rest: object) -> JobArray:
    """A mixed array."""
    rng = Random(seed)
    rows = [[rng.randint(1, 20) for _ in range(stages)] for _ in range(jobs)]
    return JobArray(rows, rows, **rest)  # type: ignore[arg-type]


def searched(array: JobArray, iterations: int, seed: int = 0) -> Monitor:
    """What a monitor holds after the search."""
    monitor = Monitor(Limits(iterations=iterations))
    improve(array.graph(), monitor, seed=seed, iterations=iterations)
    return monitor


@given(st.randoms(use_true_random=False))
def test_every_incumbent_is_a_schedule(rng: Random) -> None:
    """Whatever it offers is feasible and worth what it says; values fall."""
    array = random_array(rng)
    graph = array.graph()
    offered: list[int] = []

    class Checked(Monitor):
        def incumbent(self, sequences: optsched.Rows, objective: int, source: str = "") -> bool:
            schedule = scheduled(graph, sequences)
            assert verify(schedule) == [] and schedule.makespan == objective
            offered.append(objective)
            return super().incumbent(sequences, objective, source)

    improve(graph, Checked(Limits(iterations=60)), seed=1, iterations=60)
    assert offered == sorted(offered, reverse=True)


def test_never_worse_than_its_starting_rules() -> None:
    """The first points are the rules themselves."""
    for seed in range(5):
        array = array_of(10, 4, seed)
        space = JobOrders(array.graph(), 0)
        best = min(
            int((found[1] + array.graph().duration).max())
            for point in space.starts()
            if (found := space.listed(point)) is not None
        )
        monitor = searched(array, 300)
        assert monitor.objective is not None and monitor.objective <= best


def test_same_seed_same_search() -> None:
    """Bits repeat; the number of list schedules is the limit."""
    array = array_of(9, 4, 2, activation=1, memory=[4, 3, 2, 1])
    first, second = searched(array, 400, 3), searched(array, 400, 3)
    assert first.solution == second.solution and first.objective == second.objective
    for most in (0, 1, 5, 50):
        monitor = Monitor(Limits(iterations=most))
        assert improve(array.graph(), monitor, seed=0, iterations=most) == most


def test_search_improves_on_rules_under_caps() -> None:
    """On some of these capped arrays it finds what no rule finds."""
    better = 0
    for seed in range(4):
        array = array_of(12, 4, seed, activation=1, memory=[4, 3, 2, 2])
        rules = optsched.solve(array, "dispatch", time_limit=600)
        with_search = optsched.solve(array, "dispatch", iterations=3000, options={"search": True})
        assert with_search.objective is not None and rules.objective is not None
        assert with_search.objective <= rules.objective
        better += with_search.objective < rules.objective
    assert better


def test_only_pipelines() -> None:
    """A job shop has no forward and backward blocks: nothing is done."""
    monitor = Monitor(Limits(iterations=9))
    assert improve(JobShop([[(0, 1)]]).graph(), monitor, seed=0, iterations=9) == 0
    assert monitor.objective is None


@pytest.mark.slow
def test_stops_at_its_limits() -> None:
    """Patience, and the time of the call."""
    array = array_of(20, 4, 1)
    assert improve(array.graph(), Monitor(Limits(iterations=10**9)), seed=0, patience=50) < 10**5
    assert improve(array.graph(), Monitor(Limits(iterations=10**9)), seed=0, seconds=0.1) > 0
