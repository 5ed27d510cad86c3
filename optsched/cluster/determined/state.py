"""What Determined's schedulers are told: agents, groups and tasks of one resource pool."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

from optsched.errors import InputError
from optsched.io.values import format_value, integer, label, number, one_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

FITS: Final = ("best", "worst")

MOST_SLOTS: Final = 10**6
"""Slots of all agents of a pool together."""

MOST_WEIGHT: Final = 10**9

_TIMES: Final = 2**53


@dataclass(frozen=True, slots=True)
class Agent:
    """A machine.

    Parameters
    ----------
    name
        Distinct in its pool.
    slots
        Its GPUs.
    used
        Slots that it shows as used. None: those of the allocations on it.
    zero_slots
        Tasks without slots that it takes at once.
    zero_used
        How many it shows. None: those of the allocations on it.
    drained
        Takes no new work; only its used slots count.
    disabled
        Has no slots at all.
    """

    name: str
    slots: int
    used: int | None = None
    zero_slots: int = 100
    zero_used: int | None = None
    drained: bool = False
    disabled: bool = False

    def __post_init__(self) -> None:
        place = f"agent {_name('agent', self.name)}"
        integer(f"{place}: slots", self.slots, 0, MOST_SLOTS)
        if self.used is not None:
            integer(f"{place}: used", self.used, 0, self.slots)
        integer(f"{place}: zero_slots", self.zero_slots)
        if self.zero_used is not None:
            integer(f"{place}: zero_used", self.zero_used)
        _truth(f"{place}: drained", self.drained)
        _truth(f"{place}: disabled", self.disabled)


@dataclass(frozen=True, slots=True)
class Group:
    """An experiment or another job: all its tasks share a weight, a limit and a priority.

    Parameters
    ----------
    name
        Distinct in its pool.
    weight
        For fair share, >= 0.
    max_slots
        Most slots that fair share gives it; None: no limit.
    priority
        1 (first) to 99 (last).
    """

    name: str
    weight: float = 1.0
    max_slots: int | None = None
    priority: int = 42

    def __post_init__(self) -> None:
        place = f"group {_name('group', self.name)}"
        if number(f"{place}: weight", self.weight) > MOST_WEIGHT:
            raise InputError(
                f"{place}: weight: expected at most 10^9, got {format_value(self.weight)}"
            )
        if self.max_slots is not None:
            integer(f"{place}: max_slots", self.max_slots)
        integer(f"{place}: priority", self.priority, 1, 99)


@dataclass(frozen=True, slots=True)
class Task:
    """A request for slots, waiting or running.

    Parameters
    ----------
    name
        Distinct; ties between agents go by its hash.
    slots
        A gang: all of them or none; 0 for a task that takes a zero-slot unit of an agent.
    group
        Whose it is; None: a group of its own, with the default weight and priority.
    preemptible
        Whether it may be released.
    submitted
        When its job was submitted, in any unit of time.
    requested
        When it asked for slots: goes before the name among tasks of one `submitted`.
    position
        Place in the queue (negative: behind all positive ones); None: by `submitted`.
    blocked
        Agents of the pool that it must not be put on.
    single_agent
        Never spread it over several agents.
    allocation
        Slots it holds by agent, all of them: the task runs. Empty: it runs, nobody knows where, on
        none of these agents' slots. None: it waits.
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
        place = f"task {_name('task', self.name)}"
        integer(f"{place}: slots", self.slots)
        if self.group is not None:
            _name(f"{place}: group", self.group)
        _truth(f"{place}: preemptible", self.preemptible)
        _truth(f"{place}: single_agent", self.single_agent)
        for key in ("submitted", "requested", "position"):
            value = getattr(self, key)
            if (value is not None or key != "position") and not _is_time(value):
                raise InputError(
                    f"{place}: {key}: expected a number in -2^53..2^53, got {format_value(value)}"
                )
        if type(self.blocked) is not frozenset or self.blocked:
            names = frozenset(_names(f"{place}: blocked", self.blocked))
            object.__setattr__(self, "blocked", names)
        if self.allocation is not None:
            object.__setattr__(self, "allocation", _allocation(place, self.allocation, self.slots))

    @property
    def is_running(self) -> bool:
        """Whether it has an allocation."""
        return self.allocation is not None


