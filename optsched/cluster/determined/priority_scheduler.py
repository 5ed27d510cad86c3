"""Determined's priority scheduler: level by level, on a copy of the agents.

Source: determined-ai/determined, ``master/internal/rm/agentrm/priority.go``.
"""

from __future__ import annotations

from functools import cmp_to_key
from typing import TYPE_CHECKING, Final

import numpy as np

from optsched.cluster.determined.fitting import Outcome, second_look

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optsched.cluster.determined.fitting import Agents, Places, Tasks
    from optsched.model.schedule import IntArray

_INSERTION_SORT: Final = 12
"""Go sorts up to so many elements by insertion."""


def place_by_level(agents: Agents, tasks: Tasks, preemption: bool, backfill: bool) -> Outcome:
    """Place tasks with slots, then those without, by level; release running tasks for them.

    Parameters
    ----------
    preemption
        Whether running tasks of worse levels are released for one that does not fit.
    backfill
        Whether preemptible tasks pass better tasks that do not fit (only with preemption).
    """
    order = in_order(tasks)
    outcome, started = Outcome({}, []), list[int]()
    for zero_slot in (False, True):
        rows = order[(tasks.slots[order] == 0) == zero_slot]
        waiting = rows[~tasks.running[rows]]
        if not len(waiting):
            continue
        walk = _Walk(agents, tasks, rows, preemption)
        for at in np.split(waiting, np.flatnonzero(np.diff(tasks.level[waiting])) + 1):
            walk.level(at, backfill)
        started += walk.start
        outcome.release += walk.released
        outcome.backfilled += walk.backfilled
    outcome.start = second_look(agents, tasks, started)
    return outcome


class _Walk:
    """The levels of tasks with slots, or of those without."""

    def __init__(self, agents: Agents, tasks: Tasks, rows: IntArray, preemption: bool) -> None:
        self.agents, self.tasks = agents.copy(), tasks
        self.running = rows[tasks.running[rows]][::-1].tolist() if preemption else []
        """In the order in which they are released: worst level first, there the last one."""
        self.preemption = preemption
        self.start: list[int] = []
        self.released: dict[int, None] = {}
        self.backfilled: list[int] = []
        self.blocked = False
        """Whether a better level has a task that does not fit."""
        size = np.array([kind.slots for kind in tasks.kinds], np.int64)
        free = int(np.maximum(self.agents.free[self.agents.takes_work], 0).sum())
        self.full = size > free
        """Kinds that fit nowhere now."""
        self.hopeless = np.zeros(len(size), bool)
        """Kinds that no release helps. What can be released only shrinks from level to level, and
        more free slots never make a task misfit if agents of different sizes are not mixed."""

    def level(self, rows: IntArray, backfill: bool) -> None:
        """Place the tasks of a level in order; then release others for those that do not fit."""
        tasks, placed, at = self.tasks, [], 0
        kinds = tasks.kind[rows]
        while len(left := np.flatnonzero(~self.full[kinds[at:]])):
            at += int(left[0]) + 1
            if self._place(int(rows[at - 1])):
                placed.append(int(rows[at - 1]))
        begun = placed
        if self.blocked:  # only backfill passes a misfit
            passes = backfill and self.preemption
            begun = [i for i in placed if passes and tasks.preemptible[i]]
        if not self.released:
            self.start += begun
            self.backfilled += begun if self.blocked else []
        if len(placed) == len(rows):
            return
        self.blocked = True
        if self.preemption:
            misfits = rows[~np.isin(rows, placed)]
            for i in misfits[~self.hopeless[tasks.kind[misfits]]].tolist():
                if not self._place(i):
                    self._release_for(i)

    def _place(self, i: int) -> bool:
        """Place a task if it fits."""
        k = self.tasks.kind[i]
        places = [] if self.full[k] else self._find(self.agents, i)
        self.full[k] = not places
        if places:
            self._take(self.agents, places)
        return bool(places)

    def _take(self, agents: Agents, places: Places) -> None:
        agents.place(places)
        if agents.heterogeneous:  # fewer idle agents may serve a task that more did not
            self.full[:] = False

    def _find(self, agents: Agents, i: int) -> Places:
        return agents.find(self.tasks.kinds[self.tasks.kind[i]], int(self.tasks.first[i]))

    def _release_for(self, i: int) -> None:
        """Release running tasks, one after the other, until task i fits; else none."""
        k, mixed = self.tasks.kind[i], self.agents.heterogeneous
        if self.hopeless[k]:
            return
        victims, trial = list(self._victims(i)), self.agents.copy()
        if not mixed:
            for v in victims:
                trial.release(v)
            if not victims or not self._find(trial, i):
                self.hopeless[k] = self.tasks.position is None
                return
            trial = self.agents.copy()
        for n, v in enumerate(victims, 1):
            trial.release(v)
            if places := self._find(trial, i):
                self._take(trial, places)
                self.agents, self.full[:] = trial, False
                self.released |= dict.fromkeys(victims[:n])
                return

    def _victims(self, i: int) -> Iterator[int]:
        """Tasks that may be released for task i: of worse levels, and behind it on its own.

        On its level the first that is not behind ends the search; a missing position counts as 0.
        """
        tasks, level = self.tasks, self.tasks.level[i]
        position = tasks.position or [None] * len(tasks.level)
        for v in self.running:
            if tasks.level[v] < level:
                return
            if tasks.level[v] == level and (position[i] or 0) >= (position[v] or 0):
                return
            if tasks.preemptible[v] and v not in self.released:
                yield v


def in_order(tasks: Tasks) -> IntArray:
    """Tasks as the scheduler looks at them: by level, then queue position, then submission.

    Negative positions come last. Between two tasks of a level the submission decides
    as well if one has no position, if both are negative, and between 0 and a negative one: that is
    no order (0 before 1 before -1, but 0 beside -1), so that the result depends on the sort: Go's.
    """
    if tasks.position is None:
        return np.argsort(tasks.level, kind="stable")
    level, position = tasks.level.tolist(), tasks.position

    def is_before(i: int, j: int) -> bool:
        if level[i] != level[j]:
            return bool(level[i] < level[j])
        first, second = position[i], position[j]
        if first is None or second is None or first == second:
            return i < j
        if first >= 0 and second >= 0:
            return first < second
        return first > 0 or (second <= 0 and i < j)

    found = list(range(len(level)))
    if len(found) > _INSERTION_SORT:

        def compared(i: int, j: int) -> int:
            return -1 if is_before(i, j) else 1

        return np.array(sorted(found, key=cmp_to_key(compared)))
    for i in range(1, len(found)):
        while i > 0 and is_before(found[i], found[i - 1]):
            found[i], found[i - 1] = found[i - 1], found[i]
            i -= 1
    return np.array(found, np.int64)
