"""The documents ``optsched.decide/1`` (resource pools as they are) and ``optsched.decision/1``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, get_type_hints

import msgspec

from optsched.cluster.determined.decisions import Pool, checked_pools
from optsched.cluster.determined.state import Agent, Group, State, Task
from optsched.errors import InputError
from optsched.io.strict_json import (
    check_format,
    decode,
    format_json,
    parse,
    placed,
    without_collector,
)
from optsched.io.values import format_value, integer, label

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.cluster.determined.decisions import Decision

FORMAT: Final = "optsched.decide/1"
ANSWER: Final = "optsched.decision/1"


def _strict(kind: type) -> Any:
    """The JSON object of a dataclass: its fields and defaults, and nothing else."""
    types = get_type_hints(kind, localns={"Mapping": Mapping})
    rows = [
        (f.name, types[f.name]) if f.default is MISSING else (f.name, types[f.name], f.default)
        for f in fields(kind)
    ]
    return msgspec.defstruct(kind.__name__, rows, forbid_unknown_fields=True)


if TYPE_CHECKING:
    _Agent: TypeAlias = Any
    _Group: TypeAlias = Any
    _Task: TypeAlias = Any
else:
    _Agent, _Group, _Task = map(_strict, (Agent, Group, Task))


class _Pool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: str = "default"
    scheduler: Literal["fair_share", "priority", "kubernetes"] = "fair_share"
    variant: Literal["code", "docs"] = "code"
    preemption: bool = False
    mode: Literal["default", "gang"] = "default"
    fit: Literal["best", "worst"] = "best"
    heterogeneous: bool = False
    agents: list[_Agent]
    groups: list[_Group] = []
    tasks: list[_Task] = []


class _One(_Pool, forbid_unknown_fields=True, kw_only=True):
    format: str
    id: int | str | None = None


class _Several(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    format: str
    id: int | str | None = None
    pools: list[_Pool]


_OF_A_POOL: Final = tuple(field.name for field in msgspec.structs.fields(_Pool))


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


def read(
    text: str, name: str, overrides: Mapping[str, Any] | None = None
) -> tuple[list[Pool], Any]:
    """Pools from the text of a document; see `from_tree`."""
    with without_collector():
        return from_tree(parse(text, name), name, overrides)


def from_tree(
    tree: Any, name: str, overrides: Mapping[str, Any] | None = None
) -> tuple[list[Pool], int | str | None]:
    """Pools from parsed JSON, and the document's ``id``.

    `tree` is one pool with its settings, or has a list `pools` of such objects; `overrides` are
    settings for all pools that replace their own; messages start with `name`.
    """
    check_format(tree, FORMAT, name)
    several = "pools" in tree
    if several and (of_a_pool := [key for key in _OF_A_POOL if key in tree]):
        raise InputError(
            f"{name}: pools: excludes {of_a_pool[0]}, which belongs into an object in pools"
        )
    found: Any = decode(tree, _Several if several else _One, name)
    pools = []
    for i, given in enumerate(found.pools if several else [found]):
        inner = f"pools[{i}] ({format_json(given.name)}): " if several else ""
        with placed(f"{name}: {inner}"):
            pools.append(_pool(given, overrides))
    with placed(f"{name}: "):
        return checked_pools(pools), found.id


def answer_of(pools: Sequence[Pool], decisions: Mapping[str, Decision], id: Any = None) -> Answer:
    """The answer of the pools' schedulers, in their order."""
    start: list[Start] = []
    release: list[str] = []
    postponed: list[str] = []
    waiting: list[Waiting] = []
    for pool in pools:
        decision = decisions[pool.name]
        tasks = {task.name: task for task in pool.state.tasks}
        level = {group.name: group.priority for group in pool.state.groups}
        passed = set(decision.backfilled)
        for name, agents in decision.start.items():
            task = tasks[name]
            start.append(
                Start(
                    name, dict(agents), task.slots, task.group, level.get(task.group or "", 42),
                    pool.name, name in passed,
                )
            )  # fmt: skip
        release += decision.release
        postponed += decision.postponed
        for name, (why, text) in decision.waiting.items():
            waiting.append(Waiting(name, why.value, text, pool.name))
    return Answer(
        format=ANSWER, id=id, start=start, release=release, postponed=postponed or None,
        waiting=waiting or None,
    )  # fmt: skip


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


def _pool(given: _Pool, overrides: Mapping[str, Any] | None) -> Pool:
    settings = msgspec.structs.asdict(given) | dict(overrides or {})
    rows: dict[str, Any] = {
        key: tuple(kind(*msgspec.structs.astuple(row)) for row in settings[key])
        for key, kind in (("agents", Agent), ("tasks", Task), ("groups", Group))
    }
    state = State(**rows, fit=settings["fit"], heterogeneous=settings["heterogeneous"])
    return Pool(
        state, *(settings[key] for key in ("name", "scheduler", "variant", "preemption", "mode"))
    )
