"""The library of instances: tables, certificates, and checkers that reject what is altered."""

from __future__ import annotations

import ast
import csv
import importlib
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import optsched
from optsched.formats.read_problem import read_problem
from optsched.model.schedule import Csr

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).parents[2] / "instances"
SCRIPTS = {"jobarray": "check", "quota": "check_quotas", "subset": "check_gpus"}
SMALL = (
    "gpt2_xl-8x4", "vgg19-8x4-80GB", "bert_large-16x8-slow", "gpt2_xl-16x8-choose",
    "gpt2_xl-12x4-room1.5", "gpt2_xl-4x8", "bert_large-8x8-rolling", "gpt2_xl-19x8-rolling",
)  # fmt: skip
"""Job arrays of all families, with all kinds of fields."""


def script(name: str) -> ModuleType:
    """A module of the folder of instances."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    return importlib.import_module(name)


def table(folder: str) -> list[dict[str, str]]:
    """Rows of a table."""
    with (ROOT / folder / "best-known.csv").open(newline="") as stream:
        return list(csv.DictReader(stream))


def solution(folder: str, name: str) -> dict[str, Any]:
    """A certificate."""
    found: dict[str, Any] = json.loads(
        (ROOT / folder / "solutions" / f"{name}.solution.json").read_text()
    )
    return found


# the shipped files


@pytest.mark.parametrize("folder", SCRIPTS)
def test_tables_hold(folder: str) -> None:
    """The command line checks every row; every file has one, no certificate is left over."""
    words = [sys.executable, f"{SCRIPTS[folder]}.py", f"{folder}/best-known.csv"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    rows = table(folder)
    shipped = [row for row in rows if row["family"] != "published"]
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert len(done.stdout.splitlines()) == len(shipped)
    files = {path.name.split(f".{folder}")[0] for path in (ROOT / folder).glob(f"*.{folder}.json")}
    assert files == {row["name"] for row in shipped}
    kept = {path.name for path in (ROOT / folder / "solutions").iterdir()}
    assert kept == {f"{row['name']}.solution.json" for row in rows}
    for row in shipped:
        problem = read_problem(ROOT / folder / f"{row['name']}.{folder}.json")
        assert problem.objective_name == row["objective"]


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("gpt2_xl-4x8", {"value": 5184161}, "claims the value 5184161, it has 5184162"),
        ("gpt2_xl-4x8", {"value": 5184163}, "claims"), ("gpt2_xl-4x8", {"value": True}, "claims"),
        ("gpt2_xl-4x8", {"value": "5184162"}, "claims"), ("gpt2_xl-4x8", {"starts": []}, "zip"),
        ("vgg19-8x8-rolling", {"value": 1457838.0}, "claims"), ("nosuch", {}, "nosuch"),
    ],
)  # fmt: skip
def test_claims_of_certificates_are_checked(
    tmp_path: Path, name: str, change: dict[str, Any], said: str
) -> None:
    """A value that the starts do not have, or none, is one line and exit code 1."""
    good = solution("jobarray", name) if name != "nosuch" else {"instance": name, "value": 1}
    path = tmp_path / "x.solution.json"
    path.write_text(json.dumps(good | change))
    words = [sys.executable, str(ROOT / "check.py"), str(path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "") and said in done.stdout, done.stdout
    assert done.stdout.count("\n") == 1


@pytest.mark.parametrize("folder", ["quota", "subset"])
def test_certificates_of_any_kind_do_not_end_the_check(tmp_path: Path, folder: str) -> None:
    """A list instead of an object, or nesting without end, is a line; the next file is checked."""
    good = next((ROOT / folder / "solutions").iterdir())
    paths = [tmp_path / "list.json", tmp_path / "deep.json", good]
    paths[0].write_text(json.dumps(json.loads(good.read_text()) | {"gpus": []}))
    paths[1].write_text("[" * 10**6)
    words = [sys.executable, str(ROOT / f"{SCRIPTS[folder]}.py"), *map(str, paths)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    lines = done.stdout.splitlines()
    assert [": wrong: " in line for line in lines] == [True, True, False], lines


def test_rows_that_hide_are_noticed(tmp_path: Path) -> None:
    """A row comes twice, or calls itself published, which would leave it unchecked."""
    for folder in ("jobarray", "jobarray/solutions"):
        (tmp_path / folder).mkdir()
    (tmp_path / "check.py").write_bytes((ROOT / "check.py").read_bytes())
    for file in ("gpt2_xl-4x8.jobarray.json", "solutions/gpt2_xl-4x8.solution.json"):
        (tmp_path / "jobarray" / file).write_bytes((ROOT / "jobarray" / file).read_bytes())
    row = next(row for row in table("jobarray") if row["name"] == "gpt2_xl-4x8")
    for rows, code in (
        ([row], 0), ([row, row], 1), ([row | {"family": "published", "value": "1"}], 1)
    ):  # fmt: skip
        lines = [",".join(row), *(",".join(one.values()) for one in rows)]
        (tmp_path / "jobarray" / "t.csv").write_text("\n".join(lines))
        words = [sys.executable, str(tmp_path / "check.py"), str(tmp_path / "jobarray" / "t.csv")]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (code, ""), done.stdout


@pytest.mark.parametrize("name", SCRIPTS.values())
def test_checkers_are_short_and_independent(name: str) -> None:
    """At most 150 lines; only the standard library and each other."""
    text = (ROOT / f"{name}.py").read_text()
    assert text.count("\n") <= 150
    for node in ast.walk(ast.parse(text)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert all(n.split(".")[0] in {*sys.stdlib_module_names, "check"} for n in names)


def test_generator_writes_the_shipped_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 job arrays, the same bytes."""
    from optsched.problems.jobarray import document

    monkeypatch.syspath_prepend(str(ROOT / "jobarray"))
    made = [array for _, array in importlib.import_module("make_jobarray").families()]
    assert len(made) == len({array.name for array in made}) == 80
    for array in made:
        assert document.write(array) == (ROOT / f"jobarray/{array.name}.jobarray.json").read_bytes()


