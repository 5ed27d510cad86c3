"""The scheduler of real jobs: it decides as the simulator does, and keeps its rules in crashes."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from depth import few_examples
from hypothesis import given
from hypothesis import strategies as st
from simulated_pool import Replay, SimulatedPool, scheduled

from optsched.cluster import (
    ClusterView,
    Decision,
    Nodes,
    Policy,
    PolicyError,
    Stalled,
    policies,
    simulate,
)  # fmt: skip
from optsched.elastic import TrainingJob, live
from optsched.elastic.live import PassTimes
from optsched.elastic.micro import pass_samples
from optsched.elastic.workers import Event

SPEED = {1: 1.0, 2: 1.6, 4: 2.5}
POLICIES = policies.names()


def job(name: str, **given: Any) -> TrainingJob:
    """A job whose functions are never called."""
    return TrainingJob(name=name, model=int, data=int, optimizer=int, **given)


@st.composite
def workloads(draw: st.DrawFn) -> list[TrainingJob]:
    """Some jobs whose passes take whole milliseconds at every size."""
    submit, found = 0.0, []
    for i in range(draw(st.integers(1, 6))):
        submit += draw(st.sampled_from([0.0, 0.7, 3.3]))
        target = {"target": 1.0, "template": draw(st.sampled_from(["", "t"]))}
        given = target if draw(st.booleans()) else {}
        same = 2.0 if given.get("template") else None  # jobs of a template take equal times
        found.append(job(
            f"j{i}", submit=submit, passes=draw(st.integers(1, 4)),
            expected_passes=draw(st.integers(1, 4)), **given,
            sizes=draw(st.sampled_from([(1,), (2,), (1, 2), (1, 2, 4)])),
            pass_seconds=same or draw(st.sampled_from([1.2, 2.0, 4.4, 5.2])),
            priority=draw(st.sampled_from([10, 50, 90])), group=draw(st.sampled_from("ab")),
            preemptible=draw(st.booleans()),
        ))  # fmt: skip
    return found


def measured(jobs: list[TrainingJob]) -> tuple[dict[tuple[str, int], int], PassTimes]:
    """Milliseconds of a pass by job and size, and the same as measurements."""
    found, times = {}, PassTimes()
    for one in jobs:
        for g in {1, *one.sizes}:
            found[one.name, g] = round((one.pass_seconds or 1.0) * 1e3 / SPEED[g])
            times.add(one, g, found[one.name, g])
    return found, times


class BetweenPasses:
    """A policy in a simulation that, as in reality, cannot preempt jobs within a pass."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.name, self.clairvoyant = policy, policy.name, policy.clairvoyant

    def decide(self, view: ClusterView) -> Decision:
        """Its decision."""
        columns = {field.name: getattr(view, field.name) for field in fields(view)}
        whole = view.preemptible & view.at_pass_end
        return self.policy.decide(ClusterView(**columns | {"preemptible": whole}))


@pytest.mark.parametrize("name", POLICIES)
@few_examples
@given(jobs=workloads(), slots=st.sampled_from([4, 5]))
def test_decides_as_the_simulator(name: str, jobs: list[TrainingJob], slots: int) -> None:
    """The same jobs with known pass times: every stay is that of the simulation."""
    milliseconds, times = measured(jobs)
    needed = {one.name: one.passes for one in jobs}
    jobs = [replace(one, passes=one.passes if one.target is None else 9) for one in jobs]
    policy = policies.get(name)
    if policy.clairvoyant:  # of real jobs it sees estimates
        jobs = [replace(one, expected_passes=needed[one.name]) for one in jobs]
    pool = SimulatedPool(slots, lambda job, g: milliseconds[job, g])
    pool.metric = lambda job, done: min(1.0, done / needed[job])
    scheduler = scheduled(jobs, pool, policy, times)
    work = live.workload(scheduler.jobs, times, scheduler.signal)
    run = simulate(
        work, BetweenPasses(policy), Nodes(1, gpus=slots), checkpoint="pass", engine="generic"
    )
    log = run.log
    found = sorted((stay.start, stay.job, stay.end, len(stay.slots)) for stay in scheduler.stays)
    columns = (log.start, log.job, log.end, log.gpus)
    assert found == list(zip(*(column.tolist() for column in columns), strict=True))
    assert [one.finished for one in scheduler.jobs] == log.finished.tolist()
    assert [one.preemptions for one in scheduler.jobs] == log.preemptions.tolist()


class Always:
    """A policy that answers what it was given."""

    clairvoyant = False

    def __init__(self, answer: Any) -> None:
        self.answer, self.name = answer, "always"

    def decide(self, view: Any) -> Any:
        """The answer to a view."""
        return self.answer(view)


def everything(view: Any) -> Decision:
    """The first jobs on a worker each, and a decision within their first passes."""
    return Decision((np.arange(len(view.job)) < view.free.sum()).astype(np.int64), wake_at=500)


