"""Annealing over job orders, and hand-made schedules as starts."""

from __future__ import annotations

from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import optsched
from optsched import JobArray, Schedule, pipelines, verify
from optsched.model.graph import scheduled
from optsched.solving.limits import Limits
from optsched.solving.monitor import Monitor
from optsched.testing.random_problems import random_array
from optsched_solvers.shop import hand_made
from optsched_solvers.shop.job_orders import Annealing, improve


def array_of(jobs: int, stages: int, seed: int, **rest: object) -> JobArray:
    """A mixed array."""
    rng = Random(seed)
    rows = [[rng.randint(1, 20) for _ in range(stages)] for _ in range(jobs)]
    return JobArray(rows, rows, **rest)  # type: ignore[arg-type]


def random_job(rng: Random) -> JobArray:
    """One job, one or two chunks a device, sometimes split, capped, with recomputation blocks."""
    devices, chunks = rng.randint(1, 3), rng.choice([1, 2])
    stages = devices * chunks

    def row(low: int, high: int) -> list[list[int]]:
        return [[rng.randint(low, high) for _ in range(stages)]]

    kept = row(1, 4)
    split = rng.random() < 0.5
    place = rng.choice([pipelines.wrapped, pipelines.zigzag])(devices, chunks) if chunks > 1 else (
        tuple(range(devices)))  # fmt: skip
    need = [sum(k for k, d in zip(kept[0], place, strict=True) if d == device)
            for device in range(devices)]  # fmt: skip
    return JobArray(
        row(1, 9), row(1, 9), weight=row(1, 9) if split else None, lag_forward=rng.randint(0, 3),
        lag_backward=rng.randint(0, 3), activation=kept, weight_memory=1 if split else 0,
        checkpoint=kept, recompute=1, recompute_as_block=rng.random() < 0.5,
        recompute_mode=rng.choice(["never", "always"]), update=rng.randint(0, 3),
        update_mode=rng.choice(["fused", "block", "global", "none"]),
        micro_batches=rng.randint(2, 6), place=place,
        memory=[n + rng.randint(0, 8) for n in need] if rng.random() < 0.7 else None,
    )  # fmt: skip


def searched(graph: Schedule, iterations: int, seed: int = 0) -> Monitor:
    """What a monitor holds after the search."""
    monitor = Monitor(Limits(iterations=iterations))
    assert improve(graph, monitor, seed=seed, iterations=iterations) <= iterations
    return monitor


def peaks(schedule: Schedule) -> list[int]:
    """Most bytes held per device."""
    assert schedule.sequences is not None
    found = []
    for r in range(schedule.n_resources):
        on = schedule.sequences[r]
        change = schedule.acquire[on] - schedule.free[on]
        level = np.cumsum(change) - change + schedule.acquire[on] + schedule.workspace[on]
        found.append(int(level.max(initial=0)))
    return found


@given(st.randoms(use_true_random=False))
def test_every_incumbent_is_a_schedule(rng: Random) -> None:
    """Every incumbent is feasible and has the reported makespan; values fall."""
    graph = random_array(rng).graph()
    offered: list[int] = []

    class Checked(Monitor):
        def incumbent(self, sequences: optsched.Csr, objective: int, source: str = "") -> bool:
            schedule = scheduled(graph, sequences)
            assert verify(schedule) == [] and schedule.makespan == objective
            offered.append(objective)
            return super().incumbent(sequences, objective, source)

    improve(graph, Checked(Limits(iterations=300)), seed=1, iterations=300)
    assert offered == sorted(offered, reverse=True)


def test_same_seed_same_search() -> None:
    """Bits repeat; the number of list schedules is the limit."""
    array = array_of(9, 4, 2, activation=1, memory=[4, 3, 2, 1])
    first, second = (searched(array.graph(), 400, 3) for _ in range(2))
    assert first.solution == second.solution and first.objective == second.objective
    for most in (0, 1, 5, 50):
        monitor = Monitor(Limits(iterations=most))
        assert improve(array.graph(), monitor, seed=0, iterations=most) == most


def test_no_answer_is_worse_than_hand_made_ones() -> None:
    """Random jobs under the memory of each hand-made schedule that fits them."""
    compared = 0
    for seed in range(25):
        job = random_job(Random(seed))
        for name in hand_made.NAMES:
            try:
                made = getattr(pipelines, name)(job.replace(memory=0))
            except optsched.InputError:
                continue
            capped = job.replace(memory=[max(1, peak) for peak in peaks(made)])
            monitor = Monitor(Limits(iterations=1))
            hand_made.offer(capped, monitor)
            assert monitor.objective is not None and monitor.objective <= made.makespan
            compared += 1
    assert compared > 40


@given(st.randoms(use_true_random=False), st.booleans())
def test_makespan_of_a_walk_is_that_of_its_orders(rng: Random, mirrored: bool) -> None:
    """Without releases also where time runs backwards; caps are kept."""
    graph = random_array(rng).graph()
    walk = Annealing(graph, rng.getrandbits(20), mirrored)
    walk.begin(np.array(rng.sample(range(walk.n_jobs), walk.n_jobs)))
    walk.run(50, 3.0)
    if walk.best < 10**12:  # no list schedule if all got stuck
        schedule = scheduled(graph, walk.sequences())
        assert verify(schedule) == []
        if not (mirrored and graph.release.any()):
            assert schedule.makespan <= walk.best


def test_small_capped_arrays_are_near_the_optimum() -> None:
    """Six capped arrays of five jobs: within 2 % of the proved optima in the mean."""
    ratios = []
    for seed in range(6):
        array = array_of(5, 3, seed, activation=1, memory=[3, 2, 2])
        optimum = optsched.solve(array, "cpsat", time_limit=600)
        assert optimum.status == "optimal" and optimum.objective is not None
        found = searched(array.graph(), 4000, seed).objective
        assert found is not None and found >= optimum.objective
        ratios.append(found / optimum.objective)
    assert np.mean(ratios) <= 1.02, ratios
