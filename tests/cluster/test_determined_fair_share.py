"""Fair share: upstream's situations, the figures of the documentation, and its properties."""

from __future__ import annotations

from dataclasses import replace

import pytest
from determined_states import agents, apply, offers, on, row, started, tasks

from optsched.cluster.determined import (
    Agent,
    Group,
    State,
    Task,
    fair_share,
)


def many(group: str, count: int, slots: int = 1, first: int = 0, **rest: object) -> list[Task]:
    """Equal tasks of one group, submitted one after the other."""
    return [
        Task(f"{group}{i}", slots, group, submitted=first + i, **rest)  # type: ignore[arg-type]
        for i in range(count)
    ]


def situation(
    sizes: tuple[int, ...], rows: list[dict[str, object]], *sheet: Group, shown: int | None = None
) -> State:
    """A state of these agents, tasks and groups."""
    return State(agents(*sizes, shown=shown), tasks(*rows), sheet)


AT_LIMIT = [row(2, "a"), row(1, "a", agent=0), row(1, "a", agent=1)]
ACTIVE = [row(3, "a"), row(1, "b"), row(1, "b", agent=1), row(4, "c"), row(1, "d")]
NO_WEIGHTS = [Group(name, 0) for name in "abcd"]
FIXED = [row(1, "g", agent=0, preemptible=False), row(1, "g", agent=0)]
ALONE = [row(1, agent=0, preemptible=False), row(1, agent=0)]
BLOCKED = {"blocked": ["agent0"]}


@pytest.mark.parametrize(
    ("variants", "state", "start", "release"),
    [
        # four slots, two groups of four single tasks, the first limited to one slot
        ("code", situation((4,), [row(1, "a")] * 4 + [row(1, "b")] * 4, Group("a", 1, 1),
                           Group("b", 0)), "0456", ""),
        # weights 10 : 30; the heavy group gets six slots, the other one two
        ("code", situation((8,), [row(1, "a")] * 3 + [row(1, "b")] * 7, Group("a", 10, 100),
                           Group("b", 30, 100)), "01345678", ""),
        # two gangs on two agents, at weights 0 as upstream's test leaves them
        ("both", situation((4, 4), [row(4, "a"), row(4, "b")], Group("a", 0), Group("b", 0)),
         "01", ""),
        # four running tasks of a group that may have two slots: the oldest are released
        ("both", situation((4,), [row(1, "a", agent=0)] * 4, Group("a", max_slots=2)), "", "01"),
        # one slot of each agent is used: the task of two fits nowhere now
        ("both", situation((2, 2), AT_LIMIT, Group("a", max_slots=2)), "", ""),
        ("both", situation((2, 2), AT_LIMIT, Group("a", max_slots=2), shown=0), "", ""),
        # two slots, two tasks of two: one slot each would start none, so the later one waits
        ("both", situation((2,), [row(2, "a"), row(2, "b")]), "0", ""),
        # five slots requested of four
        ("both", situation((4,), [row(5, "a"), row(4, "b")]), "1", ""),
        # agents of 4 and 3, one slot held: the gang of four yields to three others
        ("code", situation((4, 3), ACTIVE, *NO_WEIGHTS), "014", ""),
        ("code", situation((4, 3), ACTIVE, *NO_WEIGHTS, shown=0), "014", ""),
        # five slots held of four: the share of the larger task is three
        *(("code", situation((4,), [row(4, "a", agent=0), row(1, "b", agent=0)], Group("a", w),
                             Group("b", w), shown=0), "", "0") for w in (0, 1)),
        # two tasks on one slot: the later one stops, never one that is not preemptible
        ("both", situation((1,), [row(1, agent=0)] * 2, shown=0), "", "1"),
        *(("both", situation((1,), rows, Group("g", max_slots=2), shown=0), "", "1")
          for rows in (FIXED, ALONE)),
        *(("both", situation((1,), rows[::-1], Group("g", max_slots=2), shown=0), "", "0")
          for rows in (FIXED, ALONE)),
        # a task that may not use the only agent counts for nothing
        ("both", situation((1,), [row(1, "a", **BLOCKED), row(1, "b")]), "1", ""),
        # upstream's three situations with blocked agents among running tasks
        ("code", situation((1, 1), [row(1, blocked=["agent0", "agent1"]), row(1, agent=0),
                                    row(1, **BLOCKED), row(1, agent=1)], shown=0), "2", "3"),
        ("code", situation((1,), [row(1, **BLOCKED)] * 3 + [row(1, agent=0)], shown=0), "", ""),
        ("code", situation((1,), [row(1, **BLOCKED)] + [row(1, agent=0)] * 3, shown=0), "", "23"),
    ],
)  # fmt: skip
def test_decisions(variants: str, state: State, start: str, release: str) -> None:
    """Which tasks start and which are released."""
    for variant in ("code", "docs") if variants == "both" else ("code",):
        decision = fair_share(state, variant)  # type: ignore[arg-type]
        assert started(decision) == {f"t{i}" for i in start}
        assert decision.release == tuple(f"t{i}" for i in release)


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
    assert tuple(offers(state, variant).values()) == expected  # type: ignore[arg-type]
    names = list(fair_share(state, variant).start)  # type: ignore[arg-type]
    assert tuple(sum(name[0] == group for name in names) for group in "ab") == expected


