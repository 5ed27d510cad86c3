"""Which nodes: placement of integer quotas and of streams of tasks, on bare arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from optsched.errors import InputError
from optsched_solvers.quota.fragmentation import GPU, MOST_GPUS
from optsched_solvers.quota.placement_buckets import single, whole
from optsched_solvers.quota.placement_input import arrivals, counts
from optsched_solvers.quota.placement_quotas import place_quotas
from optsched_solvers.quota.placement_stream import Placed, place_stream

if TYPE_CHECKING:
    from optsched_solvers.quota.placement_input import Ints

__all__ = [
    "Placed", "best_fit", "fgd", "place_quotas", "place_stream", "whole_nodes", "worst_fit",
]  # fmt: skip


def best_fit(free: Any, gpus: Any, *, events: Any = None) -> Ints:
    """Place tasks in order, each on the node with the fewest free GPUs that still fit.

    Parameters
    ----------
    free
        Free GPUs of every node; shape (nodes,), not changed.
    gpus
        GPUs of every task, at least 1; shape (tasks,).
    events
        Order: i where task i comes, ~i where it gives its GPUs back; by default all come as
        numbered.

    Returns
    -------
    int64 array, shape (tasks,)
        Node of every task (the lowest of equals), -1 where no node fits.

    Raises
    ------
    InputError
        Wrong shapes or numbers, a task that ends before it comes.
    """
    return _single(free, gpus, events, 0)


def worst_fit(free: Any, gpus: Any, *, events: Any = None) -> Ints:
    """Place tasks in order, each on the node with the most free GPUs.

    Parameters, result and errors are those of `best_fit`.
    """
    return _single(free, gpus, events, 1)


def whole_nodes(
    free: Any, capacity: Any, gpus: Any, *, events: Any = None
) -> tuple[Ints, Ints, Ints]:
    """Place tasks in order: on one node by best fit, else on whole idle nodes and one remainder.

    Parameters
    ----------
    free, capacity
        Free and all GPUs of every node; a node is idle where they are equal; shape (nodes,).
    gpus, events
        As in `best_fit`.

    Returns
    -------
    tuple of (ptr, node, count)
        GPUs by node, rows of task i between ``ptr[i]`` and ``ptr[i + 1]``; none where it does not
        fit. Idle nodes of the greatest capacity within what is left come first, then low ids.

    Raises
    ------
    InputError
        As `best_fit`; more GPUs free than there are.
    """
    room, wanted, order = _asked(free, gpus, events)
    total = counts("capacity", capacity)
    if len(total) != len(room):
        raise InputError(f"capacity: has {len(total)} entries, {len(room)} are needed")
    if (room > total).any():
        n = int(np.argmax(room > total))
        raise InputError(f"free: node {n} has {room[n]} free GPUs, but a capacity of {total[n]}")
    smallest = int(total[total > 0].min()) if (total > 0).any() else 1
    most = np.minimum(-(-wanted // smallest), len(room)) + 1
    start = np.concatenate((np.zeros(1, np.int64), np.cumsum(most)))
    node, count = np.zeros(int(start[-1]), np.int64), np.zeros(int(start[-1]), np.int64)
    span = np.zeros(len(wanted), np.int64)
    whole(room, total, wanted, order, start, node, count, span)
    ptr = np.concatenate((np.zeros(1, np.int64), np.cumsum(span)))
    kept = np.repeat(start[:-1] - ptr[:-1], span) + np.arange(int(ptr[-1]))
    return ptr, node[kept], count[kept]


def fgd(free: Any, gpus: Any, *, classes: Any = None, events: Any = None) -> Ints:
    """Place tasks of whole GPUs in order, each where fragmentation grows least.

    The same as `place_stream` with the rule ``fgd``, which also knows shared GPUs.

    Parameters
    ----------
    free, gpus, events
        As in `best_fit`; at most 62 GPUs a node.
    classes
        Rows of GPUs and popularity of the tasks to expect, shape (classes, 2); by default the
        tasks given.

    Returns
    -------
    int64 array, shape (tasks,)
        Node of every task (the lowest of equals), -1 where no node fits.

    Raises
    ------
    InputError
        As `best_fit`; a node with more than 62 GPUs.
    """
    room, wanted, order = _asked(free, gpus, events)
    widest = int(room.max()) if len(room) else 0
    if widest > MOST_GPUS:
        raise InputError(f"free: {widest} GPUs on a node, at most {MOST_GPUS} are known to fgd")
    shares = np.where(np.arange(widest) < room[:, None], GPU, 0)
    known = None
    if classes is not None:
        known = np.array(classes)
        if known.ndim == 2 and known.shape[1] == 2 and known.dtype.kind in "iu":
            known[:, 0] *= GPU
    return place_stream(shares, wanted * GPU, "fgd", classes=known, events=order).node


def _single(free: Any, gpus: Any, events: Any, worst: int) -> Ints:
    room, wanted, order = _asked(free, gpus, events)
    node = np.full(len(wanted), -1, np.int64)
    if len(room):
        single(room, wanted, order, worst, node)
    return node


def _asked(free: Any, gpus: Any, events: Any) -> tuple[Ints, Ints, Ints]:
    """Checked free GPUs, GPUs of tasks, and events."""
    room, wanted = counts("free", free, 2**20), counts("gpus", gpus, 2**20)
    if (wanted == 0).any():
        raise InputError(f"gpus: task {int(np.argmax(wanted == 0))} asks for no GPU")
    return room, wanted, arrivals(events, len(wanted))
