"""The documents ``optsched.decide/1`` (resource pools as they are) and ``optsched.decision/1``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from optsched.cluster.determined.pools import Pool, checked_pools
from optsched.cluster.determined.state import MOST_SLOTS, Agent, Group, State, Task
from optsched.errors import InputError
from optsched.io.strict_json import check_format, decode, format_json, parse, without_collector
from optsched.io.values import format_value, integer, label

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from optsched.cluster.determined.answer import Decision

FORMAT: Final = "optsched.decide/1"
ANSWER: Final = "optsched.decision/1"


class _Agent(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    slots: int
    used: int | None = None
    zero_slots: int = 100
    zero_used: int | None = None
    drained: bool = False
    disabled: bool = False


class _Group(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    weight: float = 1.0
    max_slots: int | None = None
    priority: int = 42


class _Task(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    slots: int
    group: str | None = None
    preemptible: bool = True
    submitted: int | float = 0
    requested: int | float = 0
    position: int | float | None = None
    blocked: list[str] = []
    single_agent: bool = False
    allocation: dict[str, int] | None = None


class _Pool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: str = "default"
    scheduler: Literal["fair_share", "priority"] = "fair_share"
    variant: Literal["code", "docs"] = "code"
    preemption: bool = True
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


class Overrides(msgspec.Struct, frozen=True):
    """Settings that go before those of the document; None: as it says."""

    scheduler: str | None = None
    variant: str | None = None
    preemption: bool | None = None
    fit: str | None = None


class Start(msgspec.Struct, omit_defaults=True):
    """A task that starts: its agents, and what a caller needs to start it."""

    task: str
    agents: dict[str, int]
    slots: int
    group: str | None = None
    priority: int = 42
    pool: str = "default"
    backfilled: bool = False


class Answer(msgspec.Struct, omit_defaults=True, kw_only=True):
    """``optsched.decision/1``; `error` instead, in a stream, if a line is wrong."""

    format: str | None = None
    id: int | str | None = None
    start: list[Start] | None = None
    release: list[str] | None = None
    postponed: list[str] | None = None
    """Tasks that were to start, but fit nowhere when their turn came; None: there are none."""
    error: str | None = None


class _GivenStart(msgspec.Struct, forbid_unknown_fields=True):
    task: str
    agents: dict[str, Any]
    slots: Any
    group: str | None = None
    priority: Any = 42
    pool: str = "default"
    backfilled: bool = False


class _GivenAnswer(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    format: str
    id: int | str | None = None
    start: list[_GivenStart]
    release: list[str]
    postponed: list[str] = []


def read(text: str, name: str, overrides: Overrides | None = None) -> tuple[list[Pool], Any]:
    """Pools from the text of a document; see `from_tree`."""
    with without_collector():
        return from_tree(parse(text, name), name, overrides)


def from_tree(
    tree: Any, name: str, overrides: Overrides | None = None
) -> tuple[list[Pool], int | str | None]:
    """Pools from parsed JSON, and the document's ``id``.

    Parameters
    ----------
    tree
        ``optsched.decide/1``: agents, groups and tasks of one pool with its settings, or a list
        `pools` of such objects.
    name
        File name for messages.
    overrides
        Settings for all pools that go before their own.

    Raises
    ------
    InputError
        With the path in the document, the rule and the value.
    """
    check_format(tree, FORMAT, name)
    try:
        if "pools" in tree:
            if beside := [key for key in _OF_A_POOL if key in tree]:
                raise InputError(
                    f"pools: stands beside {beside[0]}, but the two exclude each other: what "
                    "belongs to a pool goes into its object in pools"
                )
            several = decode(tree, _Several, name)
            rows = [_pool(p, f"pools[{i}].", overrides) for i, p in enumerate(several.pools)]
            return checked_pools(rows), several.id
        one = decode(tree, _One, name)
        return [_pool(one, "", overrides)], one.id
    except InputError as error:
        if not str(error).startswith(f"{name}: "):
            error.args = (f"{name}: {error.args[0]}",)
        raise


def answer_of(pools: Sequence[Pool], decisions: Mapping[str, Decision], id: Any = None) -> Answer:
    """The answer of the pools' schedulers, in their order."""
    start: list[Start] = []
    release: list[str] = []
    postponed: list[str] = []
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
    return Answer(format=ANSWER, id=id, start=start, release=release, postponed=postponed or None)


def to_json(answer: Answer) -> bytes:
    """The document on one line."""
    return msgspec.json.encode(answer) + b"\n"


