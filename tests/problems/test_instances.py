"""The shipped quota plans and choices of GPUs: made by scripts, solved to their proved optima."""

from __future__ import annotations

import csv
import runpy
from pathlib import Path

import pytest

import optsched
from optsched.bandwidth.models import model_document
from optsched.bandwidth.placement import document as gpus_json
from optsched.formats.read_problem import read_problem
from optsched.problems.quota import document as quota_json

QUOTA, GPUS = (Path(__file__).parents[2] / "instances" / kind for kind in ("quota", "subset"))
PLANS, CHOICES = (list(csv.DictReader((at / "optima.csv").open())) for at in (QUOTA, GPUS))


@pytest.mark.parametrize("row", PLANS, ids=lambda row: row["name"])
def test_optima_of_plans(row: dict[str, str]) -> None:
    """`auto` proves what the list says."""
    plan = read_problem(QUOTA / f"{row['name']}.quota.json")
    assert isinstance(plan, optsched.QuotaPlan)
    result = optsched.solve(plan, time_limit=600)
    assert (result.status, result.objective) == ("optimal", int(row["optimum"]))
    assert (len(plan.jobs), plan.n_gpus) == (int(row["jobs"]), int(row["gpus"]))
    assert plan.objective == row["objective"]


@pytest.mark.parametrize("row", CHOICES, ids=lambda row: row["name"])
def test_optima_of_choices(row: dict[str, str]) -> None:
    """`auto` proves what the list says."""
    problem = optsched.GpuPlacement.read(GPUS / f"{row['name']}.subset.json")
    result = optsched.solve(problem)
    assert (result.status, result.objective) == ("optimal", -int(row["kilobytes"]))
    assert (problem.k, len(problem.state.free)) == (int(row["gpus"]), int(row["free"]))


def test_files_are_what_the_scripts_make() -> None:
    """Same seed, same bytes."""
    plans = runpy.run_path(str(QUOTA / "make.py"))["plans"]()
    assert [plan.name for plan in plans] == [row["name"] for row in PLANS]
    for plan in plans:
        assert (QUOTA / f"{plan.name}.quota.json").read_bytes() == quota_json.to_json(plan)
    made = runpy.run_path(str(GPUS / "make.py"))["problems"]()
    assert {row["name"] for row in CHOICES} == {p.name for ps in made.values() for p in ps}
    for name, choices in made.items():
        model = GPUS / f"{name}.model.json"
        assert model.read_bytes() == model_document.to_json(choices[0].model)
        for problem in choices:
            path = GPUS / f"{problem.name}.subset.json"
            assert path.read_bytes() == gpus_json.to_json(problem, model)
