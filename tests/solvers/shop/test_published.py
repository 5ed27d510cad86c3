"""Known optima: published job shops as they were published, and arrays of a known best makespan."""

from __future__ import annotations

import hashlib
from pathlib import Path
from random import Random

import pytest
from depth import seeds

import optsched
from optsched import JobArray, JobShop
from optsched.formats import standard, taillard
from optsched.problems.jobshop import published

SHIPPED = Path(__file__).parents[3] / "instances" / "jobshop"

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


@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_the_published_ones(family: str) -> None:
    """The instances have the hash of the distributed files."""
    names, digits = FAMILIES[family]
    texts = [standard.to_text(published.instance(name)) for name in names]
    assert hashlib.sha256("".join(texts).encode()).hexdigest().startswith(digits)
    for name in names:
        if (path := SHIPPED / f"{name}.txt").exists():
            assert JobShop.read(path) == published.instance(name)


def test_every_instance_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name, as standard text and in Taillard's layout; never taken for a flexible shop."""
    monkeypatch.chdir(tmp_path)
    for name, (lower, upper) in [*published.bounds().items()][::3]:
        shop = JobShop.read(name)
        assert shop.name == name and shop.is_classic and 0 < shop.lower_bound() <= lower <= upper
        for write in (standard.to_text, taillard.to_text):
            Path(name).write_text(write(shop))  # a file goes before the name
            again = JobShop.read(name)
            assert again.sha256 == shop.sha256 and not Path(name).read_text().startswith("#")


@pytest.mark.parametrize("name", OPTIMA)
def test_bound_and_rules_enclose_the_optimum(name: str) -> None:
    """What is there in milliseconds: bound <= optimum <= best rule."""
    result = optsched.solve(published.instance(name), "dispatch")
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
        published.instance(name), solver, time_limit=900, workers=1 if solver == "cpsat" else None
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
def test_no_bound_above_a_schedule_on_all_162() -> None:
    """Lower bound <= best known schedule, objective >= best known bound."""
    for name, (lower, upper) in published.bounds().items():
        result = optsched.solve(published.instance(name), time_limit=1)
        assert result.objective is not None and result.lower_bound is not None
        assert result.lower_bound <= upper and result.objective >= lower, name
