"""The genetic algorithm on rolling arrays: verified, repeatable, refuses foreign options."""

from __future__ import annotations

import numpy as np
import pytest

import optsched
from optsched import JobArray

pytest.importorskip("deap")


def arrays() -> list[JobArray]:
    """Small arrays of every kind."""
    rng = np.random.default_rng(5)
    f = rng.integers(3, 30, (5, 3))
    return [
        JobArray(f, 3 * f, objective="period"),
        JobArray(f, 2 * f, switch=9, lag_forward=4, objective="period"),
        JobArray(f, 2 * f, activation=f, memory=[70, 60, 60], objective="period"),
        JobArray(f, f, weight=f, multiplicity=[1, 2, 1, 1, 1], objective="period"),
        JobArray(f[:2], f[:2], weight=f[:2], micro_batches=[3, 2], objective="period"),
    ]


@pytest.mark.parametrize("k", range(5))
def test_verified_and_repeatable(k: int) -> None:
    """`solve` verifies; the same seed and iterations give the same schedule."""
    array = arrays()[k]
    one, other = (optsched.solve(array, "genetic", iterations=600, seed=2) for _ in range(2))
    assert one.objective is not None and one.objective >= array.lower_bound()
    assert one.schedule == other.schedule


def test_finds_what_constructions_miss() -> None:
    """Evolution gets below the constructions that it begins with."""
    sizes = np.array([1, 2, 3, 4, 1, 2])
    f = np.repeat(sizes[:, None] * 100, 4, axis=1)
    array = JobArray(f, 3 * f, objective="period")
    few = optsched.solve(array, "genetic", iterations=60)
    many = optsched.solve(array, "genetic", iterations=3000)
    assert few.objective is not None and many.objective is not None
    assert many.objective <= few.objective
    assert many.status == "optimal"


def test_counts_its_own_iterations() -> None:
    """What others have reported to the monitor before takes nothing away."""
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor
    from optsched_solvers.literature.genetic_periodic import PeriodicGenetic

    array = arrays()[2]
    made = []
    for others in (0, 10**6):
        limits = Limits(iterations=400)
        monitor = Monitor(limits)
        monitor.advance(others)
        PeriodicGenetic().solve(array, limits, monitor)
        made.append((monitor.iteration - others, monitor.objective))
    assert made[0] == made[1] and made[0][0] == 400


def test_genes_name_units() -> None:
    """The n-th occurrence of a job is its n-th unit, whatever the order."""
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor
    from optsched_solvers.literature.genetic_periodic import JobOrders

    array = JobArray([[1, 1]] * 2, [[2, 2]] * 2, multiplicity=[2, 1], objective="period")
    decoder = JobOrders(array.graph(), Monitor(Limits(iterations=10)))
    assert decoder.jobs == [0, 0, 1]
    values = [decoder.value([60, *order]) for order in ([1, 0, 0], [0, 1, 0], [0, 0, 1])]
    assert min(values) >= array.lower_bound() and max(values) < 100


def test_refuses_options_of_orders() -> None:
    """By name."""
    with pytest.raises(optsched.InputError, match="crossover"):
        optsched.solve(arrays()[0], "genetic", iterations=10, options={"crossover": "pox"})
