"""The priority scheduler: upstream's situations, queue positions, backfill, both walks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from determined_states import agents, apply, groups, row, started, tasks, with_tasks, without
from test_determined_oracle import order

from optsched.cluster import determined
from optsched.cluster.determined import Decision, State

Variant = Literal["code", "docs"]

LEVELS = groups(low=50, high=40)


def priority(state: State, preemption: bool = True, variant: Variant = "code") -> Decision:
    """The scheduler with preemption, unless a test says otherwise."""
    return determined.priority(state, preemption, variant)


def test_preemption_is_off_by_default() -> None:
    """As in Determined: nothing running is released for a better level."""
    rows = tasks(row(4, "low", agent=0), row(4, "high"))
    assert not determined.priority(State(agents(4), rows, LEVELS))
    assert priority(State(agents(4), rows, LEVELS)).release == ("t0",)


def test_order_by_priority_then_submission() -> None:
    """Older ones first inside a priority, wherever they are listed."""
    rows = tasks(
        row(4, "low", submitted=15), row(1, "low", submitted=0), row(0, "high", submitted=15),
        row(0, "high", submitted=0), row(4, "high", submitted=15), row(4, "high", submitted=0),
    )  # fmt: skip
    state = State((), rows, LEVELS)
    assert order(state) == ["t3", "t5", "t2", "t4", "t1", "t0"]
    running = [replace(task, allocation={}) if task.name == "t4" else task for task in rows]
    assert order(replace(state, tasks=tuple(running))) == order(state)


def test_positions_go_before_submit_times() -> None:
    """Ascending; negative ones behind all others, among each other by submission."""
    rows = tasks(
        row(1, position=3), row(1, position=1.5), row(1, position=-1), row(1, position=0.5),
        row(1, position=-7), row(1, position=3),
    )  # fmt: skip
    assert order(State((), rows)) == ["t3", "t1", "t0", "t5", "t2", "t4"]


def test_zero_beside_a_negative_position() -> None:
    """Upstream only looks whether one is positive: then it is in front, else submission decides."""
    rows = tasks(row(1, position=-1), row(1, position=0))
    assert order(State((), rows)) == ["t0", "t1"]
    assert order(State((), tasks(row(1, position=0), row(1, position=-1)))) == ["t0", "t1"]
    rows = tasks(row(1, position=-1), row(1, position=0), row(1, position=5), row(1, position=-3))
    # t2 is behind t1 and before t0, which Go's insertion does not ask any more
    assert order(State((), rows)) == ["t0", "t1", "t2", "t3"]
    levels = groups(a=1, b=2)
    rows = tasks(row(1, "b", position=-1), row(1, "a", position=0), row(1, "b", position=2))
    assert order(State((), rows, levels)) == ["t1", "t2", "t0"]


def test_agents_are_those_of_the_second_look() -> None:
    """What was only placed for later takes no room when it comes to starting.

    Behind a task that fits nowhere, backfill may start t2 but not t1, which is not preemptible. t1
    was placed on the smaller agent, the best fit; that is where t2 really goes.
    """
    rows = tasks(row(8, "high"), row(2, "low", preemptible=False), row(2, "low"))
    state = State(agents(2, 4), rows, LEVELS)
    decision = priority(state)
    assert decision.start == {"t2": {"agent0": 2}} and decision.backfilled == ("t2",)
    assert apply(state, decision).tasks[2].allocation == {"agent0": 2}


def test_positions_beside_none_are_sorted_as_upstream_does() -> None:
    """No order at all (t0 before t1 before t2 before t0), hence by insertion, as Go's sort."""
    rows = tasks(row(1, position=2), row(1), row(1, position=1))
    assert order(State((), rows)) == ["t0", "t1", "t2"]
    rows = tasks(row(1, position=2), row(1, position=1), row(1))
    assert order(State((), rows)) == ["t1", "t0", "t2"]
    many = tasks(*[row(1, position=9 - i if i < 9 else None) for i in range(30)])
    assert sorted(order(State((), many))) == sorted(task.name for task in many)


def test_zero_slot_tasks_need_a_unit() -> None:
    """An agent without units takes only the task with slots."""
    state = State(agents(4), tasks(row(4, "high"), row(0, "low")), LEVELS)
    assert started(priority(state)) == {"t0"}


