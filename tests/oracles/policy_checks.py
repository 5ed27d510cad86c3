"""`check_policy`: what every scheduling policy has to satisfy, whoever wrote it."""

from __future__ import annotations

import random
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.cluster.results.run import Run
from optsched.cluster.world.engine import simulate_generic
from optsched.cluster.world.policy import ClusterView, Decision, PolicyError, Stalled
from optsched.model.verify import verify
from oracles.policy_worlds import World, policy_worlds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.cluster.workload.workload import Workload
    from optsched.cluster.world.log import Log
    from optsched.cluster.world.policy import Policy
    from optsched.model.schedule import IntArray

_FIELDS: Final = tuple(field.name for field in fields(ClusterView))
_ANSWER: Final = tuple(field.name for field in fields(Decision))
_MOST_ASKED: Final = 40
"""Snapshots of a simulation that are asked about again."""


def check_policy(
    policy: Policy,
    *,
    worlds: Sequence[World] | None = None,
    zero_slot: bool = False,
    non_preemptible: bool = True,
) -> None:
    """Simulate small random clusters (`worlds`, or `policy_worlds()`) under a policy.

    Every decision is legal; all jobs end; the view is not changed; the same view gets the same
    answer, also out of order (nothing is remembered); a policy that is not clairvoyant decides
    the same whatever is true behind the same view (below); compiled, it returns the same log;
    the work done is the work to do; and the history passes `optsched.verify`.

    Unknown before a job has ended are its `Workload.work`, its reports
    after the present pass, its curve, and, if it ends at a target, how many passes it takes. They
    are drawn anew for every job, so that also their order changes. Known are the view's columns,
    estimates, templates, targets, initial uncertainties, and the passes of other jobs.
    """
    if worlds is None:
        worlds = policy_worlds(zero_slot=zero_slot, non_preemptible=non_preemptible)
    for world in worlds:
        _check_world(policy, f"{policy.name}, {world.name}", world)


def _check_world(policy: Policy, place: str, world: World) -> None:
    seen: list[tuple[ClusterView, Decision]] = []

    def watch(view: ClusterView, decision: Decision) -> None:
        seen.append((_snapshot(view), decision))

    log = _simulated(policy, place, world, watch)
    _check_log(place, world, log)
    again = _simulated(policy, place, world)
    differs = _difference(log, again)
    assert not differs, f"{place}: two simulations differ in log.{differs}"
    _check_answers(policy, place, seen, log)
    _check_compiled(policy, place, world, log)
    run = Run(world.workload, world.nodes, world.settings, policy.name, {}, log)
    violations = verify(run.history)
    assert not violations, f"{place}: history: {violations[0].message}"


def _simulated(policy: Policy, place: str, world: World, watch: Any = None) -> Log:
    """The log, with the policy's own mistakes told as such."""
    try:
        return simulate_generic(
            world.workload, policy, world.nodes, world.settings, watch=watch
        ).log
    except (PolicyError, Stalled) as error:
        what = "decide() changes the view: " if "read-only" in str(error) else ""
        raise AssertionError(f"{place}: {what}{error}") from error


def _snapshot(view: ClusterView) -> ClusterView:
    """All of a view, to be looked at later."""
    return ClusterView(**{key: getattr(view, key) for key in _FIELDS})


def _check_log(place: str, world: World, log: Log) -> None:
    """Everybody ends, after doing all of the work."""
    late = np.flatnonzero(log.finished < 0)
    assert not len(late), f"{place}: job {world.workload.names[late[0]]!r} did not end"
    done = np.zeros(len(world.workload), np.int64)
    np.add.at(done, log.job, log.work)
    wrong = np.flatnonzero(done != world.workload.work)
    assert not len(wrong), f"{place}: job {world.workload.names[wrong[0]]!r}: work was lost or made"


