"""States for tests of Determined's schedulers: agents by size, tasks in the order of submission."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from optsched.cluster.determined import Agent, Decision, Group, State, Task, apply
from optsched.cluster.determined.decisions import table
from optsched.cluster.determined.fair_share_scheduler import divide

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def agents(*slots: int, zero_slots: int = 0, shown: int | None = None) -> tuple[Agent, ...]:
    """``agent0``, ``agent1``, ... of these sizes."""
    return tuple(
        Agent(f"agent{a}", n, used=shown, zero_slots=zero_slots) for a, n in enumerate(slots)
    )


def on(agent: int, slots: int) -> dict[str, int]:
    """An allocation on one agent."""
    return {f"agent{agent}": slots}


def tasks(*rows: Mapping[str, Any], first: int = 0) -> tuple[Task, ...]:
    """Tasks t0, t1, ... submitted one after the other, unless a row says more."""
    return tuple(
        Task(**{"name": f"t{i}", "submitted": i, **row}) for i, row in enumerate(rows, first)
    )


def row(slots: int, group: str | None = None, **rest: Any) -> dict[str, Any]:
    """A task in short; `agent` is where it runs."""
    agent = rest.pop("agent", None)
    held = {} if agent is None else {"allocation": on(agent, slots)}
    return {"slots": slots, "group": group, **held, **rest}


def started(decision: Decision) -> set[str]:
    """Names of the tasks that start."""
    return set(decision.start)


def with_tasks(state: State, more: Sequence[Task]) -> State:
    """The state and some more tasks."""
    return replace(state, tasks=state.tasks + tuple(more))


def groups(**levels: int) -> tuple[Group, ...]:
    """Groups by priority."""
    return tuple(Group(name, priority=level) for name, level in levels.items())


def offers(state: State, variant: str = "code") -> dict[str, int]:
    """Slots that every group is offered, without groups that have no task to consider."""
    agents, columns, rows = table(state)
    _, shares, _ = divide(agents, columns, variant == "docs")
    heads = [rows[i].group_name for i in shares.head.tolist()]
    return dict(zip(heads, shares.offer.tolist(), strict=True))


__all__ = [
    "agents", "apply", "groups", "offers", "on", "row", "started", "tasks", "with_tasks"
]  # fmt: skip
