"""One state in, a decision out: the schedulers of a pool, and what follows from a decision."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Literal

import numpy as np

from optsched.cluster.determined.fair_share_scheduler import share_slots
from optsched.cluster.determined.fitting import Agents, Kind, Tasks, by_hash
from optsched.cluster.determined.kubernetes_scheduler import place_pods
from optsched.cluster.determined.priority_scheduler import place_by_level
from optsched.cluster.determined.state import (
    Agent,
    Group,
    State,
    Task,
    check_agents,
    checked_name,
    distinct,
    held,
)
from optsched.errors import InputError
from optsched.io.strict_json import placed
from optsched.io.values import boolean, format_value, one_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from optsched.cluster.world.policy import Reason
    from optsched.model.schedule import IntArray

SCHEDULERS: Final = ("fair_share", "priority", "kubernetes")
VARIANTS: Final = ("code", "docs")
MODES: Final = ("default", "gang")


@dataclass(frozen=True, slots=True)
class Decision:
    """Hold the tasks that start, and those to be released.

    Slots become free only when a released task has stopped: nothing in `start` depends on that.

    Examples
    --------
    >>> bool(optsched.cluster.determined.Decision(release=("old",)))
    True
    """

    start: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Task -> {agent: slots}, in the order of the decision.

    They fit together: each beside the earlier starts, with nothing released yet.
    """
    release: tuple[str, ...] = ()
    """Running tasks to be preempted, in the order of the decision."""
    backfilled: tuple[str, ...] = ()
    """Those of `start` that pass a task of a better priority that does not fit."""
    postponed: tuple[str, ...] = ()
    """Tasks that the scheduler meant to start, but that no longer fit when their turn came.

    Determined's resource pool looks for agents a second time, in order; what fits nowhere then
    is left to the next decision. Fair share as documented: those for which others are released.
    """
    waiting: Mapping[str, Reason] = field(default_factory=dict)
    """Reason of every waiting task that does not start, in the scheduler's order."""

    def __bool__(self) -> bool:
        return bool(self.start or self.release)


@dataclass(frozen=True)
class Pool:
    """Describe a resource pool: its state, and how it decides.

    Parameters
    ----------
    state
        Agents, groups, tasks, and the fitting policy.
    name
        Distinct.
    scheduler
        ``"fair_share"``: slots are divided among groups; one that holds more than its offer
        releases preemptible tasks, one that holds less starts waiting tasks, in order of
        submission. ``"priority"``: tasks start level by level, 1 to 99. ``"kubernetes"``: tasks are
        pods, groups their jobs.
    variant
        ``"code"``: as Determined's master decides: fair share in equal parts, times the weight;
        priority with backfill. ``"docs"``: as its documentation says: shares in proportion to
        demand times weight, for which groups above theirs release tasks; no backfill.
    preemption
        For ``"priority"``: whether running preemptible tasks of worse levels are released for a
        task that does not fit; off by default, as in Determined.
    mode
        For ``"kubernetes"``: ``"default"`` places pod by pod, ``"gang"`` a job's pods together.

    Examples
    --------
    >>> from optsched.cluster.determined import Agent, State, Task, Pool
    >>> state = State((Agent("n1", slots=8),), (Task("a", 4), Task("b", 8)))
    >>> Pool(state, scheduler="priority").decide().start
    {'a': {'n1': 4}}
    """

    state: State
    name: str = "default"
    scheduler: Literal["fair_share", "priority", "kubernetes"] = "fair_share"
    variant: Literal["code", "docs"] = "code"
    preemption: bool = False
    mode: Literal["default", "gang"] = "default"

    def __post_init__(self) -> None:
        if not isinstance(self.state, State):
            raise InputError(f"state: expected a State, got {format_value(self.state)}")
        place = f"pool {checked_name('pool: name', self.name)}"
        one_of(f"{place}: scheduler", self.scheduler, SCHEDULERS)
        one_of(f"{place}: variant", self.variant, VARIANTS)
        boolean(f"{place}: preemption", self.preemption)
        one_of(f"{place}: mode", self.mode, MODES)

    def decide(self) -> Decision:
        """The decision of its scheduler; the state is not changed."""
        agents, tasks, rows = table(self.state)
        names, docs = [task.name for task in rows], self.variant == "docs"
        if self.scheduler == "kubernetes":
            tasks.kinds = [kind._replace(single_agent=True) for kind in tasks.kinds]
            given = {group.name: group.min_members for group in self.state.groups}
            number, pods = tasks.group.tolist(), Counter(tasks.group.tolist())
            needed = {
                g: given.get(row.group or "") or pods[g]
                for row, g in zip(rows, number, strict=True)
            }
            outcome, explain = place_pods(agents, tasks, needed, self.mode == "gang")
        elif self.scheduler == "priority":
            outcome, explain = place_by_level(agents, tasks, self.preemption, not docs)
        else:
            outcome, explain = share_slots(agents, tasks, docs)
        at = [agent.name for agent in self.state.agents]
        return Decision(
            {names[i]: {at[a]: slots for a, slots in p} for i, p in outcome.start.items()},
            tuple(names[i] for i in outcome.release),
            tuple(names[i] for i in outcome.backfilled),
            tuple(names[i] for i in outcome.postponed),
            {names[i]: reason for i, reason in explain(names).items()},
        )