def _check_answers(
    policy: Policy, place: str, seen: Sequence[tuple[ClusterView, Decision]], log: Log
) -> None:
    """Old views, in another order: the answers must be those of the first time."""
    dice = random.Random(0)
    chosen = dice.sample(seen, min(len(seen), _MOST_ASKED))
    for number, (view, decision) in enumerate(chosen):
        differs = _answers_differ(decision, policy.decide(view))
        assert not differs, (
            f"{place}: at time {view.time} the same view got another {differs}: decide() remembers "
            "something, or draws numbers that the view does not fix"
        )
        if not policy.clairvoyant:
            other = _other_truth(view, log.finished, np.random.default_rng(number))
            told = policy.decide(replace(view, workload=other))
            assert not _answers_differ(decision, told), (
                f"{place}: at time {view.time} the decision depends on what is not known yet (the "
                "true work, the passes to a target, reports to come), though `clairvoyant` is False"
            )


def _other_truth(view: ClusterView, finished: IntArray, dice: np.random.Generator) -> Workload:
    """A workload that looks the same to all who do not know the truth."""
    ended = (finished >= 0) & (finished <= view.time)
    jobs = view.workload
    n = len(jobs)
    done, passed = np.zeros(n, np.int64), np.zeros(n, np.int64)
    done[view.job], passed[view.job] = view.done, view.passes
    factor = np.exp(dice.uniform(np.log(0.25), np.log(4.0), n))
    to_target = ~np.isnan(jobs.target) & ~ended
    passes = np.maximum(np.rint(jobs.passes * factor).astype(np.int64), passed + 1)
    passes = np.where(to_target, passes, jobs.passes)
    work = np.maximum(np.rint(jobs.work * factor).astype(np.int64), done + 1)
    work = np.where(to_target, jobs.pass_work * passes, work)
    work = np.where(ended | (to_target & (passes == jobs.passes)), jobs.work, work)
    observed_ptr, observed = _reports(jobs, passed, passes, ended, dice)
    return jobs.changed(
        work=work, passes=passes, pass_work=jobs.pass_work,
        observed_ptr=observed_ptr, observed=observed,
    )  # fmt: skip


def _reports(
    jobs: Workload, passed: IntArray, passes: IntArray, ended: Any, dice: np.random.Generator
) -> tuple[IntArray, Any]:
    """What every job has reported, and something else from now on."""
    rows = []
    for j in range(len(jobs)):
        row = jobs.observed[jobs.observed_ptr[j] : jobs.observed_ptr[j + 1]]
        if len(row) > passed[j] and not ended[j]:
            known = row[: passed[j]]
            more = len(row) - len(known) if np.isnan(jobs.target[j]) else passes[j] - len(known)
            last = float(known[-1]) if len(known) else float(np.nan_to_num(jobs.initial[j], nan=1))
            tail = last * dice.uniform(0.2, 1.0, more)
            if not np.isnan(jobs.target[j]):
                tail = np.maximum(tail, np.nextafter(jobs.target[j], np.inf))
                tail[-1] = jobs.target[j] * dice.random()
            row = np.concatenate((known, tail))
        rows.append(row)
    ptr = np.concatenate(([0], np.cumsum([len(row) for row in rows])))
    return ptr, np.concatenate(rows)


def _answers_differ(one: Decision, other: Decision) -> str:
    """The first field in which two decisions differ; empty if none."""
    for key in _ANSWER:
        a, b = getattr(one, key), getattr(other, key)
        same = np.array_equal(a, b) if key in ("quota", "order") and a is not None else a == b
        if not same:
            return key
    return ""


def _check_compiled(policy: Policy, place: str, world: World, log: Log) -> None:
    """Compiled code decides the same."""
    run = getattr(policy, "compiled", None)
    if not callable(run):
        return
    compiled = run(world.workload, world.nodes, world.settings)
    differs = _difference(log, compiled)
    assert not differs, f"{place}: compiled, it differs in log.{differs}"


def _difference(one: Log, other: Log) -> str:
    """The first column in which two logs differ; empty if none."""
    for key in one._fields:
        a, b = getattr(one, key), getattr(other, key)
        if (a is None) != (b is None) or (a is not None and not np.array_equal(a, b)):
            return key
    return ""