@dataclass(frozen=True)
class State:
    """One resource pool at one instant.

    Parameters
    ----------
    agents
        Its machines; an empty list is a pool that has none at present.
    tasks
        Waiting and running ones, in any order.
    groups
        Of which tasks speak; those that are not listed have the defaults.
    fit
        ``"best"``: fullest agents first, ``"worst"``: emptiest first.
    heterogeneous
        Whether a task may be spread over idle agents of different sizes.

    Raises
    ------
    InputError
        A name twice, an allocation on or a blocked agent that is not there, more slots or zero-slot
        units held than it has.
    """

    agents: tuple[Agent, ...]
    tasks: tuple[Task, ...] = ()
    groups: tuple[Group, ...] = ()
    fit: Literal["best", "worst"] = "best"
    heterogeneous: bool = False

    def __post_init__(self) -> None:
        for key, kind in (("agents", Agent), ("tasks", Task), ("groups", Group)):
            object.__setattr__(self, key, _rows(key, getattr(self, key), kind))
        one_of("fit", self.fit, FITS)
        _truth("heterogeneous", self.heterogeneous)
        total = sum(agent.slots for agent in self.agents)
        if total > MOST_SLOTS:
            raise InputError(f"agents: have {total} slots, more than {MOST_SLOTS}; split the pool")
        _check_held(self)


def _check_held(state: State) -> None:
    """Allocations lie on agents that are there and have the slots."""
    known = {agent.name: agent for agent in state.agents}
    held, units = dict.fromkeys(known, 0), dict.fromkeys(known, 0)
    for task in state.tasks:
        check_blocked(task, known)
        for name, slots in (task.allocation or {}).items():
            if name not in known:
                raise InputError(
                    f"task {format_value(task.name)}: allocation: there is no agent "
                    f"{format_value(name)}"
                )
            held[name] += slots
            units[name] += task.slots == 0
    for name, slots in held.items():
        agent = known[name]
        if agent.used is None and slots > agent.slots:
            raise InputError(
                f"agent {format_value(name)}: its tasks hold {slots} slots, it has {agent.slots}; "
                "tell what it shows with used"
            )
        if agent.zero_used is None and units[name] > agent.zero_slots:
            raise InputError(
                f"agent {format_value(name)}: zero_slots: its tasks hold {units[name]} units, it "
                "has "
                f"{agent.zero_slots}; tell what it shows with zero_used"
            )


def check_blocked(task: Task, agents: Iterable[str]) -> None:
    """Blocked agents are agents of the pool."""
    for name in sorted(task.blocked):
        if name not in agents:
            raise InputError(
                f"task {format_value(task.name)}: blocked: there is no agent {format_value(name)}"
            )


def _rows(key: str, given: Any, kind: type) -> tuple[Any, ...]:
    if isinstance(given, (str, bytes)) or not hasattr(given, "__iter__"):
        raise InputError(f"{key}: expected a list of {kind.__name__}s, got {format_value(given)}")
    rows = tuple(given)
    names = set()
    for i, row in enumerate(rows):
        if not isinstance(row, kind):
            raise InputError(f"{key}[{i}]: expected {_article(kind)}, got {format_value(row)}")
        names.add(row.name)  # type: ignore[attr-defined]
    if len(names) < len(rows):
        seen: set[str] = set()
        twice = next(row.name for row in rows if row.name in seen or seen.add(row.name))  # type: ignore[func-returns-value]
        raise InputError(f"{key}: {format_value(twice)} is there twice; names are distinct")
    return rows


def _article(kind: type) -> str:
    return f"an {kind.__name__}" if kind is Agent else f"a {kind.__name__}"


def _name(place: str, given: Any) -> str:
    if type(given) is str and given.isascii() and 0 < len(given) <= 200:
        return given
    if not label(place, given):
        raise InputError(f"{place}: expected a name, got an empty one")
    return str(given)


def _names(place: str, given: Any) -> Iterable[str]:
    if isinstance(given, (str, bytes)) or not hasattr(given, "__iter__"):
        raise InputError(f"{place}: expected names of agents, got {format_value(given)}")
    return [_name(place, name) for name in given]


def _allocation(place: str, given: Any, slots: int) -> Mapping[str, int]:
    place = f"{place}: allocation"
    if not hasattr(given, "items"):
        raise InputError(f"{place}: expected {{agent: slots}}, got {format_value(given)}")
    rows = {
        _name(place, name): integer(f"{place}[{format_value(name)}]", count, min(slots, 1))
        for name, count in given.items()
    }
    if rows and sum(rows.values()) != slots:
        raise InputError(f"{place}: holds {sum(rows.values())} slots, but asks for {slots}")
    if slots == 0 and len(rows) > 1:
        raise InputError(f"{place}: names {len(rows)} agents, but a task without slots is on one")
    return MappingProxyType(rows)


def _truth(place: str, given: Any) -> None:
    if type(given) is not bool:
        raise InputError(f"{place}: expected true or false, got {format_value(given)}")


def _is_time(given: Any) -> bool:
    if type(given) is not int and type(given) is not float:
        try:
            number("", given, -_TIMES)
        except InputError:
            return False
    return bool(-_TIMES <= given <= _TIMES)  # false for NaN
