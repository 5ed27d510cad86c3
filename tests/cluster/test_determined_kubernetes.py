"""Pods of Kubernetes: one by one they can deadlock, as gangs they cannot."""

from __future__ import annotations

from dataclasses import replace

from determined_oracle import machines
from hypothesis import given
from test_determined_oracle import states

from optsched.cluster.determined import (
    Agent,
    Decision,
    Group,
    Pool,
    State,
    Task,
    apply,
    decide,
    kubernetes,
)
from optsched.cluster.world.policy import Why

PODS = tuple(Task(f"{job}{i}", 1, job, requested=i) for i in range(8) for job in "ab")
"""Two jobs of 8 pods, whose controllers create them at the same time."""


def test_two_halves_deadlock_by_default_and_not_as_gangs() -> None:
    """Each holds 4 of 8 slots for ever; gangs run one after the other."""
    state = State((Agent("n", 8),), PODS)
    stuck = apply(state, kubernetes(state))
    held = [task.group for task in stuck.tasks if task.is_running]
    assert held.count("a") == held.count("b") == 4
    decision = kubernetes(stuck)
    assert not decision and len(decision.waiting) == 8
    assert {reason.why for reason in decision.waiting.values()} == {Why.ROOM}
    assert "holds the slots of 4 pods, but works with 8" in decision.waiting["b7"].text

    ran = []
    while state.tasks:
        decision = kubernetes(state, "gang")
        (job,) = {name[0] for name in decision.start}
        assert len(decision.start) == 8
        waits = kubernetes(apply(state, decision), "gang").waiting
        assert {reason.why for reason in waits.values()} <= {Why.GANG}
        ran.append(job)
        state = replace(state, tasks=tuple(t for t in state.tasks if t.group != job))
    assert ran == ["a", "b"]


def test_min_members() -> None:
    """A gang starts with as many pods as fit, if they are enough; pods of running jobs join."""
    agents = (Agent("n1", 4), Agent("n2", 2))
    state = State(agents, PODS, (Group("a", min_members=5), Group("b", priority=99, min_members=7)))
    decision = decide(Pool(state, scheduler="kubernetes", mode="gang"))["default"]
    assert len(decision.start) == 6 and {name[0] for name in decision.start} == {"a"}
    assert decision.waiting["a7"].why is Why.ROOM and decision.waiting["b0"].why is Why.NEVER
    more = replace(apply(state, decision), agents=(*agents, Agent("n3", 1)))
    assert list(kubernetes(more, "gang").start) == ["a6"]
    alone = State((Agent("n", 4),), (Task("a", 4, allocation={"n": 4}), Task("b", 4)))
    assert kubernetes(alone, "gang").waiting["b"].text == "requests 4 slots, 0 are free"
    few = replace(state, groups=(Group("a", min_members=9),))
    assert kubernetes(few, "gang").waiting["a0"].text == "its job starts 9 pods together, it has 8"


def test_a_pod_is_on_one_node_and_better_priorities_go_first() -> None:
    """8 GPUs on two nodes serve no pod of 8."""
    tasks = (Task("wide", 8), Task("late", 3, "first", submitted=1), Task("early", 3))
    state = State((Agent("n1", 4), Agent("n2", 4)), tasks, (Group("first", priority=1),))
    decision = kubernetes(state)
    assert list(decision.start) == ["late", "early"]
    assert decision.waiting["wide"].why is Why.NEVER


@given(states())
def test_properties(state: State) -> None:
    """Slots suffice; by default no waiting pod fits any more; gangs start with all they need."""
    free = {m.name: m.free for m in machines(state)}
    for mode in ("default", "gang"):
        decision: Decision = kubernetes(state, mode)  # type: ignore[arg-type]
        after = apply(state, decision)
        assert not kubernetes(after) if mode == "default" else not kubernetes(after, "gang")
        waiting = {task.name for task in state.tasks if not task.is_running}
        assert set(decision.start) | set(decision.waiting) == waiting and not decision.release
        used = dict.fromkeys(free, 0)
        for where in decision.start.values():
            assert len(where) == 1
            for agent, slots in where.items():
                used[agent] += slots
        assert all(used[name] <= free[name] for name in free)
    groups = {task.group for task in state.tasks if task.name in decision.start}
    for group in groups - {None}:
        running = [task.is_running for task in after.tasks if task.group == group]
        assert all(running)
