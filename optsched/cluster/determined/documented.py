"""Fair share as Determined's documentation describes it: who gives up slots for whom; kernels.

Slots follow demand times weight "as new experiments become active": groups above their share
release tasks for groups below it, so that a waiting task counts if it fits once they have stopped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from optsched.cluster.determined.columns import COLUMNS
from optsched.cluster.determined.fitting import find, put, reset, take, undo
from optsched.kernels.compile import INT, helper

if TYPE_CHECKING:
    from collections.abc import Callable

    from optsched.cluster.determined.columns import Columns
    from optsched.cluster.world.policy import FloatArray
    from optsched.model.schedule import IntArray


@helper(INT, COLUMNS, INT, counted=False)
def _stop(c, i):  # type: ignore[no-untyped-def]
    """A running task is to be released, and its slots are taken for free."""
    c.task[i].stops = 1
    c.group[c.task[i].group].credit -= c.task[i].slots
    c.release[c.pool[0].releases] = i
    c.pool[0].releases += 1
    return take(c, i)


@helper(INT, COLUMNS, INT, INT, counted=False)
def _go_on(c, releases, undone):  # type: ignore[no-untyped-def]
    """Take back all releases but so many, which gave back so many rows."""
    for r in range(releases, c.pool[0].releases):
        task = c.task[c.release[r]]
        task.stops = 0
        c.group[task.group].credit += task.slots
    c.pool[0].releases = releases
    return undo(c, undone)


@helper(INT, COLUMNS, INT, INT, INT, counted=False)
def _clear(c, a, i, all_of_it):  # type: ignore[no-untyped-def]
    """Release tasks on agent a of groups above their offers, in order, until task i fits.

    Returns its rows; or, if the whole agent is wanted, 1 once it is idle. 0: that is not enough,
    and nothing is released.
    """
    pool = c.pool[0]
    releases, undone = pool.releases, pool.undone
    for at in range(pool.running):
        v = c.running[at]
        task, row = c.task[v], c.task[v].held
        donor = task.preemptible == 1 and task.stops == 0 and task.slots > 0
        if not donor or c.group[task.group].credit <= 0:
            continue
        while row >= 0 and c.held[row].where != a:
            row = c.held[row].following
        if row < 0:
            continue
        _stop(c, v)
        if all_of_it == 1 and c.node[a].free == c.node[a].capacity:
            return 1
        rows = find(c, c.task[i].kind, c.task[i].first) if all_of_it == 0 else 0
        if rows > 0:
            return rows
    _go_on(c, releases, undone)
    return 0


@helper(INT, COLUMNS, INT, counted=False)
def _make_room(c, i):  # type: ignore[no-untyped-def]
    """Rows of a task that fits once some are released: those of one agent, else of whole ones."""
    pool, k = c.pool[0], c.task[i].kind
    releases, undone, slots = pool.releases, pool.undone, c.kind[k].slots
    for a in range(len(c.node)):
        if c.node[a].takes == 1 and c.node[a].capacity >= slots:
            rows = _clear(c, a, i, 0)
            if rows > 0:
                return rows
    for a in range(len(c.node) if slots > 1 and c.kind[k].single == 0 else 0):
        node = c.node[a]
        if node.takes == 0 or node.capacity > slots or node.free == node.capacity:
            continue
        rows = find(c, k, c.task[i].first) if _clear(c, a, i, 1) == 1 else 0
        if rows > 0:
            return rows
    _go_on(c, releases, undone)
    return 0


@helper(INT, COLUMNS, INT, INT, counted=False)
def _begin(c, i, to):  # type: ignore[no-untyped-def]
    """Task i starts where `fit` says, if nothing there has still to stop; its end in `rows`."""
    pool, now, rows = c.pool[0], True, find(c, c.task[i].kind, c.task[i].first)
    for r in range(rows):
        free = c.node[c.fit[r].where].free
        for u in range(pool.undone):
            if c.undo[u].where == c.fit[r].where:
                free -= c.undo[u].count
        now = now and free >= c.fit[r].count
    put(c, rows)
    for r in range(rows if now else 0):
        c.rows[to].where, c.rows[to].count = c.fit[r].where, c.fit[r].count
        to += 1
    return to


@helper(INT, COLUMNS, counted=False)
def settle(c):  # type: ignore[no-untyped-def]
    """Start what the offers allow, in task order, and release what stands in the way.

    A task whose slots have still to come free is among the starts, without rows. What is left of a
    group's `credit` below 0 it cannot use: no waiting task is small enough, or fits.
    """
    pool, to, zero = c.pool[0], 0, 0
    reset(c)
    while zero < pool.starts and c.task[c.start[zero]].slots == 0:
        to = _begin(c, c.start[zero], to)
        c.end[zero] = to
        zero += 1
    pool.starts, pool.releases = zero, 0
    for k in range(len(c.kind)):
        c.kind[k].dead = 0
    for at in range(pool.running):
        c.task[c.running[at]].stops = 0
    for at in range(pool.shares):
        group = c.group[c.share[at]]
        group.credit = group.active - group.offer
    for at in range(pool.shares):
        group = c.group[c.share[at]]
        i = group.head
        while i >= 0 and group.credit < 0:
            task, kind = c.task[i], c.kind[c.task[i].kind]
            if task.runs == 0 and task.slots <= -group.credit and kind.dead == 0:
                if find(c, task.kind, task.first) > 0 or _make_room(c, i) > 0:
                    to = _begin(c, i, to)
                    c.start[pool.starts], c.end[pool.starts] = i, to
                    pool.starts += 1
                    group.credit += task.slots
                else:
                    kind.dead = 1
            i = task.following
    for at in range(pool.running):
        task = c.task[c.running[at]]
        if task.preemptible == 1 and task.stops == 0 and c.group[task.group].credit > 0:
            _stop(c, c.running[at])
    return pool.starts + pool.releases


def offer_by_docs(c: Columns) -> bool:
    """Shares of the slots in proportion to demand times weight, as the documentation says.

    Between a group's fixed slots and its demand, by largest remainder. As long as nothing is left
    over, the latest group whose smallest task exceeds its offer is left out, and all is divided
    anew: even if it was offered nothing, for the others' parts by remainder are then different.
    False where all groups are alike: both rules agree then, also in what becomes of slots given
    back, and the filling of the code is to be taken.
    """
    rows = c.share[: int(c.pool["shares"][0])]
    groups, weight, capacity = c.group[rows], c.weight[rows], int(c.pool["capacity"][0])
    low, demand = groups["fixed"], groups["demand"]
    if len({*zip(demand.tolist(), weight.tolist(), strict=True)}) <= 1 and not low.any():
        return False
    most, smallest = groups["most"], groups["smallest"]
    latest = np.argsort(-groups["registered"], kind="stable")

    def stuck(most: IntArray) -> IntArray:
        """Those to be left out, the latest first."""
        offers = _divided(demand * weight, capacity, low, most)
        if most.sum() < capacity:
            return latest[:0]
        return latest[((most > low) & (offers < demand) & (smallest > offers))[latest]]

    found = stuck(most)
    while len(found):
        for parts in range(1, 64):  # many at a time, as long as others are still stuck then
            some = max(1, len(found) >> parts)
            left = most.copy()
            left[found[:some]] = low[found[:some]]
            rest = stuck(left)
            if some == 1 or len(rest):
                break
        most, found = left, rest
    c.group["most"][rows], c.group["off"][rows] = most, most < groups["most"]
    c.group["offer"][rows] = _divided(demand * weight, capacity, low, most)
    return True


def _divided(scores: FloatArray, capacity: int, low: IntArray, most: IntArray) -> IntArray:
    """Offers that add up to the slots, or to what all groups can use."""
    from optsched_solvers.quota import proportional

    budget = min(max(capacity, int(low.sum())), int(most.sum()))
    return proportional(scores, budget, low, most)[0]


def settle_by_docs(c: Columns, again: Callable[[], object]) -> None:
    """Run `settle` by `again` until no group is offered what it cannot use while another could."""
    rows = c.share[: int(c.pool["shares"][0])]
    scores = c.group["demand"][rows] * c.weight[rows]
    capacity, low = int(c.pool["capacity"][0]), c.group["fixed"][rows]
    most = np.where(c.group["off"][rows] == 1, c.group["offer"][rows], c.group["most"][rows])
    c.group["key"] = c.group["offer"]  # the shares, before the others get what a group cannot use
    while True:
        again()
        offers, credit = c.group["offer"][rows], c.group["credit"][rows]
        # groups that release have no part in it: what they lack then they can use later
        spare = np.where(c.group["active"][rows] < offers, np.maximum(-credit, 0), 0)
        if not spare.any():
            return
        most = np.where(spare > 0, offers - spare, most)
        following = _divided(scores, capacity, low, most)
        if (following <= offers).all():
            return
        c.group["offer"][rows] = following
