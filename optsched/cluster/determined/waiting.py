"""The order of the priority scheduler, and who waits behind whom."""

from __future__ import annotations

from functools import cmp_to_key
from typing import TYPE_CHECKING, Final, NamedTuple

from optsched.cluster.determined.columns import columns
from optsched.cluster.determined.shares import checked, told_apart

if TYPE_CHECKING:
    from optsched.cluster.determined.columns import TaskColumns
    from optsched.cluster.determined.state import State

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
    cols = columns(checked(state))
    return [cols.tasks.names[i] for i in ordered(cols.tasks)]


def queue(state: State) -> dict[str, Queued]:
    """Groups in the order of the priority scheduler; a task without a group counts as its own.

    Raises
    ------
    InputError
        Not a `State`, or a task without a group has the name of another's group.
    """
    cols = columns(told_apart(state))
    group_of = {task.name: task.group or task.name for task in state.tasks}
    found: dict[str, Queued] = {}
    for i in ordered(cols.tasks):
        name = group_of[cols.tasks.names[i]]
        ahead, running, requested, allocated = found.get(name, Queued(len(found), False, 0, 0))
        slots, runs = cols.tasks.slots[i], cols.tasks.running[i]
        found[name] = Queued(
            ahead, running or runs, requested + slots, allocated + (slots if runs else 0)
        )
    return found


def ordered(tasks: TaskColumns) -> list[int]:
    """Numbers of the tasks in that order; `tasks` come in task order."""
    rows = range(len(tasks.names))
    if all(position is None for position in tasks.position):
        return sorted(rows, key=tasks.priority.__getitem__)
    given = [position for position in tasks.position if position is not None]
    if len(given) == len(rows) and not (0 in given and min(given) < 0):
        return sorted(rows, key=lambda i: (tasks.priority[i], *_place(tasks.position[i])))
    # positions beside submit times are no order (a before b before c before a), so that the result
    # depends on the way of sorting: upstream's, as long as Go sorts by insertion
    if len(rows) > _INSERTION_SORT:

        def compared(i: int, j: int) -> int:
            return -1 if _before(tasks, i, j) else 1

        return sorted(rows, key=cmp_to_key(compared))
    found = list(rows)
    for i in rows[1:]:
        while i > 0 and _before(tasks, found[i], found[i - 1]):
            found[i], found[i - 1] = found[i - 1], found[i]
            i -= 1
    return found


def _place(position: float | None) -> tuple[bool, float]:
    """A key: negative positions are behind all others, and equal among each other."""
    assert position is not None
    return (True, 0.0) if position < 0 else (False, position)


def _before(tasks: TaskColumns, i: int, j: int) -> bool:
    if tasks.priority[i] != tasks.priority[j]:
        return tasks.priority[i] < tasks.priority[j]
    first, second = tasks.position[i], tasks.position[j]
    if first is None or second is None or first == second:
        return i < j
    if first >= 0 and second >= 0:
        return first < second
    return first > 0 or (second <= 0 and i < j)  # upstream: a negative one is behind positive ones
