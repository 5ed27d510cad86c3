"""Quota plans at the command line, and whatever their files hold."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from test_hostile_documents import HOSTILE, changed, paths, without

import optsched
from optsched import InputError, QuotaPlan
from optsched.problems.quota import document as quota_json

if TYPE_CHECKING:
    from program import Cli

DOCUMENTS: dict[str, dict[str, Any]] = {
    "sum": {
        "format": "optsched.quota/1", "name": "p", "resolution": 100, "time_unit": "ms",
        "nodes": [{"name": "x", "gpus": 4, "type": "t"}, {"name": "y", "gpus": 2, "type": "u"}],
        "jobs": [
            {"name": "a", "sizes": {"t": [1, 2], "u": [1, 2]},
             "utility": {"t": [1, 2], "u": [1.5, 2]}, "idle": -1, "weight": 2},
            {"name": "b", "minimum": 1, "maximum": 2, "utility": [1, 2], "rates": [1, 2],
             "pass_work": 9, "must_run": True, "current": {"x": 1}, "locality": "single"},
        ],
    },
    "max_min": {
        "format": "optsched.quota/1", "budget": 5, "objective": "max_min",
        "jobs": [{"name": "a", "must_run": True}, {"name": "b", "weight": 2, "must_run": True}],
    },
    "proportional": {
        "format": "optsched.quota/1", "budget": 5, "objective": "proportional",
        "jobs": [{"name": "a", "score": 1, "must_run": True, "maximum": 3},
                 {"name": "b", "score": 2.5, "must_run": True}],
    },
    "makespan": {
        "format": "optsched.quota/1", "budget": {"t": 3, "u": 3}, "objective": "makespan",
        "jobs": [{"name": "a", "work": 9, "sizes": [1, 3], "rates": [1, 2], "must_run": True}],
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_any_value_anywhere(kind: str) -> None:
    """A plan that has an answer or none, or one sentence: never another exception."""
    tree = DOCUMENTS[kind]
    mutants = [changed(tree, path, value) for path in paths(tree) for value in HOSTILE]
    mutants += [without(tree, path) for path in paths(tree) if path]
    read = 0
    for mutant in mutants:
        try:
            plan = quota_json.from_tree(mutant, "x.json")
        except InputError as error:
            assert "\n" not in str(error)
            continue
        read += 1
        reason = plan.infeasibility()
        if plan.n_gpus > 1000:
            continue  # a million names take a second each
        result = optsched.solve(plan, "greedy_quota")
        assert (result.status == "infeasible") == bool(reason)
        assert quota_json.from_tree(json.loads(quota_json.to_json(plan)), "y") == plan
    assert read > 10


def test_the_documented_document() -> None:
    """The example of docs/clusters/quota-solver.md is read, and solved."""
    text = (Path(__file__).parents[2] / "docs/clusters/quota-solver.md").read_text()
    (block,) = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    result = optsched.solve(quota_json.from_tree(json.loads(block), "quota.md"))
    assert (result.status, result.objective) == ("optimal", -4_500_000)


def test_generate_solve_and_bound(cli: Cli) -> None:
    """From a seed to a verified schedule."""
    for objective in ("sum", "max_min", "proportional", "makespan"):
        made = cli("generate", "quota", "--objective", objective, "--nodes", 4, "-o", "p.json")
        assert (made.code, made.out) == (0, "wrote p.json: 20 jobs, 4 nodes, 32 GPUs\n")
        solved = cli("solve", "p.json", "-o", "s.json")
        assert solved.code == 0, solved
        assert "optimal" in solved.out
        assert cli("verify", "s.json").code == 0
        shown = cli("show", "s.json").out
        assert ("days" not in shown) and (" parts" in shown or objective == "makespan")
        bound = json.loads(cli("show", "p.json", "--json").out)
        schedule = optsched.Schedule.read("s.json")
        assert bound["lower_bound"] <= QuotaPlan.read("p.json").evaluate(schedule)
    listed = cli("show", "p.json").out
    assert "quota" in listed
    assert cli("show").out.count("\nquota ") == 1


def test_refusals(cli: Cli) -> None:
    """Exit code 2 with a sentence, or 1 where nothing is feasible."""
    assert "objective" in cli.refused("generate", "quota", "--objective", "x", "-o", "p.json")
    assert "jobs" in cli.refused("generate", "quota", "--jobs", -1, "-o", "p.json")
    path: Path = cli.folder / "q.json"
    path.write_text(json.dumps({**DOCUMENTS["max_min"], "budget": 1}))
    assert "'a', 'b' must run" in cli("solve", "q.json", "-o", "s.json").out
    assert cli("solve", "q.json", "-o", "s.json").code == 1
    assert cli("show", "q.json").code == 1
    path.write_text(json.dumps(DOCUMENTS["sum"]))
    for target in ("q2.json", "q.txt"):
        assert "one format only" in cli.refused("convert", "q.json", target)
    path.write_text('{"format": "optsched.quota/1", "budget": -1, "jobs": []}')
    assert "budget" in cli.refused("solve", "q.json", "-o", "s.json")
