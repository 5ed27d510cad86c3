"""The priority scheduler: upstream's situations, queue positions, backfill, the documented walk."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
from determined_states import agents, apply, groups, row, tasks
from test_determined_oracle import order

from optsched.cluster import determined
from optsched.cluster.determined import Decision, State

Variant = Literal["code", "docs"]
LEVELS = groups(last=55, low=50, middle=45, high=40)


def priority(state: State, preemption: bool = True, variant: Variant = "code") -> Decision:
    """The scheduler with preemption, unless a test says otherwise."""
    return determined.priority(state, preemption, variant)


def test_preemption_is_off_by_default() -> None:
    """As in Determined: nothing running is released for a better level."""
    rows = tasks(row(4, "low", agent=0), row(4, "high"))
    assert not determined.priority(State(agents(4), rows, LEVELS))
    assert priority(State(agents(4), rows, LEVELS)).release == ("t0",)


@pytest.mark.parametrize(
    ("positions", "expected"),
    [
        ((3, 1.5, -1, 0.5, -7, 3), "310524"),  # negative ones last, by submission
        ((-1, 0), "01"),  # only a positive one is before a negative one
        ((0, -1), "01"),
        ((-1, 0, 5, -3), "0123"),  # 5 before -1, but Go's insertion stops at 0
        ((2, None, 1), "012"),  # no order at all: t0, t1, t2, t0
        ((2, 1, None), "102"),
    ],
)
def test_positions(positions: Any, expected: str) -> None:
    """Ascending, before submission; where upstream's comparison is no order, as Go sorts."""
    rows = tasks(*[row(1, position=position) for position in positions])
    assert order(State((), rows)) == [f"t{i}" for i in expected]


def test_positions_of_levels_and_of_many() -> None:
    """Levels go first; beyond twelve tasks, any order of the same tasks."""
    rows = tasks(row(1, "low", position=-1), row(1, "high", position=0), row(1, "low", position=2))
    assert order(State((), rows, LEVELS)) == ["t1", "t2", "t0"]
    many = tasks(*[row(1, position=9 - i if i < 9 else None) for i in range(30)])
    assert sorted(order(State((), many))) == sorted(task.name for task in many)


MIXED = (
    row(4, "low"), row(1, "low"), row(1, "high"), row(0, "high"), row(4, "high"), row(0, "low"),
)  # fmt: skip
TWELVE = (row(4, "low"), row(1, "low"), row(12, "high"))
UNITS = (*agents(0, zero_slots=1), agents(0, 0, zero_slots=1)[1])
MORE_UNITS = (*agents(0, zero_slots=4), agents(0, 0, zero_slots=1)[1])
ABOVE = (
    row(1, "last", agent=0), row(1, "low"), row(1, "middle"), row(4, "high", agent=1),
    row(2, "high"), row(8, "high"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("pool", "rows", "options", "start", "release", "backfilled"),
    [
        # an agent without units takes only the task with slots
        (agents(4), (row(4, "high"), row(0, "low")), {}, "0", "", ""),
        # high ones first, then what is left; tasks without slots beside them
        (agents(4, 4, zero_slots=100), MIXED, {"preemption": False}, "24135", "", ""),
        # a task of twelve on eight slots: nothing of a worse level starts, except as backfill
        (agents(4, 4), TWELVE, {"preemption": False}, "", "", ""),
        (agents(4, 4), TWELVE, {}, "01", "", "01"),
        (agents(4, 4), TWELVE, {"variant": "docs"}, "", "", ""),
        # what was only placed for later takes no slots: t2 is where t1 was placed
        (agents(2, 4), (row(8, "high"), row(2, "low", preemptible=False), row(2, "low")), {},
         "2", "", "2"),
        # the middle task is released for a high one; nothing starts, not even what would fit
        (agents(4, 4), (row(1, "low"), row(4, "middle", agent=0), row(4, "high", agent=1),
                        row(4, "high"), row(8, "high")), {}, "", "1", ""),
        # levels above the first release start, also as backfill; those from it on do not
        (agents(4, 4), ABOVE, {}, "42", "0", "2"),
        # without backfill the middle task only keeps its place: the low one still releases
        (agents(4, 4), ABOVE, {"variant": "docs"}, "4", "0", ""),
        # preemption of tasks without slots, and then enough units
        (UNITS, (row(0, "low"), row(0, "middle", agent=0), row(0, "high", agent=1),
                 row(0, "high")), {}, "", "1", ""),
        (MORE_UNITS, (row(0, "last"), row(0, "low", agent=0), row(0, "middle", agent=1),
                      row(0, "high")), {}, "30", "", ""),
        # by position: the last in the queue first, and no more than needed
        (agents(4, 4), (row(1, agent=0, position=1), row(4, agent=1, position=2),
                        row(4, position=1.5)), {}, "", "1", ""),
        (agents(4, 4), (row(1, agent=0, position=1), row(4, agent=1, position=1),
                        row(4, position=0.999)), {}, "", "1", ""),
        (agents(4, 4), (row(1, agent=0), row(4, agent=1), row(4)), {}, "", "", ""),
        # eight slots are never free: the task at 2 goes on
        (agents(4, 4), (row(1, agent=0, position=1), row(4, agent=1, position=2),
                        row(8, position=1.5)), {}, "", "", ""),
        # t4 releases t0; for t3, t1 ahead ends the search although it cannot be released itself
        (agents(4, 4, 4), (row(4, agent=0, position=5),
                           row(4, agent=1, position=3, preemptible=False),
                           row(4, agent=2, position=6, preemptible=False), row(4, position=4),
                           row(4, position=2)), {}, "", "0", ""),
        # a gang of four is released for one slot; two more tasks find their place there
        (agents(4), (row(4, "low", agent=0), *[row(1, "high")] * 3, row(2, "high")), {},
         "", "0", ""),
        (agents(4), (row(2, "low", agent=0), row(2, "low", agent=0), *[row(1, "high")] * 3), {},
         "", "10", ""),
    ],
)  # fmt: skip
def test_decisions(
    pool: Any, rows: Any, options: Any, start: str, release: str, backfilled: str
) -> None:
    """Which tasks start and are released, in which order."""
    state = State(pool, tasks(*rows), LEVELS)
    decision = priority(state, **options)
    assert list(decision.start) == [f"t{i}" for i in start]
    assert decision.release == tuple(f"t{i}" for i in release)
    assert decision.backfilled == tuple(f"t{i}" for i in backfilled)
    apply(state, decision)


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