def read_answer(tree: Any, name: str) -> Answer:
    """An answer from parsed JSON.

    Raises
    ------
    InputError
        With the path in the document, the rule and the value: also if slots and agents of a start
        do not agree, a task is there twice, or the document is the error of a stream.
    """
    if isinstance(tree, dict) and "error" in tree:
        raise InputError(f"{name}: error: this state was refused: {format_value(tree['error'])}")
    check_format(tree, ANSWER, name)
    given = decode(tree, _GivenAnswer, name)
    try:
        start = [_checked_start(row, f"start[{i}]") for i, row in enumerate(given.start)]
        seen: dict[str, str] = {}
        for place, names in (
            ("start", [row.task for row in start]), ("release", given.release),
            ("postponed", given.postponed),
        ):  # fmt: skip
            for task in names:
                label(place, task)
                if task in seen:
                    where = "twice" if seen[task] == place else f"in {seen[task]} as well"
                    raise InputError(f"{place}: task {format_value(task)} is there {where}")
                seen[task] = place
    except InputError as error:
        error.args = (f"{name}: {error.args[0]}",)
        raise
    return Answer(
        format=ANSWER, id=given.id, start=start, release=given.release,
        postponed=given.postponed or None,
    )  # fmt: skip


def _checked_start(row: _GivenStart, place: str) -> Start:
    """A start whose agents have all of its slots and nothing else."""
    label(f"{place}.task", row.task)
    integer(f"{place}.slots", row.slots, 0, MOST_SLOTS)
    integer(f"{place}.priority", row.priority, 1, 99)
    for agent, count in row.agents.items():
        integer(f"{place}.agents[{format_value(agent)}]", count, min(1, row.slots), MOST_SLOTS)
    total = sum(row.agents.values())
    if total != row.slots or not row.agents:
        raise InputError(
            f"{place}.agents: have {total} slots, but slots says {row.slots}"
            if row.agents
            else f"{place}.agents: expected at least one, got none"
        )
    if row.slots == 0 and len(row.agents) > 1:
        raise InputError(
            f"{place}.agents: expected one for a task without slots, got {len(row.agents)}"
        )
    return Start(row.task, row.agents, row.slots, row.group, row.priority, row.pool, row.backfilled)


def state_to_json(pools: Iterable[Pool]) -> bytes:
    """The document ``optsched.decide/1``; fields at their default are left out."""
    rows = [_written(pool) for pool in checked_pools(pools)]
    body = rows[0] if len(rows) == 1 else {"pools": rows}
    return msgspec.json.format(msgspec.json.encode({"format": FORMAT, **body}), indent=2) + b"\n"


def _written(pool: Pool) -> dict[str, Any]:
    state = pool.state
    found: dict[str, Any] = {}
    for key, value, default in (
        ("name", pool.name, "default"), ("scheduler", pool.scheduler, "fair_share"),
        ("variant", pool.variant, "code"), ("preemption", pool.preemption, True),
        ("fit", state.fit, "best"), ("heterogeneous", state.heterogeneous, False),
    ):  # fmt: skip
        if value != default:
            found[key] = value
    for key, rows, kind in (
        ("agents", state.agents, _Agent), ("groups", state.groups, _Group),
        ("tasks", state.tasks, _Task),
    ):  # fmt: skip
        found[key] = [_row(row, kind) for row in rows]
    return found


def _row(row: Any, kind: type[msgspec.Struct]) -> dict[str, Any]:
    found = {}
    for field in msgspec.structs.fields(kind):
        value = getattr(row, field.name)
        if field.name == "blocked":
            value = sorted(value)
            if not value:
                continue
        elif field.name == "allocation" and value is not None:
            value = dict(value)
        if field.required or value != field.default:
            found[field.name] = value
    return found


def _pool(given: _Pool, place: str, overrides: Overrides | None) -> Pool:
    o = overrides or Overrides()
    try:
        state = State(
            tuple(Agent(*msgspec.structs.astuple(row)) for row in given.agents),
            tuple(_task(row) for row in given.tasks),
            tuple(Group(*msgspec.structs.astuple(row)) for row in given.groups),
            o.fit or given.fit,  # type: ignore[arg-type]
            given.heterogeneous,
        )
        return Pool(
            state, given.name, o.scheduler or given.scheduler, o.variant or given.variant,  # type: ignore[arg-type]
            given.preemption if o.preemption is None else o.preemption,
        )  # fmt: skip
    except InputError as error:
        if place:
            error.args = (f"{place[:-1]} ({format_json(given.name)}): {error.args[0]}",)
        raise


def _task(row: _Task) -> Task:
    values = list(msgspec.structs.astuple(row))
    values[7] = frozenset(row.blocked)
    return Task(*values)


__all__ = ["ANSWER", "FORMAT", "Answer", "Overrides", "Start", "answer_of", "from_tree", "read",
           "read_answer", "state_to_json", "to_json"]  # fmt: skip
