"""CP-SAT on rolling arrays: verified, never below the optimum, and equal to it where proved."""

from __future__ import annotations

from random import Random

import numpy as np
from depth import depth, seeds
from ortools.sat.python import cp_model
from rolling_problems import awkward_array

import optsched
from optsched import JobArray
from optsched.testing.brute_force import best_period
from optsched.testing.random_problems import random_rolling
from optsched_solvers.periodic.construct import Folder
from optsched_solvers.periodic.cpsat import CycleModel

EFFORT = 3_000_000
"""Iterations that prove every array of this file: CP-SAT's deterministic microseconds."""


def tiny(rng: Random) -> JobArray:
    """Any periodic array with few pairs of blocks on a device."""
    while True:
        array = random_rolling(rng)
        users = np.diff(array.graph().users.indptr)
        if (users * (users - 1)).sum() <= 40 and not array.infeasibility():
            return array


@seeds(30, 200)
def test_optimum_equals_brute_force(seed: int) -> None:
    """Orders, offsets, switches, caps, deferred weight blocks, several iterations a cycle.

    Blocks of no time may leave the bound below the optimum.
    """
    array = tiny(Random(seed))
    best = best_period(array.graph())
    result = optsched.solve(array, "cpsat", iterations=EFFORT)
    assert best is not None and result.objective is not None and result.lower_bound is not None
    assert result.lower_bound <= best <= result.objective
    if (array.graph().duration > 0).all():
        assert (result.status, result.objective) == ("optimal", best)


def test_models_refute_periods_below_the_optimum_only() -> None:
    """With awkward lags, caps and all options; without blocks of no time, all of them."""
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    for seed in range(depth(80, 300)):
        array = awkward_array(Random(seed))
        graph = array.graph()
        best = best_period(graph)
        assert (best is None) == bool(array.infeasibility()), f"seed {seed}"
        if best is None:
            continue
        assert max(array.bounds().values()) <= best, f"seed {seed}: {array.bounds()}, best {best}"
        takes_time = bool((graph.duration > 0).all())
        for period in range(max(1, best - 1), best + 2):
            built = CycleModel(graph, period)
            found = not built.refuted and solver.solve(built.model) == cp_model.OPTIMAL
            assert found or period < best, f"seed {seed}: period {period}, best {best}"
            if found and takes_time:
                assert period >= best, f"seed {seed}: period {period}, best {best}"
                orders = Folder(graph).fold(built.starts(solver.value), period)
                assert orders is not None and orders.period <= period, f"seed {seed}"


def test_a_block_of_no_time_may_end_a_window() -> None:
    """As seen from the first block of a device it belongs to the end, not to the beginning."""
    array = JobArray(
        [[1] * 2] * 2, [[1] * 2] * 2, lag_backward=[[1], [0]], objective="period",
        update_mode="global",
    )  # fmt: skip
    result = optsched.solve(array, "cpsat", iterations=EFFORT)
    assert (result.status, result.objective) == ("optimal", 5)


@seeds(5, 60)
def test_symmetry_changes_no_optimum(seed: int) -> None:
    """Ordering identical jobs, by one operation each, loses nothing."""
    rng = Random(seed)
    forward, backward = ([[rng.randint(1, 5) for _ in range(2)]] * 2 for _ in "FB")
    array = JobArray(
        forward, backward, switch=rng.randint(0, 4), lag_forward=rng.randint(0, 3),
        objective="period",
    )  # fmt: skip
    broken = optsched.solve(array, "cpsat", iterations=EFFORT)
    kept = optsched.solve(array, "cpsat", iterations=EFFORT, options={"symmetry": False})
    assert broken.status == kept.status == "optimal"
    assert broken.objective == kept.objective
