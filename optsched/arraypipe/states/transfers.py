"""Turns decisions into copies on an engine, each as early as its slot allows."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from optsched.arraypipe.states.engines import IN, OUT
from optsched.arraypipe.states.visits import CHANGES, NEEDS, POOLS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from optsched.arraypipe.states.engines import CopyEngine
    from optsched.arraypipe.states.replacement import Decision, Move, Replacement
    from optsched.arraypipe.states.visits import State, Visit


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


class Bytes:
    """A carrier of nothing but numbers, for simulation."""

    def __init__(self, states: Sequence[State]) -> None:
        self.states = states

    def mover(
        self, direction: str, slot: int, state: int, piece: int, start: int, stop: int
    ) -> Callable[[], None]:
        """Nothing is copied."""
        return _nothing

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
    cut into chunks, so that both directions of a swap overlap in one slot.

    Parameters
    ----------
    replacement
        Decides what leaves which slot.
    engine
        Runs copies and orders them with blocks.
    carrier
        Holds the bytes.
    chunk
        Largest copy in bytes; 0: pieces are copied whole.
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
        self.look_ahead()

    def look_ahead(self) -> None:
        """Decide on visits to come until there are as many undone reads as slots."""
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


def _nothing() -> None:
    pass
