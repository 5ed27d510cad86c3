"""`check_policy`: what every scheduling policy has to satisfy, whoever wrote it."""

from __future__ import annotations

import random
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

import optsched
from optsched.cluster.engine import simulate_generic
from optsched.cluster.errors import PolicyError, Stalled
from optsched.cluster.policy import ClusterView, Decision
from optsched.cluster.run import Run
from optsched.testing.policy_worlds import World, policy_worlds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.cluster.log import Log
    from optsched.cluster.policy import Policy

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
    """Simulate small random clusters under a policy, and check what all policies promise.

    Every decision is legal; all jobs end; the view is not changed; the same view gets the same
    answer, also out of order (nothing is remembered); a policy that is not clairvoyant decides
    without the true work; a compiled twin returns the same log; the work done is the work to do;
    and the history passes `optsched.verify`.

    Parameters
    ----------
    policy
        The policy, made as it is to be used.
    worlds
        Cases of your own; by default `optsched.testing.policy_worlds.policy_worlds()`.
    zero_slot
        Whether the default cases hold tasks without GPUs.
    non_preemptible
        Whether some of their jobs must not be preempted.

    Raises
    ------
    AssertionError
        Names the policy, the case, and what is wrong.
    """
    name = getattr(policy, "name", None)
    assert isinstance(name, str) and name, f"policy: `name` is {name!r}, expected a text"
    assert isinstance(getattr(policy, "clairvoyant", None), bool), (
        f"{name}: `clairvoyant` has to be True or False"
    )
    assert callable(getattr(policy, "decide", None)), f"{name}: no method `decide`"
    if worlds is None:
        worlds = policy_worlds(zero_slot=zero_slot, non_preemptible=non_preemptible)
    assert worlds, "no cases: nothing would be checked"
    for world in worlds:
        _check_world(policy, f"{name}, {world.name}", world)


def _check_world(policy: Policy, place: str, world: World) -> None:
    seen: list[tuple[ClusterView, Decision]] = []

    def watch(view: ClusterView, decision: Decision) -> None:
        seen.append((_snapshot(view), decision))

    log = _simulated(policy, place, world, watch)
    _check_log(place, world, log)
    again = _simulated(policy, place, world)
    differs = _difference(log, again)
    assert not differs, f"{place}: two simulations differ in log.{differs}"
    _check_answers(policy, place, seen)
    _check_twin(policy, place, world, log)
    run = Run(world.workload, world.nodes, world.settings, policy.name, {}, log)
    violations = optsched.verify(run.history)
    assert not violations, f"{place}: history: {violations[0].message}"


def _simulated(policy: Policy, place: str, world: World, watch: Any = None) -> Log:
    """The log, with the policy's own mistakes told as such."""
    try:
        return simulate_generic(
            world.workload, policy, world.nodes, world.settings, watch=watch
        ).log
    except (PolicyError, Stalled) as error:
        raise AssertionError(f"{place}: {error}") from error
    except ValueError as error:
        if "read-only" not in str(error):
            raise
        raise AssertionError(f"{place}: decide() changes the view ({error})") from error


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
    policy: Policy, place: str, seen: Sequence[tuple[ClusterView, Decision]]
) -> None:
    """Old views, in another order: the answers must be those of the first time."""
    dice = random.Random(0)
    chosen = dice.sample(seen, min(len(seen), _MOST_ASKED))
    for view, decision in chosen:
        differs = _answers_differ(decision, policy.decide(view))
        assert not differs, (
            f"{place}: at time {view.time} the same view got another {differs}: decide() remembers "
            "something, or draws numbers that the view does not fix"
        )
        if not policy.clairvoyant:
            told = policy.decide(replace(view, workload=_other_truth(view)))
            assert not _answers_differ(decision, told), (
                f"{place}: at time {view.time} the decision depends on the true work, "
                "though `clairvoyant` is False"
            )


def _other_truth(view: ClusterView) -> Any:
    """The same workload for those who do not know the true work."""
    jobs = view.workload
    return jobs.changed(
        work=2 * jobs.work, believed=jobs.believed, estimate=jobs.estimate,
        passes=jobs.passes, pass_work=jobs.pass_work,
    )  # fmt: skip


def _answers_differ(one: Decision, other: Decision) -> str:
    """The first field in which two decisions differ; empty if none."""
    for key in _ANSWER:
        a, b = getattr(one, key), getattr(other, key)
        same = np.array_equal(a, b) if key in ("quota", "order") and a is not None else a == b
        if not same:
            return key
    return ""


def _check_twin(policy: Policy, place: str, world: World, log: Log) -> None:
    """Compiled code decides the same."""
    twin = getattr(policy, "twin", None)
    if not callable(twin):
        return
    compiled = twin(world.workload, world.nodes, world.settings)
    if compiled is None:
        return
    differs = _difference(log, compiled)
    assert not differs, f"{place}: the compiled twin differs in log.{differs}"


def _difference(one: Log, other: Log) -> str:
    """The first column in which two logs differ; empty if none."""
    for key in one._fields:
        a, b = getattr(one, key), getattr(other, key)
        if (a is None) != (b is None) or (a is not None and not np.array_equal(a, b)):
            return key
    return ""