@pytest.mark.parametrize(("variant", "expected"), [("code", (6, 4)), ("docs", (5, 5))])
def test_what_is_held_for_good(variant: str, expected: tuple[int, int]) -> None:
    """Ten slots, equal demands of 10, one side holds two: upstream loses the credit."""
    held = many("a", 2, preemptible=False, allocation={"n": 1})
    rows = [*held, *(replace(t, name=f"x{t.name}") for t in many("a", 8)), *many("b", 10, first=9)]
    state = State((Agent("n", 10),), tuple(rows))
    offered = offers(state, variant)
    assert (offered["a"], offered["b"]) == expected


def test_the_slip_of_the_sort_decides_who_waits() -> None:
    """Three gangs on three slots, demands by registration 1, 0, 2: not the latest gives way first.

    Offers are 1 each; upstream's sort has the groups registered at 1, 2, 0. So t1 (demand 2) is
    disabled first although t2 came later, its slot goes to t0 (demand 3), which is then at 2 of 3;
    t2 is next, and t0 gets all. Properly sorted, t2 goes first and its slot lets t1 start.
    """
    state = State(agents(3), tasks(row(3), row(2), row(3)))
    assert [task.slots for task in state.tasks] == [3, 2, 3]
    assert offers(state) == {"t1": 0, "t0": 3, "t2": 0}
    assert started(fair_share(state)) == {"t0"}


def test_more_is_fixed_than_the_limit() -> None:
    """Upstream would go round for ever; the group counts as satisfied."""
    held = many("a", 3, preemptible=False, allocation={"n": 1})
    state = State((Agent("n", 8),), tuple(held + many("b", 2)), (Group("a", max_slots=1),))
    for variant in ("code", "docs"):
        assert offers(state, variant) == {"a": 3, "b": 2}  # type: ignore[arg-type]
        assert started(fair_share(state, variant)) == {"b0", "b1"}  # type: ignore[arg-type]


def test_drained_and_disabled_agents() -> None:
    """Of a drained agent only the used slots count, of a disabled one none."""
    rows = (Task("run", 2, allocation={"x": 2}), *many("a", 20))
    for flags, expected in (({"drained": True}, 6), ({"disabled": True}, 4)):
        state = State((Agent("x", 4, **flags), Agent("y", 4)), rows)  # type: ignore[arg-type]
        assert sum(offers(state).values()) == expected
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
    assert offers(state, "docs") == {"u": 0, "g0": 0, "g3": 8}
    assert started(fair_share(state, "docs")) == {"x", "y"}


def test_code_starts_and_releases_the_same_tasks_for_ever() -> None:
    """A group is excluded once its small task runs, and included again; ``docs`` settles."""
    queue = "u7 u0 u1 u2 u1 u7 u3 u1 u0 u0 u4 u3 u7 u2 u1 u0 u2 u5"
    rows = tuple(
        Task(f"t{i}", 8 if i else 2, user, submitted=i, allocation={"a1": 8} if i == 1 else None)
        for i, user in enumerate(queue.split())
    )
    for variant, expected in (
        ("code", [({"t0"}, ("t1",)), ({"t1"}, ("t0",))] * 3),
        ("docs", [({"t0"}, ())] + 5 * [(set(), ())]),
    ):  # fmt: skip
        state, changes = State((Agent("a0", 8), Agent("a1", 8)), rows), []
        for _ in expected:
            decision = fair_share(state, variant)  # type: ignore[arg-type]
            changes.append((started(decision), decision.release))
            state = apply(state, decision)
        assert changes == expected, variant
