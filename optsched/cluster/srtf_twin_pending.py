"""Pending jobs of a walk: one heap for every size of gang.

A walk's counter only falls. So if a job of some size is not selected, no later one of that size is:
of every size only the first in order can be next, selected jobs are first ones, and a heap a size
with its first job kept aside is all that a walk needs. Orders are by (key, sequence).

A *line* is one int64 array: the number of sizes, a record for every size (ascending), the heaps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from optsched.kernels.compile import INT, INTS, helper

if TYPE_CHECKING:
    from optsched.model.schedule import IntArray

_SIZES: Final = 0
_FIRST: Final = 1
"""Where the records begin."""
_RECORD: Final = 5
SIZE: Final = 0
HEAD_KEY: Final = 1
HEAD_SEQUENCE: Final = 2
_LENGTH: Final = 3
_HEAP: Final = 4

_KEY: Final = 0
_SEQUENCE: Final = 1
_JOB: Final = 2
_ENTRY: Final = 3

_EMPTY: Final = 1 << 62


def line_for(gang: IntArray) -> tuple[IntArray, IntArray]:
    """An empty line for jobs with these gangs, and every job's record in it."""
    size, kind, count = _kinds(gang)
    head = _FIRST + _RECORD * len(size)
    line = np.empty(head + _ENTRY * len(gang), np.int64)
    line[_SIZES] = len(size)
    records = line[_FIRST:head].reshape(-1, _RECORD)
    records[:, SIZE], records[:, _LENGTH] = size, 0
    records[:, HEAD_KEY] = records[:, HEAD_SEQUENCE] = _EMPTY
    records[:, _HEAP] = head + _ENTRY * (np.cumsum(count) - count)
    return line, _FIRST + _RECORD * kind.astype(np.int64)


def _kinds(gang: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Distinct sizes ascending, which of them every job has, and how often each is there."""
    if gang.max() > 4 * len(gang) + 1000:
        return np.unique(gang, return_inverse=True, return_counts=True)
    times = np.bincount(gang)
    size = np.flatnonzero(times)
    number = np.zeros(len(times), np.int64)
    number[size] = np.arange(len(size))
    return size, number[gang], times[size]


@helper(INT, INTS, INT, INT, INT, INT, counted=False)
def _set(line, at, key, sequence, job):  # type: ignore[no-untyped-def]
    """Write an entry of a heap."""
    line[at + _KEY], line[at + _SEQUENCE], line[at + _JOB] = key, sequence, job
    return at


@helper(INT, INTS, INT, INT, INT, INT, counted=False)
def insert(line, record, job, key, sequence):  # type: ignore[no-untyped-def]
    """Add a job to the heap of its size."""
    heap, at = line[record + _HEAP], line[record + _LENGTH]
    line[record + _LENGTH] = at + 1
    while at > 0:
        up = (at - 1) >> 1
        above = heap + up * _ENTRY
        theirs = line[above + _KEY]
        if theirs < key or (theirs == key and line[above + _SEQUENCE] < sequence):
            break
        _set(line, heap + at * _ENTRY, theirs, line[above + _SEQUENCE], line[above + _JOB])
        at = up
    _set(line, heap + at * _ENTRY, key, sequence, job)
    if at == 0:
        line[record + HEAD_KEY], line[record + HEAD_SEQUENCE] = key, sequence
    return at


@helper(INT, INTS, INT, counted=False)
def take_first(line, record):  # type: ignore[no-untyped-def]
    """Take the first job of a size out."""
    heap, n = line[record + _HEAP], line[record + _LENGTH] - 1
    first = line[heap + _JOB]
    line[record + _LENGTH] = n
    if n == 0:
        line[record + HEAD_KEY] = line[record + HEAD_SEQUENCE] = _EMPTY
        return first
    end = heap + n * _ENTRY
    key, sequence, job = line[end + _KEY], line[end + _SEQUENCE], line[end + _JOB]
    at, down = 0, 1
    while down < n:
        below = heap + down * _ENTRY
        theirs = line[below + _KEY]
        if down + 1 < n:
            other = line[below + _ENTRY + _KEY]
            if other < theirs or (
                other == theirs and line[below + _ENTRY + _SEQUENCE] < line[below + _SEQUENCE]
            ):
                down, theirs, below = down + 1, other, below + _ENTRY
        if key < theirs or (key == theirs and sequence < line[below + _SEQUENCE]):
            break
        _set(line, heap + at * _ENTRY, theirs, line[below + _SEQUENCE], line[below + _JOB])
        at, down = down, 2 * down + 1
    _set(line, heap + at * _ENTRY, key, sequence, job)
    line[record + HEAD_KEY] = line[heap + _KEY]
    line[record + HEAD_SEQUENCE] = line[heap + _SEQUENCE]
    return first


@helper(INT, INTS, INT, counted=False)
def first_fitting(line, gpus):  # type: ignore[no-untyped-def]
    """Record whose first job is the first of all that need at most so many GPUs; 0 if none."""
    best, key, sequence = 0, _EMPTY, _EMPTY
    record = _FIRST
    for _ in range(line[_SIZES]):
        if line[record + SIZE] > gpus:
            break
        theirs = line[record + HEAD_KEY]
        if theirs < key or (theirs == key and line[record + HEAD_SEQUENCE] < sequence):
            best, key, sequence = record, theirs, line[record + HEAD_SEQUENCE]
        record += _RECORD
    return best
