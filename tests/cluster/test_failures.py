"""Nodes that fail: the renewal process, what it costs jobs, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest

from optsched.cluster import Job, NodeFailures, Nodes, simulate
from optsched.cluster.workload import nodes
from optsched.cluster.workload.job import WORK
from optsched.errors import InputError


def test_availability_and_number_of_failures():
    """Of a long time a node is up mtbf / (mtbf + repair), and fails once in their sum."""
    found, until = NodeFailures(900, 100, 5).changes(Nodes(20), 500_000), 500_000
    for node in range(20):
        times = [(c.time, c.kind) for c in found if c.node == node]
        assert [kind for _, kind in times] == ["remove", "add"] * (len(times) // 2)
        assert times == sorted(times)
    failed = sum(c.kind == "remove" for c in found)
    assert failed == pytest.approx(20 * until / 1000, rel=0.05)
    down = sum(c.time if c.kind == "add" else -c.time for c in found)
    assert down / failed == pytest.approx(100, rel=0.05)
    assert all(c.time < until for c in found if c.kind == "remove")


def test_more_time_and_more_nodes_change_nothing_before():
    """Failures of a node depend on the seed and its number only."""
    some = NodeFailures(50, 10, 1).changes(Nodes(3), 1000)
    more = NodeFailures(50, 10, 1).changes(Nodes(5), 9000)
    known = [c for c in some if c.kind == "remove"]
    assert known == [c for c in more if c.node < 3 and c.kind == "remove" and c.time < 1000]
    assert some != NodeFailures(50, 10, 2).changes(Nodes(3), 1000)


def test_time_to_completion_between_checkpoints():
    """A pass of t on a node of mtbf M and repair R takes (e^(t/M) - 1) (M + R) in the mean."""
    t, mtbf, repair, passes = 400, 500, 200, 40
    job = Job(name="a", sizes=(1,), work=passes * t * WORK, passes=passes)
    taken = [
        simulate([job], "fifo", Nodes(1, 1), changes=NodeFailures(mtbf, repair, seed)).jct[0]
        for seed in range(60)
    ]
    expected = passes * (math.exp(t / mtbf) - 1) * (mtbf + repair)
    assert np.mean(taken) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("name", ["fifo", "elastic", "fair_share"])
def test_what_is_lost_is_told(name):
    """GPU-time held is work, restarts, and what failures threw away; interruptions are counted."""
    random = np.random.default_rng(3)
    jobs = [
        Job(name=f"j{i}", submit=int(random.integers(500)), sizes=(int(random.choice([1, 2, 4])),),
            work=int(random.integers(50, 400)) * WORK, passes=int(random.integers(1, 5)))
        for i in range(40)
    ]  # fmt: skip
    run = simulate(jobs, name, Nodes(3, 4), changes=NodeFailures(300, 40, 7), restart_cost=9)
    m, log = run.metrics, run.log
    assert m.interruptions > 10
    assert m.unfinished == 0
    removed = {(c.time, c.node) for c in run.settings.changes if c.kind == "remove"}
    hit = [
        i for i in range(len(log.job))
        if log.end[i] != log.finished[log.job[i]]
        and any((log.end[i], n) in removed for n in log.node[log.node_ptr[i]:log.node_ptr[i + 1]])
    ]  # fmt: skip
    assert m.interruptions == len(hit)
    held = sum(int(g * (e - s)) for g, s, e in zip(log.gpus, log.start, log.end, strict=True))
    worked = sum(-(-int(w) // WORK) for w in run.workload.work)
    others = held - worked - m.restart_time - m.lost_time
    assert 0 <= others < 40 * 4 * (1 + m.restarts)  # a last unit of time begun, by stay and GPU


def test_failures_go_on_to_the_end_of_the_last_job(monkeypatch):
    """However long that takes; with one pass only it may take for ever, which is refused."""
    job = Job(name="a", sizes=(1,), work=300 * WORK, passes=3)
    run = simulate([job], "fifo", Nodes(1, 1), changes=NodeFailures(40, 40, 1))
    assert run.settings.changes[-1].time >= run.log.finished[0] > 300
    endless = Job(name="a", sizes=(1,), work=3000 * WORK)
    monkeypatch.setattr(nodes, "MOST_FAILURES", 10**4)
    with pytest.raises(InputError, match="raise mtbf, or let jobs lose less by more passes"):
        simulate([endless], "fifo", Nodes(64, 1), changes=NodeFailures(2, 1, 1))


@pytest.mark.parametrize(("wrong", "told"), [
    ((0, 1), "failures: mtbf"), ((1, 0), "failures: repair"), ((1.5, 1), "failures: mtbf"),
    ((1, 1, -1), "failures: seed"), (("9", 1), "failures: mtbf"),
])  # fmt: skip
def test_refusals(wrong, told):
    """Whole numbers from 1 up."""
    with pytest.raises(InputError, match=told):
        NodeFailures(*wrong)
