"""What holds whoever decides: no idle GPU beside a waiting job, and SRTF at its best."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from depth import few_examples
from hypothesis import given
from hypothesis import strategies as st

from optsched import cluster
from optsched.cluster.workload.job import WORK

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
