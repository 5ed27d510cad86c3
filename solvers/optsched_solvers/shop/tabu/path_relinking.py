"""Elite schedules, their distance, and the path from one towards another (Peng, Lü & Cheng 2015).

Schedules are topological orders of all operations; what counts is the order on every resource.
"""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from optsched.kernels.compile import INT, INTS, READ, entry, helper
from optsched_solvers._random import random_below
from optsched_solvers.shop.proof.symmetry import identical_jobs
from optsched_solvers.shop.tabu.state import STATE, exchange, exchange_fits

if TYPE_CHECKING:
    from optsched.model.schedule import IntArray, Schedule
    from optsched_solvers.shop.tabu.walk import Walk


LEAST_APART: Final = 10
"""Exchanges by which two elites differ at least."""


class Relabelling:
    """Identical jobs renamed in the order in which they first appear.

    Schedules that differ only by exchanged identical jobs become the same one; otherwise relinking
    would walk between copies.
    """

    def __init__(self, graph: Schedule) -> None:
        self.groups = [np.array(group, np.int64) for group in identical_jobs(graph)]

    def __call__(self, order: IntArray) -> IntArray:
        """The same schedule with its identical jobs renamed."""
        if not self.groups:
            return order
        position = np.empty(len(order), np.int64)
        position[order] = np.arange(len(order))
        renamed = np.arange(len(order))
        for group in self.groups:  # shape (jobs, operations of a job)
            by_first = np.argsort(position[group].min(axis=1), kind="stable")
            renamed[group[by_first]] = group
        return renamed[order]


class Elite(NamedTuple):
    """A good schedule: its makespan, its topological order, and a unique number."""

    value: int
    order: IntArray
    number: int


class Elites:
    """A few good schedules that keep a distance from each other."""

    def __init__(self, graph: Schedule, size: int) -> None:
        self.size, self.apart = size, LEAST_APART
        self.members: list[Elite] = []
        self.relabelled = Relabelling(graph)
        self._machine = graph.single_resource
        self._indptr = graph.users.indptr
        self._number = 0
        self._paired: set[tuple[int, int]] = set()

    def distance(self, first: IntArray, second: IntArray) -> int:
        """Number of pairs of operations that the two order differently on their resource."""
        return int(count_inversions(first, second, self._machine, self._indptr))

    def add(self, value: int, order: IntArray) -> bool:
        """Add a schedule if it is good and different enough; whether it was added.

        It replaces the elites that are worse and nearer than `apart`, else the worst one.
        """
        if any(elite.value == value for elite in self.members):
            return False
        order = self.relabelled(order)
        near = [
            elite for elite in self.members if self.distance(order, elite.order) < self.apart
        ]  # fmt: skip
        if any(elite.value <= value for elite in near):
            return False
        numbers = {elite.number for elite in near}
        kept = [elite for elite in self.members if elite.number not in numbers]
        if len(kept) >= self.size:
            worst = max(range(len(kept)), key=lambda k: kept[k].value)
            if kept[worst].value <= value:
                return False
            del kept[worst]
        self._number += 1
        self.members = [*kept, Elite(value, order.copy(), self._number)]
        return True

    @property
    def best(self) -> Elite:
        """The elite of least makespan."""
        return min(self.members, key=lambda elite: elite.value)

    def keep_apart(self, share: float) -> None:
        """Set the least distance of elites to a share of their mean distance now."""
        distances = [
            self.distance(a.order, b.order) for a, b in combinations(self.members, 2)
        ]  # fmt: skip
        mean = sum(distances) / len(distances) if distances else 0.0
        self.apart = max(LEAST_APART, int(share * mean))

    def next_pair(self, random: np.random.Generator) -> tuple[Elite, Elite] | None:
        """Return a random (start, guide) not returned before; None if all have been."""
        pairs = [
            (a, b)
            for a in self.members
            for b in self.members
            if a is not b and (a.number, b.number) not in self._paired
        ]
        if not pairs:
            return None
        start, guide = pairs[int(random.integers(len(pairs)))]
        self._paired.add((start.number, guide.number))
        return start, guide

    def restart(self, *, keep_best: bool) -> None:
        """Drop all, or all but the best."""
        self.members = [self.best] if keep_best and self.members else []
        self.apart = LEAST_APART
        self._paired.clear()


