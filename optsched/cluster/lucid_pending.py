"""Sorted rows of pending jobs and of possible partners, for the packing simulation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from optsched.kernels.compile import INT, INTS, helper

if TYPE_CHECKING:
    from optsched.model.schedule import IntArray

_GANGS = 8


def no_hosts(room: int) -> IntArray:
    """Eight empty rows: ``[0]`` the room of each, ``[g]`` the length, then the rows at g * room."""
    room = max(room, _GANGS + 1)
    hosts = np.zeros((_GANGS + 1) * room, np.int64)
    hosts[0] = room
    return hosts


@helper(INT, INTS, INT, INT, counted=False)
def sorted_in(hosts, gang, value):  # type: ignore[no-untyped-def]
    """Add a number to the ascending row of a gang."""
    base, at = hosts[0] * gang, hosts[gang]
    while at > 0 and hosts[base + at - 1] > value:
        hosts[base + at] = hosts[base + at - 1]
        at -= 1
    hosts[base + at] = value
    hosts[gang] += 1
    return at


@helper(INT, INTS, INT, INT, counted=False)
def sorted_out(hosts, gang, value):  # type: ignore[no-untyped-def]
    """Take a number out of the row of a gang."""
    base, n = hosts[0] * gang, hosts[gang]
    low, high = 0, n
    while low < high:
        middle = (low + high) >> 1
        if hosts[base + middle] < value:
            low = middle + 1
        else:
            high = middle
    if low == n or hosts[base + low] != value:
        return 0
    for i in range(low, n - 1):
        hosts[base + i] = hosts[base + i + 1]
    hosts[gang] = n - 1
    return 1


@helper(INT, INTS, INT, INT, INTS, INT, INT, INT, counted=False)
def insert_pending(pending, n, job, table, width, cost_at, class_at):  # type: ignore[no-untyped-def]
    """Insert a job behind all of no greater cost, and its class beside it; returns its place."""
    cost, half = table[job * width + cost_at], len(pending) >> 1
    low, high = 0, n
    while low < high:
        middle = (low + high) >> 1
        if table[pending[middle] * width + cost_at] <= cost:
            low = middle + 1
        else:
            high = middle
    for i in range(n, low, -1):
        pending[i] = pending[i - 1]
    for i in range(half + n, half + low, -1):
        pending[i] = pending[i - 1]
    pending[low], pending[half + low] = job, table[job * width + class_at]
    return low
