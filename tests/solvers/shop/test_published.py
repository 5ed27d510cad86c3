"""Known optima: typed instances of the literature, and generated arrays like the published ones."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from depth import seeds

import optsched
from optsched import JobArray, JobShop
from optsched.model.bounds import makespan_bounds

INSTANCES = Path(__file__).parents[3] / "instances" / "jobshop"


@pytest.mark.parametrize(
    ("name", "optimum"),
    [
        ("ft06", 55),
        pytest.param("ft20", 1165, marks=pytest.mark.slow),
        pytest.param("ft10", 930, marks=pytest.mark.slow),
    ],
)
def test_fisher_and_thompson(name: str, optimum: int) -> None:
    """Proved to the published optimum; no bound is above it."""
    shop = JobShop.read(INSTANCES / f"{name}.txt")
    assert shop.lower_bound() <= optimum
    result = optsched.solve(shop, "cpsat", workers=1, time_limit=900)
    assert (result.objective, result.lower_bound, result.status) == (optimum, optimum, "optimal")


def test_machine_bound_of_ft10() -> None:
    """Jackson's bound of ft10 is 808."""
    assert makespan_bounds(JobShop.read(INSTANCES / "ft10.txt").graph())["one_machine"] == 808


@seeds(1, 4)
@pytest.mark.parametrize("jobs", [25, 30, 40])
def test_long_arrays_are_proved_by_one_rule(jobs: int, seed: int) -> None:
    """Four devices, a few kinds of jobs, backward twice forward: valley meets the bound."""
    rng = Random(100 * seed + jobs)
    forward = [[rng.choice([420, 490, 560, 680])] * 4 for _ in range(jobs)]
    array = JobArray(forward, [[19 * p // 10 for p in row] for row in forward])
    result = optsched.solve(array, "dispatch", iterations=1)
    assert result.status == "optimal" and result.objective == array.lower_bound()


@pytest.mark.parametrize(("jobs", "stages"), [(2, 2), (8, 4), (4, 4), (12, 6)])
def test_equal_jobs(jobs: int, stages: int) -> None:
    """Equal jobs of stage times f, b: (K + S - 1)(f + b)."""
    array = JobArray([[3] * stages] * jobs, [[5] * stages] * jobs)
    result = optsched.solve(array, "auto", iterations=20_000, workers=1)
    assert result.objective is not None
    assert result.objective == (jobs + stages - 1) * 8 == result.lower_bound
