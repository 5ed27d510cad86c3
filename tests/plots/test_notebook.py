"""Notebooks: short reprs, HTML that loads nothing and trusts no name, frames that lose nothing."""

from __future__ import annotations

import dataclasses
import re
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import optsched
from optsched import Csr, Resource, Schedule, bandwidth, cluster, serving
from optsched.analysis.report import report
from optsched.arraypipe.plan.plan import compile_plan, random_schedule
from optsched.bench.rows import COLUMNS, Results, Row
from optsched.cluster import determined
from optsched.plan.array_request import ArrayRequest
from optsched.plan.clearing import MovePlan

if TYPE_CHECKING:
    from pathlib import Path

    from optsched.cluster.results.run import Run

EVIL = '<script>alert("x")</script>'


def many(name: str, n: int = 30_000) -> Schedule:
    """A schedule of a long name with more operations than a picture may have."""
    return Schedule(
        name=name, resources=(Resource(name[:40]),), duration=np.ones(n, np.int64),
        op_resources=Csr.of([[0]] * n), sequences=Csr.of([range(n)]), start=np.arange(n),
    )  # fmt: skip


@pytest.fixture(scope="module")
def shop() -> optsched.JobShop:
    """Names of machines and jobs that a page must not interpret."""
    chains = [[(0, 3), (1, 2)], [(1, 4), (0, 1)]]
    return optsched.JobShop(chains, [EVIL, "mill"], name=EVIL, names=[EVIL, "b"])


@pytest.fixture(scope="module")
def run() -> Run:
    """A simulation of jobs with hostile names."""
    queue = [cluster.Job(name=EVIL + str(k), sizes=(8,), work=8 * 10**8) for k in range(40)]
    jobs = cluster.Workload.of(queue, time_unit="s", name=EVIL)
    return cluster.simulate(jobs, "fifo", cluster.Nodes(1, gpus=8))


@pytest.fixture(scope="module")
def served() -> serving.Run:
    """A simulation of a slimmable network."""
    return serving.simulate(serving.reference(rate=500, burst=2, seconds=0.1, seed=1))


def shown(thing: Any) -> str:
    """The HTML of a thing: nothing in it is loaded or interpreted."""
    page: str = thing._repr_html_()
    assert "<script" not in page and not re.search(r"""(src|href)=.(?!data:image/png)""", page)
    return page


def test_pictures(shop: optsched.JobShop, run: Run) -> None:
    """Schedule, result, simulation and state of a cluster are drawn inline."""
    pytest.importorskip("matplotlib")
    result = optsched.solve(shop)
    state = bandwidth.ClusterState.idle(bandwidth.synthetic.cluster("nvswitch", 2))
    assert result.schedule is not None
    assert result.schedule.plot(width=6).get_figwidth() == 6
    for thing in (result, result.schedule, run, state):
        assert "data:image/png;base64," in shown(thing)
    assert "optimal: objective 6, lower bound 6" in shown(result)


def test_tables(shop: optsched.JobShop, served: serving.Run) -> None:
    """What has no picture, or is too large for one, is a table; a graph is described."""
    assert served.log is not None
    assert "<td>completed</td>" in shown(served) and "<td>completed</td>" in shown(served.log)
    assert "<td>30000</td>" in shown(many(EVIL)) and "&lt;script" in shown(many(EVIL))
    rows = [[i] for i in range(513)]
    wide = Schedule(
        resources=tuple(Resource(f"r{i}") for i in range(513)), duration=np.ones(513, np.int64),
        op_resources=Csr.of(rows), sequences=Csr.of(rows), start=np.zeros(513, np.int64),
    )  # fmt: skip
    assert "<td>r0</td>" in shown(wide) and "of 513" in shown(wide)
    assert "&lt;Schedule" in shown(shop.graph())
    assert shown(optsched.Result("infeasible", reason=EVIL)).count("&lt;script") == 1


