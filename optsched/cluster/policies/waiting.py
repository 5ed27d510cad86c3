"""Pending jobs by size of gang, one heap a size: the first in order that fits some GPUs.

Who walks jobs in order with a counter that only falls need look at the first job of every size
only: if that one does not fit, no later one of its size does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numba import types

from optsched.kernels.compile import INT, INTS, helper, record, records

if TYPE_CHECKING:
    import numpy.typing as npt

    from optsched.model.schedule import IntArray

SIZE: Final = record("gpus first length")
"""A size of gang: where its heap begins, and how many jobs wait in it."""
PLACE: Final = record("key tie job time")
"""A pending job by (key, tie), and how long it is believed to take."""


class Waiting(NamedTuple):
    """All pending jobs."""

    size: npt.NDArray[np.void]
    """`SIZE`, ascending."""
    heap: npt.NDArray[np.void]
    """`PLACE`; the last one is scratch."""
    kind: IntArray
    """The row of every job in `size`."""
    count: IntArray  # type: ignore[assignment]  # tuple.count
    """Number of pending jobs, shape (1,)."""


WAITING: Final[Any] = types.NamedTuple([records(SIZE), records(PLACE), INTS, INTS], Waiting)


def waiting(gang: IntArray) -> Waiting:
    """Nobody waits, of jobs with these gangs."""
    gpus, kind, times = np.unique(gang, return_inverse=True, return_counts=True)
    size = np.zeros(len(gpus), SIZE)
    size["gpus"], size["first"] = gpus, np.cumsum(times) - times
    return Waiting(
        size, np.zeros(len(gang) + 1, PLACE), kind.astype(np.int64), np.zeros(1, np.int64)
    )


@helper(INT, records(PLACE), INT, INT, counted=False)
def before(heap, a, b):  # type: ignore[no-untyped-def]
    """1 if the job at place a goes before the one at place b."""
    if heap[a].key != heap[b].key:
        return 1 if heap[a].key < heap[b].key else 0
    return 1 if heap[a].tie < heap[b].tie else 0


@helper(INT, records(PLACE), INT, INT, INT, counted=False)
def _rise(heap, base, at, spare):  # type: ignore[no-untyped-def]
    """Put the job at place `spare`, behind the heap, at `at`, or above while it is earlier."""
    key, tie = heap[spare].key, heap[spare].tie
    while at > 0:
        up = base + ((at - 1) >> 1)
        if heap[up].key < key or (heap[up].key == key and heap[up].tie <= tie):
            break
        heap[base + at] = heap[up]
        at = (at - 1) >> 1
    heap[base + at] = heap[spare]
    return at


@helper(INT, WAITING, INT, INT, INT, INT, counted=False)
def push(q, job, key, tie, time):  # type: ignore[no-untyped-def]
    """A job waits; `time`: see `PLACE`."""
    kind = q.kind[job]
    at, base = q.size[kind].length, q.size[kind].first
    q.size[kind].length = at + 1
    q.count[0] += 1
    spare = len(q.heap) - 1
    place = q.heap[spare]
    place.key, place.tie, place.job, place.time = key, tie, job, time
    return _rise(q.heap, base, at, spare)


@helper(INT, WAITING, INT, INT, counted=False)
def take(q, kind, at):  # type: ignore[no-untyped-def]
    """The job at a place of the heap of a size waits no more."""
    base, n = q.size[kind].first, q.size[kind].length - 1
    heap = q.heap
    job = heap[base + at].job
    q.size[kind].length = n
    q.count[0] -= 1
    last, down = base + n, 2 * at + 1
    key, tie = heap[last].key, heap[last].tie
    while down < n:
        low = base + down
        if down + 1 < n and before(heap, low + 1, low) == 1:
            low += 1
        if key < heap[low].key or (key == heap[low].key and tie < heap[low].tie):
            break
        heap[base + at] = heap[low]
        at = low - base
        down = 2 * at + 1
    if at < n:
        _rise(heap, base, at, last)
    return job


@helper(INT, WAITING, INT, counted=False)
def first_fitting(q, gpus):  # type: ignore[no-untyped-def]
    """The size whose first job is the first of all that want at most so many GPUs; -1: none."""
    best = at = -1
    for kind in range(q.size.shape[0]):
        if q.size[kind].gpus > gpus:
            break
        if q.size[kind].length > 0:
            to = q.size[kind].first
            if best < 0 or before(q.heap, to, at) == 1:
                best, at = kind, to
    return best
