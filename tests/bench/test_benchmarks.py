"""The benchmark harness: its own check of schedules, its rows, and that it goes on."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import optsched
from optsched import JobArray

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path[:0] = [str(BENCHMARKS.parent), str(BENCHMARKS / "peers")]

import run_cpsat  # noqa: E402

from benchmarks.shop import instances, plain  # noqa: E402

SHOP = [[[0, 3], [1, 2]], [[1, 4], [0, 1]], [[0, 0], [1, 5]]]


# the check of start times


def random_array(rng: random.Random) -> JobArray:
    """Three jobs on two devices, with lags, switches and memory."""
    k, s = 3, 2

    def table(low: int, high: int, width: int = s) -> list[list[int]]:
        return [[rng.randint(low, high) for _ in range(width)] for _ in range(k)]

    activation = table(1, 5)
    return JobArray(
        table(1, 9), table(1, 9), lag_forward=rng.randint(0, 3), lag_backward=rng.randint(0, 3),
        switch=rng.randint(0, 4), activation=activation,
        memory=[max(row[v] for row in activation) + rng.randint(0, 6) for v in range(s)],
    )  # fmt: skip


def test_right_schedules_pass_with_their_makespan() -> None:
    """Solutions of random arrays with lags, switches and memory."""
    for seed in range(10):
        array = random_array(random.Random(seed))
        schedule = optsched.solve(array, "dispatch").schedule
        assert schedule is not None and schedule.start is not None
        graph = instances.graph_of_schedule(array.graph())
        assert plain.makespan(graph, schedule.start.tolist()) == schedule.makespan


def test_a_start_too_early_is_seen() -> None:
    """In a semi-active schedule no operation can start earlier, alone."""
    seen = 0
    for seed in range(10):
        array = random_array(random.Random(seed))
        schedule = optsched.solve(array, "dispatch").schedule
        assert schedule is not None and schedule.start is not None
        graph = instances.graph_of_schedule(array.graph())
        starts = schedule.start.tolist()
        for i, start in enumerate(starts):
            if start:
                with pytest.raises(plain.WrongSchedule):
                    plain.makespan(graph, [*starts[:i], start - 1, *starts[i + 1 :]])
                seen += 1
    assert seen > 50


@pytest.mark.parametrize(
    "starts",
    [
        [0, 3, 0, 4, 0],  # one is missing
        [-1, 3, 0, 5, 0, 5],  # before its release
        [0, 2, 4, 8, 0, 8],  # before the end of its predecessor
        [0, 4, 0, 4, 1, 6],  # an instant inside another operation
    ],
)
def test_wrong_starts(starts: list[Any]) -> None:
    """Every rule of a job shop is checked."""
    graph = plain.graph_of_jobs(SHOP)
    assert plain.makespan(graph, [0, 4, 0, 4, 0, 6]) == 11
    with pytest.raises(plain.WrongSchedule):
        plain.makespan(graph, starts)


def test_the_raw_model_is_the_same_problem() -> None:
    """Raw CP-SAT and our exact solver agree on arrays with lags, switches and memory."""
    from ortools.sat.python import cp_model

    for seed in range(6):
        array = random_array(random.Random(seed))
        graph = instances.graph_of_schedule(array.graph())
        model, start = run_cpsat.build(graph)
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        assert solver.solve(model) == cp_model.OPTIMAL
        found = plain.makespan(graph, [solver.value(s) for s in start])
        exact = optsched.solve(array, "cpsat", workers=1, time_limit=600)
        assert found == solver.objective_value == exact.objective == exact.lower_bound


@pytest.mark.parametrize("name", ["ft06", pytest.param("bert_large-8x4", marks=pytest.mark.slow)])
def test_command_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`run` twice and `report`, as a user types them."""
    monkeypatch.setenv("PYTHONPATH", str(BENCHMARKS.parent), prepend=os.pathsep)
    command = [sys.executable, "-m", "benchmarks.shop.jobshop"]
    run = [*command, "run", "--out", "r.csv", "--set", name, "--solvers", "dispatch",
           "--time", "20", "--seeds", "1"]  # fmt: skip
    for count in (1, 0):
        done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert f"# {count} solves to do" in done.stdout
    done = subprocess.run([*command, "report", "r.csv"], cwd=tmp_path, capture_output=True,
                          text=True, check=True)  # fmt: skip
    assert f"| {name} |" in done.stdout and "dispatch" in done.stdout
