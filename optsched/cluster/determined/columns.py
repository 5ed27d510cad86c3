"""A state as plain lists: what the decisions are computed on, also for the simulator."""

from __future__ import annotations

from functools import lru_cache
from hashlib import md5
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from optsched.cluster.determined.state import State

Kind: TypeAlias = "tuple[int, bool, frozenset[int] | None]"
"""Slots, single agent, blocked agents: tasks of one kind fit alike."""

Fits: TypeAlias = list[tuple[int, int]]
"""Agent and slots, one row per agent."""


class AgentColumns(NamedTuple):
    """Agents by number; drained and disabled ones are told apart by `drained`, `disabled`."""

    names: list[str]
    slots: list[int]
    used: list[int]
    zero_slots: list[int]
    zero_used: list[int]
    drained: list[bool]
    disabled: list[bool]


class TaskColumns(NamedTuple):
    """Tasks in task order: job submit time, request time, name."""

    names: list[str]
    slots: list[int]
    preemptible: list[bool]
    submitted: list[float]
    group: list[int]
    priority: list[int]
    position: list[float | None]
    kind: list[Kind]
    running: list[bool]
    held: list[Fits]
    """Where a running task is, as far as agents show its slots as used."""


class Columns(NamedTuple):
    """A pool: agents, tasks, and the groups' weight and limit (-1: none)."""

    agents: AgentColumns
    tasks: TaskColumns
    weight: list[float]
    max_slots: list[int]
    best: bool
    heterogeneous: bool
    spread: frozenset[int] = frozenset()
    """Gangs of so many slots go anywhere, if need be in pieces (only in simulations)."""


@lru_cache(maxsize=2**16)
def hash_of(name: str) -> int:
    """The first 8 bytes of a name's md5, little-endian."""
    digest = md5(name.encode(), usedforsecurity=False).digest()
    return int.from_bytes(digest[:8], "little")


def columns(state: State) -> Columns:
    """The columns of a state; computed once, for it never changes."""
    if not state._columns:
        state._columns.append(_columns(state))
    found: Columns = state._columns[0]
    return found


def _columns(state: State) -> Columns:
    at = {agent.name: a for a, agent in enumerate(state.agents)}
    tasks = sorted(state.tasks, key=lambda task: (task.submitted, task.requested, task.name))
    names = [task.name for task in tasks]
    group_at = {group.name: g for g, group in enumerate(state.groups)}
    weight = [float(group.weight) for group in state.groups]
    max_slots = [-1 if group.max_slots is None else group.max_slots for group in state.groups]
    level = [group.priority for group in state.groups]
    group, priority, kind, held = [], [], [], []
    for task in tasks:
        g = -1 if task.group is None else group_at.get(task.group, -1)
        if g < 0:
            g = len(weight)
            if task.group is not None:
                group_at[task.group] = g
            weight.append(1.0)
            max_slots.append(-1)
            level.append(42)
        group.append(g)
        priority.append(level[g])
        blocked = frozenset(at[name] for name in task.blocked if name in at) or None
        kind.append((task.slots, task.single_agent, blocked))
        held.append([(at[name], count) for name, count in (task.allocation or {}).items()])
    return Columns(
        _agents(state, held),
        TaskColumns(
            names, [task.slots for task in tasks], [task.preemptible for task in tasks],
            [task.submitted for task in tasks], group, priority,
            [task.position for task in tasks], kind, [task.is_running for task in tasks], held,
        ),
        weight, max_slots, state.fit == "best", state.heterogeneous,
    )  # fmt: skip


def _agents(state: State, held: list[Fits]) -> AgentColumns:
    agents = state.agents
    used, zero_used = [0] * len(agents), [0] * len(agents)
    for rows in held:
        for a, slots in rows:
            used[a] += slots
            zero_used[a] += slots == 0
    return AgentColumns(
        [agent.name for agent in agents],
        [agent.slots for agent in agents],
        [u if agent.used is None else agent.used for agent, u in zip(agents, used, strict=True)],
        [agent.zero_slots for agent in agents],
        [
            z if agent.zero_used is None else agent.zero_used
            for agent, z in zip(agents, zero_used, strict=True)
        ],
        [agent.drained for agent in agents],
        [agent.disabled for agent in agents],
    )


__all__ = ["AgentColumns", "Columns", "Fits", "Kind", "TaskColumns", "columns", "hash_of"]
