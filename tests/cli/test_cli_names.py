"""Names of jobs come from the document of the problem into everything that shows a schedule."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import optsched
from optsched.bandwidth import BottleneckBandwidth, Cluster, ClusterState, HostType
from optsched.bandwidth.topology.intra import IntraTable
from optsched.plots import gantt
from optsched.problems.quota.job import QuotaJob

if TYPE_CHECKING:
    from program import Cli

NAMES = ("resnet-lr3", "vgg", "bert <b>&")


def array(**fields: Any) -> optsched.JobArray:
    """Three jobs of two stages."""
    return optsched.JobArray([[2, 3], [4, 1], [2, 2]], [[3, 4], [1, 5], [2, 2]], **fields)


def quota() -> optsched.QuotaPlan:
    """Three jobs that each may have one or two GPUs."""
    jobs = [QuotaJob(name, [1, 2], utility=[1.0, 1.5], must_run=True) for name in NAMES]
    return optsched.QuotaPlan(jobs, budget=4)


def gpus() -> optsched.GpuPlacement:
    """Two running jobs and a request."""
    cluster = Cluster.uniform(HostType("h", 4, intra=IntraTable(4, [7] * 16)), 2, name="c")
    state = ClusterState.idle(cluster).take((0, 1), NAMES[0]).take((4,), NAMES[1])
    return optsched.GpuPlacement(state, BottleneckBandwidth(cluster), 2)


def shown(cli: Cli, file: str) -> tuple[str, str, dict[str, Any]]:
    """What `show` prints, the texts of the page, and the trace."""
    out = cli("show", file).out
    assert cli("show", file, "-o", "x.html").code == 0
    page = re.search(r'"job_names":(\[.*?\])', Path("x.html").read_text())
    assert page
    assert cli("show", file, "-o", "t.json").code == 0
    return out, json.loads(page[1]), json.loads(Path("t.json").read_text())


@pytest.mark.parametrize(("objective", "solver"), [("makespan", "cpsat"), ("period", "dispatch")])
def test_job_arrays(cli: Cli, objective: str, solver: str) -> None:
    """From the document through a solver into the table, the page, the chart and the trace."""
    array(names=NAMES, objective=objective).write("a.jobarray.json")
    words = ("--solver", solver, "--time", 5, "-o", "x.json")
    assert cli("solve", "a.jobarray.json", *words).code == 0
    out, page, trace = shown(cli, "x.json")
    assert all(name in out for name in NAMES) and page == [*NAMES]
    events = {e["name"] for e in trace["traceEvents"] if e["ph"] == "X"}
    assert {f"{kind} {name}" for kind in "FB" for name in NAMES} <= events
    texts = {text.get_text() for text in gantt(optsched.Schedule.read("x.json")).axes[0].texts}
    assert {*NAMES} <= texts or {"vgg"} & texts
    assert cli("verify", "x.json", "--problem", "a.jobarray.json").code == 0


@pytest.mark.parametrize("problem", [quota(), gpus()], ids=["quota", "gpus"])
def test_plans(cli: Cli, problem: Any) -> None:
    """Quotas and chosen GPUs: every operation of the path and of the trace names its job."""
    names = [*problem.job_names]
    problem.write("p.json")
    assert cli("solve", "p.json", "-o", "x.json").code == 0
    schedule = optsched.Schedule.read("x.json")
    assert schedule.job_names == names
    _, page, trace = shown(cli, "x.json")
    assert page == names
    held = {schedule.job_name(j) for j in schedule.job.tolist()}
    assert held == {e["name"].partition(" ")[2] for e in trace["traceEvents"] if e["ph"] == "X"}
