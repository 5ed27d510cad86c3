"""Why jobs of a simulation wait: the reasons of every instant, and the time for want of GPUs."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optsched.cluster import (
    WORK,
    Group,
    Job,
    NodeChange,
    Nodes,
    Reason,
    Run,
    Stalled,
    Why,
    Workload,
    simulate,
)
from optsched.cluster.policies import get
from optsched.cluster.results import document

POLICIES = ["fifo", "sjf", "srtf", "las", "elastic", "fair_share", "priority", "allocation"]


@st.composite
def runs(draw: Any) -> Run:
    """Small clusters, in some of which a node comes and goes."""
    nodes = Nodes.of(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    groups = [Group("a"), Group("b", max_concurrent=draw(st.sampled_from([None, 1, 2])))]
    jobs = [
        Job(
            name=f"j{i}", submit=draw(st.integers(0, 20)), work=draw(st.integers(1, 12)) * WORK,
            sizes=draw(st.sampled_from([(1,), (2,), (1, 2)])) if nodes.total > 1 else (1,),
            group=draw(st.sampled_from(["", "a", "b"])), priority=draw(st.sampled_from([20, 50])),
        )
        for i in range(draw(st.integers(1, 9)))
    ]  # fmt: skip
    changes = []
    if draw(st.booleans()):
        kind = draw(st.sampled_from(["drain", "remove"]))
        changes = [NodeChange(draw(st.integers(1, 15)), 0, kind), NodeChange(60, 0, "add")]
    workload = Workload.of(jobs, groups=groups)
    return simulate(workload, draw(st.sampled_from(POLICIES)), nodes, changes=changes)


def at(run: Run, now: int) -> tuple[set[int], int, int]:
    """Jobs on GPUs, free GPUs, and GPUs there, one instant looked at by itself."""
    log = run.log
    stays = [i for i in range(len(log.job)) if log.start[i] <= now < log.end[i]]
    away = set()
    for change in run.settings.changes:
        if change.time <= now:
            (away.discard if change.kind == "add" else away.add)(change.node)
    on = dict.fromkeys(range(len(run.nodes.gpus)), 0)
    for i in stays:
        for row in range(log.node_ptr[i], log.node_ptr[i + 1]):
            on[int(log.node[row])] += int(log.count[row])
    there = sum(on[n] if n in away else gpus for n, gpus in enumerate(run.nodes.gpus))
    return {int(log.job[i]) for i in stays}, there - sum(on.values()), there


def in_service(run: Run, now: int) -> int:
    """GPUs of the nodes that take work."""
    kinds = {change.node: change.kind for change in run.settings.changes if change.time <= now}
    return sum(gpus for n, gpus in enumerate(run.nodes.gpus) if kinds.get(n, "add") == "add")


def stopped(run: Run, now: int) -> dict[str, int]:
    """Jobs that the decisions of an instant stopped, and their GPUs; not on a removed node."""
    log, found = run.log, {}
    removed = {c.node for c in run.settings.changes if c.time == now and c.kind == "remove"}
    for i in np.flatnonzero((log.end == now) & (log.finished[log.job] > now)).tolist():
        if removed.isdisjoint(log.node[log.node_ptr[i] : log.node_ptr[i + 1]].tolist()):
            found[run.workload.names[log.job[i]]] = int(log.gpus[i])
    return found


def check_words(run: Run, j: int, now: int, found: Reason) -> None:
    """The word for a waiting job that its group's share does not hold back.

    It needs its smallest size. If that is free, Determined's policies give reasons of their own:
    they request the largest size that the nodes in service have, and cannot yet give away what they
    stop now.
    """
    w, sizes, (_, free, there) = run.workload, run.workload.sizes_of(j).tolist(), at(run, now)
    if sizes[0] > free:
        assert found.why is (Why.NEVER if sizes[0] > there else Why.ROOM)
        return
    stops = stopped(run, now)
    if run.policy not in ("fair_share", "priority") or w.names[j] in stops:
        assert found.why is Why.ORDER
        return
    request = max(size for size in sizes if size <= in_service(run, now))
    if found.why is Why.RELEASE:
        assert request <= free and {*re.findall('"(.*?)"', found.text)} <= {*stops} != set()
    elif request > free - sum(stops.values()):
        assert found.why is Why.ROOM
    else:
        assert found.why in (Why.ORDER, Why.GANG)


def check_every_instant(run: Run) -> None:
    """Names, and words by the GPUs that are free; the time for want of GPUs is their sum."""
    w, least = run.workload, run.workload.size[run.workload.size_ptr[:-1]]
    waited = np.zeros(len(w), np.int64)
    for now in range(int(run.log.end.max())):
        running, free, _ = at(run, now)
        active = [j for j in range(len(w)) if w.submit[j] <= now < run.log.finished[j]]
        found = run.waiting(now)
        assert list(found) == [w.names[j] for j in active if j not in running]
        for j in active:
            if j in running:
                continue
            assert found[w.names[j]].text
            if found[w.names[j]].why is not Why.SHARE:
                check_words(run, j, now, found[w.names[j]])
            waited[j] += least[j] > free
    assert run.metrics.waiting_for_room.tolist() == waited.tolist()
    assert (run.metrics.waiting_for_room <= run.metrics.waiting).all()
    assert run.waiting() == {}


@given(runs())
def test_every_waiting_job_has_a_reason_at_every_instant(run: Run) -> None:
    """Whatever the policy, the groups and the changes of nodes."""
    check_every_instant(run)


def test_determined_requests_the_largest_size() -> None:
    """One GPU is free, and is not enough for the job that could also run on it."""
    jobs = [Job(name="runs", sizes=(2,), work=8 * WORK),
            Job(name="waits", submit=1, sizes=(1, 2), work=5 * WORK)]  # fmt: skip
    run = simulate(jobs, "priority", Nodes(1, gpus=3))
    assert run.waiting(2) == {"waits": (Why.ROOM, "requests 2 slots, 1 are free")}
    check_every_instant(run)
    drained = simulate(jobs, "priority", Nodes.of([2, 1]), changes=[NodeChange(1, 0, "drain")])
    assert drained.log.gpus.tolist() == [2, 1] and drained.waiting(1) == {}
    check_every_instant(drained)


def test_what_determined_stops_is_not_free_at_once() -> None:
    """A job starts after that stop, or lacks the GPUs still; the stopped job's turn has passed."""
    jobs = [Job(name="wide", sizes=(1, 2), work=4 * WORK),
            Job(name="late", submit=1, sizes=(1,), work=4 * WORK)]  # fmt: skip
    run = simulate(jobs, "fair_share", Nodes(1, gpus=2))
    assert run.waiting(1) == {
        "wide": (Why.ORDER, "needs 1 GPU, 2 are free, but policy fair_share keeps it back"),
        "late": (Why.RELEASE, 'starts after the stop of "wide"'),
    }
    check_every_instant(run)
    rows = [("a", "g", 1, 2, 7), ("b", "", 2, 1, 5), ("c", "h", 2, 2, 7), ("d", "h", 4, 2, 2),
            ("e", "g", 5, 2, 4)]  # fmt: skip
    jobs = [
        Job(name=name, group=group, submit=submit, sizes=(gpus,), work=work * WORK)
        for name, group, submit, gpus, work in rows
    ]
    run = simulate(jobs, "fair_share", Nodes.of([3, 1]))
    assert run.log.end[run.log.job == 1].tolist() == [5, 8]  # "b", on one GPU
    assert at(run, 5)[1] == 2 and {name: reason for name, reason in run.waiting(5).items()
                                   if name in "cd"} == dict.fromkeys(
        "cd", (Why.ROOM, "requests 2 slots, 1 are free")
    )  # fmt: skip
    check_every_instant(run)


