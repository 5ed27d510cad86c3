"""A resource pool at one instant: agents, groups and tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal, Protocol, TypeVar

from optsched.errors import InputError
from optsched.io.values import boolean, format_value, integer, label, number, one_of

FITS: Final = ("best", "worst")

MOST_SLOTS: Final = 10**6
"""Slots of all agents of a pool together."""

MOST_WEIGHT: Final = 10**9

_TIMES: Final = 2**53


class _Named(Protocol):
    @property
    def name(self) -> str: ...


T = TypeVar("T", bound=_Named)


@dataclass(frozen=True, slots=True)
class Agent:
    """Describe a machine.

    Without `used` and `zero_used`, what its tasks hold counts as used. `zero_slots` tasks without
    slots run on it at once. A drained agent takes no new work, and only its used slots count; a
    disabled one has no slots.

    Examples
    --------
    >>> optsched.cluster.determined.Agent("n1", slots=8, drained=True).slots
    8
    """

    name: str
    slots: int
    used: int | None = None
    zero_slots: int = 100
    zero_used: int | None = None
    drained: bool = False
    disabled: bool = False

    def __post_init__(self) -> None:
        place = f"agent {checked_name('agent', self.name)}"
        integer(f"{place}: slots", self.slots, 0, MOST_SLOTS)
        integer(f"{place}: zero_slots", self.zero_slots)
        for key, most in (("used", self.slots), ("zero_used", self.zero_slots)):
            if (reported := getattr(self, key)) is not None:
                integer(f"{place}: {key}", reported, 0, most)
        boolean(f"{place}: drained", self.drained)
        boolean(f"{place}: disabled", self.disabled)


@dataclass(frozen=True, slots=True)
class Group:
    """Describe an experiment: its tasks share a weight, a limit and a priority.

    `weight` and `max_slots` (None: no limit) are for fair share, `priority` is 1 (first) to 99.
    `min_members` is for Kubernetes: pods without which the job does not work (None: all of them).

    Examples
    --------
    >>> optsched.cluster.determined.Group("search", weight=2.0).priority
    42
    """

    name: str
    weight: float = 1.0
    max_slots: int | None = None
    priority: int = 42
    min_members: int | None = None

    def __post_init__(self) -> None:
        place = f"group {checked_name('group', self.name)}"
        number(f"{place}: weight", self.weight, 0, MOST_WEIGHT)
        if self.max_slots is not None:
            integer(f"{place}: max_slots", self.max_slots)
        integer(f"{place}: priority", self.priority, 1, 99)
        if self.min_members is not None:
            integer(f"{place}: min_members", self.min_members, 1)


@dataclass(frozen=True, slots=True)
class Task:
    """Describe a request for slots, waiting or running.

    Parameters
    ----------
    name
        Distinct; its hash decides between equal agents.
    slots
        A gang: all of them or none; 0 for a task that takes a zero-slot unit of an agent.
    group
        None: a group of one task, with the default weight and priority.
    submitted, requested
        When its job was submitted and when it requested slots, in any unit of time.
    position
        Place in the queue (negative: behind all positive positions); None: by `submitted`.
    blocked
        Agents of the pool that the task may not use.
    single_agent
        Never spread over several agents.
    allocation
        Slots it holds by agent, all of them: the task runs. Empty: it runs on none of these
        agents' slots. None: it is waiting.

    Examples
    --------
    >>> optsched.cluster.determined.Task("a", 4, allocation={"n1": 4}).is_running
    True
    """

    name: str
    slots: int
    group: str | None = None
    preemptible: bool = True
    submitted: float = 0
    requested: float = 0
    position: float | None = None
    blocked: frozenset[str] = frozenset()
    single_agent: bool = False
    allocation: Mapping[str, int] | None = None

    def __post_init__(self) -> None:
        place = f"task {checked_name('task', self.name)}"
        integer(f"{place}: slots", self.slots)
        if self.group is not None:
            checked_name(f"{place}: group", self.group)
        boolean(f"{place}: preemptible", self.preemptible)
        boolean(f"{place}: single_agent", self.single_agent)
        number(f"{place}: submitted", self.submitted, -_TIMES, _TIMES)
        number(f"{place}: requested", self.requested, -_TIMES, _TIMES)
        if self.position is not None:
            number(f"{place}: position", self.position, -_TIMES, _TIMES)
        names = _listed(f"{place}: blocked", self.blocked, "names of agents")
        blocked = frozenset(checked_name(f"{place}: blocked", name) for name in names)
        object.__setattr__(self, "blocked", blocked)
        if self.allocation is not None:
            object.__setattr__(self, "allocation", self._checked_allocation(f"{place}: allocation"))

    def _checked_allocation(self, place: str) -> Mapping[str, int]:
        given, slots = self.allocation, self.slots
        if not isinstance(given, Mapping):
            raise InputError(f"{place}: expected {{agent: slots}}, got {format_value(given)}")
        rows = {
            checked_name(place, name): integer(
                f"{place}[{format_value(name)}]", count, min(slots, 1)
            )
            for name, count in given.items()
        }
        if rows and sum(rows.values()) != slots:
            raise InputError(f"{place}: holds {sum(rows.values())} slots, but requests {slots}")
        if slots == 0 and len(rows) > 1:
            raise InputError(f"{place}: names {len(rows)} agents, a task without slots is on one")
        return MappingProxyType(rows)

    @property
    def is_running(self) -> bool:
        """Whether it has an allocation."""
        return self.allocation is not None

    @property
    def group_name(self) -> str:
        """Name of its group; of a task without one, its name."""
        return self.name if self.group is None else self.group


@dataclass(frozen=True)
class State:
    """Describe one resource pool at one instant.

    `fit` is ``"best"`` (fullest agents first) or ``"worst"``; `heterogeneous`: a task may be spread
    over idle agents of different sizes. Groups that are not listed have the defaults.

    Examples
    --------
    >>> from optsched.cluster.determined import Agent, State, Task
    >>> state = State((Agent("n1", slots=8),), (Task("a", 4), Task("b", 8)))
    >>> len(state.tasks), state.fit
    (2, 'best')
    """

    agents: tuple[Agent, ...]
    tasks: tuple[Task, ...] = ()
    groups: tuple[Group, ...] = ()
    fit: Literal["best", "worst"] = "best"
    heterogeneous: bool = False

    def __repr__(self) -> str:
        return f"<State of {len(self.agents)} agents, {len(self.tasks)} tasks, {self.fit} fit>"

    def __post_init__(self) -> None:
        for key, kind in (("agents", Agent), ("tasks", Task), ("groups", Group)):
            object.__setattr__(self, key, distinct(key, getattr(self, key), kind))
        one_of("fit", self.fit, FITS)
        boolean("heterogeneous", self.heterogeneous)
        total = sum(agent.slots for agent in self.agents)
        if total > MOST_SLOTS:
            raise InputError(f"agents: have {total} slots, more than {MOST_SLOTS}; split the pool")
        known = {agent.name for agent in self.agents}
        groups = {task.group for task in self.tasks}
        for task in self.tasks:
            place = f"task {format_value(task.name)}"
            check_agents(f"{place}: blocked", task.blocked, known)
            check_agents(f"{place}: allocation", task.allocation or (), known)
            if task.group is None and task.name in groups:
                raise InputError(
                    f"{place}: group: missing, so that its name is that of its group, but other "
                    "tasks name a group so; rename the task or the group"
                )
        slots, units = held(self.tasks)
        for a in self.agents:
            for key, reported, taken, most in (
                ("used", a.used, slots[a.name], a.slots),
                ("zero_used", a.zero_used, units[a.name], a.zero_slots),
            ):
                if reported is None and taken > most:
                    what = "slots" if key == "used" else "zero-slot units"
                    raise InputError(
                        f"agent {format_value(a.name)}: its tasks hold {taken} {what}, it has "
                        f"{most}; give the number that it reports as {key}"
                    )


def held(tasks: Iterable[Task]) -> tuple[Counter[str], Counter[str]]:
    """Slots and zero-slot units that running tasks hold, by agent."""
    slots, units = Counter[str](), Counter[str]()
    for task in tasks:
        for name, count in (task.allocation or {}).items():
            slots[name] += count
            units[name] += count == 0
    return slots, units


def check_agents(place: str, names: Iterable[str], known: Container[str]) -> None:
    """Refuse names of agents that are not in the pool."""
    if unknown := [name for name in names if name not in known]:
        raise InputError(f"{place}: there is no agent {format_value(min(unknown))}")


def distinct(place: str, given: Any, kind: type[T]) -> tuple[T, ...]:
    """Objects of one class with distinct names."""
    rows = tuple(_listed(place, given, f"a list of {kind.__name__}s"))
    names = set()
    for i, row in enumerate(rows):
        if not isinstance(row, kind):
            what = f"expected type {kind.__name__}, got {format_value(row)}"
            raise InputError(f"{place}[{i}]: {what}")
        if row.name in names:
            raise InputError(f"{place}: duplicate name {format_value(row.name)}")
        names.add(row.name)
    return rows


def _listed(place: str, given: Any, what: str) -> Any:
    if isinstance(given, (str, bytes, Mapping)) or not hasattr(given, "__iter__"):
        raise InputError(f"{place}: expected {what}, got {format_value(given)}")
    return given


def checked_name(place: str, given: Any) -> str:
    """A label that is not empty."""
    if not label(place, given):
        raise InputError(f"{place}: expected a name, got an empty one")
    return str(given)
