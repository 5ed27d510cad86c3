"""Determined's priority scheduler: level by level, on a copy of the agents.

Source: determined-ai/determined, ``master/internal/rm/agentrm/priority.go``.
"""

from __future__ import annotations

from functools import cmp_to_key
from typing import TYPE_CHECKING, Final

import numpy as np

from optsched.cluster.determined.fitting import place_each, placed_again
from optsched.cluster.determined.reasons import NEXT_TIME, POSTPONED, after_release, unplaced
from optsched.cluster.world.reasons import Reason, Why
from optsched.io.values import format_value

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from optsched.cluster.determined.fitting import Agents, Outcome, Tasks
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
    start, release, backfilled = list[int](), list[int](), list[int]()
    for zero_slot in (False, True):
        rows = order[(tasks.slots[order] == 0) == zero_slot]
        waiting = rows[~tasks.running[rows]]
        if not len(waiting):
            continue
        walk = _Walk(agents, tasks, rows[tasks.running[rows]], preemption, backfill)
        for level in np.split(waiting, np.flatnonzero(np.diff(tasks.level[waiting])) + 1):
            walk.place(level)
        start += walk.start
        release += walk.released
        backfilled += walk.backfilled
    outcome = placed_again(agents, tasks, start)
    outcome.release = release
    outcome.backfilled = [i for i in backfilled if i in outcome.start]
    return outcome


class _Walk:
    """The levels of tasks with slots, or of those without."""

    def __init__(
        self, agents: Agents, tasks: Tasks, running: IntArray, preemption: bool, backfill: bool
    ) -> None:
        self.agents, self.tasks = agents.copy(), tasks
        self.running = running[::-1].tolist()
        """In the order in which they are released: worst level first, there the last one."""
        self.preemption, self.backfill = preemption, preemption and backfill
        self.start: list[int] = []
        self.released: dict[int, None] = {}
        self.backfilled: list[int] = []
        self.blocked = False
        """Whether a better level has a task that does not fit."""
        self.hopeless = np.zeros(len(tasks.kinds), bool)
        """Kinds that no release helps. What can be released only shrinks from level to level, and
        more free slots never make a task misfit if agents of different sizes are not mixed."""

    def place(self, rows: IntArray) -> None:
        """Place the tasks of a level in order; then release others for those that do not fit."""
        placed = place_each(self.agents, self.tasks, rows)
        begun = [*placed]
        if self.blocked:  # only backfill passes a misfit
            begun = [i for i in placed if self.backfill and self.tasks.preemptible[i]]
        if not self.released:
            self.start += begun
            self.backfilled += begun if self.blocked else []
        self.blocked = self.blocked or len(placed) < len(rows)
        if self.preemption and len(placed) < len(rows):
            misfits = rows[~np.isin(rows, [*placed])]
            for i in misfits[~self.hopeless[self.tasks.kind[misfits]]].tolist():
                if not place_each(self.agents, self.tasks, [i]):
                    self._release_for(i)

    def _release_for(self, i: int) -> None:
        """Release running tasks, one after the other, until task i fits; else none."""
        k = self.tasks.kind[i]
        victims = [] if self.hopeless[k] else list(self._victims(i))
        if victims and not self.agents.heterogeneous:
            trial = self.agents.copy()
            for v in victims:
                trial.release(v)
            if not place_each(trial, self.tasks, [i]):
                victims = []
        trial = self.agents.copy()
        for n, v in enumerate(victims, 1):
            trial.release(v)
            if place_each(trial, self.tasks, [i]):
                self.agents = trial
                self.released |= dict.fromkeys(victims[:n])
                return
        self.hopeless[k] = self.tasks.position is None and not self.agents.heterogeneous

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


def level_reasons(
    agents: Agents, tasks: Tasks, names: Sequence[str], outcome: Outcome
) -> dict[int, Reason]:
    """Why tasks wait, in the scheduler's order."""
    after, found = unplaced(agents, tasks, outcome, in_order(tasks))
    for v in outcome.release:
        after.release(v)
    fitting = place_each(after, tasks, [*found]) if outcome.release else {}
    first: dict[bool, int] = {}
    answer = {}
    for i, misfit in found.items():
        ahead = first.setdefault(tasks.slots[i] == 0, i)
        if misfit and misfit.why is Why.NEVER:
            answer[i] = misfit
        elif i in fitting:
            answer[i] = after_release(names, outcome)
        elif i in outcome.postponed:
            answer[i] = POSTPONED
        elif misfit or ahead == i:
            answer[i] = misfit or NEXT_TIME
        else:
            task = f"{format_value(names[ahead])} of priority {tasks.level[ahead]}"
            answer[i] = Reason(Why.ORDER, f"fits, but waits for {task}")
    return answer


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
