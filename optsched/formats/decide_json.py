"""The documents ``optsched.decide/1`` (resource pools as they are) and ``optsched.decision/1``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from optsched.cluster.determined.pools import Pool, checked_pools
from optsched.cluster.determined.state import Agent, Group, State, Task
from optsched.errors import InputError
from optsched.strict_json import check_format, decode, parse, shown, without_collector

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
    error: str | None = None


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
    return Answer(format=ANSWER, id=id, start=start, release=release)


def to_json(answer: Answer) -> bytes:
    """The document on one line."""
    return msgspec.json.encode(answer) + b"\n"


def read_answer(tree: Any, name: str) -> Answer:
    """An answer from parsed JSON.

    Raises
    ------
    InputError
        With the path in the document, the rule and the value.
    """
    check_format(tree, ANSWER, name)
    return decode(tree, Answer, name)


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
            error.args = (f"{place[:-1]} ({shown(given.name)}): {error.args[0]}",)
        raise


def _task(row: _Task) -> Task:
    values = list(msgspec.structs.astuple(row))
    values[7] = frozenset(row.blocked)
    return Task(*values)


__all__ = ["ANSWER", "FORMAT", "Answer", "Overrides", "Start", "answer_of", "from_tree", "read",
           "read_answer", "state_to_json", "to_json"]  # fmt: skip
