"""The benchmark harness: its own check of schedules, its arithmetic, and that it goes on."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import optsched
from optsched import JobArray, JobShop
from optsched.solving.result import primal_integral

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path[:0] = [str(BENCHMARKS.parent), str(BENCHMARKS / "peers")]

import run_cpsat  # noqa: E402

from benchmarks.shop import (  # noqa: E402
    engines,
    jobarray,
    measure,
    named_instances,
    plain,
    report,
    rows,
)
from benchmarks.shop.commands import seeds  # noqa: E402

SHOP = [[[0, 3], [1, 2]], [[1, 4], [0, 1]], [[0, 0], [1, 5]]]
ROW = rows.Row(
    instance="ft06", solver="auto", workers=2, seconds=10.0, clock="wall", seed=0, objective=60,
    bound=50, status="feasible", wall=10.1, cpu=19.0, startup=0.5, ended=10.0, checked="ok",
    trace="0.6::50 1.0:100:50 5.0:60:50", versions="optsched-1", machine="2 cores", note="",
)  # fmt: skip


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
    graph = named_instances.graph_of_schedule(JobShop(SHOP).graph())
    assert plain.graph_of_jobs(SHOP) == graph


def test_right_schedules_pass_with_their_makespan() -> None:
    """Solutions of random arrays with lags, switches and memory."""
    for seed in range(10):
        array = random_array(random.Random(seed))
        schedule = optsched.solve(array, "dispatch").schedule
        assert schedule is not None and schedule.start is not None
        graph = named_instances.graph_of_schedule(array.graph())
        assert plain.makespan(graph, schedule.start.tolist()) == schedule.makespan


def test_a_start_too_early_is_seen() -> None:
    """In a semi-active schedule no operation can start earlier, alone."""
    seen = 0
    for seed in range(10):
        array = random_array(random.Random(seed))
        schedule = optsched.solve(array, "dispatch").schedule
        assert schedule is not None and schedule.start is not None
        graph = named_instances.graph_of_schedule(array.graph())
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
    graph = named_instances.graph_of_schedule(array.graph())
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
        graph = named_instances.graph_of_schedule(array.graph())
        model, start = run_cpsat.build(graph)
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        assert solver.solve(model) == cp_model.OPTIMAL
        found = plain.makespan(graph, [solver.value(s) for s in start])
        exact = optsched.solve(array, "cpsat", workers=1, time_limit=600)
        assert found == solver.objective_value == exact.objective == exact.lower_bound


# rows


def test_primal_integral_of_a_trace() -> None:
    """Gap 1 up to 1 s, 0.5 up to 5 s, then 1/6; bounds do not count."""
    found = rows.incumbents(ROW.steps)
    assert found == [(1.0, 100), (5.0, 60)]
    assert primal_integral(found, 50, 10.0) == pytest.approx((1 * 1 + 0.5 * 4 + 10 / 60 * 5) / 10)


def test_what_a_row_says() -> None:
    """Times to the best schedule and to the proof, and the schedule of a moment."""
    assert ROW.time_to_best == 5.0 and ROW.time_to_proof is None
    assert [ROW.objective_at(t) for t in (0.1, 0.5, 4.4, 4.5)] == [None, 100, 100, 60]
    assert replace(ROW, status="optimal", ended=6.0).time_to_proof == 6.0
    assert rows.gap(60, 50) == pytest.approx(0.2) and rows.bound_gap(40, 50) == pytest.approx(0.2)
    assert rows.gap(None, 50) is None and rows.bound_gap(None, 50) is None


@pytest.mark.parametrize(
    ("changes", "valid"),
    [
        ({}, True),
        ({"cpu": 17.4}, False),  # 0.5 s of start on one core, 9.5 s on two: 19.5 s
        ({"cpu": 17.5}, True),
        ({"cpu": 22.2}, False),
        ({"cpu": 1.0, "status": "optimal"}, True),
        ({"cpu": 1.0, "ended": 3.0}, True),  # nothing left to try
        ({"cpu": 1.0, "ended": 3.0, "checked": "wrong schedule: x"}, False),
        ({"workers": 1, "cpu": 9.0}, True),
        ({"clock": "cpu", "cpu": 17.8}, False),
    ],
)
def test_a_row_counts_if_it_got_its_time(changes: dict[str, Any], valid: bool) -> None:
    """CPU time within 10 % (and a tenth of a second), or the solver ended by itself."""
    assert replace(ROW, **changes).valid is valid


def test_rows_survive_the_file_and_a_torn_line(tmp_path: Path) -> None:
    """What is appended is read; half a line at the end is dropped and written again."""
    path = tmp_path / "rows.csv"
    assert rows.read(path) == []
    written = [ROW, replace(ROW, seed=1, objective=None, bound=None, note='a "b", c')]
    for row in written:
        rows.append(path, row)
    assert rows.read(path) == written
    with path.open("a") as stream:
        stream.write("ft10,auto,2,10.0,wa")
    assert rows.read(path) == written
    rows.append(path, replace(ROW, seed=2))
    assert rows.read(path) == [*written, replace(ROW, seed=2)]
    path.write_text("a,b\n1,2\n")
    with pytest.raises(SystemExit, match="other columns"):
        rows.read(path)


# running


def test_a_run_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what the file does not hold is solved."""
    asked = []

    def solve(engine: Any, instance: Any, seconds: float, clock: str, seed: int) -> rows.Row:
        asked.append((engine.label, instance.name, seed))
        if len(asked) == 3:
            raise KeyboardInterrupt
        return replace(ROW, solver=engine.label, instance=instance.name, seconds=seconds,
                       workers=engine.workers, clock=clock, seed=seed)  # fmt: skip

    monkeypatch.setattr(measure, "solve", solve)
    out, both = tmp_path / "rows.csv", engines.engines("auto,tabu", 2, None)
    shops = [named_instances.job_shop("ft06", None)]
    with pytest.raises(KeyboardInterrupt):
        measure.solve_all(out, both, shops, 10.0, "wall", range(2))
    measure.solve_all(out, both, shops, 10.0, "wall", range(2))
    cases = [(name, "ft06", seed) for seed in (0, 1) for name in ("auto", "tabu")]
    assert asked == [*cases[:3], *cases[2:]]
    measure.solve_all(out, both, shops, 10.0, "wall", range(2))
    assert len(asked) == 5 and len(rows.read(out)) == 4
    measure.solve_all(out, both, shops, 5.0, "wall", range(1))
    assert len(asked) == 7


