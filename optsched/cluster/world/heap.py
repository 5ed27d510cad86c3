"""The running jobs by their next event: a binary heap in which every job knows its row."""

from __future__ import annotations

from optsched.cluster.world.layout import WORLD
from optsched.kernels.compile import INT, helper


@helper(INT, WORLD, INT, counted=False)
def rise(w, i):  # type: ignore[no-untyped-def]
    """Move row i towards the top while it is earlier (ties: lower job) than the row above."""
    time, job = w.heap[i, 0], w.heap[i, 1]
    while i > 0:
        up = (i - 1) >> 1
        other = w.heap[up, 0]
        if other < time or (other == time and w.heap[up, 1] < job):
            break
        w.heap[i, 0], w.heap[i, 1] = other, w.heap[up, 1]
        w.job[w.heap[i, 1]].slot = i
        i = up
    w.heap[i, 0], w.heap[i, 1] = time, job
    w.job[job].slot = i
    return i


@helper(INT, WORLD, INT, counted=False)
def sink(w, i):  # type: ignore[no-untyped-def]
    """Move row i away from the top while a row below is earlier."""
    n = w.state[0].running_now
    time, job = w.heap[i, 0], w.heap[i, 1]
    while True:
        down = 2 * i + 1
        if down >= n:
            break
        other = w.heap[down, 0]
        if down + 1 < n:
            right = w.heap[down + 1, 0]
            if right < other or (right == other and w.heap[down + 1, 1] < w.heap[down, 1]):
                down, other = down + 1, right
        if time < other or (time == other and job < w.heap[down, 1]):
            break
        w.heap[i, 0], w.heap[i, 1] = other, w.heap[down, 1]
        w.job[w.heap[i, 1]].slot = i
        i = down
    w.heap[i, 0], w.heap[i, 1] = time, job
    w.job[job].slot = i
    return i


@helper(INT, WORLD, INT, counted=False)
def enter(w, j):  # type: ignore[no-untyped-def]
    """Put running job j in, by its `JOB.next`."""
    i = w.state[0].running_now
    w.state[0].running_now += 1
    w.heap[i, 0], w.heap[i, 1] = w.job[j].next, j
    return rise(w, i)


@helper(INT, WORLD, INT, counted=False)
def move(w, j):  # type: ignore[no-untyped-def]
    """Put job j where its changed `JOB.next` belongs."""
    i = w.job[j].slot
    w.heap[i, 0] = w.job[j].next
    return sink(w, rise(w, i))


@helper(INT, WORLD, INT, counted=False)
def withdraw(w, j):  # type: ignore[no-untyped-def]
    """Take job j out."""
    i = w.job[j].slot
    w.job[j].slot = -1
    w.state[0].running_now -= 1
    last = w.state[0].running_now
    if i == last:
        return last
    w.heap[i, 0], w.heap[i, 1] = w.heap[last, 0], w.heap[last, 1]
    return sink(w, rise(w, i))
