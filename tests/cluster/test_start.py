"""Simulations that start from a running cluster."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from depth import seeds

from optsched.cluster import (
    WORK,
    Amdahl,
    Group,
    Job,
    Log,
    NodeChange,
    Nodes,
    Start,
    Stay,
    Workload,
    expected_starts,
    read_start,
    simulate,
)
from optsched.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path


def case(seed: int) -> tuple[Workload, Nodes, dict[str, Any]]:
    """Jobs, nodes and arguments of `simulate`, with all that a state may hold."""
    dice = random.Random(seed)
    nodes = Nodes.of([dice.randint(1, 4) for _ in range(dice.randint(1, 3))], zero_slots=1)
    rows = [(1,), (2,), (1, 2), (1, 2, 4), (2, 3), (0,)]
    jobs = []
    for i in range(dice.randint(2, 9)):
        sizes = tuple(s for s in dice.choice(rows) if s <= nodes.total) or (1,)
        jobs.append(Job(
            name=f"j{i}", submit=dice.randint(0, 25), sizes=sizes, passes=dice.randint(1, 8),
            work=dice.randint(8, 60 * WORK), speedup=Amdahl(dice.choice([0, 0.3])),
            estimate=dice.randint(8, 60 * WORK), preemptible=dice.random() < 0.8,
            restart_cost=dice.choice([None, 0, 3]), group=dice.choice(["", "g"]),
        ))  # fmt: skip
    changes = []
    if len(nodes) > 1 and dice.random() < 0.5:
        away = dice.randint(1, 40)
        changes = [NodeChange(away, 0, dice.choice(["drain", "remove"])),  # type: ignore[arg-type]
                   NodeChange(away + dice.randint(1, 20), 0, "add")]  # fmt: skip
    how = {
        "restart_cost": dice.choice([0, 4]), "checkpoint": dice.choice(["immediate", "pass"]),
        "resize": dice.choice(["pass", "anytime"]), "changes": changes,
    }  # fmt: skip
    limit = Group("g", max_concurrent=dice.choice([None, 1, 2]))
    return Workload.of(jobs, groups=[limit]), nodes, how


def same(a: Log, b: Log) -> bool:
    """Whether two logs are equal in every column."""
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(
    "name",
    ["fifo", "sjf", "srtf", "las", "elastic", "entropy", "time_to_target", "sia", "priority"],
)
@seeds(8, 60)
def test_a_cut_simulation_goes_on_as_before(name: str, seed: int) -> None:
    """Its whole log is the same; cut anywhere under rules that no decision more can change.

    A state does not hold on which nodes zero-slot tasks are. If some run and a node still changes,
    only what came before has to be the same.
    """
    workload, nodes, how = case(seed)
    full = simulate(workload, name, nodes, **how)
    log = full.log
    times = {*log.start.tolist(), *log.end.tolist(), *workload.submit.tolist()}
    if name in ("fifo", "sjf"):
        times = {*range(max(times) + 2)}
    for now in random.Random(seed).sample(sorted(times), min(len(times), 12)):
        start = full.at(now)
        again = simulate(workload, name, nodes, start=start, **how)
        unknown = any(stay.end is None and not stay.nodes for stay in start.stays)
        if unknown and any(change.time >= now for change in how["changes"]):
            assert again.at(now) == start, now
        else:
            assert same(log, again.log), now


def test_a_running_cluster_by_hand() -> None:
    """Work that is done, ages, held nodes, and requests that wait in order of arrival."""
    jobs = [
        Job(name="long", sizes=(4,), work=4 * 1000 * WORK),
        Job(name="half", submit=10, sizes=(2,), work=2 * 400 * WORK),
        Job(name="stopped", submit=20, sizes=(4,), work=4 * 100 * WORK),
        Job(name="next", submit=90, sizes=(4,), work=4 * 50 * WORK),
    ]
    stays = [
        Stay(job="long", start=0, nodes={1: 4}),
        Stay(job="half", start=40, nodes={0: 2}, work=2 * 300 * WORK),
        Stay(job="stopped", start=30, nodes={0: 4}, end=40),
    ]
    run = simulate(jobs, "fifo", Nodes(2, 4), start=Start(100, tuple(stays)), restart_cost=5)
    assert run.log.finished.tolist() == [1000, 200, 295, 345]
    assert run.metrics.jct.tolist() == [1000, 190, 275, 255]
    assert run.log.preemptions.tolist() == [0, 0, 1, 0] and len(run.log.job) == 5


@pytest.mark.parametrize(
    ("stays", "message"),
    [
        ([{"job": "x", "start": 0, "nodes": {0: 2}}], r'stays\[0\].job: no job "x"'),
        ([{"job": "a", "start": 9, "nodes": {0: 2}}], r"stays\[0\].start: 9 is not before now, 9"),
        ([{"job": "a", "start": -1, "nodes": {0: 2}}], "start: expected an integer"),
        ([{"job": "b", "start": 2}], "starts at 2, submitted at 5"),
        ([{"job": "a", "start": 0, "nodes": {0: 3}}], r"3 GPUs are not one of the job's sizes"),
        ([{"job": "a", "start": 0, "nodes": {7: 2}}], "no node 7, nodes are 0 to 0"),
        ([{"job": "a", "start": 0, "nodes": {0: 4}}], "holds 4 GPUs of node 0, .* leave 3 of 3"),
        ([{"job": "a", "start": 0, "nodes": 2}], "expected GPUs by node such as"),
        ([{"job": "a", "start": 3, "end": 3, "nodes": {0: 2}}], "end: 3 is not after its start 3"),
        ([{"job": "a", "start": 0, "nodes": {0: 2}, "work": 10**9}], "give the work that is done"),
        ([{"job": "a", "start": 0, "nodes": {0: 2}, "end": 2, "work": 10**9}], "is more than"),
        ([{"job": "a", "start": 0, "nodes": {0: 2}}] * 2, "during another stay of the job"),
        ([{"job": "b", "start": 5}, {"job": "c", "start": 5}], "no zero-slot unit is free"),
    ],
)  # fmt: skip
def test_states_that_cannot_be(stays: list[dict[str, Any]], message: str) -> None:
    """One sentence with the stay, the job and what is wrong."""
    jobs = [
        Job(name="a", sizes=(2, 4), work=900 * WORK),
        *(Job(name=name, submit=5, sizes=(0,), work=9 * WORK) for name in "bc"),
    ]
    with pytest.raises(InputError, match=message):
        start = Start(9, tuple(Stay(**stay) for stay in stays))
        simulate(jobs, "fifo", Nodes.of([3], zero_slots=1), start=start)


# expected starts


def queue() -> tuple[Workload, Start]:
    """Two jobs that run, three that wait, and a policy that lets the short one pass."""
    jobs = [
        Job(name=name, submit=submit, sizes=(gpus,), work=gpus * lasts * WORK)
        for name, submit, gpus, lasts in (
            ("a", 0, 8, 4000), ("b", 100, 4, 9000), ("c", 200, 8, 1000), ("d", 300, 2, 500),
            ("e", 400, 2, 700),
        )
    ]  # fmt: skip
    stays = Stay(job="a", start=0, nodes={0: 8}), Stay(job="b", start=150, nodes={1: 4})
    return Workload.of(jobs), Start(1000, stays)


@pytest.mark.parametrize("name", ["fifo", "sjf", "srtf"])
@seeds(6, 30)
def test_right_estimates_are_the_simulation(name: str, seed: int) -> None:
    """Without spread the expected start is that of a simulation with the estimates as truth."""
    workload, nodes, how = case(seed)
    workload = workload.changed(work=np.maximum(workload.estimate, workload.passes))
    full = simulate(workload, name, nodes, **how)
    now = int(np.median(full.log.start)) + 1
    start = full.at(now)
    run = simulate(workload, name, nodes, start=start, **how)
    found = expected_starts(workload, name, nodes, start, sigma=0, **how)
    waiting = run.waiting(now)
    for job, expected in found.items():
        j = workload.names.index(job)
        first = int(run.log.start[(run.log.job == j) & (run.log.start >= now)][0])
        assert expected.times == (first,) * 3
        assert expected.reason == waiting.get(job) and (expected.reason is None) == (first == now)


def test_intervals_over_draws() -> None:
    """Ordered, reproducible from the seed, wider with more spread; running jobs count their age."""
    workload, start = queue()
    nodes = Nodes(2, 8)
    few = expected_starts(workload, "fifo", nodes, start, sigma=0.1, samples=60, seed=4)
    many = expected_starts(workload, "fifo", nodes, start, sigma=0.8, samples=60, seed=4)
    assert list(few) == ["c", "d", "e"]
    for job in few:
        low, middle, high = few[job].times
        assert 1000 <= low <= middle <= high
        assert many[job].times[2] - many[job].times[0] > high - low
    assert few["c"].reason is not None and few["c"].reason.text == "needs 8 GPUs, 4 are free"
    again = expected_starts(workload, "fifo", nodes, start, sigma=0.8, samples=60, seed=4)
    assert many == again != expected_starts(workload, "fifo", nodes, start, sigma=0.8, samples=60)
    late = Start(8000, start.stays)  # "a" is twice as old as its estimate
    assert expected_starts(workload, "fifo", nodes, late, sigma=0)["c"].times == (8000,) * 3


def test_drawn_work_given_its_age() -> None:
    """The share of draws beyond t is that of the lognormal law among those beyond what is done."""
    from statistics import NormalDist

    from optsched.cluster.expected import _drawn

    n, sigma, done = 20_000, 0.5, 1.5
    jobs = Workload.of([Job(name=str(i), sizes=(1,), work=10**9) for i in range(n)])
    work = _drawn(jobs, np.full(n, int(done * 10**9)), sigma, np.random.default_rng(1)) / 10**9
    assert work.min() > done
    beyond = [1 - NormalDist().cdf(np.log(t) / sigma) for t in (done, 1.8, 2.5)]
    for t, share in zip((1.8, 2.5), beyond[1:], strict=True):
        assert (work > t).mean() == pytest.approx(share / beyond[0], abs=0.02)


def test_stays_in_a_file(tmp_path: Path) -> None:
    """Every column, and what is refused with its line."""
    path = tmp_path / "running.csv"
    path.write_text("job_id,start_s,nodes,end_s,restart_s,work_s\na,5,n0:4|n1:2,,3,\nz,1,,7,,2.5\n")
    assert read_start(path, Nodes(2), 9) == Start(9, (
        Stay(job="a", start=5, nodes={0: 4, 1: 2}, restart=3),
        Stay(job="z", start=1, end=7, work=2_500_000),
    ))  # fmt: skip
    for cells, message in (
        ("a,x,n0:1", r"running.csv:2: Expected `int`.*start_s"), ("a,1,n9:1", "nodes: expected"),
        ("a,1,n0:1|n0:1", "each node once"), ("a,1,n0:-1", "n0:4.n1:4"),
    ):  # fmt: skip
        path.write_text(f"job_id,start_s,nodes\n{cells}\n")
        with pytest.raises(InputError, match=message):
            read_start(path, Nodes(2), 9)


def test_a_zero_slot_task_goes_on_where_its_node_is_drained() -> None:
    """No unit of a node that takes work is free for it: it holds one of a drained node."""
    jobs = [Job(name=name, sizes=(0,), work=50 * WORK) for name in "ab"]
    nodes, changes = Nodes(2, gpus=4, zero_slots=1), [NodeChange(10, 1, "drain")]
    run = simulate(jobs, "fifo", nodes, changes=changes)
    later = simulate(jobs, "fifo", nodes, changes=changes, start=run.at(20))
    assert later.log.finished.tolist() == run.log.finished.tolist() == [50, 50]


def test_a_zero_slot_task_that_lost_its_node_was_preempted() -> None:
    """Even if it goes on elsewhere at once, which looks like a resize in its stays."""
    jobs = [Job(name="task", sizes=(0,), work=50 * WORK)]
    nodes, changes = Nodes(2, gpus=1, zero_slots=1), [NodeChange(10, 0, "remove")]
    run = simulate(jobs, "fifo", nodes, changes=changes)
    assert run.log.start.tolist() == [0, 10] and run.log.preemptions.tolist() == [1]
    for now in (10, 11, 40):
        again = simulate(jobs, "fifo", nodes, changes=changes, start=run.at(now))
        assert same(run.log, again.log), now
