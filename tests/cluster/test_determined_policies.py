"""The policies `fair_share` and `priority`: Determined's decisions, made in a simulated cluster."""

from __future__ import annotations

from typing import Any

import pytest
from depth import depth, half
from oracles.policy_checks import check_policy
from oracles.policy_worlds import policy_worlds

from optsched import cluster
from optsched.cluster.determined import Agent, State, Task, fair_share, priority
from optsched.cluster.determined import Group as Owner
from optsched.cluster.determined.policies import FairShare, Priority
from optsched.cluster.world.engine import simulate_generic
from optsched.cluster.world.settings import Settings

WORK = 10**6


def job(name: str, gpus: int = 1, time: int = 10, **rest: Any) -> cluster.Job:
    """A gang that takes this time."""
    return cluster.Job(name=name, sizes=(gpus,), work=time * max(1, gpus) * WORK, **rest)


@pytest.mark.parametrize(
    "policy",
    [FairShare(), FairShare(variant="docs", fit="worst"), Priority(preemption=True),
     Priority(preemption=True, variant="docs"), Priority(fit="worst", heterogeneous=True)],
)  # fmt: skip
@pytest.mark.parametrize("zero_slot", [False, True])
def test_conformance(policy: Any, zero_slot: bool) -> None:
    """Legal decisions, no memory, histories that verify."""
    check_policy(policy, worlds=policy_worlds(depth(4, 40), zero_slot=zero_slot))


def state_of(view: Any, fit: Any) -> tuple[State, dict[str, int]]:
    """A view as a state, whose task names are those of the jobs."""
    workload = view.workload
    drained = (view.capacity == 0).tolist()
    held: list[dict[str, int]] = []
    for i in range(len(view.job)):
        rows = slice(view.held_ptr[i], view.held_ptr[i + 1])
        held.append(
            {
                f"n{n}": int(c)
                for n, c in zip(view.held_node[rows], view.held_count[rows], strict=True)
            }
        )
    agents = []
    for n in range(len(view.capacity)):
        used = sum(h.get(f"n{n}", 0) for h in held)
        units = sum(h.get(f"n{n}") == 0 for h in held)
        slots = used if drained[n] else int(view.capacity[n])
        agents.append(
            Agent(f"n{n}", slots, zero_slots=int(view.zero_free[n]) + units, drained=drained[n])
        )
    tasks, owners, at = [], {}, {}
    for i, j in enumerate(view.job.tolist()):
        group = workload.groups[workload.group[j]]
        name = workload.names[j]
        owner = group.name or f"own-{name}"
        level = group.priority if group.priority is not None else int(workload.priority[j])
        # one owner by level, so that a group's jobs may have several priorities
        owners[owner] = Owner(
            owner, group.weight if group.name else float(workload.weight[j]),
            group.max_slots if group.name else None, level,
        )  # fmt: skip
        tasks.append(
            Task(name, int(workload.sizes_of(j)[0]), owner, bool(view.preemptible[i]),
                 submitted=int(view.submit[i]), requested=i,
                 allocation=held[i] if view.running[i] else None)
        )  # fmt: skip
        at[name] = i
    return State(tuple(agents), tuple(tasks), tuple(owners.values()), fit), at


