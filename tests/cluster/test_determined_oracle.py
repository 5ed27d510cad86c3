"""Both schedulers against a slow twin that follows the text, on random states; invariants."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import determined_oracle as oracle
import pytest
from determined_states import offers
from hypothesis import given
from hypothesis import strategies as st

from optsched.cluster.determined import (
    Agent,
    Group,
    State,
    Task,
    apply,
    fair_share,
    find_fit,
    priority,
)
from optsched.cluster.determined.decisions import table
from optsched.cluster.determined.priority_scheduler import in_order


def order(state: State) -> list[str]:
    """All tasks in the order of the priority scheduler."""
    _, columns, rows = table(state)
    return [rows[i].name for i in in_order(columns).tolist()]


@st.composite
def states(draw: Any, *, flags: bool = True, most_tasks: int = 14) -> State:
    """Small clusters whose running tasks were put there by the fitting itself."""
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 4, 4, 8]), min_size=1, max_size=5))
    agents = tuple(
        Agent(f"n{a}", n, zero_slots=draw(st.integers(0, 2)),
              drained=flags and draw(st.integers(0, 9)) == 0,
              disabled=flags and draw(st.integers(0, 9)) == 0)
        for a, n in enumerate(sizes)
    )  # fmt: skip
    groups = tuple(
        Group(
            f"g{k}",
            draw(st.sampled_from([0, 0.1, 0.5, 1, 1, 3])),
            draw(st.sampled_from([None, None, 0, 2, 5])),
            draw(st.sampled_from([1, 40, 42, 50, 99])),
        )
        for k in range(draw(st.integers(0, 4)))
    )
    positions = draw(st.sampled_from(["none", "all", "some"]))
    tasks = []
    for i in range(draw(st.integers(0, most_tasks))):
        placed = positions == "all" or (positions == "some" and draw(st.booleans()))
        tasks.append(
            Task(
                f"t{i}",
                draw(st.sampled_from([0, 1, 1, 1, 2, 2, 3, 4, 6, 8, 12])),
                draw(st.sampled_from([None, "unlisted", *(g.name for g in groups)])),
                draw(st.booleans()) or draw(st.booleans()),
                submitted=draw(st.integers(0, 6)),
                requested=draw(st.integers(0, 1)),
                position=draw(st.integers(-1, 5)) if placed else None,
                blocked=draw(st.sets(st.sampled_from([a.name for a in agents]), max_size=2))
                if draw(st.integers(0, 4)) == 0
                else frozenset(),
                single_agent=draw(st.integers(0, 4)) == 0,
            )
        )
    open_agents = tuple(replace(a, drained=False, disabled=False) for a in agents)
    state = State(
        open_agents,
        tuple(tasks),
        groups,
        draw(st.sampled_from(["best", "worst"])),
        draw(st.booleans()),
    )
    for task in tasks:
        if draw(st.booleans()) and (fits := find_fit(state, task)):
            rows = [replace(t, allocation=fits) if t.name == task.name else t for t in state.tasks]
            state = replace(state, tasks=tuple(rows))
    return replace(state, agents=agents)


@given(states())
def test_fits_are_those_of_the_text(state: State) -> None:
    """Every task, waiting or not, on the cluster as it is."""
    for task in state.tasks:
        expected = oracle.fits(task, oracle.machines(state), state)
        assert find_fit(state, task) == oracle.told(expected)


@given(states())
def test_fair_share_is_that_of_the_text(state: State) -> None:
    """The decision, its order, and that the state has not changed."""
    before = deepcopy((state.agents, state.groups, [repr(task) for task in state.tasks]))
    decision = fair_share(state)
    meant, release = oracle.fair_share(state)
    start, late = oracle.second_look(state, meant)
    assert decision.start == start and list(decision.start) == list(start)
    assert list(decision.postponed) == late
    assert list(decision.release) == release
    assert before == (state.agents, state.groups, [repr(task) for task in state.tasks])
    assert fair_share(state) == decision


@given(states(most_tasks=24), st.booleans(), st.sampled_from(["code", "docs"]))
def test_priority_is_that_of_the_text(state: State, preemption: bool, variant: Any) -> None:
    """The decision, and what is released for whom."""
    decision = priority(state, preemption, variant)
    meant, release = oracle.priority(state, order(state), preemption, variant == "code")
    start, late = oracle.second_look(state, meant)
    assert decision.start == start and list(decision.start) == list(start)
    assert list(decision.postponed) == late and list(decision.release) == release
    assert set(decision.backfilled) <= set(start)
    assert priority(state, preemption, variant) == decision


@given(states(most_tasks=12))
def test_the_order_is_that_of_the_text(state: State) -> None:
    """Positions of all kinds, missing ones among them."""
    assert order(state) == oracle.by_positions(state)


@given(states(), st.sampled_from(["fair_share", "priority"]), st.sampled_from(["code", "docs"]))
def test_invariants(state: State, scheduler: str, variant: Any) -> None:
    """Only waiting tasks start, only preemptible running ones are released, capacity holds."""
    decide = fair_share if scheduler == "fair_share" else priority
    decision = decide(state, variant=variant)
    tasks = {task.name: task for task in state.tasks}
    agents = {agent.name: agent for agent in state.agents}
    free = {m.name: m.free for m in oracle.machines(state)}
    units = {m.name: m.zero_free for m in oracle.machines(state)}
    for name, where in decision.start.items():
        task = tasks[name]
        assert not task.is_running and sum(where.values()) == task.slots
        assert not set(where) & task.blocked and (len(where) == 1 or not task.single_agent)
        for agent, slots in where.items():
            assert slots <= agents[agent].slots
            free[agent] -= slots
            units[agent] -= slots == 0
    assert min(free.values(), default=0) >= 0 and min(units.values(), default=0) >= 0
    assert not set(decision.postponed) & set(decision.start)
    assert all(tasks[name].is_running and tasks[name].preemptible for name in decision.release)
    assert len(set(decision.release)) == len(decision.release)
    after = apply(state, decision)
    for task in after.tasks:  # exactly what it says
        before = None if task.name in decision.release else tasks[task.name].allocation
        assert task.allocation == decision.start.get(task.name, before)
    held = {name: 0 for name in agents}
    for task in after.tasks:
        for agent, slots in (task.allocation or {}).items():
            held[agent] += slots
    assert all(held[name] <= agent.slots for name, agent in agents.items())
    shuffled = replace(state, tasks=state.tasks[::-1], agents=state.agents[::-1])
    assert decide(shuffled, variant=variant) == decision


@given(
    st.integers(1, 6), st.integers(1, 8), st.integers(1, 4), st.sampled_from([0.25, 1, 7]),
    st.integers(1, 40), st.integers(0, 2**30),
)  # fmt: skip
def test_equal_demands_and_weights(
    groups: int, tasks: int, slots: int, weight: float, capacity: int, seed: int
) -> None:
    """Both variants offer the same up to one slot; a gang may use what is left.

    Slots that divide evenly, with ample demand, are shared equally.
    """
    rows = [
        Task(f"g{g}.{i}", slots, f"g{g}", submitted=(seed >> g) % 3 + i)
        for g in range(groups)
        for i in range(tasks)
    ]
    sheet = tuple(Group(f"g{g}", weight) for g in range(groups))
    state = State(tuple(Agent(f"n{a}", 1) for a in range(capacity)), tuple(rows), sheet)
    code, docs = fair_share(state), fair_share(state, "docs")
    assert len(docs.start) >= len(code.start)
    if slots == 1 and capacity % groups == 0 and tasks * groups >= capacity:
        assert set(offers(state).values()) == {capacity // groups}
        assert len(fair_share(state).start) == capacity


@pytest.mark.parametrize("groups", [13, 40])
def test_many_groups(groups: int) -> None:
    """Beyond Go's insertion sort; weights whose sum depends on the order."""
    rows = tuple(
        Task(f"t{g}.{i}", 1 + g % 4, f"g{g}", submitted=(g * 7) % groups)
        for g in range(groups)
        for i in range(3)
    )
    sheet = tuple(Group(f"g{g}", 0.1 * (1 + g % 5)) for g in range(groups))
    for slots in (4, 16, 64):
        state = State((Agent("n", slots), Agent("m", slots)), rows, sheet)
        meant, release = oracle.fair_share(state)
        start, _ = oracle.second_look(state, meant)
        decision = fair_share(state)
        assert decision.start == start and list(decision.release) == release
