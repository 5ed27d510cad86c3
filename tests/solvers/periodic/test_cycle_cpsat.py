"""CP-SAT on rolling arrays: verified, never below the optimum, and equal to it where proved."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from depth import few_examples
from hypothesis import given
from hypothesis import strategies as st
from rolling_problems import awkward_array

import optsched
from optsched import JobArray
from optsched.testing.brute_force import best_period

EFFORT = 3_000_000
"""Iterations that prove every array of this file: CP-SAT's deterministic microseconds."""


@st.composite
def tiny_arrays(draw: st.DrawFn, twins: bool = False) -> JobArray:
    """Two jobs on two stages, or three on one, with everything that bends a model."""
    jobs, stages = (2, 2) if twins else draw(st.sampled_from([(2, 2), (3, 1), (1, 2)]))

    def table(least: int, most: int, columns: int = stages) -> list[list[int]]:
        cell = st.integers(least, most)
        row = st.lists(cell, min_size=columns, max_size=columns)
        return [draw(row)] * jobs if twins else [draw(row) for _ in range(jobs)]

    fields: dict[str, object] = {"lag_forward": table(0, 3, stages - 1)}
    fields["lag_backward"] = table(0, 3, stages - 1)
    if draw(st.booleans()):
        fields["switch"] = table(0, 4)
        fields["switch_on"] = draw(st.sampled_from(["in", "out"]))
    if draw(st.booleans()):
        fields["activation"] = table(1, 3)
        fields["memory"] = draw(st.lists(st.integers(3, 6), min_size=stages, max_size=stages))
    if jobs == 1 and draw(st.booleans()):
        fields["weight"] = table(1, 4)
    if jobs == 1:
        fields["multiplicity"] = draw(st.integers(1, 2))
    return JobArray(table(1, 6), table(1, 6), objective="period", **fields)  # type: ignore[arg-type]


@given(tiny_arrays())
def test_optimum_equals_brute_force(array: JobArray) -> None:
    """Orders, offsets, switches, caps, deferred weight blocks, several iterations a cycle."""
    result = optsched.solve(array, "cpsat", iterations=EFFORT)
    assert result.status == "optimal"
    assert result.objective == best_period(array.graph())


def test_blocks_of_no_time_and_awkward_lags() -> None:
    """The model refutes exactly the periods below the optimum; caps and all options included."""
    from ortools.sat.python import cp_model

    from optsched_solvers.periodic.cpsat_model import CycleModel
    from optsched_solvers.periodic.insertion import Circle
    from optsched_solvers.periodic.orders import folded

    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    for seed in range(60):
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
                orders = folded(Circle.of(graph), built.starts(solver.value), built.grain * period)
                assert orders is not None, f"seed {seed}: period {period} has no orders"
                assert orders.period <= period, f"seed {seed}: {orders.period} for {period}"


def test_proofs_of_blocks_of_no_time() -> None:
    """What the solver says agrees with brute force, and its schedules are right."""
    for seed in range(100, 125):
        array = awkward_array(Random(seed))
        best = best_period(array.graph())
        result = optsched.solve(array, "cpsat", iterations=EFFORT)
        said = f"seed {seed}: {result.status} {result.objective}, best {best}"
        assert result.status == ("infeasible" if best is None else "optimal"), said
        assert result.objective == best, said
        assert result.schedule is None or optsched.verify(result.schedule) == [], said


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
    from optsched_solvers.periodic import cpsat as cycle_cpsat
    from optsched_solvers.periodic import cpsat_model as cycle_cpsat_model
    from optsched_solvers.periodic import orders as rolling_orders

    array = JobArray([[2, 1, 3]] * 3, [[4, 6, 9]] * 3, switch=3, objective="period")
    made = []

    class Counted(cycle_cpsat_model.CycleModel):
        def starts(self, value: object) -> np.ndarray:
            made.append(self.period)
            return super().starts(value)  # type: ignore[arg-type]

    start = optsched.solve(array, "dispatch", iterations=1).schedule
    monkeypatch.setattr(cycle_cpsat_model, "CycleModel", Counted)
    monkeypatch.setattr(rolling_orders, "folded", lambda *_: None)
    optsched.solve(array, "cpsat", iterations=100_000, warm_start=start)
    assert 0 < len(made) <= 1 + 0.1 / cycle_cpsat.start_seconds(array.graph())


@few_examples
@given(tiny_arrays(twins=True))
def test_symmetry_changes_no_optimum(array: JobArray) -> None:
    """Ordering identical jobs, by one operation each, loses nothing."""
    broken = optsched.solve(array, "cpsat", iterations=EFFORT)
    kept = optsched.solve(array, "cpsat", iterations=EFFORT, options={"symmetry": False})
    assert broken.status == kept.status == "optimal"
    assert broken.objective == kept.objective


@pytest.mark.parametrize("period", [11, 12, 13])
def test_model_refutes_what_is_too_short(period: int) -> None:
    """Three equal jobs of 4 on two stages: 12 is feasible, 11 is not, and longer ones are."""
    from ortools.sat.python import cp_model

    from optsched_solvers.periodic.cpsat_model import CycleModel

    graph = JobArray([[1, 1]] * 3, [[3, 3]] * 3, objective="period").graph()
    built = CycleModel(graph, period)
    status = cp_model.CpSolver().solve(built.model)
    assert (status == cp_model.INFEASIBLE) == (period < 12)


def test_windows_reach_into_the_next_cycle() -> None:
    """A weight gradient may begin a whole period after the first F."""
    from optsched_solvers.periodic.cpsat_model import windows

    array = JobArray([[2, 2]], [[2, 2]], weight=[[2, 2]], objective="period")
    graph = array.graph()
    window = windows(graph, array.lower_bound(), [0], 0)
    assert window is not None
    weights = np.flatnonzero(graph.kind == "W")
    assert window[1][weights].max() >= array.lower_bound()
    assert (window[0] <= window[1]).all()


def test_windows_refute_periods_below_the_chain() -> None:
    """A cycle of arcs that is too long is found without search."""
    from optsched_solvers.periodic.cpsat_model import windows

    array = JobArray([[2, 2]], [[2, 2]], objective="period")
    assert array.lower_bound() == 8
    assert windows(array.graph(), 7, [0], 0) is None
    assert windows(array.graph(), 8, [0], 0) is not None


def test_repeats_exactly() -> None:
    """The same iterations give the same schedule."""
    rng = np.random.default_rng(3)
    forward = rng.integers(5, 40, (4, 3))
    array = JobArray(forward, 3 * forward, switch=7, objective="period")
    one, other = (optsched.solve(array, "cpsat", iterations=400_000) for _ in range(2))
    assert one.schedule == other.schedule
    assert one.lower_bound == other.lower_bound


def test_warm_start_is_never_lost() -> None:
    """The result is at least as good as the start, with next to no effort."""
    array = JobArray([[2, 5, 3]] * 3, [[4, 6, 9]] * 3, switch=3, objective="period")
    start = optsched.solve(array, "cpsat", iterations=EFFORT).schedule
    again = optsched.solve(array, "cpsat", iterations=1, warm_start=start)
    assert start is not None and start.period is not None
    assert again.objective is not None and again.objective <= start.period


def test_refuses_the_mode_of_bounds() -> None:
    """A sentence instead of a run."""
    array = JobArray([[1, 1]] * 2, [[1, 1]] * 2, objective="period")
    with pytest.raises(optsched.InputError, match="has no option 'mode'"):
        optsched.solve(array, "cpsat", iterations=1000, options={"mode": "bound"})
