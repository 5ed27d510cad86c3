"""Which agents a task is placed on; agents and tasks as columns of numbers.

Source: determined-ai/determined, ``master/internal/rm/agentrm/fitting.go``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from hashlib import md5
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from optsched.cluster.determined.state import Group, held

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from optsched.cluster.determined.state import State, Task
    from optsched.cluster.world.policy import BoolArray, FloatArray
    from optsched.model.schedule import IntArray

Places: TypeAlias = "list[tuple[int, int]]"
"""Agents of a task, and its slots on each (0: a zero-slot unit); empty: it fits nowhere."""


class Kind(NamedTuple):
    """Tasks that fit alike."""

    slots: int
    single_agent: bool = False
    blocked: tuple[int, ...] = ()
    """Agents that the task may not use."""
    in_pieces: bool = False
    """Whether any free slots serve it (simulated gangs that would never fit otherwise)."""


@dataclass
class Tasks:
    """Tasks in the order of submission (job submit time, request time, name), by number."""

    slots: IntArray
    group: IntArray
    """Number of its group; a task without one has a number of its own."""
    kind: IntArray
    kinds: Sequence[Kind]
    preemptible: BoolArray
    running: BoolArray
    submitted: FloatArray
    level: IntArray
    """Priority of the group, 1 first."""
    weight: FloatArray
    limit: IntArray
    """`max_slots` of the group; -1: no limit."""
    first: IntArray
    """Where the agents in the order of their hashes begin for this task."""
    position: Sequence[float | None] | None = None


@dataclass
class Agents:
    """Free slots and zero-slot units, while tasks are placed and released."""

    capacity: IntArray
    free: IntArray
    units: IntArray
    free_units: IntArray
    takes_work: BoolArray
    rank: IntArray
    """Place in the order of hashes, descending. From a task's first place on and round, agents
    come by md5(task) - md5(agent) mod 2^64: the order among equal scores."""
    held: Callable[[int], Places]
    """Agents of a running task, by its number."""
    best: bool = True
    heterogeneous: bool = False

    def total(self) -> int:
        """Slots that count: all of agents that take work, the used slots of others."""
        return int(np.where(self.takes_work, self.capacity, self.capacity - self.free).sum())

    def copy(self) -> Agents:
        """Agents to try on."""
        return replace(self, free=self.free.copy(), free_units=self.free_units.copy())

    def idle(self) -> Agents:
        """The same agents without any task."""
        return replace(self, free=self.capacity.copy(), free_units=self.units.copy())

    def place(self, places: Places) -> None:
        """Take slots, or a unit."""
        for agent, slots in places:
            self.free[agent] -= slots
            self.free_units[agent] -= slots == 0

    def release(self, task: int) -> None:
        """Return what a task holds, as far as agents report it as used."""
        for agent, slots in self.held(task):
            self.free[agent] = min(self.capacity[agent], self.free[agent] + slots)
            if slots == 0:
                self.free_units[agent] = min(self.units[agent], self.free_units[agent] + 1)

    def fits(self, kind: Kind) -> bool:
        """Whether a task of this kind fits."""
        free = self.free[self.takes_work]
        largest = free.max(initial=0)
        if 0 < kind.slots <= largest and not kind.blocked:
            return True
        if kind.slots > largest and not kind.in_pieces:  # then it takes whole idle agents
            free = free[free == self.capacity[self.takes_work]]
        return bool(kind.slots <= free.sum()) and bool(self.find(kind))

    def find(self, kind: Kind, first: int = 0) -> Places:
        """The agents of a task.

        One agent; else idle agents of one size that divides the request, the largest size first;
        else, if sizes may be mixed, idle agents from the largest size down, without going back.
        """
        slots, usable = kind.slots, self.takes_work
        if kind.in_pieces:
            return self._pieces(slots)
        if kind.blocked:
            usable = usable.copy()
            usable[list(kind.blocked)] = False
        enough = usable & (self.free >= slots)
        if slots == 0:
            enough &= self.free_units > 0
        at = np.flatnonzero(enough)
        if len(at):
            values = scores(self.best, slots, self.capacity[at], self.free[at], self.units[at],
                            self.free_units[at])  # fmt: skip
            at = at[values == values.max()]
            return [(int(at[np.argmin((self.rank[at] - first) % len(usable))]), slots)]
        if kind.single_agent or slots <= 1:
            return []
        idle = np.flatnonzero(usable & (self.free == self.capacity) & (self.free > 0))
        idle = idle[np.argsort((self.rank[idle] - first) % len(usable))]
        size = self.free[idle]
        sizes = sorted({*size.tolist()}, reverse=True)
        for n in sizes:
            if slots % n == 0 and (size == n).sum() * n >= slots:
                return [(a, n) for a in idle[size == n][: slots // n].tolist()]
        found: Places = []
        for n in sizes if self.heterogeneous else ():
            some = idle[size == n][: slots // n].tolist()
            found += [(a, n) for a in some]
            slots -= n * len(some)
        return found if slots == 0 else []

    def _pieces(self, slots: int) -> Places:
        """The emptiest agents wholly, until the remainder fits on one: the fullest of these."""
        found: Places = []
        free = np.where(self.takes_work, self.free, 0)
        if free.sum() < slots:
            return []
        while slots > 0:
            enough = np.flatnonzero(free >= slots)
            a = int(enough[np.argmin(free[enough])] if len(enough) else np.argmax(free))
            found.append((a, min(slots, int(free[a]))))
            slots -= found[-1][1]
            free[a] = 0
        return found


@dataclass
class Outcome:
    """What a scheduler decides, by numbers of tasks, in its order."""

    start: dict[int, Places]
    release: list[int] = field(default_factory=list)
    postponed: list[int] = field(default_factory=list)
    """Tasks that were to start, but must wait."""
    backfilled: list[int] = field(default_factory=list)
    """Tasks of `start` that pass one of a better priority that does not fit."""


def place_each(agents: Agents, tasks: Tasks, rows: IntArray | list[int]) -> dict[int, Places]:
    """Place these tasks, one after the other, as far as they fit; the agents change."""
    left, free = np.asarray(rows, np.int64), np.maximum(agents.free, 0)
    left = left[tasks.slots[left] <= free[agents.takes_work].sum()]
    found, at = {}, 0
    while at < len(left):
        i, at = int(left[at]), at + 1
        k = tasks.kind[i]
        if places := agents.find(tasks.kinds[k], int(tasks.first[i])):
            agents.place(places)
            found[i] = places
        elif not agents.heterogeneous:  # there fewer idle agents may serve what more do not
            left, at = left[at:][tasks.kind[left[at:]] != k], 0
    return found


def placed_again(agents: Agents, tasks: Tasks, start: list[int]) -> Outcome:
    """Starts on agents as they are, with nothing released; what does not fit is postponed.

    Determined's resource pool (``allocateResources``) looks for agents a second time.
    """
    found = place_each(agents.copy(), tasks, start)
    return Outcome(found, postponed=[i for i in start if i not in found])


def scores(
    best: bool, slots: int, capacity: IntArray, free: IntArray, units: IntArray,
    free_units: IntArray,
) -> FloatArray:  # fmt: skip
    """Determined's score of agents for a task, 0 (worst) to 1."""
    if slots == 0:
        idle = free == capacity
        capacity, free = np.where(idle, units, capacity), np.where(idle, free_units, free)
    free = np.maximum(free, 0)
    value = 1.0 / (1.0 + free) if best else free / np.maximum(capacity, 1)
    return np.where(capacity > 0, value, 0.0)


