"""The critical path of a schedule, or the critical cycle of a periodic one."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from optsched.analysis.links import tight_links
from optsched.errors import InputError
from optsched.model.cycles import cycle_of
from optsched.model.objectives import decisive

if TYPE_CHECKING:
    from optsched.model.schedule import Schedule


def critical_path(schedule: Schedule) -> list[int]:
    """Operations in order of time, each of which starts when the one before it allows.

    Follows *tight* links backwards from an operation that ends last (under the maximum lateness: of
    the latest job): an arc with a head that starts exactly at ``end[tail] + lag``, or neighbours on
    a resource of which the second starts exactly at the end of the first plus the setup (Pinedo,
    Scheduling, 7.1). Starts need not be semi-active, nor feasible.

    The first operation starts at time 0 if such a chain exists, else at its release, else after a
    gap that the document does not explain (measured histories have them). Of a periodic schedule:
    one cycle of tight links. If there is none, the period is longer than its orders need: the cycle
    that limits a shorter period (`optsched.kernels.cycle_ratio.cycle_time`), or ``[]`` where the
    orders allow no period.
    """
    if schedule.start is None:
        raise InputError("this graph is not scheduled: it has no critical path")
    if schedule.n_operations == 0:
        return []
    links = tight_links(schedule)
    if schedule.period is not None:
        return cycle_of(links.tail, links.head) or _slack_cycle(schedule)
    bounds = np.searchsorted(links.head, np.arange(schedule.n_operations + 1)).tolist()
    before = [links.tail[a:b].tolist() for a, b in itertools.pairwise(bounds)]
    last = decisive(schedule, schedule.end).tolist()
    return _chain(before, last, schedule.start.tolist(), schedule.release.tolist())


def _chain(
    before: list[list[int]], last: list[int], start: list[int], release: list[int]
) -> list[int]:
    """Depth-first search backwards from the last operations to a start at 0 or at a release."""
    after: dict[int, int] = dict.fromkeys(last, -1)  # its keys are the visited operations
    stack = last[::-1]
    best, best_rank = last[0], (2, 0)
    while stack:
        i = stack.pop()
        rank = (0, 0) if start[i] == 0 else (1 if start[i] == release[i] else 2, start[i])
        if i == last[0] or rank < best_rank:
            best, best_rank = i, rank
        if start[i] == 0:
            break
        for k in reversed(before[i]):
            if k not in after:
                after[k] = i
                stack.append(k)
    path = [best]
    while after[path[-1]] != -1:
        path.append(after[path[-1]])
    return path


def _slack_cycle(schedule: Schedule) -> list[int]:
    """The critical cycle of the orders alone; [] if they contradict each other."""
    from optsched.kernels.cycle_ratio import cycle_time  # compiled: only when needed

    if schedule.sequences is None:
        return []
    try:
        return cycle_time(schedule, schedule.sequences, schedule.offset).critical
    except InputError:
        return []
