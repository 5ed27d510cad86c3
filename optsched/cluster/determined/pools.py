"""Several resource pools, each with its own scheduler; and decisions made true."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal

from optsched.cluster.determined.columns import columns
from optsched.cluster.determined.decisions import VARIANTS, Decision, checked, fair_share, priority
from optsched.errors import InputError
from optsched.io.values import format_value, label, one_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from optsched.cluster.determined.state import State, Task

SCHEDULERS: Final = ("fair_share", "priority")


@dataclass(frozen=True)
class Pool:
    """A resource pool: its state, and how it decides.

    Parameters
    ----------
    state
        Agents, groups, tasks, and the fitting policy.
    name
        Distinct.
    scheduler, variant
        See `fair_share` and `priority`.
    preemption
        Only for ``"priority"``; off by default, as in Determined.
    """

    state: State
    name: str = "default"
    scheduler: Literal["fair_share", "priority"] = "fair_share"
    variant: Literal["code", "docs"] = "code"
    preemption: bool = False

    def __post_init__(self) -> None:
        checked(self.state)
        if not label("pool: name", self.name):
            raise InputError("pool: name: expected a name, got an empty one")
        one_of(f"pool {format_value(self.name)}: scheduler", self.scheduler, SCHEDULERS)
        one_of(f"pool {format_value(self.name)}: variant", self.variant, VARIANTS)
        if type(self.preemption) is not bool:
            raise InputError(
                f"pool {format_value(self.name)}: preemption: expected true or false, "
                f"got {format_value(self.preemption)}"
            )

    def decide(self) -> Decision:
        """The answer of its scheduler."""
        if self.scheduler == "priority":
            return priority(self.state, self.preemption, self.variant)
        return fair_share(self.state, self.variant)


def decide(pools: Iterable[Pool]) -> dict[str, Decision]:
    """The decision of every pool, by its name; pools do not know of each other.

    Raises
    ------
    InputError
        Two pools of one name, or an agent or a task in two pools.
    """
    return {pool.name: pool.decide() for pool in checked_pools(pools)}


def checked_pools(pools: Iterable[Pool]) -> list[Pool]:
    """Pools that share no name, agent or task."""
    if isinstance(pools, Pool) or not hasattr(pools, "__iter__"):
        raise InputError(f"pools: expected a list of Pools, got {format_value(pools)}")
    rows = list(pools)
    seen: dict[tuple[str, str], str] = {}
    for i, pool in enumerate(rows):
        if not isinstance(pool, Pool):
            raise InputError(f"pools[{i}]: expected a Pool, got {format_value(pool)}")
        for kind, name in _names(pool, len(rows) > 1):
            if (kind, name) in seen:
                where = f" ({seen[kind, name]} and {pool.name})" if kind != "pool" else ""
                raise InputError(f"pools: {kind} {format_value(name)} is there twice{where}")
            seen[kind, name] = pool.name
    return rows


def _names(pool: Pool, several: bool) -> list[tuple[str, str]]:
    if not several:
        return []
    agents = [("agent", agent.name) for agent in pool.state.agents]
    return [("pool", pool.name), *agents, *(("task", task.name) for task in pool.state.tasks)]


def apply(state: State, decision: Decision) -> State:
    """The state after a decision: exactly what `start` says runs, what is released waits again.

    Starts are booked in their order, each on the cluster as the earlier ones left it, before
    anything is released.

    Raises
    ------
    InputError
        The decision speaks of tasks that are not there, do not run or run already, or of agents
        that are not there or have no room.
    """
    checked(state)
    if not isinstance(decision, Decision):
        raise InputError(f"decision: expected a Decision, got {format_value(decision)}")
    tasks = {task.name: task for task in state.tasks}
    for name in (*decision.start, *decision.release):
        if name not in tasks or tasks[name].is_running is (name in decision.start):
            rule = "runs" if name in decision.start else "waits"
            rule = rule if name in tasks else "is not there"
            raise InputError(f"decision: task {format_value(name)} {rule} in this state")
    changed = _begun(state, decision, tasks)
    for name in decision.release:
        changed[name] = replace(tasks[name], allocation=None)
    return _changed(state, changed)


def _begun(state: State, decision: Decision, tasks: Mapping[str, Task]) -> dict[str, Task]:
    """The tasks that start, with their allocations; agents take them one after the other."""
    at = {agent.name: a for a, agent in enumerate(state.agents)}
    agents = columns(state, ())[0].given
    found: dict[str, Task] = {}
    for name, where in decision.start.items():
        place = f"decision: start[{format_value(name)}]"
        task = replace(tasks[name], allocation=where)
        if not task.allocation:
            raise InputError(f"{place}: names no agents")
        for agent, slots in task.allocation.items():
            if agent not in at:
                raise InputError(f"{place}: there is no agent {format_value(agent)}")
            if agent in task.blocked:
                raise InputError(f"{place}: may not use agent {format_value(agent)}: it is blocked")
            row = agents[at[agent]]
            free, what = (row["free"], "slots") if slots else (row["free_units"], "zero-slot units")
            free = max(0, free) if row["takes"] else 0
            if free < max(1, slots):
                raise InputError(
                    f"{place}: agent {format_value(agent)} has {free} free {what}, asked for "
                    f"{max(1, slots)}"
                )
            row["free" if slots else "free_units"] -= max(1, slots)
        found[name] = task
    return found


def _changed(state: State, changed: Mapping[str, Task]) -> State:
    """The state with other allocations; agents that tell what they show follow."""
    slots: Counter[str] = Counter()
    units: Counter[str] = Counter()
    for task in state.tasks:
        if task.name in changed:
            for sign, held in ((-1, task.allocation), (1, changed[task.name].allocation)):
                for name, count in (held or {}).items():
                    slots[name] += sign * count
                    units[name] += sign * (count == 0)
    agents = []
    for agent in state.agents:
        if agent.used is not None and slots[agent.name]:
            agent = replace(agent, used=max(0, agent.used + slots[agent.name]))
        if agent.zero_used is not None and units[agent.name]:
            agent = replace(agent, zero_used=max(0, agent.zero_used + units[agent.name]))
        agents.append(agent)
    rows = tuple(changed.get(task.name, task) for task in state.tasks)
    return replace(state, agents=tuple(agents), tasks=rows)


__all__ = ["Pool", "apply", "checked_pools", "decide"]