MIXED = tasks(
    row(4, "low"), row(1, "low"), row(1, "high"), row(0, "high"), row(4, "high"), row(0, "low")
)


def test_without_preemption() -> None:
    """High ones first, then what is left; tasks without slots beside them."""
    state = State(agents(4, 4, zero_slots=100), MIXED, LEVELS)
    decision = priority(state, preemption=False)
    assert started(decision) == {"t1", "t2", "t3", "t4", "t5"} and not decision.release
    # more tasks of the low level: two slots are left, and t0 does not block its own level
    state = with_tasks(apply(state, decision), tasks(*[row(1, "low")] * 3, first=7))
    assert started(priority(state, preemption=False)) == {"t7", "t8"}


def test_a_better_level_blocks_a_worse_one_without_preemption() -> None:
    """A task of twelve on eight slots: nothing of the lower level starts."""
    state = State(agents(4, 4), tasks(row(4, "low"), row(1, "low"), row(12, "high")), LEVELS)
    assert not priority(state, preemption=False)
    assert started(priority(state)) == {"t0", "t1"}
    assert set(priority(state).backfilled) == {"t0", "t1"}
    assert not priority(state, variant="docs")


def test_a_full_cluster_starts_nobody() -> None:
    """All eight slots taken, then two more tasks of the high level."""
    rows = tasks(
        row(4, "low"), row(1, "low"), row(1, "high"), row(1, "high"), row(4, "high"), row(1, "low")
    )
    state = State(agents(4, 4), rows, LEVELS)
    decision = priority(state, preemption=False)
    assert started(decision) == {"t1", "t2", "t3", "t4", "t5"}
    state = apply(state, decision)
    full = with_tasks(state, tasks(row(1, "high"), row(1, "high"), first=6))
    assert not priority(full, preemption=False)
    # and when all of them have ended, a task of four of each level starts
    ended = with_tasks(without(state, started(decision)), tasks(row(4, "high"), first=6))
    assert started(priority(ended, preemption=False)) == {"t0", "t6"}


def test_a_worse_level_waits_for_a_misfit() -> None:
    """Three of four slots taken, two asked for: the low task waits although it would fit."""
    rows = tasks(row(1, "low"), *[row(1, "high")] * 3, row(2, "high"))
    state = State(agents(4), rows, LEVELS)
    first = priority(state, preemption=False)
    assert started(first) == {"t1", "t2", "t3"}
    state = apply(state, first)
    assert not priority(state, preemption=False)
    assert started(priority(without(state, started(first)), preemption=False)) == {"t0", "t4"}


def test_units_are_taken_one_by_one() -> None:
    """One unit: one of two starts; a better one waits, or takes it with preemption."""
    state = State(agents(4, zero_slots=1), tasks(row(0, "low"), row(0, "low")), LEVELS)
    decision = priority(state, preemption=False)
    assert started(decision) == {"t0"}
    state = with_tasks(apply(state, decision), tasks(row(0, "high"), first=2))
    assert not priority(state, preemption=False)
    assert priority(state).release == ("t0",)


def test_preemption() -> None:
    """The middle task is released for a high one; nothing starts, not even what would fit."""
    levels = groups(low=50, middle=45, high=40)
    rows = tasks(
        row(1, "low"), row(4, "middle", agent=0), row(4, "high", agent=1), row(4, "high"),
        row(8, "high"),
    )  # fmt: skip
    decision = priority(State(agents(4, 4), rows, levels))
    assert not decision.start and decision.release == ("t1",)


def test_backfilling_above_the_level_that_preempts() -> None:
    """Levels above the first release start, also as backfill; those from there on do not."""
    levels = groups(last=55, low=50, middle=45, high=40)
    rows = tasks(
        row(1, "last", agent=0), row(1, "low"), row(1, "middle"), row(4, "high", agent=1),
        row(2, "high"), row(8, "high"),
    )  # fmt: skip
    state = State(agents(4, 4), rows, levels)
    decision = priority(state)
    assert started(decision) == {"t2", "t4"} and decision.release == ("t0",)
    assert decision.backfilled == ("t2",)
    # without backfill the middle task only keeps its place, so that the low one still releases
    decision = priority(state, variant="docs")
    assert started(decision) == {"t4"} and decision.release == ("t0",)


