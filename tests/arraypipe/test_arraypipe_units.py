"""Times keep their size whatever the unit of the schedule or of the problem."""

from __future__ import annotations

import pytest

import optsched
from optsched.arraypipe.plan.plan import compile_plan
from optsched.arraypipe.report import explain, predict

UNITS = {"ns": 10**9, "us": 10**6, "ms": 1000, "s": 1}  # a second in each


def known(unit: str) -> optsched.JobArray:
    """Two jobs in two stages: F takes 1 s, B 2 s, so that a device computes for 6 s a cycle."""
    one = UNITS[unit]
    return optsched.JobArray(
        [[one] * 2] * 2, [[2 * one] * 2] * 2, objective="period", time_unit=unit
    )


@pytest.mark.parametrize("unit", UNITS)
def test_predictions_of_a_plan(unit: str) -> None:
    """Period, loads and the text."""
    schedule = optsched.solve(known(unit), "dispatch").schedule
    assert schedule is not None
    plan = compile_plan(schedule)
    found = predict(plan)
    assert (found.period_ns, found.load_ns, found.chain_ns) == (
        6 * 10**9,
        (6 * 10**9,) * 2,
        6 * 10**9,
    )
    assert "predicted period 6 s, 0.0% above the bound" in explain(plan)
