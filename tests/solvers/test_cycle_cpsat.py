"""CP-SAT on rolling arrays: verified, never below the optimum, and equal to it where proved."""

from __future__ import annotations

import numpy as np
import pytest
from depth import depth
from hypothesis import given, settings
from hypothesis import strategies as st

import optsched
from optsched import JobArray
from optsched.testing.best_period import best_period

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


@settings(max_examples=depth(5))
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

    from optsched_solvers.cycle_cpsat_model import CycleModel

    graph = JobArray([[1, 1]] * 3, [[3, 3]] * 3, objective="period").graph()
    built = CycleModel(graph, period)
    status = cp_model.CpSolver().solve(built.model)
    assert (status == cp_model.INFEASIBLE) == (period < 12)


def test_windows_reach_into_the_next_cycle() -> None:
    """A weight gradient may begin a whole period after the first F."""
    from optsched_solvers.cycle_cpsat_model import windows

    array = JobArray([[2, 2]], [[2, 2]], weight=[[2, 2]], objective="period")
    graph = array.graph()
    window = windows(graph, array.lower_bound(), [0], 0)
    assert window is not None
    weights = np.flatnonzero(graph.kind == "W")
    assert window[1][weights].max() >= array.lower_bound()
    assert (window[0] <= window[1]).all()


def test_windows_refute_periods_below_the_chain() -> None:
    """A cycle of arcs that is too long is found without search."""
    from optsched_solvers.cycle_cpsat_model import windows

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
    with pytest.raises(optsched.InputError, match="periods"):
        optsched.solve(array, "cpsat", iterations=1000, options={"mode": "bound"})
