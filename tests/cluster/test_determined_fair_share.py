"""Fair share: upstream's situations, the figures of the documentation, and its properties."""

from __future__ import annotations

from dataclasses import replace

import pytest
from determined_states import agents, apply, on, row, started, tasks

from optsched.cluster.determined import (
    Agent,
    Group,
    State,
    Task,
    fair_share,
    fair_share_offers,
)

BOTH = pytest.mark.parametrize("variant", ["code", "docs"])


def many(group: str, count: int, slots: int = 1, first: int = 0, **rest: object) -> list[Task]:
    """Equal tasks of one group, submitted one after the other."""
    return [
        Task(f"{group}{i}", slots, group, submitted=first + i, **rest)  # type: ignore[arg-type]
        for i in range(count)
    ]


def test_a_limit_of_slots_leaves_the_rest_to_others() -> None:
    """Four slots, two groups of four single tasks, the first limited to one slot."""
    state = State(
        agents(4), tasks(*[row(1, "a")] * 4, *[row(1, "b")] * 4),
        (Group("a", 1.0, max_slots=1), Group("b", 0.0)),
    )  # fmt: skip
    assert started(fair_share(state)) == {"t0", "t4", "t5", "t6"}


def test_weights_multiply_shares_up_to_the_demand() -> None:
    """Eight slots at weights 10 : 30; the heavy group gets six, the light one two."""
    state = State(
        agents(8), tasks(*[row(1, "a")] * 3, *[row(1, "b")] * 7),
        (Group("a", 10, max_slots=100), Group("b", 30, max_slots=100)),
    )  # fmt: skip
    assert started(fair_share(state)) == {"t0", "t1", "t3", "t4", "t5", "t6", "t7", "t8"}


@BOTH
def test_two_gangs_fit_beside_each_other(variant: str) -> None:
    """Two agents of four, two tasks of four, weights 0 as upstream's test leaves them."""
    state = State(agents(4, 4), tasks(row(4, "a"), row(4, "b")), (Group("a", 0), Group("b", 0)))
    assert started(fair_share(state, variant)) == {"t0", "t1"}  # type: ignore[arg-type]


@BOTH
def test_what_exceeds_the_limit_is_released_oldest_first(variant: str) -> None:
    """Four running tasks of a group that may have two slots."""
    state = State(agents(4), tasks(*[row(1, "a", agent=0)] * 4), (Group("a", max_slots=2),))
    decision = fair_share(state, variant)  # type: ignore[arg-type]
    assert decision.release == ("t0", "t1") and not decision.start


@BOTH
def test_a_group_at_its_limit_waits(variant: str) -> None:
    """Two agents of two with one slot used each: the task of two fits nowhere now."""
    state = State(
        agents(2, 2), tasks(row(2, "a"), row(1, "a", agent=0), row(1, "a", agent=1)),
        (Group("a", max_slots=2),),
    )  # fmt: skip
    assert not fair_share(state, variant)  # type: ignore[arg-type]
    assert not fair_share(
        replace(state, agents=agents(2, 2, shown=0)),
        variant,  # type: ignore[arg-type]
    )


@BOTH
def test_gangs_do_not_block_each_other(variant: str) -> None:
    """Two slots, two tasks of two: one slot each would start nobody, so the later one waits."""
    state = State(agents(2), tasks(row(2, "a"), row(2, "b")))
    assert started(fair_share(state, variant)) == {"t0"}  # type: ignore[arg-type]


@BOTH
def test_a_task_larger_than_the_cluster_is_ignored(variant: str) -> None:
    """Five slots asked of four."""
    state = State(agents(4), tasks(row(5, "a"), row(4, "b")))
    assert started(fair_share(state, variant)) == {"t1"}  # type: ignore[arg-type]


def test_active_tasks_count_in_their_group() -> None:
    """Agents of 4 and 3, one slot held: the gang of four yields to three others."""
    rows = tasks(row(3, "a"), row(1, "b"), row(1, "b", agent=1), row(4, "c"), row(1, "d"))
    bare = tuple(Group(name, 0) for name in "abcd")
    for shown in (None, 0):
        state = State(agents(4, 3, shown=shown), rows, bare)
        assert started(fair_share(state)) == {"t0", "t1", "t4"}
        assert fair_share(state).release == ()


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_too_much_is_held_without_groups(weight: float) -> None:
    """Five slots held of four: the larger task's share is three, so it goes."""
    rows = tasks(row(4, "a", agent=0), row(1, "b", agent=0))
    state = State(agents(4, shown=0), rows, (Group("a", weight), Group("b", weight)))
    assert fair_share(state).release == ("t0",)


