"""Cyclic orders from start times: folded into one cycle, checked for memory, evaluated exactly."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numba import types

from optsched.kernels.compile import BOOL, INT, INTS, entry, helper
from optsched.kernels.cycle_ratio import least_period
from optsched.model.schedule import Rows
from optsched.problems.jobarray.cycle import answer_rows
from optsched_solvers.periodic.insertion import CIRCLE, frozen

if TYPE_CHECKING:
    from optsched.model.schedule import IntArray
    from optsched_solvers.periodic.insertion import Circle


class CyclicOrders(NamedTuple):
    """Orders of all resources, offsets, and the least period they allow."""

    sequences: Rows
    offsets: IntArray
    period: int

    @property
    def answer(self) -> Rows:
        """What `Monitor.incumbent` takes: the orders, and a last row of offsets."""
        return answer_rows(self.sequences, self.offsets)


def folded(circle: Circle, start: IntArray, period: int, least: int = 1) -> CyclicOrders | None:
    """The orders of starts seen modulo a period, if they can be repeated and fit the memory.

    Parameters
    ----------
    circle
        The cycle.
    start
        Of one instance of every operation, at any absolute time; those of one resource may
        overlap modulo the period.
    period
        Where to cut; the orders' own least period may be longer or shorter.
    least
        A lower bound of the period of any orders.
    """
    row, offset = fold(circle, np.ascontiguousarray(start), period)
    found = least_of(circle, row, offset, least)
    return CyclicOrders(Rows(circle.users, row), offset, found) if found else None


def evaluated(circle: Circle, sequences: Rows, offsets: IntArray, least: int = 1) -> int:
    """The least period of orders with tokens >= 0; 0 for a contradiction or too little memory."""
    return int(least_of(circle, np.array(sequences.ids), np.array(offsets, np.int64), least))


@entry(types.Tuple((INTS, INTS)), CIRCLE, INTS, INT)
def fold(circle, start, period):  # type: ignore[no-untyped-def]
    """Rows of operations by start modulo the period (short ones first), and offsets >= 0."""
    n = len(start)
    offset = np.empty(n, np.int64)
    phase = np.empty(n, np.int64)
    for i in range(n):
        offset[i] = start[i] // period
        phase[i] = start[i] - offset[i] * period
    offset -= offset.min()
    fill = circle.users[:-1].copy()
    row = np.empty(circle.users[-1], np.int64)
    for i in range(n):
        r = circle.resource[i]
        if r >= 0:
            row[fill[r]] = i
            fill[r] += 1
    for r in range(len(fill)):
        begin, end = circle.users[r], circle.users[r + 1]
        part = row[begin:end].copy()
        order = np.argsort(phase[part], kind="mergesort")
        for k in range(len(order)):
            i = part[order[k]]
            at = begin + k
            while at > begin:
                o = row[at - 1]
                if phase[o] < phase[i] or circle.duration[o] <= circle.duration[i]:
                    break
                row[at] = o
                at -= 1
            row[at] = i
    return row, offset


@helper(BOOL, CIRCLE, INTS, INTS)
def fits(circle, row, offset):  # type: ignore[no-untyped-def]
    """Whether the bytes held along every row, for ever, stay within memory and never below 0."""
    for r in range(len(circle.memory)):
        level = 0
        for at in range(circle.users[r], circle.users[r + 1]):
            i = row[at]
            level += offset[i] * (circle.free[i] - circle.acquire[i])
        for at in range(circle.users[r], circle.users[r + 1]):
            i = row[at]
            if level + circle.need[i] > circle.memory[r]:
                return False
            level += circle.acquire[i] - circle.free[i]
            if level < 0 and circle.free[i] > 0:
                return False
    return True


@entry(INT, CIRCLE, INTS, INTS, INT)
def least_of(circle, row, offset, guess):  # type: ignore[no-untyped-def]
    """Least period >= guess of rows and offsets; 0 if they contradict an arc or lack memory."""
    if not fits(circle, row, offset):
        return 0
    n = len(offset)
    follower = np.full(n, -1, np.int64)
    wraps = np.zeros(n, np.int64)
    for r in range(len(circle.memory)):
        begin, end = circle.users[r], circle.users[r + 1]
        for at in range(begin, end):
            follower[row[at]] = row[at + 1] if at + 1 < end else row[begin]
            wraps[row[at]] = at + 1 == end
    size = len(circle.after) + n
    indptr = np.zeros(n + 1, np.int64)
    head = np.empty(size, np.int64)
    weight = np.empty(size, np.int64)
    tokens = np.empty(size, np.int64)
    e = 0
    for i in range(n):
        for a in range(circle.after_indptr[i], circle.after_indptr[i + 1]):
            j = circle.after[a]
            head[e] = j
            weight[e] = circle.after_weight[a]
            tokens[e] = circle.after_tokens[a] + offset[j] - offset[i]
            if tokens[e] < 0:
                return 0
            e += 1
        j = follower[i]
        if j >= 0:
            head[e] = j
            weight[e] = circle.duration[i]
            if circle.family[i] != circle.family[j]:
                weight[e] += circle.setup_out[i] + circle.setup_in[j]
            tokens[e] = wraps[i]
            e += 1
        indptr[i + 1] = e
    return least_period(indptr, head[:e], weight[:e], tokens[:e], guess)[0]


__all__ = ["CyclicOrders", "evaluated", "fold", "folded", "frozen", "least_of"]
