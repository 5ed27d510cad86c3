"""GPU types with speeds by job, CPUs and memory by GPU: against a plain simulation by events."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optsched.cluster import (
    WORK,
    ClusterView,
    Decision,
    Job,
    NodeChange,
    Nodes,
    Workload,
    policies,
    read_trace,
    simulate,
    write_trace,
)  # fmt: skip
from optsched.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

TYPES = ("A100", "V100", "")


class Greedy:
    """Whoever fits, in order, at the smallest size."""

    name, clairvoyant = "greedy", False

    def decide(self, view: ClusterView) -> Decision:
        """Nodes and types are the world's."""
        return Decision(view.size[view.size_ptr[:-1]], best_effort=True)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Job], Workload, Nodes]:
    """Jobs that fit, on nodes of up to three types with few CPUs and little memory."""
    rows = st.tuples(
        st.integers(1, 4), st.sampled_from(TYPES), st.sampled_from([math.inf, 6.5, 12.0]),
        st.sampled_from([math.inf, 20.0]),
    )  # fmt: skip
    gpus, types, cpus, memory = zip(*draw(st.lists(rows, min_size=1, max_size=5)), strict=True)
    nodes = Nodes.of(gpus, types=types, cpus=cpus, memory_gb=memory)
    jobs = [
        Job(
            name=str(i), submit=draw(st.integers(0, 9)), sizes=(draw(st.integers(1, 5)),),
            work=draw(st.integers(1, 60)) * WORK, cpus_per_gpu=draw(st.sampled_from([0, 1.5, 3])),
            speeds=draw(st.dictionaries(st.sampled_from(TYPES[:2]), st.sampled_from([0, 0.5, 2]))),
            memory_per_gpu_gb=draw(st.sampled_from([0, 7.5])),
        )
        for i in range(draw(st.integers(1, 7)))
    ]  # fmt: skip
    work = Workload.of(jobs)
    free, idle = list(gpus), list(zip(cpus, memory, strict=True))
    named = {job.name: job for job in jobs}
    kept = [j for j, name in enumerate(work.names) if placed(named[name], nodes, free, idle)]
    work = work.take(kept or [0])
    return [named[name] for name in work.names], work, nodes


def speed(job: Job, kind: str) -> float:
    """Work per unit of time, as a whole number; the oracle's own."""
    return round(job.sizes[0] * WORK * job.speeds.get(kind, 1.0))


def placed(job: Job, nodes: Nodes, free: list[int], idle: list[Any]) -> dict[int, int]:
    """GPUs by node of the fastest type that has room (ties: the first); empty if none has."""

    def room(n: int) -> int:
        found = free[n]
        for need, there in zip((job.cpus_per_gpu, job.memory_per_gpu_gb), idle[n], strict=True):
            found = min(found, int(there / need)) if need and there < math.inf else found
        return found

    kinds = [kind for kind in dict.fromkeys(nodes.types) if speed(job, kind) > 0]
    for kind in sorted(kinds, key=lambda kind: -speed(job, kind)):
        rooms = {n: room(n) for n in range(len(nodes)) if nodes.types[n] == kind and room(n)}
        need, on = job.sizes[0], dict[int, int]()
        if sum(rooms.values()) < need:
            continue
        while need:
            fits = [n for n in rooms if rooms[n] >= need]
            n = min(fits, key=rooms.__getitem__) if fits else max(rooms, key=rooms.__getitem__)
            on[n] = min(rooms.pop(n), need)
            need -= on[n]
        return dict(sorted(on.items()))
    return {}


def by_events(jobs: list[Job], nodes: Nodes) -> list[tuple[int, int, int, dict[int, int]]]:
    """Job, start, end and nodes of every stay."""
    free, idle = list(nodes.gpus), list(zip(nodes.cpus, nodes.memory_gb, strict=True))
    running, found = dict[int, Any](), []
    pending, now = list(range(len(jobs))), 0
    while pending or running:
        for j in [j for j in running if running[j][0] == now]:
            for n, count in running.pop(j)[1].items():
                free[n] += count
                need = (jobs[j].cpus_per_gpu, jobs[j].memory_per_gpu_gb)
                idle[n] = tuple(x + count * y for x, y in zip(idle[n], need, strict=True))
        for j in [j for j in pending if jobs[j].submit <= now]:
            if on := placed(jobs[j], nodes, free, idle):
                for n, count in on.items():
                    free[n] -= count
                    need = (jobs[j].cpus_per_gpu, jobs[j].memory_per_gpu_gb)
                    idle[n] = tuple(x - count * y for x, y in zip(idle[n], need, strict=True))
                rate = speed(jobs[j], nodes.types[min(on)])
                running[j] = now + math.ceil(jobs[j].work / rate), on
                found.append((j, now, running[j][0], on))
                pending.remove(j)
        now += 1
    return found