@pytest.mark.parametrize(
    ("variant", "fit"),
    half([("code", "best"), ("code", "worst"), ("docs", "worst"), ("docs", "best")]),
)
@pytest.mark.parametrize("kind", ["fair_share", "priority"])
def test_decisions_are_those_of_the_pure_functions(kind: str, variant: Any, fit: Any) -> None:
    """At every instant of a busy cluster: who starts and where, who is released."""
    import random

    random.seed(f"{kind} {variant} {fit}")
    jobs = [
        job(
            f"j{i}", random.choice([0, 1, 1, 2, 2, 4, 8]), random.randint(1, 60),
            submit=random.randint(0, 150), group=random.choice(["", "a", "b", "c"]),
            weight=random.choice([1.0, 2.0]), priority=random.choice([10, 50]),
            preemptible=random.random() < 0.8,
        )
        for i in range(60)
    ]  # fmt: skip
    groups = [
        cluster.Group("a", 2.0, priority=20), cluster.Group("b", 1.0, 8, priority=50),
        cluster.Group("c", 0.5, priority=30),
    ]  # fmt: skip
    workload = cluster.Workload.of(jobs, groups=groups)
    policy: Any = FairShare(variant=variant, fit=fit)
    if kind == "priority":
        policy = Priority(preemption=True, variant=variant, fit=fit)
    seen = {"start": 0, "release": 0}

    def watch(view: Any, decision: Any) -> None:
        state, at = state_of(view, fit)
        pure = fair_share(state, variant)
        if kind == "priority":
            pure = priority(state, True, variant)
        begun = {i for i in at.values() if decision.quota[i] != 0 and not view.running[i]}
        stopped = {i for i in at.values() if decision.quota[i] == 0 and view.running[i]}
        assert stopped == {at[name] for name in pure.release}
        assert begun == {at[name] for name in pure.start}
        for name, where in pure.start.items():
            assert decision.nodes[at[name]] == {int(n[1:]): c for n, c in where.items()}
        assert decision.wake_at == (view.time + 1 if pure else None)
        if view.time % 4 == 0:
            why = {view.workload.names[view.job[i]]: r for i, r in policy.reasons(view).items()}
            assert why == pure.waiting and list(why) == list(pure.waiting)
        seen["start"] += len(begun)
        seen["release"] += len(stopped)

    nodes = cluster.Nodes.of([8, 8, 4], zero_slots=1)
    log, _, complete = simulate_generic(workload, policy, nodes, Settings(), watch=watch)
    assert complete and (log.finished > 0).all()
    assert seen["start"] >= 60 and (seen["release"] > 0 or kind == "fair_share")


@pytest.mark.parametrize("policy", [FairShare(), FairShare(variant="docs"), Priority()])
def test_it_is_asked_again_until_nothing_changes(policy: Any) -> None:
    """No node is idle while a waiting job would be started if only somebody asked.

    Fair share offers j2, which is not preemptible, j0 and j1 so few GPUs each that it leaves j0 out
    of its first answer; the second one starts it.
    """
    jobs = [job("j0", 8, 57), job("j1", 8, 45), job("j2", 16, 2, preemptible=False)]
    run = cluster.simulate(jobs, policy, cluster.Nodes(2, gpus=8))
    start = dict(zip((run.workload.names[j] for j in run.log.job), run.log.start, strict=True))
    if start["j2"] > 0:
        assert max(start["j0"], start["j1"]) <= 1
    else:
        assert (start["j0"], start["j1"]) == (2, 2)


def test_preemption_in_a_simulation() -> None:
    """What is released is given out one unit later; a group's priority goes before the job's."""
    jobs = [
        job("low", 4, 100, priority=90), job("high", 4, 10, submit=20, priority=95, group="g"),
        job("fixed", 4, 30, submit=15, preemptible=False, priority=99),
    ]  # fmt: skip
    workload = cluster.Workload.of(jobs, groups=[cluster.Group("g", priority=1)])
    preempting = Priority(preemption=True)
    run = cluster.simulate(workload, preempting, cluster.Nodes(1, gpus=8), restart_cost=5)
    finished = dict(zip(run.workload.names, run.log.finished.tolist(), strict=True))
    # low stops at 20, high runs from 21 to 31, then low pays the restart and goes on
    assert finished == {"fixed": 45, "high": 31, "low": 31 + 5 + 80}
    assert run.log.preemptions.sum() == 1
    calm = cluster.simulate(workload, "priority", cluster.Nodes(1, gpus=8))
    done = dict(zip(calm.workload.names, calm.log.finished.tolist(), strict=True))
    assert done == {"fixed": 45, "high": 55, "low": 100}


def test_elastic_jobs_are_gangs() -> None:
    """Of their largest size, or the largest up to a limit."""
    elastic = [cluster.Job(name=f"e{i}", sizes=(1, 2, 4), work=12 * WORK) for i in range(3)]
    for gang, sizes in ((None, {4}), (3, {2}), (1, {1})):
        for policy in (FairShare(gang=gang), Priority(gang=gang)):
            run = cluster.simulate(elastic, policy, cluster.Nodes(1, gpus=4))
            assert set(run.log.gpus.tolist()) == sizes


def test_a_gang_that_no_set_of_nodes_serves_is_cut_in_pieces() -> None:
    """Twelve GPUs on nodes of eight, which Determined would leave waiting for ever."""
    run = cluster.simulate([job("odd", 12)], "priority", cluster.Nodes(2, gpus=8))
    assert run.log.count.tolist() == [8, 4] and run.jct.tolist() == [10]
    (note,) = run.notes
    assert note.startswith('job "odd" of 12 GPUs would wait for ever')
