"""GPUs of nodes by time: held by jobs, or absent."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.cluster.workload.nodes import NodeChange, Nodes
    from optsched.cluster.workload.workload import Workload
    from optsched.cluster.world.log import Log
    from optsched.model.schedule import IntArray


class Held(NamedTuple):
    """So many GPUs of a node, from start to end."""

    node: IntArray
    count: IntArray  # type: ignore[assignment]  # tuple.count
    start: IntArray
    end: IntArray


def held(log: Log) -> Held:
    """GPUs held by jobs; those that two jobs share count once."""
    start = _counted_from(log)
    row = np.repeat(np.arange(len(log.job)), np.diff(log.node_ptr))
    begins, ends = start[row], log.end[row]
    counted = begins < ends
    return Held(log.node[counted], log.count[counted], begins[counted], ends[counted])


def _counted_from(log: Log) -> IntArray:
    """Start of every stay, for one on shared GPUs not before those before it there have ended."""
    if log.partner is None:
        return log.start
    start, reach = log.start.copy(), log.end.copy()
    root = np.arange(len(log.job))
    joined = np.flatnonzero(log.partner >= 0)
    for i in joined[np.argsort(log.start[joined], kind="stable")].tolist():
        r = root[i] = root[log.partner[i]]
        start[i] = min(max(start[i], reach[r]), log.end[i])
        reach[r] = max(reach[r], log.end[i])
    return start


def absences(
    nodes: Nodes, changes: Sequence[NodeChange], taken: Held, begin: int, finish: int
) -> Held:
    """GPUs of nodes that take no work, without those that jobs still hold there.

    A node takes no work from a drain or a removal to the next addition, and before its first
    change if that is an addition. Rows of a count below zero give back what is held meanwhile.
    """
    order = np.argsort(taken.node, kind="stable")
    sorted_nodes = taken.node[order]
    node, count, start, end = [], [], [], []
    for n, since, until in _closed(changes, begin, finish):
        a, b = np.searchsorted(sorted_nodes, [n, n + 1])
        rows = order[a:b]
        rows = rows[(taken.start[rows] < until) & (taken.end[rows] > since)]
        node.append(np.full(1 + len(rows), n))
        count.append(np.concatenate(([nodes.gpus[n]], -taken.count[rows])))
        start.append(np.concatenate(([since], np.maximum(taken.start[rows], since))))
        end.append(np.concatenate(([until], np.minimum(taken.end[rows], until))))
    none = np.zeros(0, np.int64)
    return Held(*(np.concatenate((none, *rows)) for rows in (node, count, start, end)))


def _closed(changes: Sequence[NodeChange], begin: int, finish: int) -> list[tuple[int, int, int]]:
    """Nodes with the times, within begin and finish, between which they take no work."""
    since: dict[int, int] = {}
    found = []
    seen: set[int] = set()
    for change in sorted(changes, key=lambda c: c.time):  # stable, as in the engine
        n, time = change.node, min(max(change.time, begin), finish)
        if change.kind != "add":
            since.setdefault(n, time)
        elif n in since or n not in seen:
            found.append((n, since.pop(n, begin), time))
        seen.add(n)
    found += [(n, time, finish) for n, time in since.items()]
    return [row for row in found if row[1] < row[2]]


def interrupted(changes: Sequence[NodeChange], log: Log) -> IntArray:
    """Stays that ended because one of their nodes was removed, ascending."""
    removed = {(change.time, change.node) for change in changes if change.kind == "remove"}
    times = np.array(sorted({time for time, _ in removed}), np.int64)
    cut = np.isin(log.end, times) & (log.end != log.finished[log.job])
    return np.array([
        i for i in np.flatnonzero(cut).tolist()
        if any((int(log.end[i]), node) in removed
               for node in log.node[log.node_ptr[i] : log.node_ptr[i + 1]].tolist())
    ], np.int64)  # fmt: skip


def span(w: Workload, log: Log) -> tuple[int, int]:
    """First submit, and when the log ends."""
    begin = int(w.submit[0])
    return begin, max(int(log.end.max(initial=begin)), int(log.finished.max(initial=begin)))
