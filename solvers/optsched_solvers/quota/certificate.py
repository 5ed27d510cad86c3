"""Certificates of optimality, and the steps of jobs in the order of their keys.

All allocations of this package but `choice` hand out GPUs one by one: step k of a job, from k to
k + 1 GPUs above its minimum, has a key, the keys of a job ascend, and the steps with the smallest
keys are taken (Fox 1966). Such an answer is optimal if and only if no step left precedes a step
taken: this exchange condition is the certificate, and needs the answer alone.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from optsched_solvers.quota.arguments import IntArray

_FEW: Final = 8192
_SAMPLE: Final = 1024
_SPREAD: Final = 64
"""Values of a sample on either side of the rank that it is to bracket."""

Keys: TypeAlias = "tuple[IntArray, ...]"
"""Columns of keys, the most significant first."""


class Proof(NamedTuple):
    """Result of a check; the fields are those of `Certificate`."""

    value: float
    bound: float
    price: float | None
    holds: bool
    proof: str


class Certificate:
    """Proof of optimality, checked on the answer alone, at the first access.

    Until then do not change the arrays given.
    """

    value: float
    bound: float
    """What no answer exceeds."""
    price: float | None
    """Multiplier of the budget: level, or share of a score; None if it does not bind."""
    holds: bool
    """Whether the check succeeded."""
    proof: str
    """``"exchange"``, ``"dual bound"``, ``"dynamic programme"``, ..."""

    def __init__(self, what: str, check: Callable[[], Proof]) -> None:
        self.what = what
        self._check = check

    @cached_property
    def found(self) -> Proof:
        """All results of the check."""
        return self._check()

    def __getattr__(self, name: str) -> Any:
        if name in Proof._fields:
            return getattr(self.found, name)
        raise AttributeError(f"Certificate has no attribute {name!r}")

    def __bool__(self) -> bool:
        return self.holds

    def __repr__(self) -> str:
        return f"<Certificate of the {self.what}: {self.found}>"


def smallest(keys: Keys, count: int) -> IntArray:
    """Return the positions of the `count` smallest keys; of equal keys the first positions."""
    at = np.arange(len(keys[0]))
    chosen = []
    for column in keys:
        if not 0 < count < len(at):
            break
        values = column[at]
        limit = ranked(values, count - 1)
        chosen.append(at[values < limit])
        count -= len(chosen[-1])
        at = at[values == limit]
    return np.concatenate([*chosen, at[: max(count, 0)]])


def ranked(values: IntArray, rank: int) -> int:
    """Return the value at a rank, from 0; pivots from a sample leave few values to partition."""
    while len(values) > _FEW:
        sample = np.sort(values[:: len(values) // _SAMPLE])
        aim = rank * len(sample) // len(values)
        low = sample[max(aim - _SPREAD, 0)]
        high = sample[min(aim + _SPREAD, len(sample) - 1)]
        middle = values[(values >= low) & (values <= high)]
        below = int((values < low).sum())
        if len(middle) == len(values) or not below <= rank < below + len(middle):
            break
        values, rank = middle, rank - below
    return int(np.partition(values, rank)[rank])


def exchange(
    keys: Callable[[IntArray, IntArray], Keys], taken: IntArray, most: IntArray, total: int
) -> bool:
    """Return whether `total` steps are taken, and none that a step left precedes.

    `keys` are those of steps by job and number, jobs break ties; `taken` and `most` are steps taken
    of every job, and steps that it has.
    """
    if (taken < 0).any() or (taken > most).any() or int(taken.sum()) != total:
        return False
    before, after = np.flatnonzero(taken > 0), np.flatnonzero(taken < most)
    if not len(before) or not len(after):
        return True
    last = _first(tuple(-column for column in (*keys(before, taken[before] - 1), before)))
    first = _first((*keys(after, taken[after]), after))
    return tuple(-value for value in last) < first


def _first(keys: Keys) -> tuple[int, ...]:
    """Return the smallest key."""
    at = np.arange(len(keys[0]))
    found = []
    for column in keys:
        found.append(int(column[at].min()))
        at = at[column[at] == found[-1]]
    return tuple(found)
