"""Which state leaves a slot for another, and the copies of both, as early as is safe."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from optsched.arraypipe.plan.types import Copied
from optsched.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from optsched.arraypipe.memory.budget import Access


IN, OUT = "in", "out"
"""Directions: host to device, and back."""

_CHUNKS: Final = 6  # into which the content of a slot is cut
LEAST_CHUNK: Final = 4 * 2**20
"""Bytes of a chunk at least; less than the latency of a copy takes would be lost otherwise."""


@dataclass
class CopyEngine:
    """Copies at once, for devices that are the host itself; others have queues beside the blocks.

    Those have one queue of copies per direction. An event is anything that the same engine
    understands, None for one that is over.
    """

    exposed_ns: float = 0.0  # that blocks have waited for copies, where none has pauses
    copies: list[Copied] = field(default_factory=list)  # that are over, with the host's times
    pauses: list[tuple[Any, Any]] = field(default_factory=list)  # events around pauses of a GPU

    def copy(
        self,
        direction: str,
        size: int,
        action: Callable[[], object],
        after: Iterable[Any],
        label: tuple[int, int, int] = (0, 0, 0),  # device, job, stage
    ) -> Any:
        """Queue a copy behind those of its direction and the events `after`; its own event."""
        began_ns = time.perf_counter_ns()
        action()
        ended_ns = time.perf_counter_ns()
        self.exposed_ns += ended_ns - began_ns
        device, job, stage = label
        self.copies.append(Copied(device, direction, job, stage, began_ns, ended_ns, size))

    def wait(self, events: Iterable[Any]) -> None:
        """Let blocks that are queued from now on wait for events."""

    def ran(self) -> Any:
        """Return the event at which all blocks queued so far are over."""

    def finish(self) -> None:
        """Return when everything that was queued is over."""


@dataclass(eq=False)
class Slot:
    """Memory for one piece of any state."""

    index: int  # among those of its piece
    state: int = -1
    graphs: int = 0  # open autograd graphs that refer to its weights
    dirty: bool = False  # whether it differs from the store
    used: Any = None  # event of the last block here
    arrived: tuple[Any, ...] = ()  # events that a block has to wait for


class Pool:
    """The slots for one piece, of so many bytes each."""

    def __init__(self, piece: int, slots: int, size: int, least_chunk: int) -> None:
        self.piece, self.slots = piece, [Slot(k) for k in range(slots)]
        step = max(1, least_chunk, -(-size // _CHUNKS))
        self.chunks = [(start, start + step) for start in range(0, size, step)]
        self.where: dict[int, Slot] = {}  # by state
        self.previous = -1  # state of the last access
        self.written: dict[int, Any] = {}  # by state: event in its store


class Transfers:
    """Has states in slots when they are accessed, and prefetches those of accesses to come.

    The state that leaves is the one with the farthest next use, a clean one among equals
    (Belady, IBM Systems Journal 5, 1966); but the one that was used last stays where there is a
    choice, so that copies overlap with its block. A copy is issued when no access before it needs
    the slot, in the order in which states are needed.
    """

    def __init__(
        self,
        slots: Sequence[int],  # per piece, as the other sequence
        sizes: Sequence[int],
        horizon: int,  # accesses to look ahead; a state that none of them needs is over
        engine: CopyEngine,
        least_chunk: int = LEAST_CHUNK,
    ) -> None:
        self.pools = [
            Pool(piece, n, size, least_chunk)
            for piece, (n, size) in enumerate(zip(slots, sizes, strict=True))
        ]
        self.horizon, self.engine = horizon, engine
        self.future: Iterator[Access] = iter(())
        self.known: deque[Access] = deque()  # to come; while a block runs, the first is its own

    # what has the bytes

    def move(
        self, direction: str, piece: int, slot: int, state: int, start: int, stop: int
    ) -> None:
        """Copy a range of bytes of a piece between its store and a slot."""

    def size(self, state: int, piece: int) -> int:
        """Return bytes to copy of a piece."""
        raise NotImplementedError

    def label(self, state: int) -> tuple[int, int, int]:
        """Return device, job and stage of a state, for the list of copies."""
        return (0, state, 0)

    def leaves(self, state: int, piece: int) -> None:
        """Note that a piece is in a slot no more: it is overwritten behind the blocks launched."""

    # which slot has which state

    def announce(self, future: Iterator[Access]) -> None:
        """Replace the accesses to come, between two segments."""
        self.future = future
        self.known.clear()
        for slot in self.pools[0].slots:
            slot.graphs = 0

    def take(self, access: Access) -> list[int]:
        """Copy the state of an access into slots, one per piece, for blocks launched later."""
        self._learn()
        if access.key in (known.key for known in self.known):
            while self.known[0].key != access.key:
                if slot := self.pools[0].where.get(self.known.popleft().state):
                    slot.graphs = 0
            access = self.known[0]
        else:
            self.known.appendleft(access)
        self._prefetch()
        slots = [self.pools[piece].where[access.state] for piece in access.pieces]
        self.engine.wait(event for slot in slots for event in slot.arrived)
        return [slot.index for slot in slots]

    def release(self) -> None:
        """Note that the block has been launched; issue the copies that had to wait for it."""
        access, event = self.known.popleft(), self.engine.ran()
        for piece in access.pieces:
            pool = self.pools[piece]
            slot = pool.where[access.state]
            pool.previous, slot.used = access.state, event
            slot.dirty = slot.dirty or access.kind == "U"
            slot.graphs = access.graphs_after(slot.graphs)
        self._learn()
        self._prefetch()

    def flush(self) -> None:
        """Write back all changes, and wait until they are in the stores."""
        for pool in self.pools:
            for slot in pool.slots:
                if slot.dirty:
                    self._exchange(pool, slot, -1)
        self.engine.finish()

    def _learn(self) -> None:
        self.known.extend(islice(self.future, max(0, self.horizon - len(self.known))))

    def _prefetch(self) -> None:
        """Issue the copies for the accesses to come, up to the first that is not safe yet."""
        before: list[Access] = []
        for access in self.known:
            for piece in access.pieces:
                pool = self.pools[piece]
                if access.state in pool.where:
                    continue
                slot = self._victim(pool, before)
                if slot is not None and all(slot.state != other.state for other in before):
                    self._exchange(pool, slot, access.state)
                elif before:
                    return
                else:  # the plan was refused for it before
                    raise InternalError("all slots hold states between a forward and its backward")
            before.append(access)

    def _victim(self, pool: Pool, before: Sequence[Access]) -> Slot | None:
        """The slot to take once these accesses are over; None if all are pinned by graphs."""
        for slot in pool.slots:
            if slot.state < 0:
                return slot
        uses: dict[int, int] = {}
        for k, access in enumerate(islice(self.known, len(before) + 1, None)):
            if access.state in pool.where and pool.piece in access.pieces:
                uses.setdefault(access.state, k)
                if len(uses) == len(pool.slots):
                    break
        here = [access for access in before if pool.piece in access.pieces]
        last = here[-1].state if here else pool.previous
        found: list[tuple[tuple[float, ...], Slot]] = []
        for slot in pool.slots:
            use, graphs, changed = uses.get(slot.state, math.inf), slot.graphs, slot.dirty
            for access in here:
                if access.state == slot.state:
                    graphs = access.graphs_after(graphs)
                    changed = changed or access.kind == "U"
            # a state that is not used again belongs to a job that has ended
            if not graphs or (use == math.inf and len(self.known) > 1):
                found.append(((slot.state != last, use, not changed, -slot.index), slot))
        return max(found)[1] if found else None

    def _exchange(self, pool: Pool, slot: Slot, state: int) -> None:
        """Copy the state in a slot out, if it has changed, and another one in (-1: none).

        Chunk by chunk, so that both directions overlap.
        """
        old, dirty, written = slot.state, slot.dirty, pool.written.get(state)
        if old >= 0 and state >= 0:
            self.leaves(old, pool.piece)
            del pool.where[old]
        left = arrived = None
        for chunk in pool.chunks:
            if dirty:
                left = self._copy(OUT, pool, slot, old, chunk, [slot.used]) or left
            if state >= 0:
                after = [slot.used, left, written]
                arrived = self._copy(IN, pool, slot, state, chunk, after) or arrived
        if dirty:
            pool.written[old] = left
        slot.dirty = False
        if state >= 0:
            # what is not in its store yet is made in the slot, after all that was there has left,
            # and after a copy for a block that was skipped
            before = slot.arrived if arrived is None else (arrived,)
            slot.arrived = tuple(event for event in (*before, left) if event is not None)
            slot.state, slot.graphs = state, 0
            pool.where[state] = slot

    def _copy(
        self,
        direction: str,
        pool: Pool,
        slot: Slot,
        state: int,
        chunk: tuple[int, int],
        after: list[Any],
    ) -> Any:
        start, stop = chunk[0], min(chunk[1], self.size(state, pool.piece))
        if start >= stop:
            return None
        action = partial(self.move, direction, pool.piece, slot.index, state, start, stop)
        return self.engine.copy(direction, stop - start, action, after, self.label(state))
