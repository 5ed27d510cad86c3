"""In which order the micro-batches of a (job, stage) are run: which comes first, which last."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.arraypipe.planning.checks import Block

Place = tuple[int, int, int]
"""Job, stage, copy."""


class MicroOrder(NamedTuple):
    """What follows from the orders of the devices; ascending micro-batches are a special case.

    Parameters
    ----------
    following
        Of a forward or backward block, the next one of its kind, job, stage and copy.
    first_forward, last_backward
        The operation that begins an iteration of a job on a stage, and the backward that ends it.
    first_forwards, last_backwards
        The same operations as sets.
    """

    following: dict[int, int]
    first_forward: dict[Place, int]
    last_backward: dict[Place, int]
    first_forwards: frozenset[int]
    last_backwards: frozenset[int]


def micro_order(blocks: Sequence[Block], sequences: Sequence[Sequence[int]]) -> MicroOrder:
    """Read the orders; within one iteration what has the smaller offset runs earlier."""
    groups: dict[tuple[str, int, int, int], list[int]] = {}
    for row in sequences:
        for i in row:
            b = blocks[i]
            if b.kind in ("F", "B"):
                groups.setdefault((b.kind, b.job, b.stage, b.copy), []).append(i)
    following: dict[int, int] = {}
    first: dict[Place, int] = {}
    last: dict[Place, int] = {}
    for (kind, job, stage, copy), group in groups.items():
        group.sort(key=lambda i: blocks[i].offset)  # stable: the order of the device within a cycle
        following.update(pairwise(group))
        if kind == "F":
            first[job, stage, copy] = group[0]
        else:
            last[job, stage, copy] = group[-1]
    return MicroOrder(following, first, last, frozenset(first.values()), frozenset(last.values()))
