"""Compiled equals asked: every policy's log is that of its own `decide` on the same world."""

from __future__ import annotations

import re
from itertools import permutations

import elastic_workloads as cases
import numpy as np
import pytest
from depth import few_examples
from hypothesis import given
from hypothesis import strategies as st
from test_compiled_function import greedy, longest

from optsched import cluster
from optsched.cluster import NodeFailures, PackingTable, Settings, Stalled, simulate
from optsched.cluster.policies import get
from optsched.cluster.workload.job import WORK
from optsched.model.verify import verify

TABLE = PackingTable(
    {("", ""): (0.7, 0.9), ("a", "b"): (0.5, 0.8), ("a", "a"): (1.2, 0.4)},
    memory={"": 1, "a": 1, "b": 2}, share_score={"": 1, "a": 0.5, "b": 1.5},
)  # fmt: skip
RIGID = [
    ("fifo", {}), ("sjf", {}), ("fifo", {"gang": 2}), ("fifo", {"backfill": "first_fit"}),
    ("sjf", {"backfill": "first_fit"}), ("fifo", {"backfill": "easy"}),
    ("sjf", {"backfill": "easy", "gang": 2}), ("srtf", {}), ("srtf", {"gang": 3}),
    ("las", {"thresholds": (50,), "round": 5}), ("las", {"thresholds": (5, 60, 900), "round": 0}),
    ("las", {"thresholds": ()}), ("lucid", {}), ("lucid", {"gang": 2, "table": TABLE}),
]  # fmt: skip

SRTF = {"order": "srtf", "clairvoyant": True, "preempt": "order"}
ELASTIC = [
    ("elastic", {}), ("elastic", {"order": "sjf", "clairvoyant": True}), ("elastic", SRTF),
    ("elastic", {"order": "srtf", "preempt": "order"}), ("elastic", {"surplus": "marginal"}),
    ("entropy", {}), ("entropy", {"score": "resolved", "preemptive": True}),
    ("time_to_target", {}), ("time_to_target", {"surplus": "marginal", "pool": False}),
    ("allocation", {}), ("allocation", {"objective": "proportional"}),
    ("allocation", {"objective": "finish_time_fairness"}),
    ("allocation", {"objective": "goodput"}), ("sia", {}),
]  # fmt: skip


def compiled_equals_asked(name, options, work, nodes, how):
    """The two logs are the same in every column, and the history is one that may be."""
    policy = get(name, **options) if isinstance(name, str) else name
    try:
        log = policy.compiled(work, nodes, Settings(**how))
    except Stalled as error:  # a node that is not repaired in time
        with pytest.raises(Stalled, match=re.escape(str(error))):
            simulate(work, policy, nodes, engine="generic", **how)
        return
    asked = simulate(work, policy, nodes, engine="generic", **how)
    for key in log._fields:
        assert np.array_equal(getattr(log, key), getattr(asked.log, key)), key
    assert verify(asked.history) == []


@pytest.mark.parametrize(("name", "options"), [*RIGID, *ELASTIC, (longest, {}), (greedy, {})])
@few_examples
@given(seed=st.integers(0, 10**6), jobs=st.integers(1, 24))
def test_on_clusters_of_elastic_jobs(name, options, seed, jobs):
    """Whatever is asked of time, restarts and resizing."""
    work = cases.workload(seed, jobs)
    compiled_equals_asked(name, options, work, cases.nodes(seed), cases.settings(seed))


@pytest.mark.parametrize("name", ["allocation", "sia"])
@few_examples
@given(seed=st.integers(0, 10**6), jobs=st.integers(1, 24))
def test_on_jobs_of_one_size(name, seed, jobs):
    """There is nothing to share out then: first fit by arrival, or (Sia) as many as possible."""
    work = cases.workload(seed, jobs, choices=cases.GANGS)
    compiled_equals_asked(name, {}, work, cases.nodes(seed), cases.settings(seed))


@pytest.mark.parametrize(("name", "options"), [
    *((name, options) for name, options in RIGID[:5] if options != {"backfill": "easy"}),
    *ELASTIC, (longest, {}),
])  # fmt: skip
@few_examples
@given(seed=st.integers(0, 10**6), jobs=st.integers(1, 24), mtbf=st.integers(5, 60))
def test_on_nodes_that_fail(name, options, seed, jobs, mtbf):
    """Jobs of failed nodes wait again; nodes come back, or come late."""
    one = {"sizes": (1 + seed % 3,)} if name in ("fifo", "sjf") else {}
    work, nodes = cases.workload(seed, jobs, **one), cases.nodes(seed)
    changes = [*NodeFailures(mtbf, 7, seed).changes(nodes, 300)]
    how = cases.settings(seed) | {"changes": changes[1 + seed % 2 :] if seed % 3 else changes}
    policy = longest if name is longest else get(name, **options)
    compiled_equals_asked(policy, {}, work, nodes, how)


# what holds whoever decides: no idle GPU beside a waiting job, and SRTF at its best

ROWS = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 15)), min_size=1, max_size=12)


def workload(rows: list[tuple[int, int]]) -> cluster.Workload:
    """Jobs of one GPU, by submit time and duration."""
    rows = sorted(rows, key=lambda row: row[0])
    return cluster.Workload.of(
        cluster.Job(name=f"j{k}", submit=at, sizes=(1,), work=time * WORK)
        for k, (at, time) in enumerate(rows)
    )


# Tiresias decides once a round; Determined gives out what it took back a unit later
LATE = ("las", "fair_share", "priority")


@pytest.mark.parametrize("name", [n for n in cluster.policies.names() if n not in LATE])
@few_examples
@given(rows=ROWS, gpus=st.integers(1, 4))
def test_no_gpu_idles_while_a_job_waits(name: str, rows: list[tuple[int, int]], gpus: int) -> None:
    """Jobs of one GPU: at every instant min(jobs there, GPUs) run."""
    jobs = workload(rows)
    run = cluster.simulate(jobs, name, cluster.Nodes(gpus, gpus=1))
    for t in range(int(run.log.finished.max())):
        there = int(((jobs.submit <= t) & (run.log.finished > t)).sum())
        busy = int(((run.log.start <= t) & (run.log.end > t)).sum())
        assert busy == min(there, gpus)


@given(rows=st.lists(st.tuples(st.integers(0, 6), st.integers(1, 4)), min_size=1, max_size=4))
def test_srtf_is_optimal_on_one_gpu(rows: list[tuple[int, int]]) -> None:
    """No preemptive schedule has a smaller sum of ends: all priority orders, unit by unit."""
    jobs = workload(rows)
    run = cluster.simulate(jobs, "srtf", cluster.Nodes(1, gpus=1))
    n, submit, work = len(jobs), jobs.submit.tolist(), (jobs.work // WORK).tolist()
    best = 10**9
    for order in permutations(range(n)):  # the best preemptive schedule follows some fixed order
        left, ends, t = list(work), [0] * n, 0
        while any(left):
            able = [j for j in order if submit[j] <= t and left[j]]
            t += 1
            if able:
                left[able[0]] -= 1
                ends[able[0]] = t if not left[able[0]] else 0
        best = min(best, sum(ends))
    assert int(np.sum(run.log.finished)) == best
