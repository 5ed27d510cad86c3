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
from optsched import JobArray, JobShop
from optsched.bench.instances import Known
from optsched.bench.rows import Results, Row
from optsched.bench.summary import summarise

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path[:0] = [str(BENCHMARKS.parent), str(BENCHMARKS / "peers")]

import run_cpsat  # noqa: E402

from benchmarks.shop import engines, instances, measure, plain, report  # noqa: E402

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


def test_a_shop_is_the_same_graph_by_both_ways() -> None:
    """Chains written down by the harness equal the library's graph."""
    graph = instances.graph_of_schedule(JobShop(SHOP).graph())
    assert plain.graph_of_jobs(SHOP) == graph


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


def test_memory_is_checked() -> None:
    """Two forwards before a backward do not fit where one job's activation does."""
    array = JobArray([[3], [3]], [[3], [3]], activation=4, memory=[4])
    graph = instances.graph_of_schedule(array.graph())
    assert plain.makespan(graph, [0, 3, 6, 9]) == 12  # F, B of one job, then of the other
    with pytest.raises(plain.WrongSchedule, match="holds 8 bytes"):
        plain.makespan(graph, [0, 6, 3, 9])


@pytest.mark.parametrize(
    "starts",
    [
        [0, 3, 0, 4, 0],  # one is missing
        [0, 3, 0, 4, 0, 9.0],  # not an integer
        [-1, 3, 0, 5, 0, 5],  # before its release
        [0, 2, 4, 8, 0, 8],  # before the end of its predecessor
        [0, 3, 0, 4, 0, 5],  # overlap on machine 1
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


# running


def ft06() -> instances.Instance:
    """The smallest classic."""
    return instances.instance("ft06", None)


def row(solver: str = "auto", **changes: Any) -> Row:
    """A row of a solve that never was."""
    engine = engines.engines(solver, 2, None)[0]
    found = measure.empty(engine, ft06(), 10.0, changes.pop("seed", 0))
    return found._replace(**{"status": "feasible", "objective": 60, "lower_bound": 50, **changes})


@pytest.mark.parametrize(
    ("cpu", "workers", "counts"),
    [
        (17.4, 2, False),  # 0.5 s of start on one core, 9.5 s on two: 19.5 s
        (17.5, 2, True),
        (22.2, 2, False),
        (9.0, 1, True),
    ],
)
def test_a_solve_counts_if_it_got_its_time(cpu: float, workers: int, counts: bool) -> None:
    """CPU time within 10 % (and a tenth of a second) of what was there to be had."""
    assert (measure.out_of_time(cpu, 10.0, 0.5, workers) == "") is counts


def test_a_run_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what the file does not hold without an error is solved."""
    asked = []

    def solve(engine: Any, instance: Any, seconds: float, seed: int) -> Row:
        asked.append((engine.label, instance.name, seed))
        if len(asked) == 3:
            raise KeyboardInterrupt
        error = "the machine was busy" if len(asked) == 2 else ""
        return measure.empty(engine, instance, seconds, seed)._replace(
            status="feasible", error=error
        )

    monkeypatch.setattr(measure, "solve", solve)
    out, both = tmp_path / "rows.csv", engines.engines("auto,tabu", 2, None)
    with pytest.raises(KeyboardInterrupt):
        measure.solve_all(Results(out), both, [ft06()], 10.0, 2)
    measure.solve_all(Results(out), both, [ft06()], 10.0, 2)
    cases = [(name, "ft06", seed) for seed in (0, 1) for name in ("auto", "tabu")]
    assert asked == [*cases[:3], *cases[1:]]
    measure.solve_all(Results(out), both, [ft06()], 10.0, 2)
    assert len(asked) == 6
    measure.solve_all(Results(out), both, [ft06()], 5.0, 1)
    assert len(asked) == 8


@pytest.mark.parametrize(
    "solver",
    ["dispatch", "cpsat-raw-1-strong", pytest.param("cpsat", marks=pytest.mark.slow)],
)
def test_one_process(solver: str) -> None:
    """A solve in a process of its own; its schedule, bound, times and versions."""
    found = measure.solve(engines.engines(solver, 1, None)[0], ft06(), 60.0, 3)
    assert not found.error and found.seed == 3
    assert found.objective is not None and found.lower_bound is not None
    assert found.lower_bound <= 55 <= found.objective
    assert found.status == "optimal" or solver == "dispatch"
    assert found.steps[-1][1:] == (found.objective, found.lower_bound)
    assert found.seconds is not None and 0 < found.seconds <= found.wall_seconds
    assert found.cpu_seconds and "python-" in found.versions
    assert not summarise([found]).contradictions


# names


def test_solver_lists() -> None:
    """Options, cores, raw CP-SAT in four settings."""
    found = engines.engines("auto,genetic@2:population=20,cpsat-raw", 2, None)
    assert [engine.label for engine in found[:2]] == ["auto", "genetic@2:population=20"]
    assert found[1].options == {"population": 20} and found[1].workers == 2
    assert [engine.workers for engine in found] == [2, 2, 2, 2, 2, 1]
    assert [engine.options["num_workers"] for engine in found[2:]] == [2, 8, 8, 1]
    assert engines.engines("tabu", 2, None)[0].workers == 1
    for wrong in ("a b", "auto:x", ""):
        with pytest.raises(SystemExit, match="--solvers"):
            engines.engines(wrong, 2, None)
    with pytest.raises(SystemExit, match="--peers"):
        engines.engines("pyjobshop", 2, None)


# reports


def test_the_best_raw_setting_is_a_row() -> None:
    """The best objective, bound and times of all four, where all four have a row."""
    raw = [
        row(name, objective=value, lower_bound=bound, history=f"[[{at}, {value}, {bound}]]")
        for name, value, bound, at in zip(
            engines.RAW_CPSAT, (70, 65, 66, 80), (50, 52, 54, 51), (1, 3, 2, 1), strict=True
        )
    ]
    (best,) = report.best_of_raw([*raw, row()])
    assert (best.objective, best.lower_bound, best.time_to_best) == (65, 54, 3)
    assert best.status == "feasible" and best.steps[0] == (1, 70, 50)
    assert report.best_of_raw(raw[1:]) == []


def test_details_of_a_report() -> None:
    """The median seed's objective and bound, or the time of a proof; errors have none."""
    rows = [row(seed=s, objective=v) for s, v in enumerate((55, 56, 60))]
    rows += [row("tabu", workers=2, status="optimal", objective=55, lower_bound=55,
                 time_to_proof=1.5)]  # fmt: skip
    known = {"ft06": Known(54, 55)}
    lines = report.details(rows, summarise(rows, known).references)
    assert lines[0] == "| instance | best known | auto | tabu |"
    assert lines[-1] == "| ft06 | 54-55 | 56 (50) | 55 in 1.50 s |"
    failed = row(error="wrong schedule: x", objective=None)
    assert report.details([failed], summarise([failed]).references)[-1].endswith("| - |")
    assert not report.show([failed], {}) and report.show(rows, known)


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