# altered certificates of job arrays


def value(instance: Any, given: dict[str, Any]) -> int:
    """The checker's value; `ValueError` if it rejects."""
    found: int = script("check").value_of(instance, given)
    return found


@pytest.mark.parametrize("name", SMALL)
def test_altered_schedules_are_rejected(name: str) -> None:
    """Earlier starts, exchanged blocks, other offsets and choices: rejected, or no better."""
    instance = script("check").read_instance(ROOT / "jobarray" / f"{name}.jobarray.json")
    good = solution("jobarray", name)
    assert value(instance, good) == good["value"]
    rng, rejected, tried = random.Random(name), 0, 0
    jobs, blocks = len(good["starts"]), len(good["starts"][0])
    for _ in range(300):
        bad = json.loads(json.dumps(good))
        j, b, change = rng.randrange(jobs), rng.randrange(blocks), rng.randrange(4)
        if change == 0:  # one block earlier by 1, or at -1
            bad["starts"][j][b] -= 1
        elif change == 1:  # two jobs exchange the starts of a stage
            i = rng.choice([i for i in range(jobs) if i != j])
            bad["starts"][j][b], bad["starts"][i][b] = bad["starts"][i][b], bad["starts"][j][b]
        elif change == 2 and "offsets" in bad:
            bad["offsets"][j][b] += rng.choice([-1, 1])
        elif change == 3 and "recompute" in bad:
            bad["recompute"][j] = not bad["recompute"][j]
        else:
            bad["starts"][j].pop(b)
        tried += bad != good
        try:
            assert value(instance, bad) >= good["value"]
        except (LookupError, ValueError):
            rejected += 1
    assert rejected > 0.7 * tried, (rejected, tried)


