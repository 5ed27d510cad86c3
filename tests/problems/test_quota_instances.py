"""The shipped quota plans: made by their script, and solved to their proved optima."""

from __future__ import annotations

import csv
import runpy
from pathlib import Path

import pytest

import optsched
from optsched.formats.read_problem import read_problem
from optsched.problems.quota import document as quota_json

FOLDER = Path(__file__).parents[2] / "instances" / "quota"
ROWS = list(csv.DictReader((FOLDER / "optima.csv").open()))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_optima(row: dict[str, str]) -> None:
    """`auto` proves what the list says."""
    plan = read_problem(FOLDER / f"{row['name']}.quota.json")
    assert isinstance(plan, optsched.QuotaPlan)
    result = optsched.solve(plan, time_limit=600)
    assert (result.status, result.objective) == ("optimal", int(row["optimum"]))
    assert (len(plan.jobs), plan.n_gpus) == (int(row["jobs"]), int(row["gpus"]))
    assert plan.objective == row["objective"]


def test_files_are_what_the_script_makes() -> None:
    """Same seed, same bytes."""
    plans = runpy.run_path(str(FOLDER / "make.py"))["plans"]()
    assert [plan.name for plan in plans] == [row["name"] for row in ROWS]
    for plan in plans:
        assert (FOLDER / f"{plan.name}.quota.json").read_bytes() == quota_json.to_json(plan)
