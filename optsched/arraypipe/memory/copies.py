"""Which state leaves a slot for another, and the copies that follow, as early as is safe."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from optsched.arraypipe.memory.engines import IN, OUT
from optsched.arraypipe.memory.types import CHANGES, NEEDS, POOLS
from optsched.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from optsched.arraypipe.memory.engines import CopyEngine
    from optsched.arraypipe.memory.types import State, Visit


class OutOfSlots(InternalError):
    """Every slot holds a state between a forward and its backward."""


class Rule(NamedTuple):
    """How the states of one pool of slots are replaced.

    With a *lead* the states of the last turns (uninterrupted visits to one state) are spared, so
    that copies begin that many turns ahead; 0 has the fewest copies and hides none. Copies of
    states that share the other slots overlap with blocks of the *fixed* ones.
    """

    slots: int  # states that fit
    lead: int = 0
    fixed: tuple[int, ...] = ()  # states that stay, once loaded, as long as they can


@dataclass(eq=False)
class Slot:
    """One place for the pieces of a pool."""

    pool: int
    index: int  # in its pool
    # once all decisions so far are carried out
    state: int = -1
    present: set[int] = field(default_factory=set)  # pieces
    changes: dict[int, int] = field(default_factory=dict)  # piece -> visit that changed it last
    last: int = -1  # visit that used it last
    turn: int = -1  # number of the turn that used it last
    graphs: int = 0  # open autograd graphs that point at its weights
    # now; events by piece
    dirty: dict[int, int] = field(default_factory=dict)  # piece -> state that changed it here
    used: Any = None  # event of the last block here
    changed: dict[int, Any] = field(default_factory=dict)
    arrived: dict[int, Any] = field(default_factory=dict)
    vacated: dict[int, list[tuple[int, Any]]] = field(default_factory=dict)  # up to which byte


class Move(NamedTuple):
    """What has to happen in a slot before a visit; -1 is "none"."""

    slot: Slot
    fetch: tuple[int, ...]  # pieces to copy in
    victim: int  # state that leaves the slot for it
    after: int  # the last visit to the slot before


class Decision(NamedTuple):
    """A visit and what it takes."""

    visit: Visit
    moves: tuple[Move, ...]  # the first one is that of the weights


class Pool:
    """Slots for the same pieces."""

    def __init__(self, index: int, rule: Rule) -> None:
        self.rule = rule
        self.needs, self.changes = (
            {k: tuple(piece for piece in row if piece in POOLS[index]) for k, row in table.items()}
            for table in (NEEDS, CHANGES)
        )
        self.slots = [Slot(index, k) for k in range(rule.slots)]
        self.where: dict[int, Slot] = {}  # by state
        self.turn, self.previous = 0, -1


@dataclass
class Carrier:
    """Who holds the bytes that are copied: here nobody, only their number is known."""

    states: Sequence[State]

    def mover(
        self, direction: str, slot: int, state: int, piece: int, start: int, stop: int
    ) -> Callable[[], None]:
        """The copy of a range of bytes of a piece, to be called when its turn comes.

        Slots are numbered within the pool of the piece.
        """
        return lambda: None

    def size(self, state: int, piece: int) -> int:
        """Bytes to copy of a piece."""
        return self.states[state].bytes[piece]

    def leaves(self, pool: int, slot: int, state: int) -> None:
        """All visits to a state in the slot have been queued and it will be overwritten."""


class Transfers:
    """Has states in slots when they are visited: decides ahead of the blocks, copies when it may.

    The victim is the state whose next use is farthest away, a clean one among equals (Belady, IBM
    Systems Journal 5, 1966), apart from what the rule of the pool spares. A piece is written back
    once the last visit that changes it is over, read into a slot once the last visit to its former
    holder is over and the bytes there have been written back. Copies are cut into chunks (0: whole
    pieces), so that both directions of a swap overlap in one slot.
    """

    def __init__(
        self,
        rules: Sequence[Rule],
        horizon: int,
        engine: CopyEngine,
        carrier: Carrier,
        chunk: int = 0,
    ) -> None:
        self.future: Iterator[Visit] = iter(())  # visits to come
        self.horizon = horizon  # visits to look ahead; what none of them needs is needed "never"
        self.engine, self.carrier, self.chunk = engine, carrier, chunk
        self.pools = [Pool(index, rule) for index, rule in enumerate(rules)]
        self.known: deque[Visit] = deque()  # announced and not decided on
        self.decided: deque[Decision] = deque()  # visits that are not over
        self.over = 0  # visits that are
        # the last visit that changes it, slot, state and piece
        self.writes: list[tuple[int, Slot, int, int]] = []
        self.reads: deque[tuple[int, Move]] = deque()  # and the state to read
        self.written: dict[tuple[int, int], Any] = {}  # state, piece -> event in its store

    def enter(self, visit: Visit) -> Decision:
        """Have the state of a visit in its slots, for blocks queued from now on."""
        if not self.decided or self.decided[0].visit.key != visit.key:
            self._meet(visit)
        decision = self.decided[0]
        self._issue()
        self.engine.wait(
            slot.arrived.get(piece)
            for slot, *_ in decision.moves
            for piece in self.pools[slot.pool].needs[decision.visit.kind]
        )
        return decision

    def leave(self) -> None:
        """The block of the visit has been queued; queue what had to wait for it."""
        visit, moves = self.decided.popleft()
        self.over += 1
        event = self.engine.ran()
        for slot, *_ in moves:
            slot.used = event
            for piece in self.pools[slot.pool].changes[visit.kind]:
                slot.changed[piece], slot.dirty[piece] = event, visit.state
        # decide on visits to come until there are as many undone reads as slots
        slots = sum(pool.rule.slots for pool in self.pools)
        while len(self.reads) <= slots and len(self.decided) < self.horizon:
            if not self._decide():
                break
        self._issue()

    def flush(self) -> None:
        """Write back all that was changed, and wait until it has been."""
        for slot in (slot for pool in self.pools for slot in pool.slots):
            for piece, state in list(slot.dirty.items()):
                self._write(slot, state, piece)
        self.writes.clear()
        self.reads.clear()
        self.engine.finish()

    def renew(self, future: Iterator[Visit]) -> None:
        """Announce visits to come, instead of those before: the run has another order."""
        self.future = future
        self._skip(len(self.decided))
        self.known.clear()
        for slot in self.pools[0].slots:
            slot.graphs = 0

    def _meet(self, visit: Visit) -> None:
        """Make a visit the next one: pass over those that will not be run, or squeeze it in."""
        self._learn()
        keys = [*(decision.visit.key for decision in self.decided), *(v.key for v in self.known)]
        if visit.key in keys:
            ahead = keys.index(visit.key)
            beyond = ahead - len(self.decided)
            self._skip(min(ahead, len(self.decided)))
            for _ in range(beyond):
                self._end_graphs(self.known.popleft().state)
        else:
            self._skip(len(self.decided), for_good=False)
            self.known.appendleft(visit)
        if not self.decided:
            self._decide()

    def _skip(self, count: int, for_good: bool = True) -> None:
        for _ in range(count):
            visit, moves = self.decided.popleft()
            self.over += 1
            if for_good:
                self._end_graphs(visit.state)
            for move in moves:  # it may have been begun before it failed
                move.slot.used = self.engine.ran()

    def _end_graphs(self, state: int) -> None:
        """A visit is not run: iterations end whole or with their job, so no graph is left."""
        if slot := self.pools[0].where.get(state):
            slot.graphs = 0

    def _learn(self) -> None:
        while len(self.known) <= self.horizon and (visit := next(self.future, None)) is not None:
            self.known.append(visit)

    def _decide(self) -> bool:
        """Decide on the next visit, unless nothing more is known."""
        self._learn()
        if not self.known:
            return False
        visit = self.known.popleft()
        moves = tuple(self._move(pool, visit) for pool in self.pools if pool.needs[visit.kind])
        weights = moves[0].slot
        weights.graphs = max(0, (0 if visit.first else weights.graphs) + visit.graph)
        self.decided.append(Decision(visit, moves))
        self.reads.extend((visit.state, move) for move in moves if move.fetch)
        return True

    def _move(self, pool: Pool, visit: Visit) -> Move:
        now = self.over + len(self.decided)
        if visit.state != pool.previous:
            pool.previous = visit.state
            pool.turn += 1
        victim, after = -1, -1
        slot = pool.where.get(visit.state)
        if slot is None:
            slot = self._choose(pool)
            victim, after = slot.state, slot.last
            self.writes += ((at, slot, victim, piece) for piece, at in slot.changes.items())
            pool.where.pop(victim, None)
            slot.state, slot.present, slot.changes, slot.graphs = visit.state, set(), {}, 0
            pool.where[visit.state] = slot
        fetch = pool.needs[visit.kind]
        if slot.present:
            fetch = tuple(piece for piece in fetch if piece not in slot.present)
        slot.present.update(fetch)
        for piece in pool.changes[visit.kind]:
            slot.changes[piece] = now
        slot.last, slot.turn = now, pool.turn
        return Move(slot, fetch, victim, after)

    def _choose(self, pool: Pool) -> Slot:
        """A free slot, or that of the victim."""
        if len(pool.where) < len(pool.slots):
            return next(slot for slot in pool.slots if slot.state < 0)
        uses: dict[int, int] = {}
        for k, visit in enumerate(self.known):
            if visit.state in pool.where and visit.state not in uses and pool.needs[visit.kind]:
                uses[visit.state] = k
                if len(uses) == len(pool.slots):
                    break
        choices: list[tuple[tuple[float, ...], Slot]] = []
        for slot in pool.slots:
            use = uses.get(slot.state, math.inf)
            # what the known future never uses belongs to a job that has ended
            needed = use < math.inf or not self.known
            if needed and slot.graphs > 0:
                continue
            spared = pool.turn - slot.turn <= pool.rule.lead
            # where all are spared, the one that was left longest ago
            rank = (0, -slot.turn) if spared else (1, use)
            fixed = needed and slot.state in pool.rule.fixed
            choices.append(((not fixed, *rank, not slot.changes, -slot.index), slot))
        if not choices:
            raise OutOfSlots(
                f"all {len(pool.slots)} slots hold states between a forward and its backward"
            )
        return max(choices)[1]

    def _issue(self) -> None:
        """Queue all copies that are safe: writes in any order, reads in that of their need."""
        waiting = []
        for write in self.writes:
            if write[0] < self.over:
                self._write(*write[1:])
            else:
                waiting.append(write)
        self.writes = waiting
        # never out of turn: a state is read again only behind the read that drove it out, and what
        # is needed first does not wait behind what is needed later
        while self.reads and self.reads[0][1].after < self.over:
            self._read(*self.reads.popleft())

    def _write(self, slot: Slot, state: int, piece: int) -> None:
        if slot.dirty.pop(piece, -1) != state:
            return  # the visit that was to change it was passed over
        after = [slot.changed.get(piece)]
        events = slot.vacated[piece] = []
        for start, stop in self._chunks(state, piece):
            action = self.carrier.mover(OUT, slot.index, state, piece, start, stop)
            events.append((stop, self.engine.copy(OUT, stop - start, action, after, state)))
        if events:
            self.written[state, piece] = events[-1][1]

    def _read(self, state: int, move: Move) -> None:
        slot = move.slot
        if move.victim >= 0:
            self.carrier.leaves(slot.pool, slot.index, move.victim)
        for piece in move.fetch:
            after = [slot.used, self.written.get((state, piece))]
            vacated = slot.vacated.get(piece, [])
            # what is not in its store yet is made in the slot, after all that was there has left
            k, arrival = 0, vacated[-1][1] if vacated else None
            for start, stop in self._chunks(state, piece):
                while k < len(vacated) - 1 and vacated[k][0] < stop:
                    k += 1
                free = [vacated[k][1]] if vacated else []
                action = self.carrier.mover(IN, slot.index, state, piece, start, stop)
                arrival = self.engine.copy(IN, stop - start, action, [*after, *free], state)
            slot.arrived[piece] = arrival

    def _chunks(self, state: int, piece: int) -> list[tuple[int, int]]:
        size = self.carrier.size(state, piece)
        step = self.chunk or max(size, 1)
        return [(start, min(start + step, size)) for start in range(0, size, step)]
