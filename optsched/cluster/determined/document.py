"""The documents ``optsched.decide/1`` (resource pools as they are) and ``optsched.decision/1``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, Final, get_type_hints

import msgspec

from optsched.cluster.determined.decisions import Pool, checked_pools
from optsched.cluster.determined.state import Agent, Group, State, Task
from optsched.errors import InputError
from optsched.io.strict_json import check_format, decode, format_json, placed
from optsched.io.values import format_value, integer, label

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.cluster.determined.decisions import Decision

FORMAT: Final = "optsched.decide/1"
ANSWER: Final = "optsched.decision/1"


def _rows(kind: type, **types: Any) -> list[Any]:
    """Name, type and default of the fields of a dataclass; other types for some of them."""
    hints = get_type_hints(kind, localns={"Mapping": Mapping}) | types
    return [
        (f.name, hints[f.name]) if f.default is MISSING else (f.name, hints[f.name], f.default)
        for f in fields(kind)
        if f.name != "state"
    ]


def _strict(name: str, rows: list[Any]) -> Any:
    """A JSON object that has these fields, and nothing else."""
    return msgspec.defstruct(name, rows, forbid_unknown_fields=True, kw_only=True)


_LISTS: Final = {"agents": Agent, "tasks": Task, "groups": Group}
_HEAD: Final = [("format", str), ("id", int | str | None, None)]
_OF_A_POOL: Final = _rows(Pool) + _rows(
    State,
    **{key: list[_strict(kind.__name__, _rows(kind))] for key, kind in _LISTS.items()},  # type: ignore[misc]
)
_ONE: Final = _strict("One", _HEAD + _OF_A_POOL)
_SEVERAL: Final = _strict("Several", [*_HEAD, ("pools", list[_strict("Pool", _OF_A_POOL)])])  # type: ignore[misc]


class Start(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A task that starts: its agents, and what a caller needs to start it."""

    task: str
    agents: dict[str, Any]  # integers, but a message is to name the agent
    slots: int
    group: str | None = None
    priority: int = 42
    pool: str = "default"
    backfilled: bool = False


class Waiting(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A waiting task: a word of `optsched.cluster.world.reasons.Why`, and a sentence."""

    task: str
    why: str
    text: str
    pool: str = "default"


class Answer(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """``optsched.decision/1``; `error` instead, in a stream, if a line is wrong."""

    format: str | None = None
    id: int | str | None = None
    start: list[Start] | None = None
    release: list[str] | None = None
    postponed: list[str] | None = None
    """Tasks that were to start, but fit nowhere when their turn came; None: there are none."""
    waiting: list[Waiting] | None = None
    """Reason of each task that neither runs nor starts; None: there are none."""
    error: str | None = None


def from_tree(
    tree: Any, name: str, overrides: Mapping[str, Any] | None = None
) -> tuple[list[Pool], int | str | None]:
    """Pools from parsed JSON, and the document's ``id``.

    `tree` is one pool with its settings, or has a list `pools` of such objects; `overrides` are
    settings for all pools that replace their own; messages start with `name`.
    """
    check_format(tree, FORMAT, name)
    several = "pools" in tree
    if several and (of_a_pool := [row[0] for row in _OF_A_POOL if row[0] in tree]):
        raise InputError(
            f"{name}: pools: excludes {of_a_pool[0]}, which belongs into an object in pools"
        )
    found: Any = decode(tree, _SEVERAL if several else _ONE, name)
    pools = []
    for i, given in enumerate(found.pools if several else [found]):
        inner = f"pools[{i}] ({format_json(given.name)}): " if several else ""
        settings = msgspec.structs.asdict(given) | dict(overrides or {})
        with placed(f"{name}: {inner}"):
            for key, kind in _LISTS.items():
                rows = (msgspec.structs.asdict(row) for row in settings[key])
                settings[key] = tuple(kind(**row) for row in rows)
            state = State(**{field.name: settings[field.name] for field in fields(State)})
            settings["state"] = state
            pools.append(Pool(**{field.name: settings[field.name] for field in fields(Pool)}))
    with placed(f"{name}: "):
        return checked_pools(pools), found.id


def answer_of(pools: Sequence[Pool], decisions: Mapping[str, Decision], id: Any = None) -> Answer:
    """The answer of the pools' schedulers, in their order."""
    answer = Answer(format=ANSWER, id=id, start=[], release=[], postponed=[], waiting=[])
    assert answer.start is not None and answer.release is not None
    assert answer.postponed is not None and answer.waiting is not None
    for pool in pools:
        decision = decisions[pool.name]
        tasks = {task.name: task for task in pool.state.tasks}
        level = {group.name: group.priority for group in pool.state.groups}
        for name, agents in decision.start.items():
            slots, group = tasks[name].slots, tasks[name].group
            priority, passes = level.get(group or "", 42), name in decision.backfilled
            start = Start(name, dict(agents), slots, group, priority, pool.name, passes)
            answer.start.append(start)
        answer.release += decision.release
        answer.postponed += decision.postponed
        for name, (why, text) in decision.waiting.items():
            answer.waiting.append(Waiting(name, why.value, text, pool.name))
    answer.postponed, answer.waiting = answer.postponed or None, answer.waiting or None
    return answer


def to_json(answer: Answer) -> bytes:
    """The document on one line."""
    return msgspec.json.encode(answer) + b"\n"


def read_answer(tree: Any, name: str) -> Answer:
    """An answer from parsed JSON; refused if it contradicts itself, or is an error of a stream."""
    if isinstance(tree, dict) and "error" in tree:
        raise InputError(f"{name}: error: this state was refused: {format_value(tree['error'])}")
    check_format(tree, ANSWER, name)
    found = decode(tree, Answer, name)
    if found.start is None or found.release is None:
        key = "start" if found.start is None else "release"
        raise InputError(f'{name}: top level: the field "{key}" is missing')
    with placed(f"{name}: "):
        for i, row in enumerate(found.start):
            with placed(f"start[{i}]: "):
                checked = Task(row.task, row.slots, allocation=row.agents)
                integer("priority", row.priority, 1, 99)
                if not checked.allocation:
                    raise InputError("agents: expected at least one, got none")
        seen: dict[str, str] = {}
        for place, names in (
            ("start", [row.task for row in found.start]), ("release", found.release),
            ("postponed", found.postponed or ()),
        ):  # fmt: skip
            for task in names:
                label(place, task)
                if task in seen:
                    where = "" if seen[task] == place else f" (also in {seen[task]})"
                    raise InputError(f"{place}: duplicate task {format_value(task)}{where}")
                seen[task] = place
    found.postponed, found.waiting = found.postponed or None, found.waiting or None
    return found
