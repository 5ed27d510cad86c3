"""First answers for rolling arrays: feasible whatever the array, optimal where theory says so."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from depth import seeds
from hypothesis import given
from hypothesis import strategies as st

import optsched
from optsched import JobArray, verify
from optsched.kernels.cycle_ratio import cycle_time
from optsched.solving.limits import Limits
from optsched.solving.monitor import Monitor
from optsched.testing.random_problems import random_array
from optsched_solvers.periodic.construct import (
    Folder,
    PeriodicOrders,
    first_answers,
)
from optsched_solvers.periodic.insertion import Units, inserted
from optsched_solvers.periodic.orders import Cycle


def cycle_of(rng: Random) -> JobArray:
    """A random array made rolling: no releases, sometimes several iterations a cycle."""
    array = random_array(rng)
    recompute = array.recompute_mode
    return array.replace(
        objective="period",
        release=0,
        multiplicity=[rng.choice([1, 1, 2, 3]) for _ in range(array.n_jobs)],
        recompute_mode="always" if recompute == "choose" else recompute,
    )


def mixed(jobs: int, stages: int, seed: int = 0, **rest: object) -> JobArray:
    """Batches 1:2:3:4 in equal shares, backward three times forward."""
    sizes = [1 + j % 4 for j in range(jobs)]
    Random(seed).shuffle(sizes)
    times = [[100 * size] * stages for size in sizes]
    return JobArray(times, (3 * np.array(times)).tolist(), objective="period", **rest)  # type: ignore[arg-type]


class Checked(Monitor):
    """Every incumbent is verified, and worth what it says."""

    array: JobArray

    def incumbent(self, solution: PeriodicOrders, objective: int, source: str = "") -> bool:
        """As the monitor's, with a look at the schedule."""
        schedule = self.array.scheduled(solution)
        assert verify(schedule) == [], source
        assert schedule.period == objective >= self.array.lower_bound()
        return super().incumbent(solution, objective, source)


def checked(array: JobArray, **limits: int) -> Checked:
    """A monitor that checks."""
    monitor = Checked(Limits(iterations=10**6, **limits))
    monitor.array = array
    monitor.bound(array.lower_bound())
    return monitor


@given(st.randoms(use_true_random=False))
def test_every_answer_is_feasible(rng: Random) -> None:
    """Micro-batches, copies, chunks, split B, updates, lags, switches, caps: all rules.

    Whatever fits job by job gets an answer.
    """
    array = cycle_of(rng)
    monitor = checked(array)
    made = first_answers(array.graph(), monitor)
    assert made == monitor.iteration
    found = monitor.objective
    if array.infeasibility():
        assert found is None
        return
    assert found is not None and monitor.solution is not None
    checked_again = Folder(array.graph()).evaluate(monitor.solution)
    assert checked_again is not None and checked_again.period == found


@pytest.mark.parametrize("caps", [False, True], ids=["free", "capped"])
def test_equal_jobs_are_optimal(caps: bool) -> None:
    """T* = max(K, S)(f + b), also with room for the S - s micro-batches of 1F1B."""
    for stages in (1, 2, 4, 7):
        for jobs in (1, 2, 3, 7, 8, 15):
            rest = {"activation": 1, "memory": list(range(stages, 0, -1))} if caps else {}
            times = np.ones((jobs, stages), np.int64)
            array = JobArray(times, 2 * times, objective="period", **rest)  # type: ignore[arg-type]
            result = optsched.solve(array, "dispatch", iterations=200)
            assert result.status == "optimal"
            assert result.objective == 3 * max(jobs, stages)


def test_mixes_meet_the_bound() -> None:
    """Long arrays and arrays as long as the pipeline, in a handful of constructions."""
    for jobs, stages in ((8, 8), (16, 16), (19, 8), (30, 8)):
        result = optsched.solve(mixed(jobs, stages), "dispatch", iterations=10)
        assert result.status == "optimal"


@given(st.randoms(use_true_random=False))
def test_insertion_keeps_the_circle(rng: Random) -> None:
    """On a circle with room nothing overlaps: folding there needs no longer period.

    Blocks of no time tie with their neighbours, and folding may refuse the order that it reads.
    """
    array = cycle_of(rng).replace(memory=None, devices=None)
    graph = array.graph()
    ties = bool((graph.duration == 0).any())
    least = array.lower_bound()
    for factor in (1, 2, 3):
        starts = inserted(Cycle.of(graph), Units.of(graph), factor * least)
        if starts is not None:
            found = Folder(graph).fold(starts, factor * least)
            assert ties or (found is not None and found.period <= factor * least)


@given(st.randoms(use_true_random=False))
def test_compiled_period_is_the_evaluators(rng: Random) -> None:
    """Folds of arbitrary starts: the kernel agrees with `cycle_time` or refuses."""
    array = cycle_of(rng).replace(memory=None, devices=None)
    graph = array.graph()
    starts = np.array([rng.randint(0, 40) for _ in range(graph.n_operations)])
    found = Folder(graph).fold(starts, rng.randint(1, 30))
    if found is not None:
        orders = found.orders
        assert cycle_time(graph, orders.sequences, orders.offset).period == found.period


@pytest.mark.parametrize("solver", ["dispatch", "tabu"])
@pytest.mark.parametrize("caps", [False, True], ids=["free", "capped"])
def test_tiny_idle_and_long_arrays(solver: str, caps: bool) -> None:
    """One or two jobs, one stage, blocks of no time, a thousand jobs."""
    for jobs, stages, time, least in (
        (1, 1, 2, 6), (2, 1, 2, 12), (1, 4, 2, 24), (1, 3, 0, 1), (5, 3, 0, 1), (1000, 1, 1, 3000),
    ):  # fmt: skip
        times = np.full((jobs, stages), time)
        rest = {"activation": 1, "memory": [1] * stages} if caps else {}
        array = JobArray(times, 2 * times, objective="period", **rest)  # type: ignore[arg-type]
        result = optsched.solve(array, solver, iterations=60)
        assert result.status == "optimal" and result.objective == least


@seeds(2, 5)
def test_answers_while_kernels_are_compiled(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One job after the other, and a rule's order repeated."""
    monkeypatch.setattr("optsched_solvers.periodic.construct.loaded", lambda *_: False)
    monkeypatch.setattr("optsched_solvers.periodic.construct.load", lambda *_: False)
    draw = np.random.default_rng(seed)
    times = draw.integers(1, 9, (6, 3))
    array = JobArray(times, 2 * times, lag_forward=1, update=1, objective="period")
    monitor = checked(array)
    assert first_answers(array.graph(), monitor) == 0
    serial, ruled = [event.objective for event in monitor.history if event.objective]
    assert serial is not None and ruled is not None and ruled < 0.8 * serial
