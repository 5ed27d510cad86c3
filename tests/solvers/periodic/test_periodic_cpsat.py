"""CP-SAT on rolling arrays: verified, never below the optimum, and equal to it where proved."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from depth import depth, seeds
from ortools.sat.python import cp_model
from rolling_problems import awkward_array

import optsched
from optsched import JobArray
from optsched.testing.brute_force import best_period
from optsched.testing.random_problems import random_rolling
from optsched_solvers.periodic import construct, cpsat
from optsched_solvers.periodic.construct import Folder
from optsched_solvers.periodic.cpsat import CycleModel, windows

EFFORT = 3_000_000
"""Iterations that prove every array of this file: CP-SAT's deterministic microseconds."""


def tiny(rng: Random, alike: bool = False) -> JobArray:
    """Any periodic array whose devices see few pairs of blocks, or one of identical jobs."""
    while True:
        array = random_rolling(rng)
        users = np.diff(array.graph().users.indptr)
        if (users * (users - 1)).sum() <= 40 and not array.infeasibility():
            rows = [array.forward[0].tolist()] * 2, [array.backward[0].tolist()] * 2
            return array if not alike else JobArray(
                *rows, switch=rng.randint(0, 4), switch_on=rng.choice(["in", "out"]),
                lag_forward=rng.randint(0, 3), objective="period",
            )  # fmt: skip


@seeds(40, 200)
def test_optimum_equals_brute_force(seed: int) -> None:
    """Orders, offsets, switches, caps, deferred weight blocks, several iterations a cycle."""
    array = tiny(Random(seed))
    result = optsched.solve(array, "cpsat", iterations=EFFORT)
    assert result.status == "optimal"
    assert result.objective == best_period(array.graph())


def test_blocks_of_no_time_and_awkward_lags() -> None:
    """The model refutes exactly the periods below the optimum; caps and all options included."""
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
        for period in range(max(1, best - 1), best + 2):
            built = CycleModel(graph, period)
            found = not built.refuted and solver.solve(built.model) == cp_model.OPTIMAL
            assert found == (period >= best), f"seed {seed}: period {period}, best {best}"
            if found:
                orders = Folder(graph).fold(built.starts(solver.value), built.grain * period)
                assert orders is not None, f"seed {seed}: period {period} has no orders"
                assert orders.period <= period, f"seed {seed}: {orders.period} for {period}"


GLOBAL = {"objective": "period", "update_mode": "global"}
"""Updates of no time that wait for the gradients of all stages."""


@pytest.mark.parametrize(
    "array,best",
    [
        (JobArray([[1] * 2] * 2, [[1] * 2] * 2, lag_backward=[[1], [0]], **GLOBAL), 5),
        (
            JobArray([[1] * 3] * 3, [[1] * 3] * 3, lag_backward=[[1, 1], [0, 1], [0, 1]], **GLOBAL),
            8,
        ),
    ],
)
def test_a_block_of_no_time_may_end_a_window(array: JobArray, best: int) -> None:
    """As seen from the first block of a device it belongs to the end, not to the beginning."""
    result = optsched.solve(array, "cpsat", iterations=EFFORT)
    assert (result.status, result.objective) == ("optimal", best)


def test_orders_that_wait_for_themselves_are_none() -> None:
    """A last block of no time may start with the one that it waits for, but not before it.

    Else the period would be 7, what the first device has to do.
    """
    array = JobArray(
        [[0, 1, 4]], [[0, 0, 3]], lag_backward=[[0, -3]], place=[0, 1, 0], objective="period"
    )
    result = optsched.solve(array, "cpsat", iterations=EFFORT)
    assert (result.status, result.objective) == ("optimal", 8)
    assert best_period(array.graph()) == 8


def test_iterations_bound_the_models_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where CP-SAT ends at once and counts nothing, and no period is ever settled."""
    array = JobArray([[2, 1, 3]] * 3, [[4, 6, 9]] * 3, switch=3, objective="period")
    made = []

    class Counted(cpsat.CycleModel):
        def starts(self, value: object) -> np.ndarray:
            made.append(self.period)
            return super().starts(value)  # type: ignore[arg-type]

    start = optsched.solve(array, "dispatch", iterations=1).schedule
    monkeypatch.setattr(cpsat, "CycleModel", Counted)
    monkeypatch.setattr(construct.Folder, "fold", lambda *_: None)
    optsched.solve(array, "cpsat", iterations=100_000, warm_start=start)
    assert 0 < len(made) <= 1 + 0.1 / cpsat.start_seconds(array.graph())


@seeds(5, 60)
def test_symmetry_changes_no_optimum(seed: int) -> None:
    """Ordering identical jobs, by one operation each, loses nothing."""
    array = tiny(Random(seed), alike=True)
    broken = optsched.solve(array, "cpsat", iterations=EFFORT)
    kept = optsched.solve(array, "cpsat", iterations=EFFORT, options={"symmetry": False})
    assert broken.status == kept.status == "optimal"
    assert broken.objective == kept.objective


def test_windows() -> None:
    """A weight gradient may begin a whole period after the first F; a chain fits into its period.

    A cycle of arcs that is too long is found without search.
    """
    array = JobArray([[2, 2]], [[2, 2]], weight=[[2, 2]], objective="period")
    graph = array.graph()
    window = windows(graph, array.lower_bound(), [0], 0)
    assert window is not None and (window[0] <= window[1]).all()
    assert window[1][np.flatnonzero(graph.kind == "W")].max() >= array.lower_bound()
    array = JobArray([[2, 2]], [[2, 2]], objective="period")
    assert array.lower_bound() == 8
    assert windows(array.graph(), 7, [0], 0) is None
    assert windows(array.graph(), 8, [0], 0) is not None
