"""The shipped subset choices: made by their script, and solved to their proved optima."""

from __future__ import annotations

import csv
import runpy
from pathlib import Path

import pytest

import optsched
from optsched.formats import model_json
from optsched.problems.gpus import document as subset_json

FOLDER = Path(__file__).parents[2] / "instances" / "subset"
ROWS = list(csv.DictReader((FOLDER / "optima.csv").open()))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_optima(row: dict[str, str]) -> None:
    """`auto` proves what the list says."""
    problem = optsched.GpuPlacement.read(FOLDER / f"{row['name']}.subset.json")
    result = optsched.solve(problem)
    assert (result.status, result.objective) == ("optimal", -int(row["kilobytes"]))
    assert (problem.k, len(problem.state.free)) == (int(row["gpus"]), int(row["free"]))


def test_files_are_what_the_script_makes() -> None:
    """Same seed, same bytes."""
    made = runpy.run_path(str(FOLDER / "make.py"))["problems"]()
    for name, choices in made.items():
        model = FOLDER / f"{name}.model.json"
        assert model.read_bytes() == model_json.to_json(choices[0].model)
        for problem in choices:
            path = FOLDER / f"{problem.name}.subset.json"
            assert path.read_bytes() == subset_json.to_json(problem, model)
    assert {row["name"] for row in ROWS} == {p.name for ps in made.values() for p in ps}