def fair_share(state: State, variant: Literal["code", "docs"] = "code") -> Decision:
    """Divide the slots among groups; see `Pool`.

    Examples
    --------
    >>> from optsched.cluster.determined import Agent, State, Task, fair_share
    >>> state = State((Agent("n1", slots=8),), (Task("a", 4), Task("b", 8)))
    >>> fair_share(state).start
    {'a': {'n1': 4}}
    """
    return Pool(state, scheduler="fair_share", variant=variant).decide()


def priority(
    state: State, preemption: bool = False, variant: Literal["code", "docs"] = "code"
) -> Decision:
    """Start tasks by priority; see `Pool`.

    Examples
    --------
    >>> from optsched.cluster.determined import Agent, State, Task, priority
    >>> state = State((Agent("n1", slots=8),), (Task("a", 4), Task("b", 8)))
    >>> priority(state).waiting["b"].why.value
    'room'
    """
    return Pool(state, "default", "priority", variant, preemption).decide()


def kubernetes(state: State, mode: Literal["default", "gang"] = "default") -> Decision:
    """Start pods one by one, or those of a job together; see `Pool`.

    Examples
    --------
    >>> from optsched.cluster.determined import Agent, State, Task, kubernetes
    >>> state = State((Agent("n1", 1),), (Task("a0", 1, "a"), Task("a1", 1, "a")))
    >>> kubernetes(state, mode="gang").start
    {}
    """
    return Pool(state, scheduler="kubernetes", mode=mode).decide()


def decide(pools: Pool | Iterable[Pool]) -> dict[str, Decision]:
    """Decide for every pool on its own; return the decisions by name.

    Raises
    ------
    InputError
        A duplicate name of a pool, or an agent or a task in two pools.

    Examples
    --------
    >>> from optsched.cluster.determined import Agent, Pool, State, Task, decide
    >>> state = State((Agent("n1", slots=8),), (Task("a", 4), Task("b", 8)))
    >>> decide(Pool(state))["default"].start
    {'a': {'n1': 4}}
    """
    return {pool.name: pool.decide() for pool in checked_pools(pools)}


def checked_pools(pools: Pool | Iterable[Pool]) -> tuple[Pool, ...]:
    """Pools that share no name, agent or task."""
    rows = distinct("pools", [pools] if isinstance(pools, Pool) else pools, Pool)
    distinct("pools: agents", [agent for pool in rows for agent in pool.state.agents], Agent)
    distinct("pools: tasks", [task for pool in rows for task in pool.state.tasks], Task)
    return rows


def find_fit(state: State, task: Task) -> dict[str, int]:
    """Find the agents that a waiting task would be placed on now, with its slots; empty: none.

    `docs/clusters/determined-model.md` has the rules. The task need not belong to the pool, and
    whether it has an allocation does not matter.

    Examples
    --------
    >>> from optsched.cluster.determined import Agent, State, Task, find_fit
    >>> find_fit(State((Agent("n1", 4), Agent("n2", 8))), Task("a", 3))
    {'n1': 3}
    """
    if not isinstance(task, Task):
        raise InputError(f"task: expected a Task, got {format_value(task)}")
    names = [agent.name for agent in Pool(state).state.agents]
    check_agents(f"task {format_value(task.name)}: blocked", task.blocked, names)
    agents, tasks, _ = table(state, [task])
    return {names[a]: slots for a, slots in agents.find(tasks.kinds[0], int(tasks.first[0]))}