def test_without_matplotlib(
    shop: optsched.JobShop, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table takes the place of the picture, with the command that installs matplotlib."""
    schedule = optsched.solve(shop).schedule
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for thing in (schedule, run):
        page = shown(thing)
        assert "pip install" in page and "[plot]" in page and "<table>" in page


def test_a_run_in_which_no_job_ended(run: Run) -> None:
    """There is nothing to draw."""
    log = run.log._replace(finished=np.full(40, -1))
    assert "40 jobs" in shown(dataclasses.replace(run, log=log))


def test_short_reprs(run: Run, served: serving.Run) -> None:
    """One line below 200 characters, however large the object is."""
    schedule = many("n" * 200)
    history = (optsched.Progress(0.1, 5, 9, 8, "incumbent"),) * 999
    things = [
        schedule, optsched.Result("feasible", schedule, 30_000, 1, history, 1.0, "solver" * 99),
        optsched.Result("infeasible", reason="because " * 99), run, run.log, run.metrics, served,
        served.log, report(schedule), serving.Plan(((0, 0, 0),) * 999),
        MovePlan(evict=("job",) * 999, move={}, cost=999, bound=0, status="optimal", snapshot=None),  # type: ignore[arg-type]
        compile_plan(random_schedule([2] * 10, 4)),
        determined.State(tuple(determined.Agent(f"n{i}", 8) for i in range(99))),
        ArrayRequest(problem=optsched.JobArray([[1] * 99], [[2] * 99])),
    ]  # fmt: skip
    for thing in things:
        assert len(repr(thing)) < 200 and "\n" not in repr(thing), repr(thing)


def test_frame_of_a_schedule(shop: optsched.JobShop) -> None:
    """Its rows make the same schedule again."""
    pytest.importorskip("pandas")
    result = optsched.solve(shop)
    schedule = result.schedule
    assert schedule is not None
    frame = schedule.to_pandas()
    assert frame.start.dtype == np.int64 and set(frame.unit) == {schedule.time_unit}
    assert (frame.end - frame.start).tolist() == schedule.duration.tolist()
    rows = list(zip(frame.job, frame.resource, frame.start.tolist(), strict=True))
    again = Schedule.from_starts(shop, rows)
    assert again.same_graph(schedule) and again.sequences == schedule.sequences
    assert again.start is not None and np.array_equal(again.start, schedule.start)  # type: ignore[arg-type]
    assert "start" not in shop.graph().to_pandas()
    two = optsched.JobArray([[1, 1], [1, 1]], [[2, 2], [2, 2]], objective="period")
    rolling = optsched.solve(two, iterations=5).schedule
    assert rolling is not None and rolling.to_pandas().offset.tolist() == rolling.offset.tolist()


def test_frame_of_a_history(shop: optsched.JobShop) -> None:
    """Values that are unknown are missing, the others stay integers."""
    pandas = pytest.importorskip("pandas")
    result = optsched.solve(shop)
    frame = result.to_pandas()
    for name in ("objective", "lower_bound", "event", "gap"):
        values = [None if pandas.isna(value) else value for value in frame[name]]
        assert values == [getattr(step, name) for step in result.history], name
    assert str(frame.objective.dtype) in ("Int64", "int64")
    assert len(optsched.Result("unknown").to_pandas()) == 0


def test_frame_of_a_simulation(run: Run, served: serving.Run) -> None:
    """A row per job, and a row per request of a batch."""
    pytest.importorskip("pandas")
    frame = run.to_pandas()
    assert frame.job.tolist() == list(run.workload.names)
    assert (frame.end - frame.submit).tolist() == frame.jct.tolist() == run.jct.tolist()
    assert served.log is not None
    requests = served.log.to_pandas()
    assert len(requests) == len(served.log.entries) == served.log.batches["images"].sum()
    assert (requests.queued_ms <= requests.start_ms).all()
    last = requests.groupby("request").end_ms.max()
    assert len(last) == served.summary.completed
    assert last.max() * 1e6 == pytest.approx(served.finish.max())


def test_frame_of_a_benchmark(tmp_path: Path) -> None:
    """A row per solve, with the columns of the file."""
    pandas = pytest.importorskip("pandas")
    results = Results(tmp_path / "results.csv")
    results.append(Row(
        "ft06", "ft", "6x6", 36, "0" * 64, "auto", "{}", 0, 2, 5.0, None, "0.1", "optimal", 55, 55,
        0.1, None, 0.2, 0.3, 0.3, "[]", "", "", "", "",
    ))  # fmt: skip
    frame = Results(tmp_path / "results.csv").to_pandas()
    assert list(frame.columns) == list(COLUMNS) and frame.objective.tolist() == [55]
    assert pandas.isna(frame.time_to_proof[0]) and pandas.isna(frame.iterations[0])


def test_without_pandas(shop: optsched.JobShop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the command that installs it."""
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(optsched.MissingExtra, match=r'pip install "\.\[pandas\]"'):
        shop.graph().to_pandas()
