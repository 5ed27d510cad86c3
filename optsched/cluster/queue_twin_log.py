"""The record that compiled simulations write, and its conversion to a `Log`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from optsched.cluster.log import Log
from optsched.kernels.compile import INT, INTS, entry

if TYPE_CHECKING:
    from optsched.model.schedule import IntArray

JOB: Final = 0
START: Final = 1
END: Final = 2
RESTART: Final = 3
GPUS: Final = 4
WORK_DONE: Final = 5
PARTS: Final = 6
"""Where the stay's parts (node and GPUs) begin in the parts' arrays."""
WIDTH: Final = 8


class Record(NamedTuple):
    """Stays in the order of their starts: `WIDTH` numbers each, and the parts of all of them."""

    rows: IntArray
    nodes: IntArray
    counts: IntArray


def record(stays: int, parts: int) -> Record:
    """An empty record with room."""
    return Record(*(np.empty(n, np.int64) for n in (stays * WIDTH, parts, parts)))


def grown(old: Record) -> Record:
    """The same with twice the room."""
    return Record(*(np.concatenate((a, np.empty(len(a), np.int64))) for a in old))


@entry(INT, INTS, INTS, INTS, INT, INT, INTS, INTS, INTS, INTS, INTS)
def _ordered(rows, nodes, counts, n, parts, order, out, ptr, node, count):  # type: ignore[no-untyped-def]
    """Columns with stays of one instant by job, and their parts; ``out`` is (columns, n) flat."""
    for i in range(n):
        at = i
        start, job = rows[i * WIDTH + START], rows[i * WIDTH + JOB]
        while at > 0:
            other = order[at - 1] * WIDTH
            if rows[other + START] != start or rows[other + JOB] < job:
                break
            order[at] = order[at - 1]
            at -= 1
        order[at] = i
    used = 0
    for i in range(n):
        row = order[i]
        base = row * WIDTH
        for column in range(PARTS):
            out[column * n + i] = rows[base + column]
        begin = rows[base + PARTS]
        end = rows[base + WIDTH + PARTS] if row + 1 < n else parts
        ptr[i] = used
        for at in range(begin, end):
            node[used], count[used] = nodes[at], counts[at]
            used += 1
    ptr[n] = used
    return used


def log(
    kept: Record, stays: int, parts: int, finished: IntArray, preemptions: IntArray,
    half: IntArray | None = None, host: IntArray | None = None,
) -> Log:  # fmt: skip
    """The log of a record.

    Parameters
    ----------
    kept, stays, parts
        The record, and how much of it is used.
    finished, preemptions
        By job.
    half, host
        With shared GPUs: the half that every stay holds, and the stay (by order of record) on
        whose GPUs it was put, -1 for none.
    """
    order = np.empty(stays, np.int64)
    columns = np.empty((6, stays), np.int64)
    ptr, node, count = np.empty(stays + 1, np.int64), *np.empty((2, parts), np.int64)
    _ordered(*kept, stays, parts, order, columns.reshape(-1), ptr, node, count)
    job, start, end, restart, gpus, work = columns
    shared: dict[str, IntArray] = {}
    if half is None or host is None:
        half = np.zeros(stays, np.int64)
    else:
        place = np.empty(stays + 1, np.int64)
        place[order], place[stays] = np.arange(stays), -1
        half = half[order]
        if (half != 0).any():
            shared["partner"] = place[host[order]]
    return Log(job=job, start=start, end=end, restart=restart, gpus=gpus, half=half, work=work,
               node_ptr=ptr, node=node, count=count, finished=finished, preemptions=preemptions,
               **shared)  # fmt: skip