def relink(walk: Walk, start: IntArray, guide: IntArray, swaps: int) -> tuple[IntArray, int]:
    """Exchange random neighbours on the machines of `start` that `guide` orders differently.

    Every exchange keeps the orders free of cycles and within the memory. `start` and `guide` are
    topological orders; the walk's schedule and its random numbers change. At most `swaps`; fewer
    where no exchange is left, or memory refuses too many. Returns the topological order of the
    schedule on the path, and the number of exchanges.
    """
    walk.load(start)
    n = len(start)
    position = np.empty(n + 1, np.int64)
    position[guide] = np.arange(n)
    wrong, slot = np.empty(n, np.int64), np.empty(n, np.int64)
    made = _relink(walk.state, position, wrong, slot, swaps)
    return walk.order, int(made)


@entry(INT, INTS, INTS, READ, READ)
def count_inversions(first, second, machine, indptr):  # type: ignore[no-untyped-def]
    """Count pairs on one machine that two topological orders put in a different order."""
    n, n_machines = len(first), len(indptr) - 1
    seen = np.zeros(n_machines, np.int64)
    place = np.zeros(n, np.int64)
    for i in first:
        m = machine[i]
        if m >= 0:
            seen[m] += 1
            place[i] = seen[m]  # 1..size
    seen[:] = 0
    # per machine a binary indexed tree over the places in `first`, at base + 1 .. base + size;
    # invariant: it counts the operations of `second` so far, by their places
    tree = np.zeros(n + 1, np.int64)
    inversions = 0
    for i in second:
        m = machine[i]
        if m < 0:
            continue
        base, size = indptr[m], indptr[m + 1] - indptr[m]
        inversions += seen[m]
        seen[m] += 1
        k = place[i]
        while k > 0:
            inversions -= tree[base + k]
            k -= k & -k
        k = place[i]
        while k <= size:
            tree[base + k] += 1
            k += k & -k
    return inversions


@helper(counted=False, inline=True)
def may_swap(s, u, v):  # type: ignore[no-untyped-def]
    """Whether neighbors u, v of a machine can change places: no other path joins them, bytes fit.

    Exact: marks what u reaches through its arcs, up to the place of v.
    """
    link, op = s.link, s.op
    if not exchange_fits(s, u, v):
        return False
    low, high = np.int64(link[u].place), np.int64(link[v].place)
    link[u].mark = 1
    for k in range(low + 1, high + 1):
        i = s.order[k]
        before = link[i].machine_before
        hit = link[before].mark
        if before == u:
            hit = 0  # the machine arc that is to be reversed
        for e in range(op[i].arcs_in, op[i].arcs_in_end):
            hit |= link[s.arc[e].other].mark
        link[i].mark = hit
    joined = link[v].mark != 0
    for k in range(low, high + 1):
        link[s.order[k]].mark = 0
    return not joined


@helper(counted=False, inline=True)
def update_wrong(s, position, wrong, slot, n_wrong, x):  # type: ignore[no-untyped-def]
    """Put x into the list `wrong`, or take it out; returns the length of the list."""
    after = s.link[x].machine_after
    is_wrong = after != len(s.order) and position[x] > position[after]
    if is_wrong and slot[x] < 0:
        slot[x] = n_wrong
        wrong[n_wrong] = x
        return n_wrong + 1
    if not is_wrong and slot[x] >= 0:
        n_wrong -= 1
        wrong[slot[x]] = wrong[n_wrong]
        slot[wrong[n_wrong]] = slot[x]
        slot[x] = -1
    return n_wrong


@entry(INT, STATE, INTS, INTS, INTS, INT, counted=False)
def _relink(s, position, wrong, slot, swaps):  # type: ignore[no-untyped-def]
    """Up to `swaps` random exchanges towards the guide, with the order `position`.

    `wrong` lists the operations that the guide puts behind their machine successor, `slot` their
    places in the list.
    """
    link, n = s.link, len(s.order)
    n_wrong = 0
    for i in range(n):
        slot[i] = -1
    for i in range(n):
        n_wrong = update_wrong(s, position, wrong, slot, n_wrong, i)
    trials = 10 * swaps + n  # memory may refuse most exchanges
    # invariant: the schedule is feasible, and `made` pairs nearer to the guide than the start
    for made in range(swaps):
        if n_wrong == 0:
            return made
        k = random_below(s.control[0], n_wrong)
        tried = 0
        while tried < min(n_wrong, trials):
            u = wrong[k]
            v = np.int64(link[u].machine_after)
            if may_swap(s, u, v):
                break
            k = k + 1 if k + 1 < n_wrong else 0
            tried += 1
        if tried == min(n_wrong, trials):
            return made
        trials -= tried
        before = np.int64(link[u].machine_before)
        exchange(s, u, v)
        for x in (before, v, u):  # the three operations with a new machine successor
            if x != n:
                n_wrong = update_wrong(s, position, wrong, slot, n_wrong, x)
    return swaps
