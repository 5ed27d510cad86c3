"""Which agents a task is placed on, or why on none; agents and tasks as columns of numbers.

Source: determined-ai/determined, ``master/internal/rm/agentrm/fitting.go``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from hashlib import md5
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import numpy as np

from optsched.cluster.world.policy import Reason, Why
from optsched.io.values import format_value

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from optsched.cluster.world.policy import BoolArray, FloatArray
    from optsched.model.schedule import IntArray

    Explain: TypeAlias = Callable[[Sequence[str]], dict[int, Reason]]
    """Reason of every waiting task by number, if all tasks have these names."""

Places: TypeAlias = "list[tuple[int, int]]"
"""Agents of a task, and its slots on each (0: a zero-slot unit); empty: it fits nowhere."""

NEXT_TIME: Final = Reason(Why.ORDER, "fits; the next decision tries it again")
_LATE: Final = Reason(Why.ORDER, "the tasks that start before it leave it no free slots")


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

    def copy(self, without: Iterable[int] = ()) -> Agents:
        """Agents to try on, after the release of these tasks."""
        made = replace(self, free=self.free.copy(), free_units=self.free_units.copy())
        for task in without:
            for agent, slots in self.held(task):  # as far as agents report it as used
                made.free[agent] = min(made.capacity[agent], made.free[agent] + slots)
                if slots == 0:
                    made.free_units[agent] = min(made.units[agent], made.free_units[agent] + 1)
        return made

    def idle(self) -> Agents:
        """The same agents without any task."""
        return replace(self, free=self.capacity.copy(), free_units=self.units.copy())

    def place(self, places: Places) -> None:
        """Take slots, or a unit."""
        for agent, slots in places:
            self.free[agent] -= slots
            self.free_units[agent] -= slots == 0

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
            return pieces(np.where(usable, self.free, 0), slots)
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


def pieces(free: IntArray, slots: int) -> Places:
    """The emptiest agents wholly, until the remainder fits on one: the fullest of these."""
    found: Places = []
    if free.sum() < slots:
        return found
    free = free.copy()
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


def placed_again(
    agents: Agents, tasks: Tasks, start: list[int], release: list[int], backfilled: Iterable[int]
) -> Outcome:
    """Starts on agents as they are, with nothing released; what does not fit is postponed.

    Determined's resource pool (``allocateResources``) looks for agents a second time.
    """
    found = place_each(agents.copy(), tasks, start)
    late = [i for i in start if i not in found]
    return Outcome(found, release, late, [i for i in backfilled if i in found])


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
    """`Agents.rank` and `Tasks.first`: by the first 8 bytes of each name's md5, little-endian."""

    def hashes(names: Iterable[str]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        digests = [md5(name.encode(), usedforsecurity=False).digest()[:8] for name in names]
        return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)

    of, n = hashes(agents), len(agents)
    rank = np.empty(n, np.int64)
    rank[sorted(range(n), key=lambda a: (-int(of[a]), agents[a]))] = range(n)
    first = n - np.searchsorted(np.sort(of), hashes(tasks), "right")
    return rank, first.astype(np.int64) % max(1, n)


def go_sorted(found: list[int], swaps: Callable[[list[int], int], bool]) -> list[int]:
    """Insertion sort, as Go sorts up to 12 elements: if `swaps(found, i)`, i - 1 and i change.

    For comparisons that are no order, where the result depends on the algorithm.
    """
    for i in range(1, len(found)):
        while i > 0 and swaps(found, i):
            found[i], found[i - 1] = found[i - 1], found[i]
            i -= 1
    return found


# why tasks wait


def unplaced(
    agents: Agents, tasks: Tasks, outcome: Outcome, order: Iterable[int]
) -> tuple[Agents, dict[int, Reason | None]]:
    """The agents after the starts, and why waiting tasks do not fit there; None: they fit.

    `order` are all tasks as the scheduler looks at them.
    """
    after = agents.copy()
    for places in outcome.start.values():
        after.place(places)
    waiting = [int(i) for i in order if not tasks.running[i] and i not in outcome.start]
    kind = tasks.kind.tolist()
    found = {k: _misfit(tasks.kinds[k], agents, after) for k in {kind[i] for i in waiting}}
    return after, {i: found[kind[i]] for i in waiting}


def freed(
    after: Agents, tasks: Tasks, outcome: Outcome, schedule: Callable[[Agents, Tasks], Outcome]
) -> Collection[int]:
    """Tasks that the next decision starts, when the released tasks have stopped."""
    if not outcome.release:
        return ()
    running = tasks.running.copy()
    running[[*outcome.start]] = True
    running[outcome.release] = False
    later = replace(
        after.copy(outcome.release), held=lambda i: outcome.start.get(i) or after.held(i)
    )
    return schedule(later, replace(tasks, running=running)).start


def explained(
    names: Sequence[str],
    outcome: Outcome,
    misfits: Mapping[int, Reason | None],
    freed: Collection[int],
    special: Callable[[int, Reason | None], Reason | None],
) -> dict[int, Reason]:
    """Reasons of these tasks: the first that holds.

    They never fit; they start after a release (`freed`); they are postponed; the scheduler's
    `special` reason; they do not fit now.
    """
    stopping = ", ".join(format_value(names[i]) for i in outcome.release[:3])
    more = len(outcome.release) - 3
    stop = f"starts after the stop of {stopping}" + f" and {more} more" * (more > 0)
    answer = {}
    for i, misfit in misfits.items():
        if misfit and misfit.why is Why.NEVER:
            answer[i] = misfit
        elif i in freed:
            answer[i] = Reason(Why.RELEASE, stop)
        elif i in outcome.postponed:
            answer[i] = _LATE
        else:
            answer[i] = special(i, misfit) or misfit or NEXT_TIME
    return answer


def _misfit(kind: Kind, agents: Agents, after: Agents) -> Reason | None:
    """Why tasks of a kind never fit these agents, or not now; None: they fit."""
    usable = agents.takes_work.copy()
    usable[list(kind.blocked)] = False
    sizes, free = agents.capacity[usable], np.maximum(after.free[usable], 0)
    request = f"requests {in_slots(kind.slots)}"
    if not agents.idle().fits(kind):
        if kind.slots == 0:
            return Reason(Why.NEVER, "no agent that it may use has a zero-slot unit")
        one = "on one agent" if kind.single_agent or len(sizes) == 1 else _whole(kind, agents)
        has = f"those it may use have {sizes.sum()} in all, at most {sizes.max(initial=0)} each"
        return Reason(Why.NEVER, f"{request} {one}, {has}")
    if after.fits(kind):
        return None
    if kind.slots == 0:
        return Reason(Why.ROOM, "no zero-slot unit is free")
    if kind.slots > free.sum():
        return Reason(Why.ROOM, f"{request}, {free.sum()} are free")
    where = "on one agent"
    if not kind.single_agent and kind.slots > sizes.max():
        where = _whole(kind, agents)
    largest = f"{free.sum()} are free, at most {free.max()} on one"
    return Reason(Why.GANG, f"{request} {where}; {largest}")


def _whole(kind: Kind, agents: Agents) -> str:
    """Which agents a task gets that no single agent can serve."""
    alike = "" if agents.heterogeneous else f" of one size that divides {kind.slots}"
    return f"on wholly idle agents{alike}"


def in_slots(count: int) -> str:
    """A number of slots as text."""
    return f"{count} slot{'' if count == 1 else 's'}"