@pytest.mark.parametrize(
    ("solver", "clock"),
    [
        ("dispatch", "warm"),
        ("cpsat-raw-1-strong", "wall"),
        *(
            pytest.param(*given, marks=pytest.mark.slow)
            for given in (("dispatch", "wall"), ("cpsat", "cpu"))
        ),
    ],
)
def test_one_process(solver: str, clock: str) -> None:
    """A solve in a process of its own; its schedule, bound, times and versions."""
    engine = engines.engines(solver, 1, None)[0]
    row = measure.solve(engine, named_instances.job_shop("ft06", None), 30.0, clock, 3)
    assert row.checked == "ok" and row.valid and row.finished
    assert row.objective is not None and row.bound is not None
    assert row.bound <= 55 <= row.objective and row.seed == 3
    assert row.status == "optimal" or solver == "dispatch"
    assert row.steps[-1][1:] == (row.objective, row.bound)
    assert 0 <= row.startup <= row.ended and row.cpu > 0 and "python-" in row.versions


def test_a_process_that_fails_is_a_row() -> None:
    """An unknown solver ends as a row with its message, not as the end of the run."""
    engine = engines.engines("magic", 1, None)[0]
    row = measure.solve(engine, named_instances.job_shop("ft06", None), 5.0, "wall", 0)
    assert row.status == "failed" and not row.valid and "no 'magic'" in row.checked


def test_steps_per_second() -> None:
    """Counted by doubling iterations until a run is long enough; start-up is left out."""
    engine = engines.engines("tabu", 1, None)[0]
    shop = named_instances.job_shop("ft20", None)
    run = measure.spawn(engine, measure.request(engine, shop, 0.05, "wall", 0, 500), 120)
    assert run.answer is not None, run.error
    assert run.answer["iterations"] >= 500 and run.answer["cpu"] > 0


# names


def test_solver_lists() -> None:
    """Options, cores, raw CP-SAT in four settings."""
    found = engines.engines("auto,genetic@2:population=20,cpsat-raw",
                            2, None)  # fmt: skip
    assert [engine.label for engine in found[:2]] == [
        "auto",
        "genetic@2:population=20",
    ]
    assert found[1].options == {"population": 20} and found[1].workers == 2
    assert [engine.workers for engine in found] == [2, 2, 2, 2, 2, 1]
    assert [engine.options["num_workers"] for engine in found[2:]] == [2, 8, 8, 1]
    assert engines.engines("tabu", 2, None)[0].workers == 1
    for wrong in ("a b", "auto:x", ""):
        with pytest.raises(SystemExit, match="--solvers"):
            engines.engines(wrong, 2, None)
    with pytest.raises(SystemExit, match="--peers"):
        engines.engines("pyjobshop", 2, None)


def test_sets_of_instances() -> None:
    """162 classics, sixteen of them in the short set; ranges; no name twice."""
    sets = named_instances.SETS
    assert len(set(sets["all"])) == 162 and len(sets["short"]) == 16 and len(sets["easy"]) == 20
    assert len(sets["tenbyten"]) == 18 and set(sets["short"]) <= set(sets["all"])
    assert named_instances.chosen("ta01-10,ft06,ft", sets) == [
        *(f"ta{i:02d}" for i in range(1, 11)), "ft06", "ft10", "ft20",
    ]  # fmt: skip
    assert seeds("5") == range(5) and seeds("3-4") == range(3, 5)
    with pytest.raises(SystemExit, match="not found"):
        named_instances.job_shop("ta99", None)


