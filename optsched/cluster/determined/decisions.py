"""One state in, a decision out: the schedulers of a pool, and what follows from a decision."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Literal

from optsched.cluster.determined.fair_share_scheduler import divide, share_reasons, share_slots
from optsched.cluster.determined.fitting import table
from optsched.cluster.determined.kubernetes_scheduler import place_pods, pod_reasons
from optsched.cluster.determined.priority_scheduler import level_reasons, place_by_level
from optsched.cluster.determined.state import State, Task, check_agents, held
from optsched.errors import InputError
from optsched.io.strict_json import placed
from optsched.io.values import boolean, format_value, label, one_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from optsched.cluster.world.reasons import Reason

SCHEDULERS: Final = ("fair_share", "priority", "kubernetes")
VARIANTS: Final = ("code", "docs")
MODES: Final = ("default", "gang")


@dataclass(frozen=True, slots=True)
class Decision:
    """The tasks that start, and those to be released.

    Slots become free only when a released task has stopped: nothing in `start` depends on that.
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
    """A resource pool: its state, and how it decides.

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
        if not label("pool: name", self.name):
            raise InputError("pool: name: expected a name, got an empty one")
        place = f"pool {format_value(self.name)}"
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
            groups = tasks.group.tolist()
            pods = Counter(groups)
            needed = {
                g: given.get(row.group or "") or pods[g]
                for row, g in zip(rows, groups, strict=True)
            }
            outcome = place_pods(agents, tasks, needed, self.mode == "gang")
            why = pod_reasons(agents, tasks, outcome, needed, self.mode == "gang")
        elif self.scheduler == "priority":
            outcome = place_by_level(agents, tasks, self.preemption, not docs)
            why = level_reasons(agents, tasks, names, outcome)
        else:
            outcome, shares = share_slots(agents, tasks, docs)
            why = share_reasons(agents, tasks, names, outcome, shares, docs)
        return Decision(
            {
                names[i]: {self.state.agents[a].name: slots for a, slots in places}
                for i, places in outcome.start.items()
            },
            tuple(names[i] for i in outcome.release),
            tuple(names[i] for i in outcome.backfilled),
            tuple(names[i] for i in outcome.postponed),
            {names[i]: reason for i, reason in why.items()},
        )


def fair_share(state: State, variant: Literal["code", "docs"] = "code") -> Decision:
    """Divide the slots among groups; see `Pool`."""
    return Pool(state, scheduler="fair_share", variant=variant).decide()


def priority(
    state: State, preemption: bool = False, variant: Literal["code", "docs"] = "code"
) -> Decision:
    """Start tasks by priority; see `Pool`."""
    return Pool(state, "default", "priority", variant, preemption).decide()


def kubernetes(state: State, mode: Literal["default", "gang"] = "default") -> Decision:
    """Start pods one by one, or those of a job together; see `Pool`."""
    return Pool(state, scheduler="kubernetes", mode=mode).decide()


def decide(pools: Pool | Iterable[Pool]) -> dict[str, Decision]:
    """The decision of every pool, by its name; each decides on its own.

    Raises
    ------
    InputError
        A duplicate name of a pool, or an agent or a task in two pools.
    """
    return {pool.name: pool.decide() for pool in checked_pools(pools)}


def checked_pools(pools: Pool | Iterable[Pool]) -> list[Pool]:
    """Pools that share no name, agent or task."""
    rows = [pools] if isinstance(pools, Pool) else pools
    if not hasattr(rows, "__iter__"):
        raise InputError(f"pools: expected a list of Pools, got {format_value(pools)}")
    rows, seen = list(rows), dict[tuple[str, str], str]()
    for i, pool in enumerate(rows):
        if not isinstance(pool, Pool):
            raise InputError(f"pools[{i}]: expected a Pool, got {format_value(pool)}")
        parts = (("pool", [pool]), ("agent", pool.state.agents), ("task", pool.state.tasks))
        for kind, parts_of_kind in parts if len(rows) > 1 else ():
            for name in (part.name for part in parts_of_kind):
                if (kind, name) in seen:
                    where = "" if kind == "pool" else f" ({seen[kind, name]} and {pool.name})"
                    raise InputError(f"pools: duplicate {kind} {format_value(name)}{where}")
                seen[kind, name] = pool.name
    return rows


def find_fit(state: State, task: Task) -> dict[str, int]:
    """The agents that a waiting task would be placed on now, with its slots on each; empty: none.

    One agent with enough free slots (or a free zero-slot unit), by the pool's fit; else, for more
    than one slot and unless `single_agent`, idle agents of one size that divides the request, the
    largest size first; else, if the pool is `heterogeneous`, idle agents from the largest size
    down, without going back (idle agents of 8, 7 and 5 slots cannot serve 12). The task need not
    belong to the pool, and whether it has an allocation does not matter.
    """
    if not isinstance(task, Task):
        raise InputError(f"task: expected a Task, got {format_value(task)}")
    names = [agent.name for agent in Pool(state).state.agents]
    check_agents(f"task {format_value(task.name)}: blocked", task.blocked, names)
    agents, tasks, _ = table(state, [task])
    return {names[a]: slots for a, slots in agents.find(tasks.kinds[0], int(tasks.first[0]))}


def fair_share_offers(state: State, variant: Literal["code", "docs"] = "code") -> dict[str, int]:
    """Slots that every group is offered, by name; groups without a task to consider are left out.

    A task without a group is a group of its own, with the name of the task.
    """
    agents, tasks, rows = table(Pool(state, variant=variant).state)
    _, shares, _ = divide(agents, tasks, variant == "docs")
    heads = [rows[i].group_name for i in shares.head.tolist()]
    return dict(zip(heads, shares.offer.tolist(), strict=True))


def apply(state: State, decision: Decision) -> State:
    """The state after a decision: `start` runs exactly so, what is released is waiting again.

    Starts are placed in their order, each on the cluster as the earlier starts left it, before
    anything is released.

    Raises
    ------
    InputError
        The decision names tasks that do not exist, do not run or run already, or agents that do
        not exist or have too few free slots.
    """
    tasks = {task.name: task for task in Pool(state).state.tasks}
    if not isinstance(decision, Decision):
        raise InputError(f"decision: expected a Decision, got {format_value(decision)}")
    for name in (*decision.start, *decision.release):
        if name not in tasks or tasks[name].is_running is (name in decision.start):
            rule = "runs" if name in decision.start else "waits"
            rule = f"{rule} in this state" if name in tasks else "does not exist"
            raise InputError(f"decision: task {format_value(name)} {rule}")
    takes_work = {agent.name for agent in state.agents if not (agent.drained or agent.disabled)}
    starts = [replace(tasks[name], allocation=where) for name, where in decision.start.items()]
    for task in starts:
        place = f"decision: start[{format_value(task.name)}]"
        if not task.allocation:
            raise InputError(f"{place}: names no agents")
        check_agents(place, task.allocation, {agent.name for agent in state.agents})
        for name in task.allocation:
            if name not in takes_work or name in task.blocked:
                rule = "is blocked for it" if name in takes_work else "takes no work"
                raise InputError(f"{place}: agent {format_value(name)} {rule}")
    with placed("decision: "):
        state = _changed(state, starts)
    return _changed(state, [replace(tasks[name], allocation=None) for name in decision.release])


def _changed(state: State, tasks: Sequence[Task]) -> State:
    """The state with these tasks; agents that report what they use follow."""
    after = {task.name: task for task in tasks}
    before = [task for task in state.tasks if task.name in after]
    (slots, units), (slots_before, units_before) = held(tasks), held(before)
    agents = []
    for agent in state.agents:
        name, used, busy = agent.name, agent.used, agent.zero_used
        if used is not None:
            used = max(0, used + slots[name] - slots_before[name])
        if busy is not None:
            busy = max(0, busy + units[name] - units_before[name])
        agents.append(replace(agent, used=used, zero_used=busy))
    rows = tuple(after.get(task.name, task) for task in state.tasks)
    return replace(state, agents=tuple(agents), tasks=rows)
