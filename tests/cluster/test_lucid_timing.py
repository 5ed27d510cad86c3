"""Finish times and preemptions with Lucid's timing equal those of a tick simulator."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from depth import few_examples
from hypothesis import given
from lucid_tick_oracle import simulate as tick
from rigid_workloads import ticking, workload

from optsched.cluster import Job, Nodes, Workload
from optsched.cluster.policies import get
from optsched.cluster.simulate import simulate
from optsched.errors import InputError
from optsched.model.verify import verify

POLICIES = ("fifo", "sjf", "srtf", "las")

LINES = {
    "fifo": (209209.01, 202595.98, 1059407, 0),
    "sjf": (25056.54, 18443.52, 1097392, 0),
    "srtf": (17624.01, 10993.31, 1068244, 834),
    "las": (24063.54, 17444.77, 1027440, 237),
}


@pytest.mark.parametrize("policy", POLICIES)
@given(ticking())
def test_events_equal_ticks(policy, case):
    """Job by job: end and number of preemptions; and the log is complete."""
    submit, gpus, duration, nodes = case
    jobs = workload(submit, gpus, duration)
    log = simulate(jobs, policy, Nodes(nodes), timing="lucid").log
    finished, preemptions = tick(policy, submit, gpus, duration, nodes)
    assert log.finished.tolist() == finished
    assert log.preemptions.tolist() == preemptions
    done = np.zeros(len(jobs), np.int64)
    np.add.at(done, log.job, log.work)
    assert (done == jobs.work).all()


@pytest.mark.parametrize("policy", POLICIES)
@few_examples
@given(ticking(12))
def test_history_is_accepted(policy, case):
    """The verifier accepts what was simulated."""
    submit, gpus, duration, nodes = case
    run = simulate(workload(submit, gpus, duration), policy, Nodes(nodes), timing="lucid")
    assert verify(run.history) == []


def test_end_is_seen_one_tick_late():
    """A walk's job holds its GPUs a second longer; a queue's does not."""
    jobs = workload([0], [8], [5])
    ends = {p: int(simulate(jobs, p, Nodes(1), timing="lucid").log.finished[0]) for p in POLICIES}
    assert ends == {"fifo": 5, "sjf": 5, "srtf": 6, "las": 6}


def test_round_at_the_very_end_preempts_and_charges():
    """A las round in the second after the work is done still takes the GPUs and adds 40 s."""
    # the first job passes the threshold and has done its work at 3000, a round; the other waits
    jobs = workload([0, 2950], [8, 8], [3000, 10])
    log = simulate(jobs, "las", Nodes(1), timing="lucid").log
    assert log.preemptions.tolist() == [1, 0]
    assert log.finished.tolist() == [3061 + 40, 3011]


def test_consolidation_keeps_the_quota_of_a_job_that_cannot_be_placed():
    """A selected job of 16 GPUs that finds no idle nodes keeps others from its part."""
    submit, gpus, duration = [0, 0, 1, 2], [4, 4, 16, 8], [100, 300, 50, 60]
    log = simulate(workload(submit, gpus, duration), "srtf", Nodes(3), timing="lucid").log
    assert log.finished.tolist() == tick("srtf", submit, gpus, duration, 3)[0]


@pytest.mark.parametrize(
    ("nodes", "options", "field"),
    [
        (Nodes(4, gpus=4), {}, "timing"),
        (Nodes(2), {"round": 5}, "round"),
        (Nodes(1), {}, "'b'|\"b\""),
    ],
)
def test_refuses_what_lucid_does_not_have(nodes, options, field):
    """Other nodes, rounds, and jobs larger than the cluster are named."""
    jobs = [Job(name="a", sizes=(1,), work=10), Job(name="b", sizes=(9,), work=10)]
    with pytest.raises(InputError, match=field) as caught:
        simulate(Workload.of(jobs), "srtf", nodes, timing="lucid", **options)
    assert "\n" not in str(caught.value)


def test_refuses_backfill():
    """Lucid's queues stop at the first misfit."""
    with pytest.raises(InputError, match="backfill"):
        simulate(workload([0], [1], [1]), get("fifo", backfill="easy"), Nodes(1), timing="lucid")


@pytest.mark.skipif("OPTSCHED_TRACES" not in os.environ, reason="needs OPTSCHED_TRACES")
@pytest.mark.parametrize("policy", POLICIES)
def test_reference_lines(policy):
    """Mean JCT, mean queue, makespan and preemptions on 2000 Philly jobs, 8 nodes of 8."""
    path = Path(os.environ["OPTSCHED_TRACES"]) / "philly_week_2017-10-09.csv"
    rows = [line.split(",") for line in path.read_text().splitlines()[1:2001]]
    jobs = workload(*([int(row[i]) for row in rows] for i in (1, 2, 3)))
    log = simulate(jobs, policy, Nodes(8), timing="lucid").log
    jct = log.finished - jobs.submit
    held = np.bincount(log.job, weights=log.end - log.start, minlength=len(jct))
    found = (
        round(float(jct.mean()), 2), round(float((jct - held).mean()), 2),
        int(log.finished.max() - jobs.submit[0]), int(log.preemptions.sum()),
    )  # fmt: skip
    assert found == LINES[policy]