@given(cases())
def test_against_a_plain_simulation(case: tuple[list[Job], Workload, Nodes]) -> None:
    """Starts, ends and nodes of every job; what never fits is refused."""
    jobs, work, nodes = case
    idle = list(zip(nodes.cpus, nodes.memory_gb, strict=True))
    if not all(placed(job, nodes, list(nodes.gpus), idle) for job in jobs):
        with pytest.raises(InputError, match=r"do not fit|the cluster has"):
            simulate(work, Greedy(), nodes)
        return
    log = simulate(work, Greedy(), nodes).log
    rows = [dict(zip(log.node[a:b].tolist(), log.count[a:b].tolist(), strict=True))
            for a, b in zip(log.node_ptr, log.node_ptr[1:], strict=False)]  # fmt: skip
    assert list(zip(log.job, log.start, log.end, rows, strict=True)) == by_events(jobs, nodes)


@pytest.mark.parametrize("name", sorted(set(policies.names()) - {"lucid"}))
def test_every_policy(name: str) -> None:
    """Elastic jobs, preemption and a removed node: one type a stay, never more than a node has."""
    jobs = [
        Job(name=str(i), submit=3 * i, sizes=(1, 2, 4) if i % 3 else (2,), work=(i + 5) * 9 * WORK,
            passes=4, speeds={"A100": 1 + i % 3, "V100": i % 2}, cpus_per_gpu=1 + i % 3)
        for i in range(12)
    ]  # fmt: skip
    nodes = Nodes.parse("1x4:A100:9,2x2:V100:9,1x4")
    changes = [NodeChange(20, 0, "remove"), NodeChange(40, 0, "add")]
    run = simulate(jobs, name, nodes, changes=changes)
    log, w = run.log, run.workload
    assert (log.finished > 0).all()
    for t in np.unique(log.start).tolist():
        used = np.zeros((2, len(nodes)))
        for i in np.flatnonzero((log.start <= t) & (t < log.end)).tolist():
            on = slice(log.node_ptr[i], log.node_ptr[i + 1])
            assert len({nodes.types[n] for n in log.node[on].tolist()}) == 1
            used[0, log.node[on]] += log.count[on]
            used[1, log.node[on]] += log.count[on] * w.cpus_per_gpu[log.job[i]]
        assert (used[0] <= nodes.gpus).all() and (used[1] <= nodes.cpus).all()
    assert np.bincount(log.job, log.work).tolist() == w.work.tolist()


def test_traces_with_types(tmp_path: Path) -> None:
    """Columns of speeds and demands come back; wrong cells name row, job and field."""
    path = tmp_path / "t.csv"
    path.write_text(
        "job_id,submit_time_s,num_gpus,duration_s,speed:A100,speed:V100,cpus_per_gpu,"
        "memory_per_gpu_gb\na,0,2,100,2,,4,\nb,1,1,50,,0,,32.5\n"
    )
    work = read_trace(path)
    assert work.types == ("A100", "V100") and work.speeds.tolist() == [[2, 1], [1, 0]]
    assert work.cpus_per_gpu.tolist() == [4, 0] and work.memory_per_gpu_gb.tolist() == [0, 32.5]
    assert simulate(work, "fifo", Nodes.parse("2:A100,2:V100")).jct.tolist() == [50, 99]
    write_trace(work, tmp_path / "u.csv")
    assert read_trace(tmp_path / "u.csv").changed(name=work.name) == work
    for old, new, message in (
        (
            ",2,,4,",
            ",-1,,4,",
            r't.csv:2: job "a": speeds\["A100"\]: expected a number >= 0 and <= 1000',
        ),
        (",32.5", ",x", r"memory_per_gpu_gb: expected a number"),
        ("speed:V100", "speed:", "unknown column"),
        ("speed:V100", "speed:A100", "twice"),
    ):
        (tmp_path / "w").mkdir(exist_ok=True)
        bad = tmp_path / "w" / "t.csv"
        bad.write_text(path.read_text().replace(old, new))
        with pytest.raises(InputError, match=message):
            read_trace(bad)


def test_nodes_in_words() -> None:
    """Groups with types, CPUs and memory; what is wrong is told."""
    nodes = Nodes.parse("2x4:A100:96:1024,8,1x2:V100")
    assert nodes == Nodes.of(
        [4, 4, 8, 2], types=["A100", "A100", "", "V100"], cpus=[96, 96, math.inf, math.inf],
        memory_gb=[1024, 1024, math.inf, math.inf],
    )  # fmt: skip
    assert Nodes.parse("16x8") == Nodes(16, 8) and Nodes.parse("3x8:A") == Nodes(3, 8, type="A")
    for text in ("", "x8", "2x", "2x4:A:b", "2x4:A:1:2:3", "8,,4", "-1", "2x4:A:1.2.3"):
        with pytest.raises(InputError, match=r"expected 16x8, 8,8,4 or 4x8:A100"):
            Nodes.parse(text)
    for text in ("0x8", "99999999x8", "2x4:A:9999999"):
        with pytest.raises(InputError, match=r"nodes: expected|cpus: expected"):
            Nodes.parse(text)
    with pytest.raises(InputError, match="types: 1 types for 2 nodes"):
        Nodes.of([1, 2], types=["A"])


