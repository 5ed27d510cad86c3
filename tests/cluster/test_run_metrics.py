"""Metrics against their definitions, computed tick by tick; hand-made cases; scaling of time."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
from depth import few_examples
from hand_logs import held_at, run_of, runs, slow_percentile, stay
from hypothesis import given
from hypothesis import strategies as st

from optsched.cluster.results import document
from optsched.cluster.results.metrics import nearest_rank
from optsched.cluster.simulate import simulate
from optsched.cluster.workload.job import WORK, Job
from optsched.cluster.workload.nodes import NodeChange, Nodes
from optsched.errors import InputError
from optsched.io.strict_json import parse

if TYPE_CHECKING:
    from optsched.cluster.results.run import Run


def test_a_case_by_hand() -> None:
    """Two jobs on two GPUs; the second waits, is preempted once and restarts."""
    jobs = [
        Job(name="a", sizes=(2,), work=8 * WORK),
        Job(name="b", submit=1, sizes=(1,), work=5 * WORK),
    ]
    run = run_of(
        jobs,
        Nodes(1, gpus=2),
        [
            stay(0, 0, 4, {0: 2}, work=8 * WORK),
            stay(1, 4, 6, {0: 1}, work=2 * WORK),
            stay(1, 8, 12, {0: 1}, restart=1, work=3 * WORK),
        ],
    )
    m = run.metrics
    assert m.jct.tolist() == [4, 11] and m.queueing.tolist() == [0, 3]
    assert m.service.tolist() == [4, 8] and m.waiting.tolist() == [0, 5]
    assert (m.jct_mean, m.queueing_mean, m.service_mean, m.makespan) == (7.5, 1.5, 6.0, 12)
    assert m.gpu_time.tolist() == [8, 6] and m.gpu_hours == pytest.approx(14 / 3600)
    assert m.utilisation == pytest.approx(14 / 24)
    assert m.effective_utilisation == pytest.approx(13 / 24)
    assert (m.restarts, m.restart_time) == (1, 1)
    # a alone has both GPUs: n = (1 + 3*2)/4 = 1.75, 2 * 1.75 > 2: T_iso = 4 * 1.75
    assert m.rho[0] == pytest.approx(4 / (4 * 1.75))
    # b: n = (3*2 + 8*1)/11 = 14/11; one GPU is fair: T_iso = 5
    assert m.rho[1] == pytest.approx(11 / 5)
    assert m.rho_max == pytest.approx(2.2)


@given(runs() | runs(sharing=True))
def test_against_ticks(run: Run) -> None:
    """Integrals over time by walking it step by step; two jobs on one GPU use it once."""
    m, log, w = run.metrics, run.log, run.workload
    begin, end = int(w.submit[0]), int(log.end.max())
    used = sum(sum(held_at(run, t).values()) for t in range(begin, end))
    total = run.nodes.total * (end - begin)
    assert m.makespan == end - begin
    assert m.utilisation == pytest.approx(used / total)
    for j in range(len(w)):
        rows = [i for i in range(len(log.job)) if log.job[i] == j]
        assert m.gpu_time[j] == sum(log.gpus[i] * (log.end[i] - log.start[i]) for i in rows)
        assert m.restarts_by_job[j] == len(rows) - 1
        idle = [
            t for t in range(int(w.submit[j]), int(log.finished[j]))
            if not any(log.start[i] <= t < log.end[i] for i in rows)
        ]  # fmt: skip
        assert m.waiting[j] == len(idle)
        assert m.queueing[j] == min(log.start[i] for i in rows) - w.submit[j]
        assert m.jct[j] == max(log.end[i] for i in rows) - w.submit[j] == run.jct[j]
    assert (m.service == m.jct - m.queueing).all()


@given(runs())
def test_finish_time_fairness(run: Run) -> None:
    """T_iso by counting active jobs in every tick of a job's life."""
    w, log = run.workload, run.log
    for j in range(len(w)):
        life = range(int(w.submit[j]), int(log.finished[j]))
        active = [sum(w.submit[k] <= t < log.finished[k] for k in range(len(w))) for t in life]
        mean = sum(active) / len(life)
        fair = [s for s in w.sizes_of(j).tolist() if s * mean <= run.nodes.total]
        s = fair[-1] if fair else int(w.sizes_of(j)[0])
        alone = w.work[j] / (WORK * s) * max(1.0, mean * s / run.nodes.total)
        assert run.metrics.rho[j] == pytest.approx(len(life) / alone)


