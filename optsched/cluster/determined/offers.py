"""Fair share: how many slots every group is offered, as the code does it and as the docs say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

_INSERTION_SORT: Final = 12
"""Go sorts up to so many elements by insertion."""


@dataclass(slots=True)
class GroupShare:
    """A group in the division of slots."""

    group: int
    registered: float
    """Submit time of its first task."""
    weight: float
    demand: int = 0
    active: int = 0
    fixed: int = 0
    """Running slots that cannot be preempted."""
    smallest: int | None = None
    """Slots of its smallest pending task."""
    offer: int = 0
    disabled: bool = False
    credit: int = 0


def offer_by_code(shares: list[GroupShare], capacity: int) -> None:
    """Progressive filling, as Determined's master does it.

    Parameters
    ----------
    shares
        Groups by demand, then registration; their `offer` and `disabled` are set.
    capacity
        All slots.
    """
    for share in shares:
        share.offer = share.credit = share.fixed
        capacity -= share.fixed
    capacity = max(capacity, 0)
    _fill(shares, capacity, _by_copied_comparator(shares))


def offer_by_docs(shares: list[GroupShare], capacity: int) -> None:
    """Shares of the slots in proportion to demand times weight, as the documentation says.

    Between a group's fixed slots and its demand, by largest remainder. As long as nothing is left
    over, the latest group whose smallest task exceeds its offer is left out, and all is divided
    anew: even if it was offered nothing, for the others' parts by remainder are then different.
    """
    if _all_alike(shares):  # both rules agree then, also in what becomes of slots given back
        offer_by_code(shares, capacity)
        return
    from optsched_solvers.quota import proportional

    low = np.array([share.fixed for share in shares], np.int64)
    demand = np.array([share.demand for share in shares], np.int64)
    high = np.maximum(np.minimum(demand, capacity), low)
    scores = np.array([share.demand * share.weight for share in shares])
    # nobody waits: no task exceeds the offer
    smallest = np.array([share.smallest or 0 for share in shares], np.int64)
    latest = np.argsort([-share.registered for share in shares], kind="stable")
    offers = np.zeros(len(shares), np.int64)
    enabled = np.ones(len(shares), bool)
    while True:
        rows = np.flatnonzero(enabled)
        floor, most = low[rows], high[rows]
        budget = min(max(capacity, int(floor.sum())), int(most.sum()))
        offers[rows], _ = proportional(scores[rows], budget, floor, most)
        stuck = latest[(enabled & (offers < demand) & (smallest > offers))[latest]]
        if len(stuck) == 0 or budget < capacity:
            break
        enabled[stuck[0]] = False
    for share, offer, keeps in zip(shares, offers.tolist(), enabled.tolist(), strict=True):
        share.offer, share.disabled = (offer if keeps else 0), not keeps


def _all_alike(shares: list[GroupShare]) -> bool:
    kinds = {(share.demand, share.weight) for share in shares}
    return len(kinds) <= 1 and not any(share.fixed for share in shares)


def _is_stuck(share: GroupShare) -> bool:
    return (
        not share.disabled
        and share.offer < share.demand
        and share.smallest is not None
        and share.smallest > share.offer
    )


def _by_copied_comparator(shares: list[GroupShare]) -> list[GroupShare]:
    """The latest registered first, as upstream sorts: its comparator reads the unsorted list.

    Up to 12 groups Go sorts by insertion, which is reproduced; beyond, the sort is a proper one.
    """
    if len(shares) > _INSERTION_SORT:
        return sorted(shares, key=lambda share: -share.registered)
    copied = shares.copy()
    for i in range(1, len(shares)):
        j = i
        while j > 0 and shares[j].registered > shares[j - 1].registered:
            copied[j], copied[j - 1] = copied[j - 1], copied[j]
            j -= 1
    return copied


def _fill(shares: list[GroupShare], capacity: int, latest: list[GroupShare]) -> None:
    """Passes over the groups that want more, and removal of gangs that block each other."""
    weights = _Weights(shares)
    wanting = [share for share in shares if share.offer < share.demand]
    turn = 0  # a group that is not stuck never becomes so again
    while wanting:
        before = capacity
        for share in wanting:
            if not capacity:
                break  # nothing would change any more
            if share.disabled:
                continue
            part = int(before * share.weight / weights.total) if share.weight else 0
            given = min(max(1, part), capacity, share.demand - share.offer)
            if share.credit:
                if given <= share.credit:
                    share.credit -= given
                    continue
                share.credit = 0  # upstream's slip: the rest of the credit is lost, not deducted
            share.offer += given
            capacity -= given
            if share.offer == share.demand:
                weights.drop(share)
        wanting = [s for s in wanting if not s.disabled and s.offer < s.demand]
        if capacity:
            continue
        while turn < len(latest) and not capacity:
            share = latest[turn]
            if _is_stuck(share):
                capacity, share.offer, share.disabled = share.offer, 0, True
                weights.drop(share)
            turn += 1
        if not capacity:
            return


class _Weights:
    """Sum of the weights of the groups that want more, in their order: floats are not associative.

    Weights in whole 2^-20 are added without error in any order, so that their sum is kept up.
    """

    def __init__(self, shares: list[GroupShare]) -> None:
        wanting = [share for share in shares if share.offer < share.demand]
        self._at = {share.group: i for i, share in enumerate(wanting)}
        self._weights = np.array([share.weight for share in wanting])
        self._wants = np.ones(len(wanting), bool)
        self._exact = bool((self._weights * 2**20 % 1 == 0).all()) and self._weights.sum() < 2**32
        self._total = self._summed()
        self._stale = False

    @property
    def total(self) -> float:
        if self._stale:
            self._total, self._stale = self._summed(), False
        return self._total

    def drop(self, share: GroupShare) -> None:
        """A group is satisfied or disabled."""
        self._wants[self._at[share.group]] = False
        if self._exact:
            self._total -= share.weight
        else:
            self._stale = True

    def _summed(self) -> float:
        """One after the other, as a loop would."""
        left = self._weights[self._wants]
        return float(np.add.accumulate(left)[-1]) if len(left) else 0.0