@BOTH
def test_the_later_of_two_gives_way(variant: str) -> None:
    """Two tasks on one slot."""
    state = State(agents(1, shown=0), tasks(row(1, agent=0), row(1, agent=0)))
    assert fair_share(state, variant).release == ("t1",)  # type: ignore[arg-type]


@BOTH
@pytest.mark.parametrize("group", ["g", None])
@pytest.mark.parametrize("fixed", [0, 1])
def test_what_cannot_be_preempted_stays(variant: str, group: str | None, fixed: int) -> None:
    """Two tasks on one slot, one of them not preemptible, in either order."""
    rows = tasks(*(row(1, group, agent=0, preemptible=i != fixed) for i in range(2)))
    state = State(agents(1, shown=0), rows, (Group("g", max_slots=2),))
    decision = fair_share(state, variant)  # type: ignore[arg-type]
    assert decision.release == (f"t{1 - fixed}",) and not decision.start


@BOTH
def test_blocked_agents(variant: str) -> None:
    """A task that may not use the only agent counts for nothing."""
    state = State(agents(1), tasks(row(1, "a", blocked=["agent0"]), row(1, "b")))
    assert started(fair_share(state, variant)) == {"t1"}  # type: ignore[arg-type]


def test_two_starts_may_want_the_same_agents() -> None:
    """Both fit alone on two of four agents; the second fits nowhere when its turn comes."""
    blocked = {"blocked": ["agent2", "agent3"]}
    state = State(agents(4, 4, 4, 4), tasks(row(8, "a", **blocked), row(8, "b", **blocked)))
    decision = fair_share(state)
    assert {name: sum(where.values()) for name, where in decision.start.items()} == {"t0": 8}
    assert decision.postponed == ("t1",)
    after = apply(state, decision)
    assert [task.is_running for task in after.tasks] == [True, False]


def test_a_blocked_task_does_not_take_part() -> None:
    """Upstream's three situations with blocked agents among running tasks."""
    rows = tasks(
        row(1, blocked=["agent0", "agent1"]), row(1, agent=0),
        row(1, blocked=["agent0"]), row(1, agent=1),
    )  # fmt: skip
    decision = fair_share(State(agents(1, 1, shown=0), rows))
    assert started(decision) == {"t2"} and decision.release == ("t3",)
    rows = tasks(*[row(1, blocked=["agent0"])] * 3, row(1, agent=0))
    assert not fair_share(State(agents(1, shown=0), rows))
    rows = tasks(row(1, blocked=["agent0"]), *[row(1, agent=0)] * 3)
    assert fair_share(State(agents(1, shown=0), rows)).release == ("t2", "t3")


def test_zero_slot_tasks_start_as_long_as_they_fit() -> None:
    """One unit, two tasks: both are meant to start, one of them does."""
    state = State((Agent("agent0", 1, zero_slots=1),), tasks(row(0), row(0), row(1)))
    decision = fair_share(state)
    assert decision.start == {"t0": on(0, 0), "t2": on(0, 1)} and decision.postponed == ("t1",)
    after = apply(state, decision)
    assert [task.is_running for task in after.tasks] == [True, False, True]
    assert not fair_share(after)


@pytest.mark.parametrize(
    ("variant", "weights", "expected"),
    [("code", (1, 1), (4, 4)), ("docs", (1, 1), (2, 6)),
     ("code", (3, 1), (6, 2)), ("docs", (3, 1), (4, 4))],
)  # fmt: skip
def test_the_example_of_the_documentation(
    variant: str, weights: tuple[int, int], expected: tuple[int, int]
) -> None:
    """Eight slots, demands of 10 and 30 single-slot tasks, at weights 1 : 1 and 3 : 1."""
    state = State(
        (Agent("n", 8),), tuple(many("a", 10) + many("b", 30)),
        (Group("a", weights[0]), Group("b", weights[1])),
    )  # fmt: skip
    assert tuple(fair_share_offers(state, variant).values()) == expected  # type: ignore[arg-type]
    names = list(fair_share(state, variant).start)  # type: ignore[arg-type]
    assert tuple(sum(name[0] == group for name in names) for group in "ab") == expected


