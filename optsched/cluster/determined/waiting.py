"""The order of the priority scheduler, and who waits behind whom."""

from __future__ import annotations

from functools import cmp_to_key
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from optsched.cluster.determined.columns import columns
from optsched.cluster.determined.decisions import checked, told_apart

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.cluster.determined.columns import Columns
    from optsched.cluster.determined.state import State, Task
    from optsched.model.schedule import IntArray

_INSERTION_SORT: Final = 12
"""Go sorts up to so many elements by insertion."""


class Queued(NamedTuple):
    """A group in the queue."""

    ahead: int
    """Groups before it."""
    is_running: bool
    """Whether one of its tasks runs."""
    requested: int
    """Slots of all its tasks."""
    allocated: int
    """Slots of its running tasks."""


def order(state: State) -> list[str]:
    """All tasks in the order in which the priority scheduler looks at them.

    By priority (1 first), then queue position (negative ones behind positive ones), then by submit
    time, request time and name. Between two tasks of one priority the submit time decides as well
    if one has no position, if both are negative, and between 0 and a negative one: that is no order
    (0 before 1 before -1, but 0 beside -1), so that the result depends on the sort, which is Go's.
    """
    c, tasks = columns(checked(state))
    return [tasks[i].name for i in ordered(c, tasks).tolist()]


def queue(state: State) -> dict[str, Queued]:
    """Groups in the order of the priority scheduler; a task without a group counts as its own.

    Raises
    ------
    InputError
        Not a `State`, or a task without a group has the name of another's group.
    """
    c, tasks = columns(told_apart(state))
    found: dict[str, Queued] = {}
    for i in ordered(c, tasks).tolist():
        task = tasks[i]
        name = task.group or task.name
        ahead, running, requested, allocated = found.get(name, Queued(len(found), False, 0, 0))
        found[name] = Queued(
            ahead, running or task.is_running, requested + task.slots,
            allocated + (task.slots if task.is_running else 0),
        )  # fmt: skip
    return found


def ordered(c: Columns, tasks: Sequence[Task]) -> IntArray:
    """Numbers of the tasks in that order."""
    level = c.task["level"]
    given = [task.position for task in tasks if task.position is not None]
    if not given:
        return np.argsort(level, kind="stable")
    if len(given) == len(tasks) and not (0 in given and min(given) < 0):
        # negative positions are behind all others, and equal among each other
        place = np.array([np.inf if position < 0 else position for position in given])
        return np.lexsort((place, level))
    # positions beside submit times are no order (a before b before c before a), so that the result
    # depends on the way of sorting: upstream's, as long as Go sorts by insertion

    def is_before(i: int, j: int) -> bool:
        if level[i] != level[j]:
            return bool(level[i] < level[j])
        first, second = tasks[i].position, tasks[j].position
        if first is None or second is None or first == second:
            return i < j
        if first >= 0 and second >= 0:
            return first < second
        # upstream: a negative one is behind positive ones
        return first > 0 or (second <= 0 and i < j)

    rows = range(len(tasks))
    if len(rows) > _INSERTION_SORT:

        def compared(i: int, j: int) -> int:
            return -1 if is_before(i, j) else 1

        return np.array(sorted(rows, key=cmp_to_key(compared)))
    found = list(rows)
    for i in rows[1:]:
        while i > 0 and is_before(found[i], found[i - 1]):
            found[i], found[i - 1] = found[i - 1], found[i]
            i -= 1
    return np.array(found, np.int64)