def test_preemption_and_backfill_of_tasks_without_slots() -> None:
    """As with slots, by units."""
    levels = groups(last=55, low=50, middle=45, high=40)
    one = (*agents(0, zero_slots=1), replace(agents(0, 0, zero_slots=1)[1]))
    rows = tasks(row(0, "low"), row(0, "middle", agent=0), row(0, "high", agent=1), row(0, "high"))
    decision = priority(State(one, rows, levels))
    assert not decision.start and decision.release == ("t1",)
    two = (*agents(0, zero_slots=4), agents(0, 0, zero_slots=1)[1])
    rows = tasks(row(0, "last"), row(0, "low", agent=0), row(0, "middle", agent=1), row(0, "high"))
    decision = priority(State(two, rows, levels))
    assert started(decision) == {"t0", "t3"} and not decision.release


@pytest.mark.parametrize("positions", [(1, 2, 1.5), (1, 1, 0.999)])
def test_preemption_by_position_takes_one(positions: tuple[float, float, float]) -> None:
    """The last in the queue first, and no more than needed."""
    rows = tasks(
        row(1, "a", agent=0, position=positions[0]), row(4, "b", agent=1, position=positions[1]),
        row(4, "c", position=positions[2]),
    )  # fmt: skip
    state = State(agents(4, 4), rows, groups(a=42, b=42, c=42))
    decision = priority(state)
    assert not decision.start and decision.release == ("t1",)
    unplaced = replace(state, tasks=tuple(replace(task, position=None) for task in rows))
    assert not priority(unplaced)


def test_no_preemption_by_position_if_it_does_not_help() -> None:
    """Eight slots are never free: the one ahead in the queue stays."""
    rows = tasks(row(1, agent=0, position=1), row(4, agent=1, position=2), row(8, position=1.5))
    assert not priority(State(agents(4, 4), rows))


def test_a_task_ahead_in_the_queue_ends_the_search() -> None:
    """Also one that cannot be preempted itself."""
    rows = tasks(
        row(4, agent=0, position=5), row(4, agent=1, position=3, preemptible=False),
        row(4, agent=2, position=6, preemptible=False), row(4, position=4), row(4, position=2),
    )  # fmt: skip
    state = State(agents(4, 4, 4), rows)
    # t4 (place 2) releases t0 (place 5), then t3 (place 4) finds nobody behind it any more
    assert priority(state).release == ("t0",)


def test_what_was_released_makes_room_for_more() -> None:
    """A gang of four is released for one slot; two more tasks find their place there."""
    rows = tasks(row(4, "low", agent=0), *[row(1, "high")] * 3, row(2, "high"))
    state = State(agents(4), rows, LEVELS)
    assert priority(state).release == ("t0",)
    both = tasks(row(2, "low", agent=0), row(2, "low", agent=0), *[row(1, "high")] * 3)
    assert priority(State(agents(4), both, LEVELS)).release == ("t1", "t0")


def test_the_walk_of_the_documentation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both walks, all seven steps; they part at the sixth."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    from determined_walks import walk

    code, docs = walk("code"), walk("docs")
    assert [step.running for step in code[:5]] == [step.running for step in docs[:5]]
    assert code[0].running == {"asha": 8}
    assert code[1].running == {"asha": 4, "distributed": 4} and code[1].preempted == 4
    assert code[2].running == {"asha": 4, "distributed": 4}
    assert code[3].running == {"notebook": 1}
    assert code[4].running == {"notebook": 1} and code[4].waiting == {"eight": 8}
    assert code[5].running == {"notebook": 1, "four": 4} and code[5].preempted == 0
    assert docs[5].running == {"notebook": 1} and docs[5].waiting == {"eight": 8, "four": 4}
    assert code[6].preempted == 1 and docs[6].preempted == 0
    for steps in (code, docs):
        assert steps[6].running == {"eight": 8} and steps[6].waiting == {"four": 4}
        assert steps[7].running == {"four": 4} and not steps[7].waiting
