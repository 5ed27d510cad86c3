"""States: what is refused and how; what `apply` and `decide` do with several pools."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from optsched.cluster.determined import (
    Agent,
    Decision,
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
from optsched.errors import InputError
from optsched.io.strict_json import parse

AGENT = Agent("n", 8)
WAITING = State(
    (AGENT, Agent("drained", 8, drained=True)),
    (Task("t", 4), Task("u", 8), Task("z", 0), Task("v", 1, blocked=frozenset({"n"}))),
)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Agent(3, 8), "agent: expected a string, got 3"),  # type: ignore[arg-type]
        (lambda: Agent("n", -1), "agent n: slots: expected an integer in 0..1000000, got -1"),
        (lambda: Agent("n", 4, 5), "agent n: used: expected an integer in 0..4, got 5"),
        (lambda: Agent("n", 4, drained=1), "drained: expected True or False"),  # type: ignore[arg-type]
        (lambda: Group("g", -1), "group g: weight: expected a number >= 0 and <= 1e+09, got -1"),
        (lambda: Group("g", 1e10), "<= 1e+09"),
        (lambda: Group("g", priority=0), "group g: priority: expected an integer in 1..99, got 0"),
        (lambda: Task("t", -1), "task t: slots"),
        (lambda: Task("t", 1, submitted=float("nan")), "task t: submitted: expected a number"),
        (lambda: Task("t", 1, position=2**60), "position"),
        (lambda: Task("t", 1, blocked="n"), "blocked: expected names"),  # type: ignore[arg-type]
        (lambda: Task("t", 1, blocked={"n": 1}), "blocked: expected names"),  # type: ignore[arg-type]
        (lambda: Task("t", 1, allocation=["n"]), "expected {agent: slots}"),  # type: ignore[arg-type]
        (lambda: Task("t", 1, allocation={"n": 2}), "holds 2 slots, but requests 1"),
        (lambda: State("n"), "agents: expected a list of Agents"),  # type: ignore[arg-type]
        (lambda: State([3]), "agents[0]: expected type Agent, got 3"),  # type: ignore[list-item,arg-type]
        (lambda: State((AGENT, AGENT)), 'agents: duplicate name "n"'),
        (lambda: State((AGENT,), (Task("t", 1), Task("t", 2))), 'tasks: duplicate name "t"'),
        (lambda: State((AGENT,), groups=(Group("g"), Group("g"))), 'groups: duplicate name "g"'),
        (lambda: State((AGENT,), (Task("t", 1, allocation={"m": 1}),)), 'there is no agent "m"'),
        (lambda: State((AGENT,), (Task("t", 9, allocation={"n": 9}),)), "hold 9 slots, it has 8"),
        (lambda: State((AGENT,), (Task("t", 4, allocation={"n": 4, "m": 0}),)), "integer in 1.."),
        (lambda: Task("t", 0, allocation={"n": 0, "m": 0}), "names 2 agents"),
        (lambda: State((AGENT,), (Task("t", 1, blocked=["m"]),)),  # type: ignore[arg-type]
         'task "t": blocked: there is no agent "m"'),
        (lambda: State((Agent("n", 8, zero_slots=0),), (Task("t", 0, allocation={"n": 0}),)),
         "its tasks hold 1 zero-slot units, it has 0"),
        (lambda: State(tuple(Agent(f"n{i}", 10**6) for i in range(2))), "split the pool"),
        (lambda: State((AGENT,), (Task("x", 4), Task("y", 8, "x"))), 'task "x": group: missing'),
        (lambda: fair_share("state"), "state: expected a State"),  # type: ignore[arg-type]
        (lambda: fair_share(State(()), "doc"), "variant: expected one of code, docs"),  # type: ignore[arg-type]
        (lambda: priority(State(()), 1), "preemption"),  # type: ignore[arg-type]
        (lambda: find_fit(State(()), "t"), "task: expected a Task"),  # type: ignore[arg-type]
        (lambda: Pool(State(()), scheduler="fifo"), "scheduler: expected one of"),  # type: ignore[arg-type]
        (lambda: decide(3), "expected a list of Pools"),  # type: ignore[arg-type]
        (lambda: decide([State(())]), "pools[0]: expected type Pool"),  # type: ignore[list-item]
        (lambda: decide([Pool(State(())), Pool(State(()))]), 'pools: duplicate name "default"'),
        (lambda: decide([Pool(State((AGENT,)), "a"), Pool(State((AGENT,)), "b")]),
         'pools: agents: duplicate name "n"'),
        (lambda: apply(State(()), Decision({"t": {}})), 'task "t" does not exist'),
        (lambda: apply(State((AGENT,), (Task("t", 1),)), Decision(release=("t",))), "waits"),
        (lambda: apply(State((AGENT,), (Task("t", 1, allocation={"n": 1}),)), Decision({"t": {}})),
         'task "t" runs'),
        (lambda: apply(WAITING, Decision({"t": {"m": 4}})), 'allocation: there is no agent "m"'),
        (lambda: apply(WAITING, Decision({"t": {}})), 'start["t"]: empty'),
        (lambda: apply(WAITING, Decision({"t": {"n": 4}, "u": {"n": 8}})),
         'decision: agent "n": its tasks hold 12 slots, it has 8'),
        (lambda: apply(WAITING, Decision({"t": {"drained": 4}})), 'agent "drained" takes no work'),
        (lambda: apply(WAITING, Decision({"z": {"drained": 0}})), "takes no work"),
        (lambda: apply(WAITING, Decision({"v": {"n": 1}})), "takes no work of it"),
        (lambda: apply(State((Agent("n", 8, used=1),), (Task("t", 8),)), Decision({"t": {"n": 8}})),
         "decision: agent n: used: expected an integer in 0..8, got 9"),
        (lambda: apply(State(()), {}), "decision: expected a Decision"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_refused_with_a_sentence(make: Any, said: str) -> None:
    """The field, the rule and the value, on one line."""
    with pytest.raises(InputError) as error:
        make()
    assert said in str(error.value) and "\n" not in str(error.value)


def test_an_oversubscribed_agent_tells_what_it_shows() -> None:
    """Then its tasks may hold more than it has."""
    rows = (Task("a", 8, allocation={"n": 8}), Task("b", 8, allocation={"n": 8}))
    assert fair_share(State((Agent("n", 8, used=8),), rows)).release == ("a", "b")


def test_apply_follows_what_agents_show() -> None:
    """Used slots and units that agents tell change with the tasks."""
    state = State(
        (Agent("n", 4, used=2, zero_slots=3, zero_used=1),),
        (Task("old", 2, allocation={"n": 2}), Task("new", 2), Task("unit", 0)),
    )
    after = apply(state, Decision({"new": {"n": 2}, "unit": {"n": 0}}, ("old",)))
    assert after.agents == (Agent("n", 4, used=2, zero_slots=3, zero_used=2),)
    assert [task.is_running for task in after.tasks] == [False, True, True]
    assert after == apply(state, Decision({"new": {"n": 2}, "unit": {"n": 0}}, ("old",)))
    assert after != state and state.tasks[1].allocation is None


# the documents of `optsched cluster decide`: what is written is what is read

POOL = Pool(
    State(
        (Agent("a", 8, 2, 3, 1, drained=True), Agent("b", 4, disabled=True), Agent("c", 8)),
        (
            Task("t", 4, "g", False, 1.5, 2, -3, frozenset({"a", "b"}), True, {"c": 4}),
            Task("u", 0),
            Task("v", 2, submitted=-1, allocation={}),
        ),
        (Group("g", 0.5, 3, 7), Group("h")),
        "worst",
        True,
    ),
    "gpu", "priority", "docs", False,
)  # fmt: skip


def written(pools: list[Pool]) -> str:
    """The document of pools, all fields given."""

    def plain(value: Any) -> Any:
        if is_dataclass(value):
            return {
                field.name: plain(getattr(value, field.name))
                for field in fields(value)
                if field.init
            }
        if isinstance(value, Mapping):
            return dict(value)
        return [plain(v) for v in value] if isinstance(value, (tuple, frozenset)) else value

    rows = [plain(pool) for pool in pools]
    rows = [row.pop("state") | row for row in rows]
    body = rows[0] if len(rows) == 1 else {"pools": rows}
    return json.dumps({"format": "optsched.decide/1", **body})


def test_pools_survive_writing_and_reading() -> None:
    """One pool on the top level, several in a list."""
    others = [Pool(State(())), Pool(State((Agent("x", 1),), (Task("y", 1),)), "second")]
    for pools in ([POOL], [POOL, *others], [others[0]]):
        found, given = document.from_tree(json.loads(written(pools)), "file")
        assert list(found) == pools and given is None


def test_answers_survive_writing_and_reading() -> None:
    """With and without an id."""
    pools = [Pool(State((Agent("n", 8),), (Task("t", 1, "g"),), (Group("g", priority=3),)))]
    for given in (None, 5, "x"):
        answer = document.answer_of(pools, decide(pools), given)
        text = document.to_json(answer).decode()
        assert document.read_answer(parse(text, "a"), "a") == answer
        assert answer.start is not None and answer.start[0].priority == 3


def test_documents_of_the_page_and_the_instances() -> None:
    """They are read, and something starts or stops."""
    root = Path(__file__).parents[2]
    page = (root / "docs/clusters/determined.md").read_text()
    (text,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    pools, _ = document.from_tree(json.loads(text), "page")
    assert pools[0].decide().release == ("old",)
    for path in (root / "instances/determined").glob("*.json"):
        pools, _ = document.from_tree(json.loads(path.read_text()), str(path))
        assert pools[0].decide()
