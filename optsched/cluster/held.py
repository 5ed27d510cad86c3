"""Which GPUs of a node are held when: shared ones once, absent ones as if held."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optsched.errors import InputError

if TYPE_CHECKING:
    from optsched.cluster.log import Log
    from optsched.cluster.run import Run
    from optsched.schedule import IntArray


class Held(NamedTuple):
    """So many GPUs of a node, from start to end."""

    node: IntArray
    count: IntArray  # type: ignore[assignment]  # tuple.count
    start: IntArray
    end: IntArray


def held(log: Log) -> Held:
    """GPUs that are held by anybody; two jobs that share hold theirs once.

    Raises
    ------
    InputError
        A log with shared GPUs that does not say who shares with whom.
    """
    start = sharing_start(log)
    row = np.repeat(np.arange(len(log.job)), np.diff(log.node_ptr))
    begins, ends = start[row], log.end[row]
    counted = begins < ends
    return Held(log.node[counted], log.count[counted], begins[counted], ends[counted])


def sharing_start(log: Log) -> IntArray:
    """Start of every stay, for one on shared GPUs not before those before it there have ended."""
    shared = np.flatnonzero(log.half != 0)
    if not len(shared):
        return log.start
    if log.partner is None:
        raise InputError("log.partner: missing, but there are shared GPUs")
    start, reach = log.start.copy(), log.end.copy()
    root = np.arange(len(log.job))
    joins = log.partner[shared] >= 0
    for i in shared[np.lexsort((joins, log.start[shared]))].tolist():  # a partner comes before
        p = int(log.partner[i])
        if p < 0:
            continue
        if not (log.start[p] <= log.start[i] < log.end[p] and log.half[p] not in (0, log.half[i])):
            raise InputError(f"log.partner[{i}]: stay {p} is not there, or not on the other half")
        r = root[i] = root[p]
        start[i] = min(max(int(start[i]), int(reach[r])), int(log.end[i]))
        reach[r] = max(reach[r], log.end[i])
    return start


def absences(run: Run, begin: int, finish: int) -> Held:
    """GPUs of nodes that are not there: before they are added, after they are removed."""
    rows = []
    gone: dict[int, int] = {}
    for change in sorted(run.settings.changes, key=lambda c: c.time):
        n = change.node
        if change.kind == "add":
            since = gone.pop(n, begin)
            rows.append((n, run.nodes.gpus[n], since, min(max(change.time, begin), finish)))
        elif change.kind == "remove":
            gone.setdefault(n, max(change.time, begin))
    rows += [(n, run.nodes.gpus[n], t, finish) for n, t in gone.items()]
    table = np.array([row for row in rows if row[2] < row[3]], np.int64).reshape(-1, 4)
    return Held(*(np.ascontiguousarray(column) for column in table.T))