@pytest.mark.parametrize(("variant", "expected"), [("code", (6, 4)), ("docs", (5, 5))])
def test_what_is_held_for_good(variant: str, expected: tuple[int, int]) -> None:
    """Ten slots, equal demands of 10, one side holds two: upstream loses the credit."""
    held = many("a", 2, preemptible=False, allocation={"n": 1})
    rows = [*held, *(replace(t, name=f"x{t.name}") for t in many("a", 8)), *many("b", 10, first=9)]
    state = State((Agent("n", 10),), tuple(rows))
    offers = fair_share_offers(state, variant)  # type: ignore[arg-type]
    assert (offers["a"], offers["b"]) == expected


def test_the_slip_of_the_sort_decides_who_waits() -> None:
    """Three gangs on three slots, demands by registration 1, 0, 2: not the latest gives way first.

    Offers are 1 each; upstream's sort has the groups registered at 1, 2, 0. So t1 (demand 2) is
    disabled first although t2 came later, its slot goes to t0 (demand 3), which is then at 2 of 3;
    t2 is next, and t0 gets all. Properly sorted, t2 goes first and its slot lets t1 start.
    """
    state = State(agents(3), tasks(row(3), row(2), row(3)))
    assert [task.slots for task in state.tasks] == [3, 2, 3]
    assert fair_share_offers(state) == {"t1": 0, "t0": 3, "t2": 0}
    assert started(fair_share(state)) == {"t0"}


def test_weight_zero_still_earns_a_slot_a_pass() -> None:
    """Alone it gets all it asks for; beside a weight it gets one slot of the first pass."""
    state = State((Agent("n", 8),), tuple(many("a", 5)), (Group("a", 0),))
    assert fair_share_offers(state) == {"a": 5}
    state = State(
        (Agent("n", 8),), tuple(many("a", 20) + many("b", 20)), (Group("a", 0), Group("b", 1))
    )
    assert fair_share_offers(state) == {"a": 1, "b": 7}


def test_more_is_fixed_than_the_limit() -> None:
    """Upstream would go round for ever; the group counts as satisfied."""
    held = many("a", 3, preemptible=False, allocation={"n": 1})
    state = State((Agent("n", 8),), tuple(held + many("b", 2)), (Group("a", max_slots=1),))
    for variant in ("code", "docs"):
        assert fair_share_offers(state, variant) == {"a": 3, "b": 2}  # type: ignore[arg-type]
        assert started(fair_share(state, variant)) == {"b0", "b1"}  # type: ignore[arg-type]


def test_drained_and_disabled_agents() -> None:
    """Of a drained agent only the used slots count, of a disabled one none."""
    rows = (Task("run", 2, allocation={"x": 2}), *many("a", 20))
    for flags, expected in (({"drained": True}, 6), ({"disabled": True}, 4)):
        state = State((Agent("x", 4, **flags), Agent("y", 4)), rows)  # type: ignore[arg-type]
        assert sum(fair_share_offers(state).values()) == expected
        assert {name for where in fair_share(state).start.values() for name in where} == {"y"}


def test_docs_divides_anew_whoever_is_left_out() -> None:
    """Also after a group that was offered nothing: its part went into the others' remainders.

    Scores 1, 0.5 and 16 of eight slots are 0.46, 0.23 and 7.31: one goes to u, so that g3 has seven
    and starts one gang. Without g0, u's part is 0.47 and that of g3 7.53: it gets all.
    """
    state = State(
        agents(2, 2, 2, 2),
        (Task("u", 1, "u", submitted=2), Task("g", 1, "g0", submitted=3),
         Task("x", 4, "g3"), Task("y", 4, "g3")),
        (Group("g0", 0.5), Group("g3", 2), Group("u", 1)),
    )  # fmt: skip
    assert fair_share_offers(state, "docs") == {"u": 0, "g0": 0, "g3": 8}
    assert started(fair_share(state, "docs")) == {"x", "y"}
