"""Determined's fair share: slots are divided among groups, which then start or release tasks.

``code`` follows determined-ai/determined, ``master/internal/rm/agentrm/fair_share.go``. ``docs``
follows its documentation: slots in proportion to demand times weight, "as new experiments become
active", so that groups above their share release tasks for groups below it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from optsched.cluster.determined.fitting import (
    Outcome,
    explained,
    freed,
    go_sorted,
    in_slots,
    placed_again,
    unplaced,
)
from optsched.cluster.world.policy import Reason, Why

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.cluster.determined.fitting import Agents, Explain, Tasks
    from optsched.cluster.world.policy import FloatArray
    from optsched.model.schedule import IntArray


@dataclass
class Shares:
    """Groups with a task that counts, by demand, then by the submission of their first task."""

    member: IntArray
    """Tasks that count, in order of submission: those that run, and those that would fit."""
    group: IntArray
    """Row of the group of each of them; the other columns are by group."""
    head: IntArray
    """First task."""
    demand: IntArray
    active: IntArray
    """Slots of running tasks."""
    fixed: IntArray
    """Slots of running tasks that are not preemptible."""
    smallest: IntArray
    """Slots of the smallest waiting task (``docs``: or may be released); -1: none."""
    weight: FloatArray
    submitted: FloatArray
    offer: IntArray
    most: IntArray
    """Upper bound of the offer."""
    excluded: list[bool]
    """Groups with an offer too small for all their tasks: it went to the others."""


def share_slots(agents: Agents, tasks: Tasks, docs: bool) -> tuple[Outcome, Explain]:
    """Divide the slots; groups above their offer release tasks, groups below it start tasks."""
    zero_slot, shares, capacity = divide(agents, tasks, docs)
    if docs:
        outcome = _exchanged(agents, tasks, shares, zero_slot, capacity)
    else:
        outcome = _started(agents, tasks, shares, zero_slot)
    return outcome, partial(_reasons, agents, tasks, outcome, shares, docs)


def _started(agents: Agents, tasks: Tasks, shares: Shares, zero_slot: list[int]) -> Outcome:
    """Release and start tasks of every group in order of submission, as the master does."""
    start, release = zero_slot, []
    for g in np.flatnonzero(shares.active != shares.offer).tolist():
        above = int(shares.active[g] - shares.offer[g])
        for i in shares.member[shares.group == g].tolist():
            slots = int(tasks.slots[i])
            if above > 0 and tasks.running[i] and tasks.preemptible[i]:
                release.append(i)
                above = max(0, above - slots)
            elif above < 0 and not tasks.running[i] and slots <= -above:
                start.append(i)
                above += slots
            if above == 0:
                break
    return placed_again(agents, tasks, start, release, ())


def _exchanged(
    agents: Agents, tasks: Tasks, shares: Shares, start: list[int], capacity: int
) -> Outcome:
    """Release what groups hold above their offers; start tasks of the others in the free slots.

    Tasks are released agent by agent, so that whole agents become free. Slots that a group cannot
    use even then are offered to the others, until there are none.
    """
    row = dict(zip(shares.member.tolist(), shares.group.tolist(), strict=True))
    donors = [i for i in row if tasks.running[i] and tasks.preemptible[i]]
    donors.sort(key=lambda i: min((agents.rank[a] for a, _ in agents.held(i)), default=0))
    below = [i for i in row if not tasks.running[i]]
    below.sort(key=row.__getitem__)
    offer, most = shares.offer, np.where(shares.excluded, shares.offer, shares.most)
    while True:
        outcome, above = Outcome({}), (shares.active - offer).tolist()
        misfits = set()
        for i in donors:
            if above[row[i]] > 0:
                outcome.release.append(i)
                above[row[i]] -= int(tasks.slots[i])
        now, then = agents.copy(), agents.copy(outcome.release)
        for i in start + [i for i in below if shares.active[row[i]] < offer[row[i]]]:
            slots, kind = int(tasks.slots[i]), int(tasks.kind[i])
            if slots > 0 and (slots > -above[row[i]] or kind in misfits):
                continue
            places = then.find(tasks.kinds[kind], int(tasks.first[i]))
            if places and all(now.free[a] >= n for a, n in places):
                outcome.start[i] = places
            elif places or slots == 0:
                outcome.postponed.append(i)
            else:
                misfits.add(kind)
            then.place(places)
            now.place(places)
            if places and slots > 0:
                above[row[i]] += slots
        # groups that release have no part in it: what they lack then they can use later
        spare = np.where(shares.active < offer, np.maximum(-np.array(above), 0), 0)
        most = np.where(spare > 0, offer - spare, most)
        following = _divided(shares, capacity, most)
        if not spare.any() or (following <= offer).all():
            return outcome
        offer = following


def _reasons(
    agents: Agents, tasks: Tasks, outcome: Outcome, shares: Shares, docs: bool, names: Sequence[str]
) -> dict[int, Reason]:
    """Why tasks wait.

    The share is the reason of a task that would fit, in ``docs`` also of others: in ``code`` a
    task that does not fit now has no part in a share.
    """
    after, found = unplaced(agents, tasks, outcome, range(len(tasks.slots)))
    row = {g: at for at, g in enumerate(tasks.group[shares.head].tolist())}
    runs = tasks.running.copy()
    runs[[*outcome.start, *outcome.postponed]] = True
    runs[outcome.release] = False
    taken = np.bincount(tasks.group, np.where(runs, tasks.slots, 0)).astype(np.int64)

    def limited(i: int, misfit: Reason | None) -> Reason | None:
        slots, limit, group = int(tasks.slots[i]), int(tasks.limit[i]), int(tasks.group[i])
        at = row.get(group, -1)
        if 0 <= limit < slots:
            text = f"requests {in_slots(slots)}, its group's max_slots is {limit}"
        elif at < 0 or slots == 0 or (misfit and not docs):
            return None
        elif shares.excluded[at]:
            text = "its group is excluded: its share is smaller than its smallest task"
        elif taken[group] + slots > shares.offer[at]:
            offer = f"{in_slots(int(shares.offer[at]))}, {taken[group]} of them taken"
            text = f"requests {in_slots(slots)}, its group's share is {offer}"
        else:
            return None
        return Reason(Why.SHARE, text)

    def following(agents: Agents, tasks: Tasks) -> Outcome:
        return share_slots(agents, tasks, docs)[0]

    return explained(names, outcome, found, freed(after, tasks, outcome, following), limited)


def divide(agents: Agents, tasks: Tasks, docs: bool) -> tuple[list[int], Shares, int]:
    """Tasks without slots that fit, the groups with their offers, and the slots that count."""
    open_agents = agents
    if docs:  # a task counts if it fits once all preemptible tasks have stopped
        stops = np.flatnonzero(tasks.running & tasks.preemptible & (tasks.slots > 0))
        open_agents = agents.copy(stops.tolist())
    fits = np.zeros(len(tasks.kinds), bool)
    for k in set(tasks.kind[~tasks.running].tolist()):
        fits[k] = open_agents.fits(tasks.kinds[k])
    counts = tasks.running | fits[tasks.kind]
    zero_slot = np.flatnonzero(counts & ~tasks.running & (tasks.slots == 0)).tolist()
    capacity = agents.total()
    counts &= (tasks.slots > 0) & (tasks.slots <= capacity)
    if docs:
        counts &= tasks.running | (tasks.limit < 0) | (tasks.limit >= tasks.slots)
    shares = _groups(tasks, np.flatnonzero(counts), capacity, docs)
    if docs:
        _offer_in_proportion(shares, capacity)
    else:
        _offer_in_passes(shares, capacity)
    return zero_slot, shares, capacity


def _groups(tasks: Tasks, member: IntArray, capacity: int, docs: bool) -> Shares:
    """The groups of these tasks."""
    _, first, group = np.unique(tasks.group[member], return_index=True, return_inverse=True)
    n, slots, running = len(first), tasks.slots[member], tasks.running[member]

    def total(values: IntArray) -> IntArray:
        return np.bincount(group, values, n).astype(np.int64)

    limit = tasks.limit[member[first]]
    demand = np.where(limit >= 0, np.minimum(total(slots), limit), total(slots))
    order = np.lexsort((first, demand))
    place = np.argsort(order)
    group, head, demand = place[group], member[first][order], demand[order]
    stays = running & ~tasks.preemptible[member]
    fixed = total(np.where(stays, slots, 0))
    smallest = np.full(n, capacity + 1)
    moves = ~(stays if docs else running)
    np.minimum.at(smallest, group[moves], slots[moves])
    return Shares(
        member=member, group=group, head=head, demand=demand, fixed=fixed,
        active=total(np.where(running, slots, 0)),
        smallest=np.where(smallest > capacity, -1, smallest), weight=tasks.weight[head],
        submitted=tasks.submitted[head], offer=fixed,
        most=np.maximum(np.minimum(demand, capacity), fixed), excluded=[False] * n,
    )  # fmt: skip


def _offer_in_passes(shares: Shares, capacity: int) -> None:
    """Progressive filling, as Determined's master does it: passes over the groups by demand.

    Every pass offers each group that needs more the same slots, times its weight. When none are
    left, groups that cannot start their smallest task are excluded, the latest first, until one of
    the others can use the slots.
    """
    enough = np.maximum(shares.demand, shares.fixed)
    if enough.sum() <= capacity:
        shares.offer = enough
        return
    # sums of whole numbers do not depend on the order; those of others are computed as Go does
    whole = bool((shares.weight % 1 == 0).all() and shares.weight.sum() < 2.0**53)
    left = before = max(capacity - int(shares.fixed.sum()), 0)
    demand, smallest, weight = (
        column.tolist() for column in (shares.demand, shares.smallest, shares.weight)
    )
    offers = shares.fixed.copy()
    # groups of one slot come first, and any pass gives them exactly this slot
    single = np.flatnonzero((shares.demand == 1) & (offers == 0))[:left]
    offers[single] = 1
    left -= len(single)
    credit, offer = shares.fixed.tolist(), offers.tolist()
    needy = np.flatnonzero(offers < shares.demand).tolist()
    latest = iter(_latest(shares.submitted))
    while needy:
        counted = np.zeros(len(demand))
        counted[needy] = shares.weight[needy]
        total = float(counted.cumsum()[-1])
        for g in needy:
            if left == 0:
                break
            part = int(before * weight[g] / total) if weight[g] > 0 else 0
            given = min(max(1, part), left, demand[g] - offer[g])
            if given <= credit[g]:
                credit[g] -= given
                continue
            credit[g] = 0  # upstream's slip: what is left of the credit is lost, not deducted
            offer[g] += given
            left -= given
            if offer[g] == demand[g]:
                counted[g] = 0
                total = total - weight[g] if whole else counted.cumsum()[-1]
        needy = [g for g in needy if offer[g] < demand[g]]
        if left == 0:
            for g in latest:
                if offer[g] < min(demand[g], smallest[g]):
                    left, offer[g], shares.excluded[g] = offer[g], 0, True
                    if left > 0:
                        break
            else:
                break
            needy = [g for g in needy if not shares.excluded[g]]
        before = left
    shares.offer = np.array(offer, np.int64)


def _latest(submitted: FloatArray) -> list[int]:
    """Groups, the latest first, as upstream sorts: its comparator reads the unsorted list.

    Up to 12 groups Go sorts by insertion, which is reproduced; beyond, the sort is a proper one.
    """
    if len(submitted) <= 12:
        order = list(range(len(submitted)))
        return go_sorted(order, lambda _, i: bool(submitted[i] > submitted[i - 1]))
    latest: list[int] = np.argsort(-submitted, kind="stable").tolist()
    return latest


def _offer_in_proportion(shares: Shares, capacity: int) -> None:
    """Shares in proportion to demand times weight, as the documentation says.

    Between a group's fixed slots and its demand, by largest remainder. As long as no slots are
    left over, the latest group with an offer below its smallest task is excluded, and all is
    divided anew: even if its offer was 0, for the remainders of the others are then different.
    """
    low, most = shares.fixed, shares.most.copy()
    latest = np.argsort(-shares.submitted, kind="stable")

    def stuck(most: IntArray) -> IntArray:
        """Groups to exclude, the latest first."""
        offer = _divided(shares, capacity, most)
        if most.sum() < capacity:
            return latest[:0]
        return latest[((most > low) & (offer < shares.demand) & (shares.smallest > offer))[latest]]

    found = stuck(most)
    while len(found):
        count, others = max(2, len(found)), found[:0]
        while count > 1 and not len(others):  # many at a time, as long as others are still stuck
            count //= 2
            fewer = most.copy()
            fewer[found[:count]] = low[found[:count]]
            others = stuck(fewer)
        most, found = fewer, others
    shares.excluded = (most < shares.most).tolist()
    shares.most, shares.offer = most, _divided(shares, capacity, most)


def _divided(shares: Shares, capacity: int, most: IntArray) -> IntArray:
    """Offers that add up to the slots, or to what all groups can use."""
    from optsched_solvers.quota import proportional

    budget = min(max(capacity, int(shares.fixed.sum())), int(most.sum()))
    return proportional(shares.demand * shares.weight, budget, shares.fixed, most)[0]
