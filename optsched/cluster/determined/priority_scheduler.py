"""Determined's priority scheduler: level by level, on a copy of the agents.

Source: determined-ai/determined, ``master/internal/rm/agentrm/priority.go``.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import cmp_to_key, partial
from typing import TYPE_CHECKING

import numpy as np

from optsched.cluster.determined.fitting import (
    explained,
    freed,
    go_sorted,
    place_each,
    placed_again,
    unplaced,
)
from optsched.cluster.world.policy import Reason, Why
from optsched.io.values import format_value

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from optsched.cluster.determined.fitting import Agents, Explain, Outcome, Tasks
    from optsched.model.schedule import IntArray


def place_by_level(
    agents: Agents, tasks: Tasks, preemption: bool, backfill: bool
) -> tuple[Outcome, Explain]:
    """Place tasks with slots, then those without, by level; release running tasks for them.

    With `preemption`, running tasks of worse levels are released for one that does not fit; with
    `backfill` too, preemptible tasks pass better tasks that do not fit.
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
    outcome = placed_again(agents, tasks, start, release, backfilled)
    return outcome, partial(_reasons, agents, tasks, outcome, preemption, backfill)


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
        if not self.preemption or len(placed) == len(rows):
            return
        for i in rows[~np.isin(rows, [*placed])].tolist():
            if self.hopeless[self.tasks.kind[i]] or place_each(self.agents, self.tasks, [i]):
                continue
            self._release_for(i)

    def _release_for(self, i: int) -> None:
        """Release running tasks, one after the other, until task i fits; else none."""
        k, victims = self.tasks.kind[i], list(self._victims(i))

        def fits(count: int) -> bool:
            return self.agents.copy(victims[:count]).fits(self.tasks.kinds[k])

        counts = range(1, len(victims) + 1)
        if self.agents.heterogeneous:  # more idle agents may serve what fewer serve, or not
            count = next(filter(fits, counts), len(victims) + 1)
        else:
            count = 1 + bisect_left(counts, True, key=fits)
        if count <= len(victims):
            self.agents = self.agents.copy(victims[:count])
            place_each(self.agents, self.tasks, [i])
            self.released |= dict.fromkeys(victims[:count])
        else:
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


def _reasons(
    agents: Agents, tasks: Tasks, outcome: Outcome, preemption: bool, backfill: bool,
    names: Sequence[str],
) -> dict[int, Reason]:  # fmt: skip
    """Why tasks wait, in the scheduler's order."""
    after, found = unplaced(agents, tasks, outcome, in_order(tasks))
    first = {bool(tasks.slots[i] == 0): i for i in reversed(found)}

    def behind(i: int, misfit: Reason | None) -> Reason | None:
        ahead = first[bool(tasks.slots[i] == 0)]
        if misfit or ahead == i:
            return None
        task = f"{format_value(names[ahead])} of priority {tasks.level[ahead]}"
        return Reason(Why.ORDER, f"fits, but waits for {task}")

    def following(agents: Agents, tasks: Tasks) -> Outcome:
        return place_by_level(agents, tasks, preemption, backfill)[0]

    return explained(names, outcome, found, freed(after, tasks, outcome, following), behind)


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

    def order(i: int, j: int) -> int:
        return -1 if is_before(i, j) else 1

    found = list(range(len(level)))
    if len(found) <= 12:
        found = go_sorted(found, lambda found, i: is_before(found[i], found[i - 1]))
    else:
        found = sorted(found, key=cmp_to_key(order))
    return np.array(found, np.int64)
