"""Times keep their size whatever the unit of the schedule or of the problem."""

from __future__ import annotations

from typing import Any

import pytest
from test_arraypipe_profile_document import from_tree, times, tree

import optsched
from optsched.arraypipe.plan.plan import compile_plan
from optsched.arraypipe.report.report import explain, predict
from optsched.io.text import NANOSECONDS

UNITS = {"ns": 10**9, "us": 10**6, "ms": 1000, "s": 1}  # a second in each


def known(unit: str) -> optsched.JobArray:
    """Two jobs in two stages: F takes 1 s, B 2 s, so that a device computes for 6 s a cycle."""
    one = UNITS[unit]
    return optsched.JobArray(
        [[one] * 2] * 2, [[2 * one] * 2] * 2, objective="period", time_unit=unit
    )


def test_block_times_of_a_profile_are_predicted(longer: int) -> None:
    """Of one job alone the period is the sum of its measured blocks, in every unit."""
    given = tree()

    def scaled(value: Any) -> Any:
        if isinstance(value, dict):
            value = {key: scaled(one) for key, one in value.items()}
            return value | times(value["median_ns"] * longer) if "median_ns" in value else value
        return [scaled(one) for one in value] if isinstance(value, list) else value

    profile = from_tree(scaled(given))
    problem = profile.problem(jobs=[0], place=[0, 0, 0])
    job = profile.jobs[0]
    whole = sum(
        profile.duration_of(kind, s, job.batch, job).median_ns for kind in "FBU" for s in range(3)
    )
    assert problem.time_unit == ("ns" if longer == 1 else "us") and job.microbatches == 1
    found = problem.lower_bound() * NANOSECONDS[problem.time_unit]
    assert whole <= found <= whole + 12_000  # twelve times are rounded up to a microsecond


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
    assert "predicted period  6 s, 0.0% above the bound" in explain(plan)