@given(
    kills=st.lists(st.tuples(st.integers(0, 30_000), st.integers(0, 1)), max_size=5),
    policy=st.sampled_from(["elastic", "allocation", "entropy", "time_to_target", "fifo"]),
)
def test_crashes(kills: list[tuple[int, int]], policy: str) -> None:
    """A worker that dies costs its job the open pass, and the others only time."""
    jobs = [job(f"j{i}", passes=3 + i, sizes=(1, 2), submit=1.3 * i, micro={}) for i in range(3)]
    pool = SimulatedPool(2, lambda name, g: 2000 // g, start=30)
    pool.due = [(time, Event(slot, "died")) for time, slot in kills]
    alive = pool.kill

    def kill(slots: Any) -> None:  # deaths to come stay
        later = [(time, event) for time, event in pool.due if event.kind == "died"]
        alive(slots)
        pool.due = [row for row in pool.due if row[1].kind != "died"] + later

    pool.kill = kill  # type: ignore[method-assign]
    scheduler = scheduled(jobs, pool, policies.get(policy))
    assert all(one.phase == "ended" and one.passes == 3 + i for i, one in enumerate(scheduler.jobs))
    for a in scheduler.stays:
        for b in scheduler.stays:
            apart = a.end <= b.start or b.end <= a.start or not {*a.slots} & {*b.slots}
            assert a is b or apart, "two jobs on one worker"
    for one in scheduler.jobs:
        assert sum(stay.passes for stay in scheduler.stays if stay.job == one.number) == one.passes


def test_a_pass_that_was_saved_but_not_reported() -> None:
    """It counts, once, and the policy decides on the next one."""
    pool = SimulatedPool(2, lambda name, g: 1000)
    pool.due = [(1500, Event(0, "died"))]
    saved = {"samples": [500, 500], "uncertainty": 0.5, "metric": 0.0}
    pool.missing["a"] = {1: saved}
    quotas = {"a": [2, 2, 1, 1]}
    scheduler = scheduled([job("a", passes=4, sizes=(1, 2))], pool, Replay(quotas))
    assert scheduler.jobs[0].log[1] is saved
    assert [len(record["samples"]) for record in scheduler.jobs[0].log] == quotas["a"]
    assert pool.joins == [("a", 0), ("a", 1), ("a", 2)]
    assert scheduler.jobs[0].finished == 3500


def test_hopeless_jobs_fail() -> None:
    """Workers that always die fail the job; the others go on."""
    jobs = [job(name, passes=2, sizes=(1, 2)) for name in ("bad", "good")]
    pool = SimulatedPool(2, lambda name, g: 1000)
    pool.deadly = "bad"
    bad, good = scheduled(jobs, pool, policies.get("elastic")).jobs
    assert (bad.phase, good.phase) == ("failed", "ended")
    assert "died 10 times in pass 1" in bad.reason
    assert good.finished >= 0 > bad.finished


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda view: Decision(np.full(len(view.job), 2)), "quota 2 is none of its sizes"),
        (lambda view: Decision(np.ones(3, np.int64)), "over-allocation: 3 workers of 2"),
        (lambda view: Decision(np.ones(3)), "expected 3 quotas"),
        (lambda view: Decision(0 * view.gpus) if view.time else everything(view), "within a pass"),
        (lambda view: Decision(view.gpus.copy(), wake_at=view.time), "wake_at"),
        (lambda view: Decision(view.gpus.copy(), share={0: 1}), "without share"),
    ],
)  # fmt: skip
def test_illegal_decisions(answer: Any, words: str) -> None:
    """An illegal decision names policy, job and rule."""
    jobs = [job(f"j{i}", sizes=(1,)) for i in range(3)]
    with pytest.raises(PolicyError, match=words):
        scheduled(jobs, SimulatedPool(2, lambda name, g: 1000), Always(answer))


def test_stalled_and_woken() -> None:
    """Jobs that no policy starts are an error; a policy is called at its wake-up time."""
    jobs = [job("a", passes=1), job("b", passes=1)]
    with pytest.raises(Stalled, match='"a", "b"'):
        scheduled(jobs, SimulatedPool(1, lambda n, g: 1000), Always(lambda v: Decision(v.gpus + 0)))

    pool = SimulatedPool(1, lambda n, g: 1000)
    pool.late = 3
    scheduler = scheduled(jobs, pool, policies.get("las", round=700))
    assert [one.finished for one in scheduler.jobs] == [1703, 3103]


def test_passes_follow_the_quota() -> None:
    """(12): with a density a pass of g workers has g times so many samples; else all of them."""
    fields: dict[str, Any] = {"density": 250, "micro": {"batch_bounds": (1, 64)}, "batch_size": 16}
    wide = job("wide", sizes=(2,), passes=3, **fields)
    narrow = job("narrow", sizes=(1,), samples=900, passes=9, density=250)
    whole = job("whole", sizes=(2,), passes=2, batch_size=16, micro={})
    done = scheduled(
        [wide, narrow, whole], SimulatedPool(5, lambda n, g: 1000), policies.get("fifo")
    )
    totals = [[sum(record["samples"]) for record in one.log] for one in done.jobs]
    assert totals == [[500] * 3, [250] * 4, [1000] * 2]
    assert done.jobs[1].expected == 4
    assert [pass_samples(g, 250.5) for g in (1, 2, 4)] == [250, 501, 1002]


def test_pass_times() -> None:
    """Estimates come from measurements of the template, without any from the user."""
    one, two = job("one", sizes=(1, 2), template="t"), job("two", sizes=(2, 4), template="t")
    times = PassTimes()
    assert times.of(job("x", pass_seconds=3.0))[0] == 3000
    for size, time in ((1, 1000), (2, 700), (2, 500), (2, 550)):
        times.add(one, size, time)
    base, speed = times.of(two)
    assert (base, speed.of(2)) == (1000, pytest.approx(1000 / 583.333))
    assert speed.of(4) == live.UNMEASURED.of(4)
    assert times.of(job("x"))[0] == 1000
