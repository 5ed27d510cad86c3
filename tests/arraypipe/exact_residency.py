"""The least time of a cycle of tiny devices: every choice of victims, of order and of times.

Copies are made of chunks that take one unit of time each way, blocks take whole units, and only one
pool has slots (the other pool's states have no bytes). In every unit of time each direction of the
link carries any chunk that it may, or none: so states are loaded early or late, in any order, to
any slot, several at a time, and written back whenever somebody likes. Blocks start as soon as they
can, which no plan gains by putting off.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, NamedTuple

from optsched.arraypipe.memory.types import State, Visit

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_LAPS = (1, 2, 3, 4, 6)  # periods, in cycles, that are looked for


class Phase(NamedTuple):
    """A block: its state, its units of time, and whether it changes the state at its end."""

    state: int
    duration: int
    changes: bool


class Slot(NamedTuple):
    """What a slot holds: `state` with so many of its chunks, beside what has to leave of `old`."""

    state: int
    arrived: int
    old: int  # -1: nothing
    dirty: int  # chunks to write: of `old`, or of `state` once that is whole


class Moment(NamedTuple):
    """All that decides what can come."""

    phase: int
    left: int  # units of the block that runs; -1: it has not begun
    slots: tuple[Slot, ...]


class TooLarge(Exception):
    """There are more moments than were allowed."""


class Drawn(NamedTuple):
    """A tiny device: as the planner sees it, and for the search."""

    states: list[State]
    visits: list[Visit]
    slots: tuple[int, int]
    device: Device


def drawn(seed: int, most: int) -> Drawn:
    """Three to five jobs, one to three slots, states of two to six chunks; jobs alike or not."""
    rng = random.Random(seed)
    jobs, late = rng.randint(3, 5), rng.random() < 0.35
    slots, chunks = rng.randint(1 if late else 2, min(3, jobs - 1)), rng.choice([2, 3, 4, 6])
    row, shift = range(jobs), rng.randint(1, jobs - 1)
    order = rng.choice(
        [
            [(kind, j) for kind in "FB" for j in row],
            [x for j in row for x in (("F", j), ("B", (j - shift) % jobs))],
            [x for j in row for x in (("B", j), ("F", j))],
            rng.sample([(kind, j) for kind in "FB" for j in row], 2 * jobs),
        ]
    )
    units = [(rng.choice([1, 1, 2]), rng.choice([2, 3])) for _ in row]
    if seed % 2:
        units = [(1, units[0][1])] * jobs
    visits, phases = [], []
    for kind, j in order:
        duration = units[j][kind == "B"]
        visits.append(Visit(j, kind, duration_ns=duration))
        if kind == "B":
            visits.append(Visit(j, "U"))
        phases.append(Phase(j, duration, kind == "B"))
    sizes = (0, 0, 0, chunks) if late else (chunks, 0, 0, 0)
    states = [State(j, 0, sizes) for j in row]
    device = Device(phases, slots, chunks, late, most)
    return Drawn(states, visits, (1, slots) if late else (slots, 1), device)


class Device:
    """A cycle of blocks, so many slots, so many chunks a state; at most so many moments.

    `late`: the state is needed at the end of the blocks that change it only (moments), instead of
    during all blocks (weights).
    """

    def __init__(
        self, phases: Sequence[Phase], slots: int, chunks: int, late: bool, most: int = 400_000
    ) -> None:
        self.phases, self.slots, self.chunks, self.late = phases, slots, chunks, late
        self.most = most
        self.used = sorted({p.state for p in phases if p.changes or not late})
        self.numbers: dict[Moment, int] = {}
        self.moments: list[Moment] = []
        self.after: list[list[tuple[int, bool]] | None] = []  # and whether a cycle has ended

    def least_period(self, cycles: int = 40) -> float:
        """Least mean time of a cycle in the long run.

        `reached` has the earliest time of every moment at which the cycle number so-and-so can
        begin. No plan is faster than the least growth of any of them over some cycles; it is told
        once the first of them grows no faster than that.
        """
        start, _ = self._settle(0, -1, (Slot(-1, self.chunks, -1, 0),) * self.slots)
        reached = [{self._number(start): 0}]
        for _ in range(cycles):
            reached.append(self._cycle(reached[-1]))
            for laps in _LAPS:
                if len(reached) > laps and reached[-1].keys() == reached[-1 - laps].keys():
                    before = reached[-1 - laps]
                    least = min(time - before[m] for m, time in reached[-1].items())
                    if min(reached[-1].values()) - min(before.values()) == least:
                        return least / laps
        raise TooLarge

    def _cycle(self, begin: dict[int, int]) -> dict[int, int]:
        """Earliest times of the moments at which the next cycle can begin."""
        fronts: dict[int, list[int]] = {}
        for moment, time in begin.items():
            fronts.setdefault(time, []).append(moment)
        seen: set[int] = set()
        found: dict[int, int] = {}
        time = min(fronts)
        while fronts:
            for moment in fronts.pop(time, ()):
                if moment in seen:
                    continue
                seen.add(moment)
                for other, ended in self._next(moment):
                    if ended:
                        found.setdefault(other, time + 1)
                    elif other not in seen:
                        fronts.setdefault(time + 1, []).append(other)
            time += 1
        return found

    def _number(self, moment: Moment) -> int:
        if moment not in self.numbers:
            if len(self.moments) == self.most:
                raise TooLarge
            self.numbers[moment] = len(self.moments)
            self.moments.append(moment)
            self.after.append(None)
        return self.numbers[moment]

    def _next(self, number: int) -> list[tuple[int, bool]]:
        found = self.after[number]
        if found is None:
            found = [(self._number(m), ended) for m, ended in self._steps(self.moments[number])]
            self.after[number] = found
        return found

    def _settle(self, phase: int, left: int, slots: tuple[Slot, ...]) -> tuple[Moment, bool]:
        """Begin and end blocks that can, without any time; whether a cycle has ended."""
        ended = False
        while True:
            block = self.phases[phase]
            here = any(s.state == block.state and s.arrived == self.chunks for s in slots)
            if left == -1:
                if not self.late and not here:
                    return Moment(phase, -1, slots), ended
                left = block.duration
            if left > 0 or (self.late and block.changes and not here):
                return Moment(phase, left, slots), ended
            if block.changes:
                slots = tuple(
                    s._replace(dirty=self.chunks) if s.state == block.state and s.old < 0 else s
                    for s in slots
                )
            phase, left = phase + 1, -1
            if phase == len(self.phases):
                phase, ended = 0, True

    def _steps(self, moment: Moment) -> set[tuple[Moment, bool]]:
        """What one unit of time may lead to."""
        found = set()
        left = moment.left - 1 if moment.left > 0 else moment.left
        for read in self._reads(moment):
            for write in self._writes(moment):
                slots = list(moment.slots)
                if read is not None:
                    k, slots[k] = read
                if write is not None:
                    slots[write] = slots[write]._replace(dirty=slots[write].dirty - 1)
                settled = [s._replace(old=-1) if s.old >= 0 and not s.dirty else s for s in slots]
                found.add(self._settle(moment.phase, left, tuple(sorted(settled))))
        return found

    def _busy(self, moment: Moment, slot: Slot) -> bool:
        """Whether a block works on the state of the slot."""
        state = self.phases[moment.phase].state
        return not self.late and moment.left > 0 and slot.state == state

    def _writes(self, moment: Moment) -> Iterator[int | None]:
        """Slots of which a chunk may be written; what a block is about to change is not."""
        yield None
        changes = self.phases[moment.phase].changes
        for k, slot in enumerate(moment.slots):
            if slot.dirty and not (self._busy(moment, slot) and changes):
                yield k

    def _reads(self, moment: Moment) -> Iterator[tuple[int, Slot] | None]:
        """Slots into which a chunk may be read, and what they hold after that."""
        yield None
        inside = {s.state for s in moment.slots} | {s.old for s in moment.slots}
        for k, slot in enumerate(moment.slots):
            room = self.chunks - slot.dirty
            if slot.arrived < self.chunks:
                if slot.arrived < room:
                    yield k, slot._replace(arrived=slot.arrived + 1)
            elif room and not self._busy(moment, slot):
                old = slot.state if slot.dirty else -1
                for state in self.used:
                    if state not in inside:
                        yield k, Slot(state, 1, old, slot.dirty)
