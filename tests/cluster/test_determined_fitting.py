"""Which agent takes a task: upstream's tables, ties by hash, whole agents, mixed sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from determined_states import agents

from optsched.cluster.determined import Agent, State, Task, find_fit

# slots, used, zero-slot units, used units of both agents; the task's slots; fit; which agent
ONE_OF_TWO = [
    ((4, 0, 100, 0), (4, 0, 100, 0), 0, "best", 0),
    ((4, 0, 100, 2), (4, 0, 100, 2), 0, "best", 0),
    ((4, 0, 2, 0), (4, 0, 4, 2), 0, "best", 0),
    ((4, 0, 100, 1), (4, 0, 100, 0), 0, "best", 0),
    ((4, 0, 2, 1), (4, 0, 2, 0), 0, "best", 0),
    ((2, 0, 100, 0), (4, 0, 100, 0), 2, "best", 0),
    ((1, 0, 100, 0), (4, 0, 100, 0), 1, "best", 0),
    ((4, 0, 100, 0), (1, 0, 100, 0), 1, "best", 1),
    ((4, 0, 100, 0), (1, 0, 100, 0), 4, "best", 0),
    ((4, 0, 100, 0), (4, 0, 100, 0), 1, "best", 0),
    ((2, 0, 100, 0), (4, 2, 100, 0), 2, "best", 0),
    ((2, 1, 100, 0), (4, 1, 100, 0), 1, "worst", 1),
    ((4, 1, 100, 0), (2, 1, 100, 0), 1, "worst", 0),
    ((2, 1, 100, 0), (5, 3, 100, 0), 1, "worst", 0),
    ((2, 0, 100, 0), (5, 3, 100, 0), 2, "worst", 0),
    ((4, 0, 100, 0), (4, 0, 100, 0), 4, "worst", 0),
    ((8, 0, 100, 0), (4, 0, 100, 0), 4, "worst", 0),
    ((4, 0, 100, 0), (4, 0, 100, 0), 2, "best", 0),
    ((1, 0, 100, 0), (3, 0, 100, 0), 2, "best", 1),
]


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize(("one", "two", "slots", "fit", "expected"), ONE_OF_TWO)
def test_one_of_two_agents(
    one: tuple[int, ...], two: tuple[int, ...], slots: int, fit: Any, expected: int, single: bool
) -> None:
    """Upstream's table, the agents listed in either order; agent1 is nearer to task1 by hash."""
    pair = [Agent("agent1", *one), Agent("agent2", *two)]
    task = Task("task1", slots, single_agent=single)
    for listed in (pair, pair[::-1]):
        assert find_fit(State(tuple(listed), fit=fit), task) == {pair[expected].name: slots}


@pytest.mark.parametrize(
    ("slots", "sizes", "heterogeneous", "expected"),
    [
        (10, [1, 5, 10], False, {2}),
        (16, [8, 7, 7, 4, 4, 4, 4], False, {3, 4, 5, 6}),
        (16, [3, 3, 3, 3, 3], False, set()),
        (12, [8, 8, 3, 3, 3], False, set()),
        (8, [4, 4, 4, 4, 4], False, 2),
        (4, [2, 1, 1], True, {0, 1, 2}),
        (4, [2, 1, 1], False, set()),
        (4, [2, 1, 1, 1, 1], True, {1, 2, 3, 4}),
        (4, [2, 1, 1, 1], True, 3),
        (8, [2, 1, 1], True, set()),
        (63, [32, 32, 16, 16, 8, 8, 4, 4, 2, 2, 1, 1], True, 6),
        (12, [8, 6, 6], True, {1, 2}),  # one size first
        (12, [8, 6, 6, 6], True, 2),
        (14, [8, 6, 6], True, 2),
        (18, [8, 6, 6], True, set()),  # 8 + 6, then 4 are left
        (12, [8, 7, 5], True, set()),  # 8, then 4 are left: no way back to 7 + 5
        (16, [8, 8, 4, 4, 4, 4], False, {0, 1}),  # the largest size first
    ],
)
def test_whole_agents(slots: int, sizes: list[int], heterogeneous: bool, expected: Any) -> None:
    """Idle agents of one size that divides the request, else (if allowed) of several."""
    for fit in ("best", "worst"):
        state = State(agents(*sizes), fit=fit, heterogeneous=heterogeneous)  # type: ignore[arg-type]
        found = find_fit(state, Task("a", slots))
        assert sum(found.values()) in (0, slots)
        if isinstance(expected, int):
            assert len(found) == expected
        else:
            assert set(found) == {f"agent{a}" for a in expected}
        if len(found) > 1:
            assert not find_fit(state, Task("a", slots, single_agent=True))


def test_only_idle_agents_are_taken_whole() -> None:
    """A used, drained or disabled agent is none of them; zero-slot tasks do not matter."""
    base = agents(4, 4, 4)
    task = Task("t", 8)
    for change in ({"used": 1}, {"drained": True}, {"disabled": True}):
        state = State((base[0], replace(base[1], **change), base[2]))  # type: ignore[arg-type]
        assert set(find_fit(state, task)) == {"agent0", "agent2"}
        assert not find_fit(replace(state, agents=state.agents[:2]), task)
    units = tuple(replace(agent, zero_slots=5, zero_used=5) for agent in base)
    assert len(find_fit(State(units), task)) == 2


def test_ties_go_round_the_agents() -> None:
    """Tasks of different names are spread over equal agents, always in the same way."""
    state = State(tuple(Agent(f"n{a}", 8) for a in range(10)))
    taken = [next(iter(find_fit(state, Task(f"task{i}", 1)))) for i in range(200)]
    assert set(taken) == {f"n{a}" for a in range(10)}
    assert taken == [next(iter(find_fit(state, Task(f"task{i}", 1)))) for i in range(200)]
