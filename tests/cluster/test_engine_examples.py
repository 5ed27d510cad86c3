"""Simulations small enough to follow by hand, and how `simulate` treats its caller."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from test_engine import stays
from toy_policies import Anything, Greedy

import optsched
from optsched.cluster import (
    Decision,
    Job,
    NodeChange,
    NodeFailures,
    Nodes,
    Settings,
    Workload,
    simulate,
)
from optsched.cluster.policies.packing_table import PackingTable
from optsched.cluster.workload import nodes
from optsched.cluster.workload.job import WORK
from optsched.cluster.world.build import world
from optsched.cluster.world.engine import simulate_generic
from optsched.cluster.world.events import MOST_IDLE
from optsched.errors import InputError

UNIT = 10**6


class Plan:
    """Decides by time: quotas (or a whole decision), and wakes up at all times that it names."""

    name = "plan"
    clairvoyant = True

    def __init__(self, answers: dict[int, Any], **more: Any) -> None:
        self.answers, self.more = answers, more

    def decide(self, view: Any) -> Decision:  # noqa: D102
        wake = min((t for t in self.answers if t > view.time), default=None)
        quota = self.answers.get(view.time)
        if quota is None:
            return Decision(view.gpus, wake_at=wake)
        return Decision(np.array(quota), wake_at=wake, **self.more)


def job(name: str = "a", sizes: tuple[int, ...] = (1, 2, 4), work: int = 20, **more: Any) -> Job:
    """A job of so many units of time on one GPU."""
    return Job(name=name, sizes=sizes, work=work * UNIT, **more)


def rows(run: Any) -> list[tuple[int, ...]]:
    """Job, start, end, restart and GPUs of every stay."""
    return [tuple(row[:5]) for row in stays(run.log)]


def test_packed_jobs_are_slower() -> None:
    """Half the speed while two share a GPU: 10 alone, 20 together for 10 each, the rest alone."""
    table = PackingTable({("x", "x"): (0.5, 0.5)})
    jobs = [job("a", (1,), template="x"), job("b", (1,), template="x")]

    class Share(Plan):
        def decide(self, view: Any) -> Decision:
            if view.time != 10:
                return super().decide(view)
            return Decision(np.array([1, 1]), share={1: 0})

    policy = Share({0: [1, 0], 10: None})
    policy.table = table
    run = simulate(jobs, policy, Nodes(1, 1))
    assert rows(run) == [(0, 0, 30, 0, 1), (1, 10, 40, 0, 1)]
    assert run.log.half.tolist() == [1, 2] and run.log.partner.tolist() == [-1, 0]
    assert optsched.verify(run.history) == []


def test_progress_and_interruption() -> None:
    """The last report is the end; Ctrl-C returns what there is."""
    told: list[tuple[int, int, int]] = []
    run = simulate([job("a"), job("b")], Greedy(), Nodes(1), on_progress=lambda *x: told.append(x))
    assert told[-1] == (20, 2, 2) and run.jct.tolist() == [20, 20]

    class Stop(Plan):
        def decide(self, view: Any) -> Decision:
            if view.time == 12:
                raise KeyboardInterrupt
            return super().decide(view)

    jobs = [job("a", work=10, sizes=(1,)), job("b", sizes=(1,))]
    run = simulate(jobs, Stop({0: [1, 1], 12: None}), Nodes(1))
    assert run.log.finished.tolist() == [10, -1]
    assert rows(run) == [(0, 0, 10, 0, 1), (1, 0, 12, 0, 1)]
    assert run.log.work.tolist() == [10 * UNIT, 12 * UNIT]


def test_auto_runs_compiled_and_generic_asks() -> None:
    """One of both, as the engine says."""
    asked: list[str] = []

    class Twinned(Greedy):
        def compiled(self, workload: Any, nodes: Any, settings: Any) -> Any:
            asked.append("compiled")
            return simulate_generic(workload, Greedy(), nodes, settings).log

        def decide(self, view: Any) -> Decision:
            asked.append("decide")
            return super().decide(view)

    for engine, expected in (("auto", {"compiled"}), ("generic", {"decide"})):
        asked.clear()
        simulate([job()], Twinned(), Nodes(1), engine=engine)  # type: ignore[arg-type]
        assert set(asked) == expected


def test_a_view_is_over_after_the_decision() -> None:
    """Columns that were not read in time are refused, not wrong; none can be written."""
    views: list[Any] = []

    class Keeps(Greedy):
        def decide(self, view: Any) -> Decision:
            views.append(view)
            return super().decide(view)

    simulate([job("a"), job("b", work=3)], Keeps(), Nodes(1))
    assert views[0].gpus.tolist() == [0, 0]
    with pytest.raises(RuntimeError, match="earlier instant"):
        _ = views[0].held_ptr
    with pytest.raises(AttributeError, match="no attribute 'speed'"):
        _ = views[0].speed
    for column in ("gpus", "running", "free", "size"):
        with pytest.raises(ValueError, match="read-only"):
            getattr(views[0], column)[0] = 1


def test_the_log_grows() -> None:
    """More stays than there was room for at first."""
    jobs = [job(str(i), work=400, sizes=(1, 2)) for i in range(6)]
    workload = Workload.of(jobs)
    policy = Anything(1, calm=2000, wild=False)
    how = Settings(resize="anytime", round=1)
    log = simulate_generic(workload, policy, Nodes(2, 2), how).log
    assert len(log.job) > len(world(workload, Nodes(2, 2), Settings()).log)
    done = np.bincount(log.job, log.work, minlength=6)
    assert (done == workload.work).all()


def test_idle_limit_is_what_the_message_says() -> None:
    """A policy may sleep longer than that while an arrival is still to come."""
    late = job("late", submit=MOST_IDLE + 500)

    class Waits(Greedy):
        def decide(self, view: Any) -> Decision:
            if len(view.job) < 2:
                return Decision(np.zeros(1, np.int64), wake_at=view.time + 1)
            return super().decide(view)

    run = simulate([job("a"), late], Waits(), Nodes(1), changes=[NodeChange(1, 0, "add")])
    assert run.log.start.min() == MOST_IDLE + 500


@pytest.mark.parametrize("kind", [np.int8, np.int32, np.uint64])
def test_numpy_values_are_taken(kind: Any) -> None:
    """Quotas of any integer type, NumPy truth values, orders that name some jobs only."""
    jobs = [job(name, (2,), 2) for name in "abc"]

    class Typed(Plan):
        def decide(self, view: Any) -> Decision:
            if view.time:
                return super().decide(view)
            return Decision(
                np.array([2, 2, 2], kind), best_effort=np.True_, order=np.array([2], kind),  # type: ignore[arg-type]
                wake_at=np.int32(1),  # type: ignore[arg-type]
            )  # fmt: skip

    run = simulate(jobs, Typed({1: [2]}), Nodes(2, 2))
    assert rows(run) == [(0, 0, 1, 0, 2), (2, 0, 1, 0, 2), (1, 1, 2, 0, 2)]
    assert run.log.node.tolist() == [1, 0, 0]


# nodes that fail: the renewal process, what it costs jobs, and what is refused


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