@pytest.mark.parametrize("name", ["sia", "allocation"])
def test_speeds_decide_on_the_type(name: str) -> None:
    """Each job gets the type that it is fast on, also where the other one would be as fast free."""
    jobs = [
        Job(name=f"j{i}", sizes=(1, 2), work=400 * WORK, passes=4,
            speeds={"A": 1.0, "B": 2.0} if i % 2 else {"A": 2.0, "B": 1.0})
        for i in range(4)
    ]  # fmt: skip
    log = simulate(jobs, name, Nodes.parse("4:A,4:B")).log
    for row in range(4):
        kind = "AB"[int(log.node[log.node_ptr[row]])]
        assert jobs[log.job[row]].speeds[kind] == 2.0 and log.gpus[row] == 2


@given(st.integers(0, 10**6))
def test_sia_on_two_types_against_brute_force(seed: int) -> None:
    """Costs of configurations are at least the least ones, and at most 30 % above."""
    from optsched.cluster.policies import sia
    from optsched.cluster.policies.gpu_types import types_of

    dice = np.random.default_rng(seed)
    jobs = [
        Job(name=str(i), sizes=(1, 2, 4), work=100 * WORK,
            speeds={"A": float(dice.choice([0.0, 1.0, 2.0])), "B": float(dice.choice([0.5, 1, 3]))})
        for i in range(4)
    ]  # fmt: skip
    seen = []

    class Look:
        name, clairvoyant = "look", False

        def decide(self, view: ClusterView) -> Decision:
            types, every = types_of(view), np.arange(len(view.job))
            seen.append((sia.costs(view, types, every, 0 * every, -0.5), sia.Sia().decide(view)))
            return seen[-1][1]

    simulate(jobs, Look(), Nodes.parse("4:A,4:B"))
    cost, found = seen[0]
    ways = [[(0, 0, 110 * 5)]
            + [(t, 2**k, c) for t in (0, 1) for k in range(3)
               if (c := cost[12 * t + 3 * r + k]) < 10**6]
            for r in range(4)]  # fmt: skip

    def total(chosen: Any) -> float:
        used = [sum(g for t, g, _ in chosen if t == kind) for kind in (0, 1)]
        return sum(c for _, _, c in chosen) if max(used) <= 4 else math.inf

    mine = []
    for r in range(4):
        kinds = {n for n in found.nodes.get(r, {})}
        mine.append(
            next(w for w in ways[r] if w[1] == found.quota[r] and (not kinds or w[0] in kinds))
        )
    best = min(map(total, itertools.product(*ways)))
    assert best <= total(mine) <= 1.3 * best  # a local search: 1.23 at most in 5,605 draws


def test_sia_counts_whole_nodes_that_are_there() -> None:
    """6 GPUs are three nodes of 2, of which there is one: the job starts on the node of 8."""
    jobs = [Job(name="a", sizes=(6,), work=60 * WORK)]
    assert simulate(jobs, "sia", Nodes.parse("1x8:A,1x2:B")).log.finished.tolist() == [10]


@pytest.mark.parametrize("name", ["elastic", "time_to_target", "allocation", "sia"])
@given(st.integers(0, 10**6))
def test_jobs_that_may_not_be_preempted_keep_their_gpus(name: str, seed: int) -> None:
    """A job whose next size fits no type once it has left its GPUs is not resized."""
    dice = np.random.default_rng(seed)
    sizes = [(1, 2, 4), (2, 4), (1, 2, 3, 4), (2, 3)]
    jobs = [
        Job(name=str(i), submit=int(dice.integers(40)), sizes=sizes[dice.integers(4)],
            work=int(dice.integers(5, 60)) * WORK, passes=int(dice.integers(1, 6)),
            preemptible=bool(dice.integers(2)), cpus_per_gpu=float(dice.choice([0, 1])),
            speeds={"A": float(dice.choice([1, 2])), "B": float(dice.choice([0.5, 1, 3]))})
        for i in range(dice.integers(3, 9))
    ]  # fmt: skip
    run = simulate(jobs, name, Nodes.parse(["4:A,4:B", "2x2:A:3,1x4:B:8"][seed % 2]))
    assert (run.log.finished > 0).all()
    assert not run.log.preemptions[~run.workload.preemptible].any()


def test_a_job_that_is_not_preemptible_keeps_its_size() -> None:
    """It is to grow from two GPUs to four, which only a type has that it does not run on."""

    class Grows(Greedy):
        def decide(self, view: ClusterView) -> Decision:
            return Decision(np.array([2 if view.time < 5 else 4]), wake_at=view.time + 5)

    nodes = Nodes.of([2, 4, 4], types=["A100", "V100", "A100"])
    job = Job(name="a", sizes=(2, 4), work=40 * WORK, preemptible=False, speeds={"V100": 0})
    drained = [NodeChange(0, 2, "drain"), NodeChange(10, 2, "add")]
    log = simulate([job], Grows(), nodes, resize="anytime", changes=drained).log
    assert log.gpus.tolist() == [2, 4] and log.start.tolist() == [0, 10]
    assert log.preemptions.tolist() == [0]
