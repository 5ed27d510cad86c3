"""The chain of operations that explains the makespan (or the period) of a schedule."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from optsched.errors import InputError
from optsched.model.cycles import cycle_of

if TYPE_CHECKING:
    from optsched.model.schedule import Csr, IntArray, Schedule


def critical_path(schedule: Schedule) -> list[int]:
    """Operations in order of time, each of which starts when the one before it allows.

    Walks back from an operation that ends last, along *tight* links: an arc whose head starts
    exactly at ``end[tail] + lag``, or neighbours on a resource of which the second starts exactly
    at the end of the first plus the setup (Pinedo, Scheduling, 7.1). Only the numbers of the
    schedule count: the start times need not be semi-active, nor even feasible.

    Parameters
    ----------
    schedule
        A scheduled graph.

    Returns
    -------
    list[int]
        Operation ids; the last one ends at the makespan. The first starts at time 0 if such a
        chain exists, else at its release, else where nothing in the document explains its start
        (a gap: measured histories have them). Of a periodic schedule: the operations of one
        critical cycle, whose links are tight all the way round. If there is none, the period is
        longer than its orders need, and the cycle is the one that would hold up a shorter period
        (`optsched.kernels.cycle_ratio.cycle_time`); ``[]`` where orders allow no period at all.

    Raises
    ------
    InputError
        The graph is not scheduled.
    """
    if schedule.start is None:
        raise InputError("this graph is not scheduled: it has no critical path")
    if schedule.n_operations == 0:
        return []
    links = tight_links(schedule)
    if schedule.period is not None:
        return cycle_of(links.tail, links.head) or _slack_cycle(schedule)
    before = [links.tail[a:b].tolist() for a, b in _groups(links.head, schedule.n_operations)]
    end = schedule.end
    last = np.flatnonzero(end == end.max()).tolist()
    return _chain(before, last, schedule.start.tolist(), schedule.release.tolist())


class Links(NamedTuple):
    """Pairs of operations, sorted by head.

    ``resource`` is -1 for an arc; ``wait`` is the lag of an arc, or the setup between neighbours;
    ``tokens`` is how many cycles later the head runs than the tail, 0 in a one-shot schedule.
    ``slack`` is the time between the two that nothing needs; Python integers where int64 could
    overflow.
    """

    tail: IntArray
    head: IntArray
    resource: IntArray
    wait: IntArray
    tokens: IntArray
    slack: npt.NDArray[Any]


def links(schedule: Schedule) -> Links:
    """Arcs and neighbours on a resource, in a periodic schedule also across the cycle's end.

    Of the links of one head, neighbours on a resource come before arcs.
    """
    if schedule.start is None:
        raise InputError("this graph is not scheduled: it has no links")
    arcs = schedule.arcs
    left, right, resource, wraps = _neighbours(schedule.sequences, schedule.period is not None)
    setup = np.where(
        schedule.family[left] == schedule.family[right],
        0,
        schedule.setup_out[left] + schedule.setup_in[right],
    )
    ahead = arcs.distance + schedule.offset[arcs.head] - schedule.offset[arcs.tail]
    tail, head = np.concatenate([left, arcs.tail]), np.concatenate([right, arcs.head])
    owner = np.concatenate([resource, np.full(len(arcs.tail), -1)])
    wait, tokens = np.concatenate([setup, arcs.lag]), np.concatenate([wraps, ahead])
    turn = schedule.period or 0
    exact = turn * int(np.abs(tokens).max(initial=0)) > _SAFE
    later = tokens.astype(object) * turn if exact else tokens * turn
    slack = schedule.start[head] + later - (schedule.end[tail] + wait)
    order = np.argsort(head, kind="stable")
    return Links(*(column[order] for column in (tail, head, owner, wait, tokens, slack)))


def tight_links(schedule: Schedule) -> Links:
    """Those `links` that leave no slack between their two operations."""
    found = links(schedule)
    tight = found.slack == 0
    return Links(*(column[tight] for column in found))


_SAFE = 1 << 61


def _neighbours(
    sequences: Csr | None, cyclic: bool
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Neighbours on every resource: left, right, resource, and 1 where a cycle wraps round."""
    rows: list[tuple[int, int, int, int]] = []
    for r, row in enumerate(sequences.to_lists() if sequences is not None else []):
        rows += [(i, j, r, 0) for i, j in itertools.pairwise(row)]
        if cyclic and row:
            rows.append((row[-1], row[0], r, 1))
    table = np.array(rows, np.int64).reshape(-1, 4)
    return table[:, 0], table[:, 1], table[:, 2], table[:, 3]


def _groups(head: IntArray, n: int) -> list[tuple[int, int]]:
    bounds = np.searchsorted(head, np.arange(n + 1)).tolist()
    return list(itertools.pairwise(bounds))


def _chain(
    before: list[list[int]], last: list[int], start: list[int], release: list[int]
) -> list[int]:
    """Depth-first search backwards from the last operations to the best explained beginning."""
    after: dict[int, int] = dict.fromkeys(last, -1)  # also marks what has been seen
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
    from optsched.kernels.cycle_ratio import cycle_time  # compiled: only for those who need it

    if schedule.sequences is None:
        return []
    try:
        return cycle_time(schedule, schedule.sequences, schedule.offset).critical
    except InputError:
        return []
