"""A copy of the cluster on which tasks are put and taken: who fits where, at once."""

from __future__ import annotations

from bisect import bisect_left, insort
from functools import lru_cache
from typing import TYPE_CHECKING

from optsched.cluster.determined.columns import hash_of

if TYPE_CHECKING:
    from optsched.cluster.determined.columns import AgentColumns, Columns, Fits, Kind


class Board:
    """Free slots and zero-slot units of every agent, kept in buckets of equal score.

    Agents of one bucket are listed by their place on the *ring*: all agents by hash, descending
    (then by name). From a task's own hash downwards and round, they come in the order in which
    Determined breaks ties: md5(task) - md5(agent) mod 2^64, ascending.
    """

    def __init__(self, cols: Columns, agents: AgentColumns | None = None) -> None:
        """The agents of a pool, or these instead, under its fitting policy."""
        agents = cols.agents if agents is None else agents
        self.best, self.heterogeneous, self.spread = cols.best, cols.heterogeneous, cols.spread
        self.used, self.zero_used = agents.used.copy(), agents.zero_used.copy()
        self._slots, self._zero_slots = agents.slots, agents.zero_slots
        self._drained = agents.drained
        self._open = [not (d or x) for d, x in zip(agents.drained, agents.disabled, strict=True)]
        self._ring, self._place, self._hashes = ring(tuple(agents.names))
        self._buckets: dict[tuple[int, int], list[int]] = {}
        self._frees: list[tuple[int, int]] = []  # keys of the buckets, ascending
        self._idle: dict[int, list[int]] = {}
        for place, a in enumerate(self._ring):
            if self._open[a] and (free := self._slots[a] - self.used[a]) > 0:
                self._bucket((free, self._slots[a])).append(place)
                if not self.used[a]:
                    self._idle.setdefault(free, []).append(place)
        self._frees.sort()
        self._zero: dict[float, list[int]] | None = None

    def total(self, agent: int) -> int:
        """Slots that count: of a drained agent only the used ones, of a disabled one none."""
        if self._open[agent]:
            return self._slots[agent]
        return self.used[agent] if self._drained[agent] else 0

    @property
    def capacity(self) -> int:
        """All slots that count."""
        return sum(map(self.total, range(len(self._slots))))

    def free(self, agent: int) -> int:
        """Slots that new work can take."""
        return max(0, self._slots[agent] - self.used[agent]) if self._open[agent] else 0

    def free_units(self, agent: int) -> int:
        """Zero-slot units that new work can take."""
        left = self._zero_slots[agent] - self.zero_used[agent]
        return max(0, left) if self._open[agent] else 0

    # Whether and where

    def has(self, kind: Kind) -> bool:
        """Whether a task of this kind fits now."""
        slots, single, blocked = kind
        if slots in self.spread:
            return self._free() >= slots
        if blocked is not None or slots == 0 or self.heterogeneous:
            return bool(self.find(kind, ""))
        if self._frees and self._frees[-1][0] >= slots:
            return True
        return slots > 1 and not single and self._size(slots) > 0

    def find(self, kind: Kind, name: str) -> Fits:
        """The agents that a task of this kind and name is put on; empty if it fits nowhere."""
        slots, single, blocked = kind
        if slots in self.spread:
            return self._pieces(slots)
        one = self._zero_unit(name, blocked) if slots == 0 else self._shared(slots, name, blocked)
        if one >= 0:
            return [(self._ring[one], slots)]
        if single or slots <= 1:
            return []
        if blocked is not None:
            return self._whole(slots, name, self._permitted(blocked))
        return self._whole(slots, name, self._idle)

    def _shared(self, slots: int, name: str, blocked: frozenset[int] | None) -> int:
        """Place of the best agent that holds all of it; -1 if there is none."""
        first = bisect_left(self._frees, (slots, 0))
        keys = self._frees[first:]
        if self.best:
            for key in keys:  # ascending free slots: descending scores
                if (place := self._nearest(self._buckets[key], name, blocked)) >= 0:
                    # equal free slots are an equal score, whatever the agents' sizes
                    others = [k for k in keys if k[0] == key[0]]
                    return place if len(others) == 1 else self._nearest_of(others, name, blocked)
            return -1
        scores: dict[float, list[tuple[int, int]]] = {}
        for key in keys:
            scores.setdefault(key[0] / key[1], []).append(key)
        for _, same in sorted(scores.items(), reverse=True):
            if (place := self._nearest_of(same, name, blocked)) >= 0:
                return place
        return -1

    def _whole(self, slots: int, name: str, idle: dict[int, list[int]]) -> Fits:
        """Idle agents of one size that divides the request, or (if allowed) of several."""
        if size := self._size(slots, idle):
            return [(self._ring[p], size) for p in self._round(idle[size], name)[: slots // size]]
        if not self.heterogeneous:
            return []
        found: Fits = []
        left = slots
        for size in sorted(idle, reverse=True):
            taken = self._round(idle[size], name)[: left // size]
            found += [(self._ring[p], size) for p in taken]
            left -= size * len(taken)
            if not left:
                return found
        return []

    def _free(self) -> int:
        return sum(key[0] * len(bucket) for key, bucket in self._buckets.items())

    def _pieces(self, slots: int) -> Fits:
        """The emptiest agents wholly, until the rest fits on one: then on the fullest such one."""
        if self._free() < slots:
            return []
        found: Fits = []
        rest = sorted((self._slots[a] - self.used[a], -a) for a in self._ring if self._open[a])
        while rest[-1][0] < slots:
            free, agent = rest.pop()
            found.append((-agent, free))
            slots -= free
        free, agent = min((row for row in rest if row[0] >= slots), key=lambda r: (r[0], -r[1]))
        return [*found, (-agent, slots)]

    def _size(self, slots: int, idle: dict[int, list[int]] | None = None) -> int:
        idle = self._idle if idle is None else idle
        sizes = [n for n, rows in idle.items() if slots % n == 0 and len(rows) * n >= slots]
        return max(sizes, default=0)

    def _permitted(self, blocked: frozenset[int]) -> dict[int, list[int]]:
        rows = (
            (n, [p for p in places if self._ring[p] not in blocked])
            for n, places in self._idle.items()
        )
        return {n: places for n, places in rows if places}

    # Ties

    def _start(self, name: str) -> int:
        """Where the ring begins for a task."""
        return bisect_left(self._hashes, -hash_of(name))

    def _round(self, bucket: list[int], name: str) -> list[int]:
        first = bisect_left(bucket, self._start(name))
        return bucket[first:] + bucket[:first]

    def _nearest(self, bucket: list[int], name: str, blocked: frozenset[int] | None) -> int:
        if blocked is None:
            if len(bucket) == 1:
                return bucket[0]
            first = bisect_left(bucket, self._start(name))
            return bucket[first] if first < len(bucket) else bucket[0]
        ring = self._ring
        return next((p for p in self._round(bucket, name) if ring[p] not in blocked), -1)

    def _nearest_of(
        self, keys: list[tuple[int, int]], name: str, blocked: frozenset[int] | None
    ) -> int:
        start, n = self._start(name), len(self._ring)
        found = (self._nearest(self._buckets[key], name, blocked) for key in keys)
        return min((p for p in found if p >= 0), key=lambda p: (p - start) % n, default=-1)

    # Changes

    def put(self, fits: Fits) -> None:
        """Book the slots of a task, or its zero-slot unit."""
        for agent, slots in fits:
            if slots:
                self._show(agent, self.used[agent] + slots)
            else:
                self._show_zero(agent, self.zero_used[agent] + 1)

    def take(self, fits: Fits) -> Fits:
        """Give them back, as far as the agents show them as used; what `put` undoes."""
        undo: Fits = []
        for agent, slots in fits:
            if slots == 0:
                if self.zero_used[agent]:
                    self._show_zero(agent, self.zero_used[agent] - 1)
                    undo.append((agent, 0))
            elif back := min(slots, self.used[agent]):
                self._show(agent, self.used[agent] - back)
                undo.append((agent, back))
        return undo

    def _show(self, agent: int, used: int) -> None:
        before, self.used[agent] = self.used[agent], used
        self._zero = None  # the scores of zero-slot tasks know whether slots are used
        if not self._open[agent]:
            return
        slots, place = self._slots[agent], self._place[agent]
        if free := slots - before:
            key = (free, slots)
            bucket = self._buckets[key]
            if len(bucket) == 1:
                del self._buckets[key]
                del self._frees[bisect_left(self._frees, key)]
            else:
                del bucket[bisect_left(bucket, place)]
            if not before:
                _drop(self._idle, free, place)
        if free := slots - used:
            bucket = self._bucket((free, slots), sort=True)
            insort(bucket, place)
            if not used:
                insort(self._idle.setdefault(free, []), place)

    def _bucket(self, key: tuple[int, int], *, sort: bool = False) -> list[int]:
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = []
            if sort:
                insort(self._frees, key)
            else:
                self._frees.append(key)
        return bucket

    # Zero-slot units

    def _zero_unit(self, name: str, blocked: frozenset[int] | None) -> int:
        if self._zero is None:
            self._zero = {}
            for place, a in enumerate(self._ring):
                if self._has_unit(a):
                    self._zero.setdefault(self._zero_score(a), []).append(place)
        for score in sorted(self._zero, reverse=True):
            if (place := self._nearest(self._zero[score], name, blocked)) >= 0:
                return place
        return -1

    def _has_unit(self, agent: int) -> bool:
        return self._open[agent] and self._zero_slots[agent] > self.zero_used[agent]

    def _zero_score(self, agent: int) -> float:
        return score(
            self.best, 0, self.total(agent), self.used[agent],
            self._zero_slots[agent], self.zero_used[agent],
        )  # fmt: skip

    def _show_zero(self, agent: int, used: int) -> None:
        if self._zero is not None and self._has_unit(agent):
            _drop(self._zero, self._zero_score(agent), self._place[agent])
        self.zero_used[agent] = used
        if self._zero is not None and self._has_unit(agent):
            insort(self._zero.setdefault(self._zero_score(agent), []), self._place[agent])


def score(
    best: bool, slots: int, agent_slots: int, used: int, zero_slots: int, zero_used: int
) -> float:
    """Determined's score of an agent that takes work, 0 (worst) to 1."""
    if used or slots:
        free = agent_slots - used
        return 1.0 / (1.0 + free) if best else (free / agent_slots if agent_slots else 0.0)
    if not zero_slots:
        return 0.0
    free = zero_slots - zero_used
    return 1.0 / (1.0 + free) if best else free / zero_slots


@lru_cache(maxsize=64)
def ring(names: tuple[str, ...]) -> tuple[list[int], list[int], list[int]]:
    """Agents by hash, descending, then by name; their places; the hashes, negated."""
    order = sorted(range(len(names)), key=lambda a: (-hash_of(names[a]), names[a]))
    place = [0] * len(names)
    for p, a in enumerate(order):
        place[a] = p
    return order, place, [-hash_of(names[a]) for a in order]


def _drop(buckets: dict[float, list[int]] | dict[int, list[int]], key: float, place: int) -> None:
    bucket = buckets[key]  # type: ignore[index]
    if len(bucket) == 1:
        del buckets[key]  # type: ignore[arg-type]
    else:
        del bucket[bisect_left(bucket, place)]


__all__ = ["Board", "ring", "score"]
