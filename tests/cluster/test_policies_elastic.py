"""Elastic policies: what they promise, which job waits for which, published figures."""

from __future__ import annotations

import elastic_workloads as cases
import numpy as np
import pytest
from depth import depth
from oracles.policy_checks import check_policy
from oracles.policy_worlds import policy_worlds

from optsched.cluster import Curve, Job, Nodes, Workload, entropy_workload, simulate
from optsched.cluster.policies import get
from optsched.cluster.policies.allocation import OBJECTIVES
from optsched.cluster.workload.job import WORK

SRTF = {"order": "srtf", "clairvoyant": True, "preempt": "order"}
CASES = [
    ("elastic", {}), ("elastic", {"order": "sjf"}),
    ("elastic", {"order": "sjf", "clairvoyant": True}),
    ("elastic", SRTF), ("elastic", {"order": "srtf", "preempt": "order"}),
    ("elastic", {"surplus": "marginal"}),
    ("entropy", {}), ("entropy", {"preemptive": True, "lam": 0.9}),
    ("entropy", {"score": "resolved"}), ("entropy", {"score": "resolved", "preemptive": True}),
    ("time_to_target", {}), ("time_to_target", {"pool": False}),
    ("time_to_target", {"surplus": "marginal", "sigma": 0.3}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options"), CASES)
@pytest.mark.parametrize("zero_slot", [False, True])
def test_conformance(name, options, zero_slot):
    """What every policy promises."""
    check_policy(get(name, **options), worlds=policy_worlds(depth(4, 40), zero_slot=zero_slot))


@pytest.mark.parametrize(("name", "options"), [
    *((name, {}) for name in ("fifo", "sjf", "srtf", "allocation")),
    *(case for case in CASES if "score" not in case[1]),
])  # fmt: skip
def test_twice_as_slow(name, options):
    """Doubling all times doubles all completion times: no policy has a constant of time."""
    for seed in range(3):
        fixed = {"sizes": (1,), "passes": 1, "curve": None}
        jobs = cases.workload(seed, 16, restart_cost=0, **fixed)
        fast = jobs.changed(work=(1 + jobs.work // WORK) * WORK)
        slow = fast.changed(submit=2 * fast.submit, work=2 * fast.work, estimate=2 * fast.estimate)
        ends = [simulate(w, get(name, **options), Nodes(1, 3)).log.finished for w in (fast, slow)]
        assert (2 * ends[0]).tolist() == ends[1].tolist()


# which job waits for which

HOUR = 3600


@pytest.mark.parametrize("engine", ["auto", "generic"])
@pytest.mark.parametrize(("name", "options"), [("elastic", SRTF), ("time_to_target", {})])
@pytest.mark.parametrize("passes", [1, 4])
def test_displaced_only_by_a_job_that_starts(name, options, passes, engine):
    """A shorter gang that has to wait for a pass of a third job preempts no job meanwhile."""
    jobs = [
        Job(name="a", sizes=(1, 8), work=2 * HOUR * WORK, passes=passes),
        Job(name="c", sizes=(4,), work=20 * HOUR * WORK),
        Job(name="b", submit=20, sizes=(8,), work=3 * HOUR * WORK),
    ]
    log = simulate(jobs, get(name, **options), Nodes(3, gpus=4), engine=engine).log
    begin = {j: log.start[log.job == j].tolist() for j in range(3)}
    pass_end = 2 * HOUR // 8 // passes
    assert begin[2] == [pass_end]
    if passes == 1:  # a has ended
        assert log.preemptions.sum() == 0
    else:  # a shrinks, and b takes the GPUs of c at the same instant
        assert log.preemptions.tolist() == [0, 1, 0]
        assert log.end[log.job == 1].tolist()[0] == pass_end


class Displacing:
    """A policy whose every decision is checked: no job goes whose GPUs stay unused."""

    def __init__(self, policy):
        self.policy, self.name, self.clairvoyant = policy, policy.name, policy.clairvoyant
        self.displaced = 0

    def decide(self, view):
        """Count displaced jobs."""
        decision = self.policy.decide(view)
        left = view.free.sum() + view.gpus.sum() - np.maximum(decision.quota, 0).sum()
        held = view.settings.resize == "pass" or view.settings.checkpoint == "pass"
        for i in np.flatnonzero(view.running & (decision.quota == 0)):
            self.displaced += 1
            free = view.at_pass_end[i] or not held
            assert left < (view.size[view.size_ptr[i]] if free else view.gpus[i])
        return decision


@pytest.mark.parametrize(
    ("name", "options"),
    [("elastic", SRTF), ("time_to_target", {}), ("entropy", {"preemptive": True})],
)
def test_no_job_is_displaced_for_nothing(name, options):
    """In whole simulations."""
    displaced = 0
    for seed in range(12):
        policy = Displacing(get(name, **options))
        simulate(cases.workload(seed), policy, cases.nodes(seed), **cases.settings(seed))
        displaced += policy.displaced
    assert displaced > 5


SJF = ("elastic", {"order": "sjf"})
QUOTAS = [
    ("elastic", {}), ("entropy", {}), ("elastic", {"surplus": "marginal"}),
    *(("allocation", {"objective": objective}) for objective in OBJECTIVES),
]  # fmt: skip


def gang_between(**first):
    """When jobs of 8 and 4 GPUs start that arrive while the first of 12 GPUs holds 8."""
    jobs = [
        Job(**{"name": "a", "sizes": (1, 2, 4, 8), "work": 800 * HOUR * WORK} | first),
        Job(name="b", submit=10, sizes=(8,), work=8 * HOUR * WORK),
        Job(name="c", submit=20, sizes=(4,), work=4 * HOUR * WORK),
    ]
    return Workload.of(jobs)


def starts(jobs, name, options, engine="auto"):
    """First start of b and c."""
    log = simulate(jobs, get(name, **options), Nodes(3, gpus=4), engine=engine).log
    return [int(log.start[log.job == j].min()) for j in (1, 2)]


@pytest.mark.parametrize(("name", "options"), [*QUOTAS, SJF])
def test_no_gang_waits_for_a_job_that_cannot_shrink(name, options):
    """A job of one pass, or in its last: a job that fits beside it starts."""
    for engine in ("auto", "generic"):
        for estimate in (1.0, 3.0):  # the number of passes is known, whatever the estimate
            alone = gang_between(estimate=int(estimate * 800 * HOUR * WORK))
            assert starts(alone, name, options, engine) == [360_000, 20]


@pytest.mark.parametrize(("name", "options"), QUOTAS)
def test_gpus_are_reserved_for_a_gang_until_the_pass_ends(name, options):
    """A job with passes to come shrinks at the end of this one: the gang comes first."""
    for engine in ("auto", "generic"):
        assert starts(gang_between(passes=4), name, options, engine) == [90_000, 93_600]


@pytest.mark.parametrize("name", ["elastic", "entropy", "allocation"])
@pytest.mark.parametrize(("estimate", "second"), [(1.0, False), (0.2, True)])
def test_last_pass_of_a_job_with_a_target_is_estimated(name, estimate, second):
    """Four passes in truth; an estimate of one reserves no GPUs."""
    curve = Curve(1.0, 0.0, 0.5, float(np.exp(-1.75)), 0.0)
    jobs = gang_between(passes=4, curve=curve, estimate=int(estimate * 800 * HOUR * WORK))
    assert jobs.passes[0] == 4
    for engine in ("auto", "generic"):
        assert (starts(jobs, name, {}, engine)[1] == 20) == second


def test_many_jobs_at_once():
    """Thousands of arrivals in one instant are sorted, too."""
    work = [1 + (7919 * i) % 3000 for i in range(3000)]
    jobs = [Job(name=f"j{i}", sizes=(1,), work=w * WORK) for i, w in enumerate(work)]
    run = simulate(jobs, get("elastic", order="sjf"), Nodes(1, 1))
    assert np.array(work)[run.log.job].tolist() == sorted(work)


# what they are for


def figures(policy, seeds=4, sigma=0.0, **options):
    """Mean completion time and makespan in hours on the reference workload."""
    found = []
    for seed in range(seeds):
        jobs = entropy_workload(50, seed).with_estimate_error(sigma, seed + 100)
        run = simulate(jobs, get(policy, **options), Nodes(1, 4))
        found.append((run.jct.mean() / 3600, run.log.finished.max() / 3600))
    return np.mean(found, axis=0)


def test_figures_of_the_controls():
    """The prototype's: elastic FIFO 6.98 / 13.3 h, SJF with errors .3 5.46 / 13.5 h."""
    assert figures("elastic") == pytest.approx([6.98, 13.3], rel=0.03)
    assert figures("elastic", sigma=0.3, order="sjf") == pytest.approx([5.46, 13.5], rel=0.03)
    assert figures("time_to_target", sigma=0.5) == pytest.approx([5.31, 13.6], rel=0.03)


def test_printed_score_cannot_rank():
    """Without preemption it is elastic FIFO; with it, worse than no signal at all."""
    fifo = figures("elastic", 3)
    assert figures("entropy", 3) == pytest.approx(fifo, rel=0.01)
    assert figures("entropy", 3, preemptive=True)[0] > 1.15 * fifo[0]
    assert figures("entropy", 3, score="resolved")[0] < 0.85 * fifo[0]
