"""The documents of `optsched cluster decide`: what is written is what is read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from optsched.cluster.determined import Agent, Group, Pool, State, Task, decide, document
from optsched.io.strict_json import parse

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
    (text,) = re.findall(r"```json\n(.*?)```", (root / "docs/determined.md").read_text(), re.DOTALL)
    pools, _ = document.from_tree(json.loads(text), "page")
    assert pools[0].decide().release == ("old",)
    for path in (root / "instances/determined").glob("*.json"):
        pools, _ = document.from_tree(json.loads(path.read_text()), str(path))
        assert pools[0].decide()
