"""Running jobs in order: two sorted arrays that are shifted on the shorter side."""

from __future__ import annotations

from optsched.cluster.srtf_twin_state import (
    BITS,
    GANG,
    JOB_WIDTH,
    KEY_NOW,
    LOW,
    ROOM,
    RUNNING,
    SEQUENCE_NOW,
    WALK,
)
from optsched.kernels.compile import INT, INTS, helper


@helper(INT, INTS, INT, INT, INT, counted=False)
def _move(array, begin, end, by):  # type: ignore[no-untyped-def]
    """Shift ``array[begin:end]`` by one place, up or down."""
    if by > 0:
        for i in range(end, begin, -1):
            array[i] = array[i - 1]
    else:
        for i in range(begin, end):
            array[i - 1] = array[i]
    return 0


@helper(INT, WALK, INT, INT, counted=False)
def _place_in_run(w, key, sequence):  # type: ignore[no-untyped-def]
    """Where (key, sequence) is, or is to be put, in the running arrays."""
    low = w.state[LOW]
    high = low + w.state[RUNNING]
    top = high
    while low < high:
        middle = (low + high) >> 1
        if w.run[middle] > key:
            low = middle + 1
        else:
            high = middle
    # the later of equals come first
    while low < top and w.run[low] == key:
        other = (w.run[w.state[ROOM] + low] >> BITS) * JOB_WIDTH
        if w.job[other + SEQUENCE_NOW] <= sequence:
            break
        low += 1
    return low


@helper(INT, WALK, counted=False)
def _centre(w):  # type: ignore[no-untyped-def]
    """Put the running arrays into the middle of their room."""
    low, n, room = w.state[LOW], w.state[RUNNING], w.state[ROOM]
    to = (room - n) >> 1
    for base in range(0, 2 * room, room):
        if to < low:
            for i in range(n):
                w.run[base + to + i] = w.run[base + low + i]
        else:
            for i in range(n - 1, -1, -1):
                w.run[base + to + i] = w.run[base + low + i]
    w.state[LOW] = to
    return to


@helper(INT, WALK, INT, INT, INT, counted=False)
def enter_run(w, job, key, sequence):  # type: ignore[no-untyped-def]
    """Put a job into the running arrays."""
    n, room = w.state[RUNNING], w.state[ROOM]
    if w.state[LOW] == 0 or w.state[LOW] + n == room:
        _centre(w)
    low, line = w.state[LOW], job * JOB_WIDTH
    at = _place_in_run(w, key, sequence)
    if at - low < low + n - at:
        _move(w.run, low, at, -1)
        _move(w.run, room + low, room + at, -1)
        at -= 1
        w.state[LOW] = low - 1
    else:
        _move(w.run, at, low + n, 1)
        _move(w.run, room + at, room + low + n, 1)
    w.run[at], w.run[room + at] = key, job << BITS | w.job[line + GANG]
    w.job[line + KEY_NOW], w.job[line + SEQUENCE_NOW] = key, sequence
    w.state[RUNNING] = n + 1
    return at


@helper(INT, WALK, INT, counted=False)
def leave_place(w, at):  # type: ignore[no-untyped-def]
    """Take what stands at a place out of the running arrays."""
    low, n, room = w.state[LOW], w.state[RUNNING], w.state[ROOM]
    if at - low < low + n - at:
        _move(w.run, low, at, 1)
        _move(w.run, room + low, room + at, 1)
        w.state[LOW] = low + 1
    else:
        _move(w.run, at + 1, low + n, -1)
        _move(w.run, room + at + 1, room + low + n, -1)
    w.state[RUNNING] = n - 1
    return 0


@helper(INT, WALK, INT, counted=False)
def leave_run(w, job):  # type: ignore[no-untyped-def]
    """Take a job out of the running arrays."""
    line = job * JOB_WIDTH
    return leave_place(w, _place_in_run(w, w.job[line + KEY_NOW], w.job[line + SEQUENCE_NOW]))