def by_hash(agents: Sequence[str], tasks: Iterable[str]) -> tuple[IntArray, IntArray]:
    """`Agents.rank`, and `Tasks.first`."""
    hashes = _hashes(agents)
    rank = np.empty(len(agents), np.int64)
    rank[sorted(range(len(agents)), key=lambda a: (-int(hashes[a]), agents[a]))] = range(len(rank))
    first = len(hashes) - np.searchsorted(np.sort(hashes), _hashes(tasks), "right")
    return rank, first.astype(np.int64) % max(1, len(hashes))


def _hashes(names: Iterable[str]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """The first 8 bytes of every name's md5, little-endian."""
    digests = [md5(name.encode(), usedforsecurity=False).digest()[:8] for name in names]
    return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)


def table(state: State, tasks: Sequence[Task] | None = None) -> tuple[Agents, Tasks, list[Task]]:
    """A state as columns, and its tasks by number; or these tasks on its agents."""
    given = state.tasks if tasks is None else tasks
    rows = sorted(given, key=lambda task: (task.submitted, task.requested, task.name))
    names = [agent.name for agent in state.agents]
    number = {name: a for a, name in enumerate(names)}
    rank, first = by_hash(names, [task.name for task in rows])
    listed = {group.name: group for group in state.groups}
    default = Group("default")
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
        kind=_ints(kind_of),
        kinds=list(kinds),
        preemptible=np.array([task.preemptible for task in rows], bool),
        running=np.array([task.is_running for task in rows], bool),
        submitted=np.array([task.submitted for task in rows], float),
        level=_ints(group.priority for group in groups),
        weight=np.array([group.weight for group in groups], float),
        limit=_ints(-1 if group.max_slots is None else group.max_slots for group in groups),
        first=first,
        position=[task.position for task in rows] if any(t.position for t in rows) else None,
    )
    places = [[(number[n], s) for n, s in (task.allocation or {}).items()] for task in rows]
    return _agents(state, rank, places.__getitem__), columns, rows


def _agents(state: State, rank: IntArray, places: Callable[[int], Places]) -> Agents:
    """A drained agent takes no task and counts its used slots; a disabled one has none."""
    slots, units = held(state.tasks)
    capacity, free, free_units = [], [], []
    for agent in state.agents:
        used = slots.get(agent.name, 0) if agent.used is None else agent.used
        busy = units.get(agent.name, 0) if agent.zero_used is None else agent.zero_used
        counts = not agent.disabled or agent.drained
        capacity.append(agent.slots if counts else 0)
        free.append(agent.slots - used if counts else 0)
        free_units.append(agent.zero_slots - busy)
    return Agents(
        _ints(capacity), _ints(free), _ints(agent.zero_slots for agent in state.agents),
        _ints(free_units), np.array([not (a.drained or a.disabled) for a in state.agents], bool),
        rank, places, state.fit == "best", state.heterogeneous,
    )  # fmt: skip


def _ints(values: Iterable[int]) -> IntArray:
    return np.array([*values], np.int64)
