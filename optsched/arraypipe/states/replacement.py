"""Which state leaves a slot for another: Belady's rule on the known future, with a lead."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from typing import TYPE_CHECKING, NamedTuple

from optsched.arraypipe.states.visits import CHANGES, NEEDS, POOLS
from optsched.errors import OptschedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from optsched.arraypipe.states.visits import Visit


class OutOfSlots(OptschedError):
    """Every slot holds a state between a forward and its backward."""


class Rule(NamedTuple):
    """How the states of one pool of slots are replaced.

    Parameters
    ----------
    slots
        Number of states that fit.
    lead
        Turns (uninterrupted visits to one state) that a copy may begin ahead: the states of the
        last turns are spared. 0 has the fewest copies and hides none.
    fixed
        States that stay, once loaded, for as long as they are needed at all. The others share the
        slots that are left, and their copies overlap with blocks of the fixed ones.
    """

    slots: int
    lead: int = 0
    fixed: tuple[int, ...] = ()


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


class _Slot:
    """What a slot holds once all decisions so far are carried out."""

    def __init__(self) -> None:
        self.state = -1
        self.present: set[int] = set()
        self.changed: dict[int, int] = {}  # piece -> visit that changed it last
        self.last = -1  # visit that used it last
        self.turn = -1  # number of the turn that used it last


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

    Parameters
    ----------
    future
        Visits to come.
    rules
        One per pool of `visits.POOLS`.
    horizon
        How many visits to look ahead; what is not needed within them is needed "never".
    """

    def __init__(self, future: Iterator[Visit], rules: Sequence[Rule], horizon: int) -> None:
        self.future, self.horizon = future, horizon
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
