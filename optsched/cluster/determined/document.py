"""The documents ``optsched.decide/1`` (resource pools as they are) and ``optsched.decision/1``."""

from __future__ import annotations

from collections import Counter
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, Final

import msgspec

from optsched.cluster.determined.decisions import Pool, checked_pools
from optsched.cluster.determined.state import Agent, Group, State, Task
from optsched.errors import InputError
from optsched.io.strict_json import check_format, decode, format_json, placed
from optsched.io.values import did_you_mean, format_value, integer, label

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from optsched.cluster.determined.decisions import Decision

FORMAT: Final = "optsched.decide/1"
ANSWER: Final = "optsched.decision/1"


class _Head(msgspec.Struct):
    """What a document has beside one pool, or instead."""

    format: str
    id: int | str | None = None
    pools: list[dict[str, Any]] | None = None


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
    """A waiting task: a word of `optsched.cluster.world.policy.Why`, and a sentence."""

    task: str
    why: str
    text: str
    pool: str = "default"


class Answer(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """``optsched.decision/1``."""

    format: str | None = None
    id: int | str | None = None
    start: list[Start] | None = None
    release: list[str] | None = None
    postponed: list[str] | None = None
    """Tasks that were to start, but fit nowhere when their turn came; None: there are none."""
    waiting: list[Waiting] | None = None
    """Reason of each task that neither runs nor starts; None: there are none."""


def from_tree(
    tree: Any, name: str, overrides: Mapping[str, Any] | None = None
) -> tuple[tuple[Pool, ...], int | str | None]:
    """Pools from parsed JSON, and the document's ``id``.

    `tree` is one pool with its settings, or has a list `pools` of such objects; `overrides` are
    settings for all pools that replace their own; messages start with `name`.
    """
    check_format(tree, FORMAT, name)
    head = {key: value for key, value in tree.items() if key in ("format", "id", "pools")}
    found = decode(head, _Head, name)
    given = {key: value for key, value in tree.items() if key not in head}
    if "pools" in tree and given:
        what = f"excludes {min(given)}, which belongs into an object in pools"
        raise InputError(f"{name}: pools: {what}")
    pools = []
    for i, settings in enumerate([given] if found.pools is None else found.pools):
        place = name if found.pools is None else f"{name}: pools[{i}]"
        _check_fields(place, settings, (Pool, State))
        for key, kind in (("agents", Agent), ("tasks", Task), ("groups", Group)):
            rows = settings.get(key, [])
            if not isinstance(rows, list):
                raise InputError(f"{place}: {key}: expected a list, got {format_json(rows)}")
            made = []
            for k, row in enumerate(rows):
                _check_fields(f"{place}: {key}[{k}]", row, (kind,))
                with placed(f"{place}: {key}[{k}]: "):
                    made.append(kind(**row))
            settings = settings | {key: made}
        settings = settings | dict(overrides or {})
        with placed(f"{place}: "):
            state = {f.name: settings.pop(f.name) for f in fields(State) if f.name in settings}
            pools.append(Pool(State(**state), **settings))
    with placed(f"{name}: "):
        return checked_pools(pools), found.id


def _check_fields(place: str, given: Any, kinds: tuple[Any, ...]) -> None:
    """Refuse a value that is not an object, or with fields that are unknown or missing."""
    if not isinstance(given, dict):
        raise InputError(f"{place}: expected an object, got {format_json(given)}")
    known = {f.name: f for kind in kinds for f in fields(kind) if f.name != "state"}
    for key in given:
        if key not in known:
            hint = did_you_mean(key, known)
            raise InputError(f"{place}: unknown field {format_value(key)}{hint}")
    for key, f in known.items():
        if f.default is MISSING and key not in given:
            raise InputError(f'{place}: the field "{key}" is missing')


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
        names = [*(row.task for row in found.start), *found.release, *(found.postponed or ())]
        for task, times in Counter(names).items():
            label("release", task)
            if times > 1:
                raise InputError(f"start, release, postponed: duplicate task {format_value(task)}")
    found.postponed, found.waiting = found.postponed or None, found.waiting or None
    return found