def test_arrays_by_name(tmp_path: Path) -> None:
    """Shipped files and generated arrays; every array in a set but the published is there."""
    for which in ("profiles", "long", "wide"):
        assert len(jobarray.SETS[which]) in (16, 8, 2)
    for name in jobarray.SETS["profiles"]:
        assert (named_instances.SHIPPED / "jobarray" / f"{name}.jobarray.json").is_file()
    found = jobarray.instance("bert_large-40x2", None, tmp_path)
    assert found.path is not None and len(found.graph["duration"]) == 160
    with pytest.raises(SystemExit, match="--data"):
        jobarray.instance("S4_J10_mach4/6", None, tmp_path)


# reports


def test_report_tables() -> None:
    """Medians over seeds, means over instances, ratios, and the best raw setting."""
    raw = [
        replace(ROW, solver=name, objective=value, bound=bound)
        for (name, value, bound) in zip(engines.RAW_CPSAT, (70, 65, 66, 80), (50, 52, 54, 51),
                                        strict=True)
    ]  # fmt: skip
    mine = [replace(ROW, seed=s, objective=v) for s, v in enumerate((55, 56, 60))]
    known = {"ft06": rows.Known(55, 55)}
    text, possible = report.report([*raw, *mine], known, report.BEST_OF_RAW, False)
    assert possible
    lines = {line.split("|")[1].strip(): line for line in text.splitlines() if "|" in line}
    assert "| 1.82 % | 1.82 % |" in lines["auto"] and lines["auto"].endswith("| 0.100 |")
    assert "| 18.18 % | 18.18 % | 1.82 % |" in lines[report.BEST_OF_RAW]
    assert lines["ft06"] == (
        "| ft06 | 55 | 70 (50) | 65 (52) | 66 (54) | 80 (51) | 56 (50) |"
    )  # fmt: skip


def test_rows_without_their_time_are_left_out() -> None:
    """And counted; nothing else changes."""
    slow = replace(ROW, seed=1, cpu=3.0, objective=90)
    text, _ = report.report([ROW, slow], {}, "auto", False)
    assert "| 1 (1) |" in text and "| 60 (50) |" in text
    text, _ = report.report([slow], {}, "auto", False)
    assert "no valid rows" in text
    text, _ = report.report([slow], {}, "auto", True)
    assert "| 90 (50) |" in text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bound": 61}, "but a schedule of 60 exists"),
        ({"bound": 59}, "above the published schedule of 58"),
        ({"objective": 52, "bound": 50}, "below the published bound of 54"),
        ({"checked": "wrong schedule: overlap"}, "wrong schedule"),
    ],
)
def test_impossible_rows_are_named(changes: dict[str, Any], words: str) -> None:
    """False bounds and schedules better than a proof make the report fail."""
    known = {"ft06": rows.Known(54, 58)}
    text, possible = report.report([ROW, replace(ROW, seed=1, **changes)], known, "auto", False)
    assert not possible and words in text
    assert report.report([ROW], known, "auto", False)[1]


def test_claims_against_the_ga(tmp_path: Path) -> None:
    """A schedule worse than the log, and a long array without a quick proof."""
    (tmp_path / "ga_logs.csv").write_text("instance,final_best\nS10_J30_homo_F1,49422.0\nx,\n")
    logs = jobarray.ga_logs(tmp_path / "ga_logs.csv")
    assert logs == {"S10_J30_homo_F1": 49422}
    good = replace(ROW, instance="S10_J30_homo_F1", objective=44000)
    proved = replace(ROW, instance="S4_J25_mach4", status="optimal", wall=0.4)
    assert jobarray.failed_claims([good, proved], logs) == []
    assert "| 49422 | 44000 | 12.32% |" in jobarray.against_ga([good], logs)[-1]
    bad = [replace(good, objective=50000), replace(proved, wall=1.5),
           replace(proved, status="feasible")]  # fmt: skip
    assert len(jobarray.failed_claims(bad, logs)) == 3


@pytest.mark.parametrize("script", ["jobshop", pytest.param("jobarray", marks=pytest.mark.slow)])
def test_command_lines(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`run` twice and `report`, as a user types them."""
    monkeypatch.setenv("PYTHONPATH", str(BENCHMARKS.parent), prepend=os.pathsep)
    command = [sys.executable, "-m", f"benchmarks.shop.{script}"]
    name = {"jobshop": "ft06", "jobarray": "bert_large-8x4"}[script]
    run = [*command, "run", "--out", "r.csv", "--set", name, "--solvers", "dispatch",
           "--time", "20", "--seeds", "1"]  # fmt: skip
    for count in (1, 0):
        done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert f"# {count} solves to do" in done.stdout
    done = subprocess.run([*command, "report", "r.csv"], cwd=tmp_path, capture_output=True,
                          text=True, check=True)  # fmt: skip
    assert f"| {name} |" in done.stdout and "| dispatch | 1 of 1 |" in done.stdout