@given(st.lists(st.integers(-5, 40), min_size=1, max_size=60), st.integers(1, 1000))
def test_percentiles_are_nearest_rank(values: list[int], permille: int) -> None:
    """Against the definition, for shares with a decimal too."""
    p = permille / 10
    assert nearest_rank(np.array(values), p) == slow_percentile(values, p)


@pytest.mark.parametrize("p", [0, -1, 100.1, math.nan, True, "x", None])
def test_percentiles_out_of_range(p: object) -> None:
    """Refused, with the range."""
    with pytest.raises(InputError, match="0 < p <= 100"):
        nearest_rank(np.array([1, 2]), p)  # type: ignore[arg-type]


@st.composite
def coming_and_going(draw: st.DrawFn) -> Run:
    """A simulation in which nodes change at random, node 0 but for a while."""
    jobs = [
        Job(
            name=f"j{i}",
            submit=draw(st.integers(0, 12)),
            sizes=(draw(st.integers(1, 3)),),
            work=draw(st.integers(1, 30)) * WORK,
        )
        for i in range(draw(st.integers(1, 6)))
    ]
    gpus = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    change = st.builds(
        NodeChange,
        st.integers(0, 40),
        st.integers(0, len(gpus)),
        st.sampled_from(["add", "drain", "remove"]),
    )
    changes, takes = [], dict[int, bool]()
    drawn = sorted(draw(st.lists(change, max_size=10)), key=lambda change: change.time)
    for one in [*drawn, NodeChange(49, 0, "drain"), NodeChange(50, 0, "add")]:
        if one.kind != "add" or not takes.get(one.node, False):  # nothing is added twice
            changes.append(one)
            takes[one.node] = one.kind == "add"
    nodes = Nodes.of([3, *gpus])
    return simulate(jobs, draw(st.sampled_from(["fifo", "srtf"])), nodes, changes=changes)


@given(coming_and_going())
def test_nodes_that_change_at_random(run: Run) -> None:
    """Shares by counting, in every tick, the GPUs that are there and those that are held."""
    changes = sorted(run.settings.changes, key=lambda change: change.time)
    w, log = run.workload, run.log
    there = used = 0.0
    for t in range(int(w.submit[0]), int(log.end.max())):
        for node, busy in held_at(run, t).items():
            own = [change for change in changes if change.node == node]
            takes = not own or own[0].kind != "add"
            for change in own:
                if change.time <= t:
                    takes = change.kind == "add"
            count = run.nodes.gpus[node]
            free = count - busy if takes else 0
            there += busy + free
            used += busy
    m = run.metrics
    assert 0 <= m.utilisation <= 1
    assert m.utilisation == pytest.approx(used / there if there else 0)
    assert m.effective_utilisation <= m.utilisation + 1e-12


def test_zero_slot_tasks_use_no_gpu() -> None:
    """Times count, GPU-times do not."""
    run = run_of(
        [Job(name="z", sizes=(0,), work=5 * WORK), Job(name="a", sizes=(1,), work=4 * WORK)],
        Nodes(1, gpus=1),
        [stay(0, 0, 5, {0: 0}, work=5 * WORK), stay(1, 0, 4, {0: 1}, work=4 * WORK)],
    )
    m = run.metrics
    assert m.gpu_time.tolist() == [0, 4] and m.jct.tolist() == [5, 4]
    assert m.utilisation == m.effective_utilisation == pytest.approx(4 / 5)
    assert m.rho.tolist() == [1.0, 1.0]


def test_jobs_that_did_not_end() -> None:
    """They are counted, and left out of every mean."""
    jobs = [Job(name="a", sizes=(1,), work=WORK), Job(name="b", sizes=(1,), work=9 * WORK)]
    run = run_of(jobs, Nodes(1, 1), [stay(0, 0, 1, {0: 1}, work=WORK)])
    assert (run.metrics.unfinished, run.metrics.jct_mean, run.jct.tolist()) == (1, 1.0, [1, -1])
    nobody = run_of(jobs, Nodes(1, 1), [])
    assert nobody.metrics.unfinished == 2 and math.isnan(nobody.metrics.jct_mean)
    assert "jct_p50" not in nobody.metrics.summary()


@given(runs())
@few_examples
def test_document_round_trip(tmp_path_factory: pytest.TempPathFactory, run: Run) -> None:
    """What is written is what is read."""
    path = tmp_path_factory.mktemp("m") / "m.json"
    document.write({"x": run, "y": run}, path)
    found = parse(path.read_text(), "m")
    assert found["names"] == list(run.workload.names) and list(found["runs"]) == ["x", "y"]
    assert found["runs"]["x"]["jobs"]["jct"] == run.jct.tolist()
    for key, value in run.metrics.summary().items():
        assert found["runs"]["y"]["metrics"][key] == value