@pytest.mark.parametrize(
    ("name", "field", "change"),
    [
        ("bert_large-16x8-slow", "switch", 10**6),
        ("bert_large-16x8-slow", "lag_forward", 10**6),
        ("bert_large-16x8-slow", "lag_backward", 10**6),
        ("gpt2_xl-8x4", "forward", 10**5),
        ("gpt2_xl-8x4", "backward", 10**5),
        ("vgg19-8x4-80GB", "recompute", 10**6),
        ("gpt2_xl-8x4", "update", 10**6),
        ("gpt2_xl-12x4-room1.5", "activation", 10**11),
        ("vgg19-8x4-80GB", "checkpoint", 10**12),
        ("gpt2_xl-19x8-rolling", "forward", 10**6),
        ("gpt2_xl-19x8-rolling", "lag_backward", 10**8),
    ],
)
def test_every_field_counts(name: str, field: str, change: int) -> None:
    """A schedule of the instance is none if any of its numbers were larger."""
    instance = script("check").read_instance(ROOT / "jobarray" / f"{name}.jobarray.json")
    for job in instance[0]:
        job[field] = [x + change for x in job[field]]
    with pytest.raises(ValueError, match=r"early|bytes|overlap"):
        value(instance, solution("jobarray", name))


def random_array(seed: int) -> optsched.JobArray:
    """Three jobs on three devices with lags, switches, memory, and any objective and mode."""
    rng = random.Random(seed)

    def rows(low: int, high: int, width: int = 3) -> list[list[int]]:
        return [[rng.randint(low, high) for _ in range(width)] for _ in range(3)]

    kept = rows(2, 5)
    return optsched.JobArray(
        rows(1, 9), rows(1, 9), recompute=rows(0, 4), update=rows(0, 3), checkpoint=1,
        lag_forward=rows(0, 3, 2), lag_backward=rows(0, 3, 2), activation=kept,
        switch=rows(0, 3) if seed % 2 else 0,
        memory=[max(row[v] for row in kept) + rng.randint(0, 4) for v in range(3)],
        objective="period" if seed % 3 == 0 else "makespan", name="random",
        recompute_mode=("never", "always", "choose")[seed % 3],
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(12))
def test_checker_and_verifier_agree(tmp_path: Path, seed: int) -> None:
    """Same value, a bound below it; altered starts are rejected by both or by neither."""
    check, improve = script("check"), script("improve")
    array = random_array(seed)
    result = optsched.solve(array, time_limit=5, iterations=2000, workers=1)
    schedule = result.schedule
    assert schedule is not None and schedule.start is not None and result.objective is not None
    array.write(tmp_path / "random.jobarray.json")
    instance = check.read_instance(tmp_path / "random.jobarray.json")
    good = json.loads(improve.text_of(improve.certificate(array, schedule)))
    assert check.value_of(instance, good) == result.objective >= check.bound_of(instance)
    assert array.evaluate(improve.schedule_of(array, good)) <= result.objective
    rng, outcomes = random.Random(seed), set()
    for _ in range(60):
        start = schedule.start.copy()
        i = rng.randrange(len(start))
        start[i] = max(0, start[i] + rng.randint(-3, 3))
        order = np.lexsort((start + schedule.duration, start))
        on = [order[schedule.single_resource[order] == r].tolist() for r in range(3)]
        altered = schedule.with_orders(Csr.of(on), start)
        valid = not optsched.verify(altered) and (
            not schedule.period or start.max() < schedule.period
        )
        try:
            check.value_of(instance, {**good, "starts": start.reshape(3, -1).tolist()})
            accepted = True
        except ValueError:
            accepted = False
        assert accepted == valid, (start.tolist(), optsched.verify(altered))
        outcomes.add(accepted)
    assert outcomes == {True, False} or schedule.period


# altered rows and other certificates


