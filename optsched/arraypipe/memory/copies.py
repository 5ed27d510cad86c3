"""Which state leaves a slot for another, and the copies that follow, as early as is safe."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

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
    fixed: tuple[int, ...] = ()  # states that stay, once loaded, as long as they are needed at all


class Move(NamedTuple):
    """What has to happen in one pool before a visit; -1 is "none"."""

    pool: int
    slot: int
    fetch: tuple[int, ...]  # pieces to copy in
    victim: int  # state that leaves the slot for it
    writes: tuple[tuple[int, int], ...]  # its pieces to copy out, and the visit that changed each
    after: int  # the last visit to the slot before


class Decision(NamedTuple):
    """A visit and what it takes; positions count the visits that were decided on."""

    visit: Visit
    position: int
    moves: tuple[Move, ...]


@dataclass
class _Slot:
    """What a slot holds once all decisions so far are carried out."""

    state: int = -1
    present: set[int] = field(default_factory=set)  # pieces
    changed: dict[int, int] = field(default_factory=dict)  # piece -> visit that changed it last
    last: int = -1  # visit that used it last
    turn: int = -1  # number of the turn that used it last


class Pool:
    """Slots for the same pieces."""

    def __init__(self, index: int, rule: Rule) -> None:
        self.index, self.rule = index, rule
        self.needs, self.changes = (
            {k: tuple(piece for piece in row if piece in POOLS[index]) for k, row in table.items()}
            for table in (NEEDS, CHANGES)
        )
        self.slots = [_Slot() for _ in range(rule.slots)]
        self.where: dict[int, int] = {}  # state -> slot
        self.uses: dict[int, deque[int]] = defaultdict(deque)  # known positions by state
        self.turn, self.previous = 0, -1

    def wants(self, visit: Visit) -> bool:
        """Whether a visit needs a piece that is kept here."""
        return bool(self.needs[visit.kind])


class Replacement:
    """Decides visit by visit; knows as much of the future as it has been told.

    The victim is the state whose next use is farthest away, a clean one among equals (Belady, IBM
    Systems Journal 5, 1966), apart from what the rule of the pool spares.
    """

    def __init__(self, future: Iterator[Visit], rules: Sequence[Rule], horizon: int) -> None:
        self.future = future  # visits to come
        self.horizon = horizon  # visits to look ahead; what none of them needs is needed "never"
        self.pools = [Pool(index, rule) for index, rule in enumerate(rules)]
        self.graphs: dict[int, int] = defaultdict(int)  # open autograd graphs by state
        self.position = 0  # of the next visit to decide on
        self.known: deque[Visit] = deque()

    def decide(self) -> Decision | None:
        """The next visit and what it takes; None when nothing more is known."""
        if not self.known and not self._learn():
            return None
        visit = self._pass()
        moves = tuple(self._move(pool, visit) for pool in self.pools if pool.wants(visit))
        if visit.first:
            self.graphs[visit.state] = 0
        self.graphs[visit.state] = max(0, self.graphs[visit.state] + visit.graph)
        decision = Decision(visit, self.position, moves)
        self.position += 1
        return decision

    def expects(self, visit: Visit) -> int:
        """How many undecided visits come before this one; -1 if it is not in sight."""
        for ahead in range(self.horizon):
            if ahead == len(self.known) and not self._learn():
                return -1
            if self.known[ahead].key == visit.key:
                return ahead
        return -1

    def drop(self, count: int) -> None:
        """Forget the next undecided visits: they will not be run."""
        for _ in range(count):
            self.skipped(self._pass())
            self.position += 1

    def skipped(self, visit: Visit) -> None:
        """A visit is not run: iterations end whole or with their job, so no graph is left."""
        self.graphs[visit.state] = 0

    def forget(self) -> None:
        """What was announced and not decided on does not hold any more; no graph is left."""
        self.known.clear()
        self.graphs.clear()
        for pool in self.pools:
            pool.uses.clear()

    def surprise(self, visit: Visit) -> None:
        """Put a visit that nobody announced before all undecided ones."""
        self.known.appendleft(visit)
        for pool in self.pools:
            pool.uses.clear()
        for position, other in enumerate(self.known, self.position):
            self._note(other, position)

    def _pass(self) -> Visit:
        visit = self.known.popleft()
        for pool in self.pools:
            if pool.wants(visit):
                pool.uses[visit.state].popleft()
        return visit

    def _learn(self) -> bool:
        if len(self.known) >= self.horizon:
            return False
        visit = next(self.future, None)
        if visit is None:
            return False
        self._note(visit, self.position + len(self.known))
        self.known.append(visit)
        return True

    def _note(self, visit: Visit, position: int) -> None:
        for pool in self.pools:
            if pool.wants(visit):
                pool.uses[visit.state].append(position)

    def _move(self, pool: Pool, visit: Visit) -> Move:
        if visit.state != pool.previous:
            pool.previous = visit.state
            pool.turn += 1
        victim, after = -1, -1
        writes: tuple[tuple[int, int], ...] = ()
        k = pool.where.get(visit.state, -1)
        if k < 0:
            k = self._choose(pool)
            slot = pool.slots[k]
            victim, after = slot.state, slot.last
            writes = tuple(sorted(slot.changed.items()))
            if victim >= 0:
                del pool.where[victim]
            slot.state, slot.present, slot.changed = visit.state, set(), {}
            pool.where[visit.state] = k
        slot = pool.slots[k]
        fetch = pool.needs[visit.kind]
        if slot.present:
            fetch = tuple(piece for piece in fetch if piece not in slot.present)
        slot.present.update(fetch)
        for piece in pool.changes[visit.kind]:
            slot.changed[piece] = self.position
        slot.last, slot.turn = self.position, pool.turn
        return Move(pool.index, k, fetch, victim, writes, after)

    def _next_use(self, pool: Pool, state: int) -> float:
        uses = pool.uses[state]
        while not uses:
            if not self._learn():
                return math.inf
        return uses[0]

    def _choose(self, pool: Pool) -> int:
        """A free slot, or that of the victim."""
        choices: list[tuple[tuple[int, float, bool], int]] = []
        for k, slot in enumerate(pool.slots):
            if slot.state < 0:
                return k
            use = self._next_use(pool, slot.state)
            pinned = pool.index == 0 and self.graphs[slot.state] > 0
            # what the known future never uses belongs to a job that has ended
            if (pinned or slot.state in pool.rule.fixed) and not (use == math.inf and self.known):
                continue
            spared = pool.turn - slot.turn <= pool.rule.lead
            # where all are spared, the one that was left longest ago
            rank = (0, -slot.turn) if spared else (1, use)
            choices.append(((*rank, not slot.changed), -k))
        if not choices:
            raise OutOfSlots(
                f"all {len(pool.slots)} slots hold states between a forward and its backward"
            )
        return -max(choices)[1]


class Carrier(Protocol):
    """Who holds the bytes that are copied; slots are numbered within the pool of the piece."""

    def mover(
        self, direction: str, slot: int, state: int, piece: int, start: int, stop: int
    ) -> Callable[[], None]:
        """The copy of a range of bytes of a piece, to be called when its turn comes."""

    def size(self, state: int, piece: int) -> int:
        """Bytes to copy of a piece."""

    def leaves(self, pool: int, slot: int, state: int) -> None:
        """All visits to a state in the slot have been queued and it will be overwritten."""


@dataclass
class Simulated:
    """A carrier of nothing but numbers."""

    states: Sequence[State]

    def mover(
        self, direction: str, slot: int, state: int, piece: int, start: int, stop: int
    ) -> Callable[[], None]:
        """Nothing is copied."""
        return lambda: None

    def size(self, state: int, piece: int) -> int:
        """Bytes of the piece."""
        return self.states[state].bytes[piece]

    def leaves(self, pool: int, slot: int, state: int) -> None:
        """Nothing to note."""


class _Write(NamedTuple):
    changed: int  # visit after which it may be read
    slot: int
    state: int
    piece: int


class Transfers:
    """Runs ahead of the blocks with decisions, and queues copies as soon as they are safe.

    A piece is written back once the last visit that changes it is over, read into a slot once the
    last visit to its former holder is over and the bytes there have been written back. Copies are
    cut into chunks (0: whole pieces), so that both directions of a swap overlap in one slot.
    """

    def __init__(
        self, replacement: Replacement, engine: CopyEngine, carrier: Carrier, chunk: int = 0
    ) -> None:
        self.replacement, self.engine, self.carrier = replacement, engine, carrier
        self.chunk = chunk
        self.decided: deque[Decision] = deque()  # visits that are not over
        self.over = 0  # visits that are
        self.writes: list[_Write] = []
        self.reads: deque[tuple[int, Move]] = deque()  # and the state to read
        self.used: dict[tuple[int, int], Any] = {}  # pool, slot -> event of the last block there
        self.changed: dict[tuple[int, int], Any] = {}  # slot, piece -> event of its last change
        self.vacated: dict[tuple[int, int], list[tuple[int, Any]]] = defaultdict(list)
        self.arrived: dict[tuple[int, int], Any] = {}  # slot, piece -> event of its arrival
        self.written: dict[tuple[int, int], Any] = {}  # state, piece -> event in its store
        self.dirty: dict[tuple[int, int], int] = {}  # slot, piece -> state that changed it there

    def enter(self) -> Decision | None:
        """Have the state of the next visit in its slot, for blocks queued from now on."""
        if not self.decided:
            self._decide()
        if not self.decided:
            return None
        decision = self.decided[0]
        self._issue()
        needs = NEEDS[decision.visit.kind]
        self.engine.wait(
            self.arrived.get((move.slot, piece))
            for move in decision.moves
            for piece in POOLS[move.pool]
            if piece in needs
        )
        return decision

    def leave(self) -> None:
        """The block of the visit has been queued; queue what had to wait for it."""
        decision = self.decided.popleft()
        event = self.engine.ran()
        changes = CHANGES[decision.visit.kind]
        for move in decision.moves:
            self.used[move.pool, move.slot] = event
            for piece in POOLS[move.pool]:
                if piece in changes:
                    self.changed[move.slot, piece] = event
                    self.dirty[move.slot, piece] = decision.visit.state
        self.over = decision.position + 1
        # decide on visits to come until there are as many undone reads as slots
        slots = sum(len(pool.slots) for pool in self.replacement.pools)
        while len(self.reads) <= slots and len(self.decided) < self.replacement.horizon:
            if not self._decide():
                break
        self._issue()

    def flush(self) -> None:
        """Write back all that was changed, and wait until it has been."""
        for (slot, piece), state in list(self.dirty.items()):
            self._write(_Write(-1, slot, state, piece))
        self.writes.clear()
        self.reads.clear()
        self.engine.finish()

    def renew(self) -> None:
        """Forget all visits to come: the run has changed over to another order."""
        self._skip(len(self.decided))
        self.replacement.forget()
        self.over = self.replacement.position

    def meet(self, visit: Visit) -> None:
        """Make a visit the next one: pass over those that will not be run, or squeeze it in."""
        for k, decision in enumerate(self.decided):
            if decision.visit.key == visit.key:
                self._skip(k)
                return
        ahead = self.replacement.expects(visit)
        self._skip(len(self.decided), for_good=ahead >= 0)
        if ahead < 0:
            self.replacement.surprise(visit)
        else:
            self.replacement.drop(ahead)
            self.over = self.replacement.position

    def _skip(self, count: int, for_good: bool = True) -> None:
        for _ in range(count):
            decision = self.decided.popleft()
            self.over = decision.position + 1
            if for_good:
                self.replacement.skipped(decision.visit)
            for move in decision.moves:  # it may have been begun before it failed
                self.used[move.pool, move.slot] = self.engine.ran()

    def _decide(self) -> bool:
        decision = self.replacement.decide()
        if decision is None:
            return False
        self.decided.append(decision)
        for move in decision.moves:
            self.writes += (
                _Write(changed, move.slot, move.victim, piece) for piece, changed in move.writes
            )
            if move.fetch:
                self.reads.append((decision.visit.state, move))
        return True

    def _issue(self) -> None:
        """Queue all copies that are safe: writes in any order, reads in that of their need."""
        waiting = []
        for write in self.writes:
            if write.changed < self.over:
                self._write(write)
            else:
                waiting.append(write)
        self.writes = waiting
        # never out of turn: a state is read again only behind the read that drove it out, and what
        # is needed first does not wait behind what is needed later
        while self.reads and self.reads[0][1].after < self.over:
            self._read(*self.reads.popleft())

    def _write(self, write: _Write) -> None:
        slot, state, piece = write.slot, write.state, write.piece
        if self.dirty.pop((slot, piece), -1) != state:
            return  # the visit that was to change it was passed over
        after = [self.changed.get((slot, piece))]
        events = self.vacated[slot, piece] = []
        for start, stop in self._chunks(state, piece):
            action = self.carrier.mover(OUT, slot, state, piece, start, stop)
            events.append((stop, self.engine.copy(OUT, stop - start, action, after, state)))
        if events:
            self.written[state, piece] = events[-1][1]

    def _read(self, state: int, move: Move) -> None:
        slot = move.slot
        if move.victim >= 0:
            self.carrier.leaves(move.pool, slot, move.victim)
        for piece in move.fetch:
            after = [self.used.get((move.pool, slot)), self.written.get((state, piece))]
            vacated = self.vacated[slot, piece]
            # what is not in its store yet is made in the slot, after all that was there has left
            k, arrival = 0, vacated[-1][1] if vacated else None
            for start, stop in self._chunks(state, piece):
                while k < len(vacated) - 1 and vacated[k][0] < stop:
                    k += 1
                free = [vacated[k][1]] if vacated else []
                action = self.carrier.mover(IN, slot, state, piece, start, stop)
                arrival = self.engine.copy(IN, stop - start, action, [*after, *free], state)
            self.arrived[slot, piece] = arrival

    def _chunks(self, state: int, piece: int) -> list[tuple[int, int]]:
        size = self.carrier.size(state, piece)
        step = self.chunk or max(size, 1)
        return [(start, min(start + step, size)) for start in range(0, size, step)]
