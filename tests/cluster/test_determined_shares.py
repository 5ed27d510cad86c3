"""Fair share as documented: newcomers get their share of a full cluster; why tasks wait."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from determined_oracle import machines
from determined_states import offers
from hypothesis import given
from hypothesis import strategies as st
from test_determined_oracle import states

from optsched.cluster.determined import (
    Agent,
    Group,
    Pool,
    State,
    Task,
    apply,
    decide,
    document,
    fair_share,
    find_fit,
    priority,
)
from optsched.cluster.world.policy import Why
from optsched_solvers.quota import proportional


def running(state: State) -> dict[str, int]:
    """Slots held by group."""
    held = {task.group or task.name: 0 for task in state.tasks}
    for task in state.tasks:
        held[task.group or task.name] += task.slots if task.is_running else 0
    return held


@st.composite
def singles(draw: Any) -> State:
    """Groups of single-slot tasks, of which any may run, on a few agents."""
    sizes = draw(st.lists(st.integers(1, 8), min_size=1, max_size=4))
    agents = tuple(Agent(f"n{a}", size) for a, size in enumerate(sizes))
    weights = draw(st.lists(st.sampled_from([0.5, 1, 1, 2, 3]), min_size=1, max_size=5))
    groups = tuple(Group(f"g{g}", weight) for g, weight in enumerate(weights))
    slots = [agent.name for agent in agents for _ in range(agent.slots)]
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    random.shuffle(slots)
    tasks = []
    for i in range(draw(st.integers(1, 40))):
        where = {slots.pop(): 1} if slots and random.random() < 0.6 else None
        group = groups[random.integers(len(groups))].name
        tasks.append(Task(f"t{i}", 1, group, submitted=int(random.integers(9)), allocation=where))
    return State(agents, tuple(tasks), groups, draw(st.sampled_from(["best", "worst"])))


@given(singles())
def test_shares_are_reached_from_any_start(state: State) -> None:
    """One decision releases what is above the shares; once that has stopped, the others start.

    The shares are those of an idle cluster: demand times weight, bounded by demand.
    """
    idle = replace(state, tasks=tuple(replace(task, allocation=None) for task in state.tasks))
    shares = offers(idle, "docs")
    demand = {name: sum(t.group == name for t in state.tasks) for name in shares}
    weight = {group.name: group.weight for group in state.groups}
    slots, most = sum(agent.slots for agent in state.agents), sum(demand.values())
    assert sum(shares.values()) == min(slots, most)
    scores = np.array([demand[name] * weight[name] for name in shares])
    if (scores > 0).all() and min(shares.values()) > 0 and len({*scores.tolist()}) == len(scores):
        high = np.minimum(np.array([*demand.values()]), slots)
        exact, _ = proportional(scores, min(slots, most), np.zeros(len(scores), np.int64), high)
        assert exact.tolist() == [*shares.values()]
    first = fair_share(state, "docs")
    after = apply(state, first)
    second = fair_share(after, "docs")
    assert not second.release
    settled = apply(after, second)
    assert {**dict.fromkeys(running(state), 0), **shares} == running(settled)
    assert not fair_share(settled, "docs")


def test_the_newcomer_of_the_text() -> None:
    """Eight slots held by ten tasks' group; thirty tasks come: two and six."""
    held = [Task(f"a{i}", 1, "a", allocation={"n": 1} if i < 8 else None) for i in range(10)]
    come = [Task(f"b{i}", 1, "b", submitted=1) for i in range(30)]
    state = State((Agent("n", 8),), (*held, *come))
    decision = fair_share(state, "docs")
    assert len(decision.release) == 6 and not decision.start
    assert decision.waiting["b0"].why is Why.RELEASE and decision.postponed[0] == "b0"
    assert decision.waiting["b9"].why is Why.SHARE
    after = apply(state, decision)
    assert running(apply(after, fair_share(after, "docs"))) == {"a": 2, "b": 6}
    assert not fair_share(state), "as the code decides, nothing changes"


@given(states(most_tasks=12))
def test_documented_shares_come_to_rest(state: State) -> None:
    """Starts and releases end after a few looks, and who waits then has no room or no share."""
    state = replace(state, tasks=tuple(replace(t, position=None) for t in state.tasks))
    for _ in range(12):
        decision = fair_share(state, "docs")
        if not decision:
            break
        state = apply(state, decision)
    else:
        pytest.fail(f"still {decision}")
    assert {reason.why for reason in decision.waiting.values()} <= {
        Why.NEVER, Why.SHARE, Why.ROOM, Why.GANG,
    }  # fmt: skip


@given(states(), st.sampled_from(["fair_share", "priority"]), st.sampled_from(["code", "docs"]),
       st.booleans())  # fmt: skip
def test_every_waiting_task_has_a_reason(
    state: State, scheduler: Any, variant: Any, preemption: bool
) -> None:
    """`never`: not even on the idle cluster; `release`: the next decision starts it."""
    pool = Pool(state, "p", scheduler, variant, preemption)
    decision = pool.decide()
    waiting = {task.name: task for task in state.tasks if not task.is_running}
    assert set(decision.waiting) == set(waiting) - set(decision.start)
    idle = replace(state, tasks=(), agents=tuple(replace(a, used=0) for a in state.agents))
    free, following = sum(m.free for m in machines(state)), None
    for name, (why, text) in decision.waiting.items():
        assert text and "\n" not in text
        assert (why is Why.NEVER) is (find_fit(idle, waiting[name]) == {})
        if why is Why.ROOM and not decision.start and waiting[name].slots:
            blocked = sum(m.free for m in machines(state) if m.name in waiting[name].blocked)
            assert waiting[name].slots > free - blocked
        if why is Why.RELEASE:
            following = following or replace(pool, state=apply(state, decision)).decide()
            assert decision.release and name in following.start
    answer = json.loads(document.to_json(document.answer_of([pool], {"p": decision})))
    assert {row["task"]: row["why"] for row in answer.get("waiting", ())} == {
        name: reason.why.value for name, reason in decision.waiting.items()
    }
    assert document.read_answer(answer, "answer").waiting or not decision.waiting


def test_reasons_of_the_priority_scheduler() -> None:
    """Behind a better one, for whom room is made, too large for ever, in pieces."""
    agents = (Agent("n0", 4), Agent("n1", 2))
    groups = (Group("first", priority=1), Group("last", priority=90))
    tasks = (
        Task("runs", 2, "last", allocation={"n0": 2}), Task("wide", 4, "first", submitted=1),
        Task("small", 1, "last", submitted=2), Task("never", 12, "first", submitted=3),
        Task("pieces", 3, "last", submitted=4),
    )  # fmt: skip
    state = State(agents, tasks, groups)
    why = {name: reason.why for name, reason in priority(state).waiting.items()}
    assert why == {
        "wide": Why.GANG, "never": Why.NEVER, "small": Why.ORDER, "pieces": Why.GANG,
    }  # fmt: skip
    text = priority(state).waiting["small"].text
    assert text == 'fits, but waits for "wide" of priority 1'
    decision = priority(state, preemption=True)
    assert decision.release == ("runs",) and decision.waiting["wide"].why is Why.RELEASE
    assert decide([Pool(state, scheduler="priority")])["default"].waiting == priority(state).waiting