@pytest.mark.parametrize(
    ("column", "text"),
    [
        ("name", "gpt2_xl-8x8"), ("value", "-1"), ("value", "+1"), ("bound", "-1"),
        ("bound", "+1"), ("status", "other"), ("bound", "value"), ("value", "x"),
    ],
)  # fmt: skip
def test_altered_rows_are_rejected(column: str, text: str) -> None:
    """Any changed cell of a row that is proved by the checker."""
    check = script("check")
    row = next(row for row in table("jobarray") if row["name"] == "bert_large-64x24")
    assert row["proof"] == "check.py"
    path = ROOT / "jobarray" / "solutions" / f"{row['name']}.solution.json"
    found = check.check(path, None)
    check.check_row(row, *found)
    if text in ("-1", "+1"):
        text = str(int(row[column]) + int(text))
    elif text == "value":
        text = str(int(row["value"]) + 5)
    with pytest.raises(ValueError):
        check.check_row({**row, column: text}, *found)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("sum-20", {"j0": {"n0": 9}}), ("single-12", {"j1": {"n0": 1, "n1": 1}}),
        ("two-types-12", {"j11": {"n0": 1, "n1": 1}}), ("max-min-30", {"j0": {}}),
        ("proportional-40", {"j0": {"n0": 1}}), ("sum-20", {"j0": {"n0": -1}}),
        ("whole-12", {"j1": {"n0": 2, "n1": 2}}), ("sum-20", {"j99": {"n0": 1}}),
    ],
)  # fmt: skip
def test_altered_quotas_are_rejected(name: str, change: dict[str, dict[str, int]]) -> None:
    """Sizes, types, nodes that overflow, localities, GPUs that are not handed out."""
    plan = json.loads((ROOT / "quota" / f"{name}.quota.json").read_text())
    given = solution("quota", name)["gpus"]
    check_quota = script("check_quotas").check_quota
    assert check_quota(plan, given)[0] == solution("quota", name)["value"]
    with pytest.raises(ValueError, match=r"may not|must|does not have|handed out"):
        check_quota(plan, given | change)


def test_altered_placements_are_rejected(tmp_path: Path) -> None:
    """GPUs that are not free, too few, the same twice, counts that the policy forbids."""
    check = script("check_gpus").check
    path = tmp_path / "x.solution.json"
    for gpus in (
        {"n01": [0, 1, 2, 3, 4, 5, 6, 7]}, {"n02": [2, 3, 4, 5, 6, 7]},
        {"n02": [2, 3, 4, 5], "n03": [2, 2, 3, 4]}, {"n02": [2, 3, 4, 5, 6, 7], "n03": [2, 3]},
        {"n02": [2.0, 3, 4, 5], "n03": [2, 3, 4, 5]},
    ):  # fmt: skip
        path.write_text(json.dumps({"instance": "homogeneous-4x8-4", "gpus": gpus}))
        with pytest.raises(ValueError, match=r"free GPUs|policy"):
            check(path, None)
    worse = {"instance": "mixed-4x8-3", "gpus": {"n03": [4, 5, 6, 7], "n04": [2, 3, 4, 5, 6, 7]}}
    path.write_text(json.dumps(worse))
    _, found, bound = check(path, None)
    assert found >= bound


def test_only_better_answers_are_kept(tmp_path: Path) -> None:
    """A worse or wrong answer changes no file; a better one replaces value and certificate."""
    improve = script("improve")
    folder = tmp_path / "quota"
    folder.mkdir()
    good = solution("quota", "two-types-12")
    worse = {**good, "gpus": {**good["gpus"], "j11": {"n1": 4}}}
    facts = {"objective": "utility", "found_by": "a", "seconds": 1, "seed": 0, "version": "1",
             "date": "2026-11-29", "proof": "b"}  # fmt: skip
    first = improve.keep(folder, worse, dict(facts), -(10**9), None)
    assert first["status"] == "open" and first["proof"] == "check_quotas.py"
    best = improve.keep(folder, good, facts | {"found_by": "c"}, -(10**9), None)
    assert (best["found_by"], best["value"], best["status"]) == ("c", good["value"], "optimal")
    files = [folder / "best-known.csv", folder / "solutions" / "two-types-12.solution.json"]
    before = [path.read_bytes() for path in files]
    improve.keep(folder, worse, dict(facts), -(10**9), None)
    with pytest.raises(ValueError, match="may not"):
        improve.keep(folder, {**good, "gpus": {"j11": {"n1": 3}}}, dict(facts), 0, None)
    assert [path.read_bytes() for path in files] == before
    assert len([*folder.rglob("*")]) == 3