def apply(state: State, decision: Decision) -> State:
    """Return the state after a decision: `start` runs exactly so, what is released is waiting.

    Starts are placed in their order, each on the cluster as the earlier starts left it, before
    anything is released.

    Raises
    ------
    InputError
        The decision names tasks that do not exist, do not run or run already, or agents that do
        not exist or have too few free slots.

    Examples
    --------
    >>> from optsched.cluster.determined import Agent, State, Task, apply, fair_share
    >>> state = State((Agent("n1", slots=8),), (Task("a", 4), Task("b", 8)))
    >>> [task.name for task in apply(state, fair_share(state)).tasks if task.is_running]
    ['a']
    """
    tasks = {task.name: task for task in Pool(state).state.tasks}
    if not isinstance(decision, Decision):
        raise InputError(f"decision: expected a Decision, got {format_value(decision)}")
    for name in (*decision.start, *decision.release):
        if name not in tasks or tasks[name].is_running is (name in decision.start):
            rule = "runs" if name in decision.start else "waits"
            rule = f"{rule} in this state" if name in tasks else "does not exist"
            raise InputError(f"decision: task {format_value(name)} {rule}")
    closed = {agent.name for agent in state.agents if agent.drained or agent.disabled}
    starts = [replace(tasks[name], allocation=where) for name, where in decision.start.items()]
    for task in starts:
        refused = sorted((closed | task.blocked).intersection(task.allocation or ()))
        if refused or not task.allocation:
            what = f"agent {format_value(refused[0])} takes no work of it" if refused else "empty"
            raise InputError(f"decision: start[{format_value(task.name)}]: {what}")
    with placed("decision: "):
        state = _changed(state, starts)
    return _changed(state, [replace(tasks[name], allocation=None) for name in decision.release])


def _changed(state: State, tasks: Sequence[Task]) -> State:
    """The state with these tasks; agents that report what they use follow."""
    after = {task.name: task for task in tasks}
    more, less = held(tasks), held(task for task in state.tasks if task.name in after)

    def agent_after(agent: Agent) -> Agent:
        used, busy = (
            None if reported is None else max(0, reported + up[agent.name] - down[agent.name])
            for reported, up, down in zip((agent.used, agent.zero_used), more, less, strict=True)
        )
        return replace(agent, used=used, zero_used=busy)

    return replace(
        state,
        agents=tuple(map(agent_after, state.agents)),
        tasks=tuple(after.get(task.name, task) for task in state.tasks),
    )


def table(state: State, tasks: Sequence[Task] | None = None) -> tuple[Agents, Tasks, list[Task]]:
    """A state as columns, and its tasks by number; or these tasks on its agents."""
    given = state.tasks if tasks is None else tasks
    rows = sorted(given, key=lambda task: (task.submitted, task.requested, task.name))
    names = [agent.name for agent in state.agents]
    number = {name: a for a, name in enumerate(names)}
    rank, first = by_hash(names, [task.name for task in rows])
    listed, default = {group.name: group for group in state.groups}, Group("default")
    groups = [listed.get(task.group or "", default) for task in rows]
    numbers: dict[str, int] = {}
    kinds: dict[Kind, int] = {}
    kind_of = []
    for task in rows:
        numbers.setdefault(task.group_name, len(numbers))
        blocked = tuple(sorted(number[name] for name in task.blocked))
        kind_of.append(kinds.setdefault(Kind(task.slots, task.single_agent, blocked), len(kinds)))
    columns = Tasks(
        slots=_ints(task.slots for task in rows),
        group=_ints(numbers[task.group_name] for task in rows),
        kind=_ints(kind_of), kinds=list(kinds),
        preemptible=np.array([task.preemptible for task in rows], bool),
        running=np.array([task.is_running for task in rows], bool),
        submitted=np.array([task.submitted for task in rows], float),
        level=_ints(group.priority for group in groups),
        weight=np.array([group.weight for group in groups], float),
        limit=_ints(-1 if group.max_slots is None else group.max_slots for group in groups),
        first=first,
        position=[task.position for task in rows] if any(t.position for t in rows) else None,
    )  # fmt: skip
    places = [[(number[n], s) for n, s in (task.allocation or {}).items()] for task in rows]
    slots, units = held(state.tasks)
    used = _ints(slots[a.name] if a.used is None else a.used for a in state.agents)
    busy = _ints(units[a.name] if a.zero_used is None else a.zero_used for a in state.agents)
    disabled = np.array([a.disabled and not a.drained for a in state.agents], bool)
    capacity = np.where(disabled, 0, _ints(agent.slots for agent in state.agents))
    zero_slots = _ints(agent.zero_slots for agent in state.agents)
    agents = Agents(
        capacity, np.where(disabled, 0, capacity - used), zero_slots, zero_slots - busy,
        np.array([not (a.drained or a.disabled) for a in state.agents], bool), rank,
        places.__getitem__, state.fit == "best", state.heterogeneous,
    )  # fmt: skip
    return agents, columns, rows


def _ints(values: Iterable[int]) -> IntArray:
    return np.array([*values], np.int64)
