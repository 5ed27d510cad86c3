"""Determined's priority scheduler: pure, for one pool."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Literal

from optsched.cluster.determined.board import Board
from optsched.cluster.determined.columns import columns
from optsched.cluster.determined.shares import VARIANTS, checked, named
from optsched.cluster.determined.waiting import ordered
from optsched.io.values import boolean, one_of

if TYPE_CHECKING:
    from optsched.cluster.determined.answer import Decision
    from optsched.cluster.determined.columns import Columns, Fits, Kind
    from optsched.cluster.determined.state import State


def priority(
    state: State, preemption: bool = True, variant: Literal["code", "docs"] = "code"
) -> Decision:
    """Start tasks level by level, from priority 1 to 99, and release others that stand in the way.

    Parameters
    ----------
    state
        One pool; it is not changed.
    preemption
        Whether running preemptible tasks of worse levels are released for a task that does not fit.
    variant
        ``"code"``: a worse level may be backfilled, with preemptible tasks and if there is
        preemption, where a better one does not fit. ``"docs"``: after a misfit no worse level
        starts (the older text of the documentation).

    Returns
    -------
    Decision
        Once anything is to be released, no further level starts. Agents are those of a second
        look, in order and without the tasks that were only placed for later: now and then not the
        first choice, and rarely (see `postponed`) none at all.

    Raises
    ------
    InputError
        Not a `State`, or no such variant.

    Notes
    -----
    Source: determined-ai/determined, ``master/internal/rm/agentrm/priority.go``.
    """
    cols = columns(checked(state))
    one_of("variant", variant, VARIANTS)
    boolean("preemption", preemption)
    return named(cols, *decide_priority(cols, preemption, variant))


def decide_priority(
    cols: Columns, preemption: bool, variant: str
) -> tuple[list[int], list[int], list[int]]:
    """Numbers of the tasks that are to start, of those to release, and of those backfilled.

    Tasks with slots and tasks without do not know of each other.
    """
    order = ordered(cols.tasks)
    slots = cols.tasks.slots
    walks = [
        _Walk(cols, [i for i in order if (slots[i] == 0) is zero], preemption, variant == "code")
        for zero in (False, True)
    ]
    start, release, backfilled = [], [], []
    for walk in walks:
        walk.go()
        start += walk.start
        release += walk.release
        backfilled += walk.backfilled
    return start, release, backfilled


class _Walk:
    """One run over the levels, on a copy of the cluster.

    If agents of different sizes may not be mixed, more free slots never make a task misfit: then a
    kind of task that did not fit is not tried again until something came free, and one that no
    release could help never is, for what could be released only shrinks from level to level.
    """

    def __init__(self, cols: Columns, order: list[int], preemption: bool, backfill: bool) -> None:
        self.cols, self.tasks = cols, cols.tasks
        self.preemption, self.backfill = preemption, backfill
        self.start: list[int] = []
        self.release: list[int] = []
        self.backfilled: list[int] = []
        self._monotone = not cols.heterogeneous
        self._misfits: set[Kind] = set()
        self._hopeless: dict[Kind, tuple[int, int]] = {}
        self._pending: dict[int, list[int]] = {}
        self._running: dict[int, list[int]] = {}
        for i in order:
            rows = self._running if self.tasks.running[i] else self._pending
            rows.setdefault(self.tasks.priority[i], []).append(i)
        # whom everybody displaces first: worst level first, there the last; released is a prefix
        self._victims = [
            i for i in reversed(order) if self.tasks.running[i] and self.tasks.preemptible[i]
        ]
        self._levels = [-self.tasks.priority[i] for i in self._victims]
        if self._pending:
            self.board = Board(cols)

    def go(self) -> None:
        """Level by level."""
        blocked = False
        for level in sorted(self._pending):
            placed, misfits = self._place(self._pending[level])
            if not self.release:
                self._begin(placed, blocked)
            blocked = blocked or bool(misfits)
            if self.preemption:
                for i in misfits:
                    self._make_room(i, level)

    def _place(self, pending: list[int]) -> tuple[list[int], list[int]]:
        placed, misfits = [], []
        for i in pending:
            if fits := self._fits(i):
                self.board.put(fits)
                placed.append(i)
            else:
                misfits.append(i)
        return placed, misfits

    def _fits(self, i: int) -> Fits:
        kind = self.tasks.kind[i]
        if self._monotone and kind in self._misfits:
            return []
        if not (fits := self.board.find(kind, self.tasks.names[i])):
            self._misfits.add(kind)
        return fits

    def _begin(self, placed: list[int], blocked: bool) -> None:
        """Start what was placed; behind a misfit only preemptible tasks, as backfill."""
        if not blocked:
            self.start += placed
        elif self.preemption and self.backfill:
            passing = [i for i in placed if self.tasks.preemptible[i]]
            self.start += passing
            self.backfilled += passing

    def _make_room(self, i: int, level: int) -> None:
        """Reserve for a misfit: where earlier releases made room, or by releasing some more."""
        if fits := self._fits(i):
            self.board.put(fits)
            return
        kind, board, tasks = self.tasks.kind[i], self.board, self.tasks
        own = self._behind(i, level)
        known = self._hopeless.get(kind)
        if self._monotone and known and (known[0] < level or own <= known[1]):
            return
        gone = len(self.release)
        candidates = self._victims[gone : max(gone, bisect_left(self._levels, -level)) + own]
        taken: list[Fits] = []
        if not self._monotone or self._could_fit(kind, candidates):
            for n, victim in enumerate(candidates):
                taken.append(board.take(tasks.held[victim]))
                if taken[-1] and (fits := board.find(kind, tasks.names[i])):
                    board.put(fits)
                    self.release += candidates[: n + 1]
                    self._misfits.clear()
                    return
        for rows in reversed(taken):
            board.put(rows)
        self._hopeless[kind] = (level, own)

    def _behind(self, i: int, level: int) -> int:
        """How many it may displace on its own level: those behind it in the queue, last first.

        The first that is not behind ends it. Without positions nobody is.
        """
        tasks = self.tasks
        own = tasks.position[i] or 0
        found = 0
        for victim in reversed(self._running.get(level, [])):
            if own >= (tasks.position[victim] or 0):
                break
            found += tasks.preemptible[victim]
        first = bisect_left(self._levels, -level)
        return max(0, found - max(0, len(self.release) - first))

    def _could_fit(self, kind: Kind, candidates: list[int]) -> bool:
        """Whether it would help to release all of them: much cheaper than one after the other."""
        used, zero_used = self.board.used.copy(), self.board.zero_used.copy()
        for victim in candidates:
            for agent, slots in self.tasks.held[victim]:
                if slots:
                    used[agent] = max(0, used[agent] - slots)
                else:
                    zero_used[agent] = max(0, zero_used[agent] - 1)
        agents = self.cols.agents._replace(used=used, zero_used=zero_used)
        return Board(self.cols, agents).has(kind)