def test_words_and_documents() -> None:
    """A limit of active jobs, the order of the policy, and what the document holds."""
    jobs = [Job(name=f"a{i}", sizes=(1,), work=10 * WORK, group="a") for i in range(3)]
    jobs += [Job(name="wide", submit=1, sizes=(4,), work=WORK), Job(name="late", submit=2,
                 sizes=(1,), work=WORK)]  # fmt: skip
    run = simulate(
        Workload.of(jobs, groups=[Group("a", max_concurrent=2)]), "fifo", Nodes(1, gpus=4)
    )
    reasons = run.waiting(5)
    assert {name: reason.why for name, reason in reasons.items()} == {
        "a2": Why.SHARE, "wide": Why.ROOM, "late": Why.ORDER,
    }  # fmt: skip
    assert reasons["wide"].text == "needs 4 GPUs, 2 are free"
    assert reasons["late"].text.startswith("needs 1 GPU, 2 are free, but policy fifo")
    columns = json.loads(document.to_json({"fifo": run}))["runs"]["fifo"]["jobs"]
    assert columns["waiting_for_room"] == run.metrics.waiting_for_room.tolist()
    assert columns["waiting"] == run.metrics.waiting.tolist()


def test_reasons_of_the_policy_itself() -> None:
    """Enough GPUs are free, but on two nodes, or another job of a better priority waits."""
    jobs = [Job(name=f"r{i}", sizes=(2,), work=20 * WORK) for i in range(2)]
    jobs += [Job(name="wide", submit=1, sizes=(3,), work=WORK, priority=10),
             Job(name="late", submit=2, sizes=(1,), work=WORK, priority=90)]  # fmt: skip
    nodes = Nodes(2, gpus=4)
    run = simulate(jobs, get("priority", fit="worst"), nodes)
    assert run.waiting(5) == {
        "wide": (Why.GANG, "requests 3 slots on one agent; 4 are free, at most 2 on one"),
        "late": (Why.ORDER, 'fits, but waits for "wide" of priority 10'),
    }


def test_a_cluster_that_shrinks_tells_why_it_stalls() -> None:
    """The job can never run any more, and the error says so."""
    jobs = [Job(name="wide", sizes=(4,), work=9 * WORK, submit=5)]
    with pytest.raises(Stalled, match=r"wide .the first needs 4 GPUs, the nodes .* have 2"):
        simulate(jobs, "fifo", Nodes(2, gpus=2), changes=[NodeChange(1, 0, "remove")])


def test_free_gpus_of_another_type_or_without_cpus_do_not_count() -> None:
    """The job waits for room: of its type, or of CPUs."""
    jobs = [
        Job(name="old", sizes=(4,), work=400 * WORK, speeds={"A100": 0}),
        Job(name="new", submit=1, sizes=(2,), work=WORK, speeds={"A100": 0}),
    ]
    run = simulate(jobs, "fifo", Nodes.parse("1x8:A100,1x4:V100"))
    assert run.waiting(5) == {"new": (Why.ROOM, "needs 2 GPUs, 0 are free")}
    jobs = [Job(name=x, sizes=(1,), work=9 * WORK, cpus_per_gpu=60) for x in ("old", "new")]
    run = simulate(jobs, "fifo", Nodes(1, gpus=8, cpus=96))
    assert run.waiting(5) == {"new": (Why.ROOM, "needs 1 GPU, 0 are free")}
