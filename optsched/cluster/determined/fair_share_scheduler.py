"""Determined's fair share: slots are divided among groups, which then start or release tasks.

``code`` follows determined-ai/determined, ``master/internal/rm/agentrm/fair_share.go``. ``docs``
follows its documentation: slots in proportion to demand times weight, "as new experiments become
active", so that groups above their share release tasks for groups below it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Final

import numpy as np

from optsched.cluster.determined.fitting import Outcome, placed_again
from optsched.cluster.determined.reasons import (
    NEXT_TIME,
    POSTPONED,
    after_release,
    in_slots,
    unplaced,
)
from optsched.cluster.world.reasons import Reason, Why

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from optsched.cluster.determined.fitting import Agents, Places, Tasks
    from optsched.cluster.world.policy import FloatArray
    from optsched.model.schedule import IntArray

_INSERTION_SORT: Final = 12
"""Go sorts up to so many elements by insertion."""
_FINE: Final = 2.0**20
"""Weights in whole parts of it are added without error, in any order."""


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

    def members(self, group: int) -> list[int]:
        """Tasks of a group, in order of submission."""
        tasks: list[int] = self.member[self.group == group].tolist()
        return tasks


def share_slots(agents: Agents, tasks: Tasks, docs: bool) -> tuple[Outcome, Shares]:
    """Divide the slots; groups above their offer release tasks, groups below it start tasks."""
    start, shares, capacity = divide(agents, tasks, docs)
    if docs:
        return _exchanged(agents, tasks, shares, start, capacity), shares
    release = []
    for g in np.flatnonzero(shares.active != shares.offer).tolist():
        above = int(shares.active[g] - shares.offer[g])
        for i in shares.members(g):
            slots = int(tasks.slots[i])
            if above > 0 and tasks.running[i] and tasks.preemptible[i]:
                release.append(i)
                above = max(0, above - slots)
            elif above < 0 and not tasks.running[i] and slots <= -above:
                start.append(i)
                above += slots
            if above == 0:
                break
    outcome = placed_again(agents, tasks, start)
    outcome.release = release
    return outcome, shares


def share_reasons(
    agents: Agents, tasks: Tasks, names: Sequence[str], outcome: Outcome, shares: Shares, docs: bool
) -> dict[int, Reason]:
    """Why tasks wait.

    The share is the reason of a task that would fit, in ``docs`` also of others: in ``code`` a
    task that does not fit now has no part in a share.
    """
    _, found = unplaced(agents, tasks, outcome, range(len(tasks.slots)))
    row = {int(g): at for at, g in enumerate(tasks.group[shares.head].tolist())}
    taken = [0] * len(row)
    begun = {*np.flatnonzero(tasks.running).tolist(), *outcome.start, *outcome.postponed}
    for i in begun.difference(outcome.release):
        if (at := row.get(int(tasks.group[i]))) is not None:
            taken[at] += int(tasks.slots[i])
    answer = {}
    for i, misfit in found.items():
        slots, limit, at = int(tasks.slots[i]), int(tasks.limit[i]), row.get(int(tasks.group[i]))
        answer[i] = misfit or NEXT_TIME
        if misfit and misfit.why is Why.NEVER:
            continue
        if i in outcome.postponed:
            answer[i] = after_release(names, outcome) if docs and slots else POSTPONED
        elif 0 <= limit < slots:
            text = f"requests {in_slots(slots)}, its group's max_slots is {limit}"
            answer[i] = Reason(Why.SHARE, text)
        elif at is None or slots == 0 or (misfit and not docs):
            continue
        elif shares.excluded[at]:
            text = "its group is excluded: its share is smaller than its smallest task"
            answer[i] = Reason(Why.SHARE, text)
        elif taken[at] + slots > shares.offer[at]:
            share = f"{in_slots(int(shares.offer[at]))}, {taken[at]} of them taken"
            text = f"requests {in_slots(slots)}, its group's share is {share}"
            answer[i] = Reason(Why.SHARE, text)
    return answer


def divide(agents: Agents, tasks: Tasks, docs: bool) -> tuple[list[int], Shares, int]:
    """Tasks without slots that fit, the groups with their offers, and the slots that count."""
    open_agents = agents
    if docs:  # a task counts if it fits once all preemptible tasks have stopped
        open_agents = agents.copy()
        for i in np.flatnonzero(tasks.running & tasks.preemptible & (tasks.slots > 0)).tolist():
            open_agents.release(i)
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
    head = member[first]
    demand = np.bincount(group, slots, n).astype(np.int64)
    demand = np.where(tasks.limit[head] >= 0, np.minimum(demand, tasks.limit[head]), demand)
    order = np.lexsort((first, demand))
    place = np.empty(n, np.int64)
    place[order] = np.arange(n)
    group, head, demand = place[group], head[order], demand[order]
    stays = running & ~tasks.preemptible[member]
    fixed = np.bincount(group, np.where(stays, slots, 0), n).astype(np.int64)
    smallest = np.full(n, capacity + 1)
    moves = ~(stays if docs else running)
    np.minimum.at(smallest, group[moves], slots[moves])
    return Shares(
        member=member, group=group, head=head, demand=demand, fixed=fixed,
        active=np.bincount(group, np.where(running, slots, 0), n).astype(np.int64),
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
    weight, excluded = shares.weight.tolist(), shares.excluded
    parts = shares.weight * _FINE
    exact = bool((parts == np.floor(parts)).all() and shares.weight.sum() < 2.0**32)
    left = before = max(capacity - int(shares.fixed.sum()), 0)
    demand, smallest = shares.demand.tolist(), shares.smallest.tolist()
    credit, offer = shares.fixed.tolist(), shares.fixed.tolist()
    needy = [g for g in range(len(demand)) if offer[g] < demand[g]]
    latest = iter(_latest(shares.submitted))
    while needy:
        total = (sum if exact else _sum)([weight[g] for g in needy])
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
                total -= weight[g]
                if not exact:
                    total = _sum(weight[h] for h in needy if offer[h] < demand[h])
        needy = [g for g in needy if offer[g] < demand[g]]
        if left == 0:
            for g in latest:
                if offer[g] < min(demand[g], smallest[g]):
                    left, offer[g], excluded[g] = offer[g], 0, True
                    if left > 0:
                        break
            else:
                break
            needy = [g for g in needy if not excluded[g]]
        before = left
    shares.offer = np.array(offer, np.int64)


def _sum(weights: Iterable[float]) -> float:
    """Add in order, as Go does: floats are not associative, and `sum` corrects for that."""
    return reduce(add, weights, 0.0)


def _latest(submitted: FloatArray) -> list[int]:
    """Groups, the latest first, as upstream sorts: its comparator reads the unsorted list.

    Up to 12 groups Go sorts by insertion, which is reproduced; beyond, the sort is a proper one.
    """
    if len(submitted) > _INSERTION_SORT:
        order: list[int] = np.argsort(-submitted, kind="stable").tolist()
        return order
    latest = list(range(len(submitted)))
    for i in range(1, len(submitted)):
        while i > 0 and submitted[i] > submitted[i - 1]:
            latest[i], latest[i - 1] = latest[i - 1], latest[i]
            i -= 1
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
        for halvings in range(1, 64):  # many at a time, as long as others are still stuck then
            some = max(1, len(found) >> halvings)
            fewer = most.copy()
            fewer[found[:some]] = low[found[:some]]
            others = stuck(fewer)
            if some == 1 or len(others):
                break
        most, found = fewer, others
    shares.excluded = (most < shares.most).tolist()
    shares.most, shares.offer = most, _divided(shares, capacity, most)


def _divided(shares: Shares, capacity: int, most: IntArray) -> IntArray:
    """Offers that add up to the slots, or to what all groups can use."""
    from optsched_solvers.quota import proportional

    budget = min(max(capacity, int(shares.fixed.sum())), int(most.sum()))
    return proportional(shares.demand * shares.weight, budget, shares.fixed, most)[0]


def _exchanged(
    agents: Agents, tasks: Tasks, shares: Shares, zero_slot: list[int], capacity: int
) -> Outcome:
    """Start and release; slots that a group cannot use are offered to the others, and again."""
    offer = shares.offer
    most = np.where(shares.excluded, offer, shares.most)
    while True:
        exchange = _Exchange(agents, tasks, shares, offer)
        exchange.run(zero_slot)
        # groups that release have no part in it: what they lack then they can use later
        spare = np.where(shares.active < offer, np.maximum(-np.array(exchange.credit), 0), 0)
        most = np.where(spare > 0, offer - spare, most)
        following = _divided(shares, capacity, most)
        if not spare.any() or (following <= offer).all():
            return Outcome(exchange.start, [*exchange.stopped], exchange.postponed)
        offer = following


class _Exchange:
    """Tasks that start within the offers, and those released for them."""

    def __init__(self, agents: Agents, tasks: Tasks, shares: Shares, offer: IntArray) -> None:
        self.tasks, self.shares = tasks, shares
        self.now, self.agents = agents.copy(), agents.copy()
        """Before and after the releases."""
        self.credit: list[int] = (shares.active - offer).tolist()
        """Slots that every group holds above its offer; below 0: that it may start."""
        self.start: dict[int, Places] = {}
        self.postponed: list[int] = []
        """Tasks that start after the releases."""
        self.stopped: dict[int, None] = {}
        running = tasks.running[shares.member] & tasks.preemptible[shares.member]
        donors = shares.member[running].tolist(), shares.group[running].tolist()
        self.donors = dict(zip(*donors, strict=True))
        """Tasks that may be released, and their groups."""
        self.on: dict[int, list[tuple[int, int]]] = {}
        """Of every agent: these tasks, and their slots on it."""
        for i in self.donors:
            for agent, slots in agents.held(i):
                self.on.setdefault(agent, []).append((i, slots))

    def run(self, zero_slot: list[int]) -> None:
        """Start in order of groups and tasks, then release what is above the offers."""
        tasks, hopeless = self.tasks, set()
        for i in zero_slot:
            self._begin(i)
        for g in range(len(self.credit)):
            for i in self.shares.members(g) if self.credit[g] < 0 else ():
                slots, kind = int(tasks.slots[i]), int(tasks.kind[i])
                if tasks.running[i] or slots > -self.credit[g] or kind in hopeless:
                    continue
                if self._begin(i) or (self._release_for(i) and self._begin(i)):
                    self.credit[g] += slots
                else:
                    hopeless.add(kind)
        for i, g in self.donors.items():
            if i not in self.stopped and self.credit[g] > 0:
                self.stopped[i] = None
                self.credit[g] -= int(tasks.slots[i])

    def _begin(self, i: int) -> bool:
        """Place a task if it fits after the releases; it starts if it fits before them."""
        places = self.agents.find(self.tasks.kinds[self.tasks.kind[i]], int(self.tasks.first[i]))
        if places and all(self.now.free[a] >= slots for a, slots in places):
            self.start[i] = places
        elif places or self.tasks.slots[i] == 0:
            self.postponed.append(i)
        self.agents.place(places)
        self.now.place(places)
        return bool(places)

    def _release_for(self, i: int) -> bool:
        """Release tasks of groups above their offers on one agent, else on whole agents."""
        tasks, agents = self.tasks, self.agents.copy()
        kind, first = tasks.kinds[tasks.kind[i]], int(tasks.first[i])
        credit, stopped = self.credit, self.stopped
        near = np.argsort((agents.rank - first) % len(agents.rank))  # not by the order given
        large = agents.capacity[near] >= kind.slots
        smaller = near[~large].tolist() if kind.slots > 1 and not kind.single_agent else []
        for a in near[large].tolist() + smaller:
            missing = int(min(kind.slots, agents.capacity[a]) - agents.free[a])
            if missing <= 0 or not agents.takes_work[a] or a in kind.blocked:
                continue
            left, chosen = credit.copy(), []
            for donor, slots in self.on.get(a, ()):
                g = self.donors[donor]
                if missing > 0 and left[g] > 0 and donor not in stopped:
                    chosen.append(donor)
                    left[g] -= int(tasks.slots[donor])
                    missing -= slots
            if missing > 0:
                continue
            credit, stopped = left, stopped | dict.fromkeys(chosen)
            for donor in chosen:
                agents.release(donor)
            if agents.find(kind, first):
                self.agents, self.credit, self.stopped = agents, credit, stopped
                return True
        return False
