"""Why jobs of a simulation wait: the reasons of every instant, and the time for want of GPUs."""

from __future__ import annotations

import json
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


@given(runs())
def test_every_waiting_job_has_a_reason_at_every_instant(run: Run) -> None:
    """Names, and words by the GPUs that are free; the time for want of GPUs is their sum."""
    w, least = run.workload, run.workload.size[run.workload.size_ptr[:-1]]
    waited = np.zeros(len(w), np.int64)
    for now in range(int(run.log.end.max())):
        running, free, there = at(run, now)
        active = [j for j in range(len(w)) if w.submit[j] <= now < run.log.finished[j]]
        found = run.waiting(now)
        assert list(found) == [w.names[j] for j in active if j not in running]
        for j in active:
            if j in running:
                continue
            why, text = found[w.names[j]]
            assert text
            if why is not Why.SHARE:
                expected = [Why.ROOM] if least[j] > free else [Why.ORDER, Why.GANG]
                assert why in ([Why.NEVER] if least[j] > there else expected)
                assert why is not Why.GANG or run.policy in ("fair_share", "priority")
            waited[j] += least[j] > free
    assert run.metrics.waiting_for_room.tolist() == waited.tolist()
    assert (run.metrics.waiting_for_room <= run.metrics.waiting).all()
    assert run.waiting() == {}


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
