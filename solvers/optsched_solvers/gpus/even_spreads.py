"""Even spreads of k GPUs over sets of hosts: the candidates of `eha`."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

    from optsched.model.schedule import IntArray


def candidates(
    free: IntArray, kinds: Sequence[Hashable], k: int, m: int, most: int
) -> tuple[IntArray, IntArray]:
    """Sets of m hosts with an even spread of k over them, the first `most` in lexicographic order.

    Of equivalent hosts (the same kind, as many free GPUs) only the first are used, and of
    equivalent spreads only the first. Returned are positions in `free`, and GPUs, both of shape
    (candidates, m).
    """
    sizes = free.tolist()
    every = (
        (some, counts)
        for some in _host_sets(sizes, kinds, k, m)
        for counts in _even_counts([sizes[h] for h in some], [kinds[h] for h in some], k)
    )
    if not 1 <= m <= min(len(sizes), k):
        return np.zeros((0, max(m, 0)), np.int64), np.zeros((0, max(m, 0)), np.int64)
    found = np.array(list(islice(every, most)), np.int64).reshape(-1, 2, m)
    return np.ascontiguousarray(found[:, 0]), np.ascontiguousarray(found[:, 1])


def _host_sets(
    free: list[int], kinds: Sequence[Hashable], k: int, m: int
) -> Iterator[tuple[int, ...]]:
    """Sets of m hosts with k free GPUs in lexicographic order, of equivalent hosts the first."""
    members: dict[Hashable, list[int]] = {}
    for h, kind in enumerate(kinds):
        members.setdefault(kind, []).append(h)
    todo: list[tuple[int, ...]] = [()]
    while todo:
        chosen = todo.pop()
        taken, last, need = (
            Counter(kinds[h] for h in chosen),
            max(chosen, default=-1),
            m - len(chosen),
        )
        left = [hosts[taken[kind] :] for kind, hosts in members.items()]
        left = [hosts for hosts in left if hosts and hosts[0] > last]
        sizes = sorted((free[h] for hosts in left for h in hosts), reverse=True)
        if len(sizes) < need or sum(free[h] for h in chosen) + sum(sizes[:need]) < k:
            continue
        if need:
            todo += [(*chosen, h) for h in sorted((hosts[0] for hosts in left), reverse=True)]
        else:
            yield chosen


def _even_counts(free: list[int], kinds: list[Hashable], k: int) -> Iterator[list[int]]:
    """Even spreads of k over hosts in lexicographic order, without equivalent spreads.

    Every host has the same count, or all its free GPUs if they are fewer; some of the others have
    one more, of equivalent hosts the last ones.
    """
    level = k // len(free)
    while sum(min(size, level + 1) for size in free) <= k and max(free) > level:
        level += 1  # smaller hosts leave their share to the others
    base = [min(size, level) for size in free]
    able = [i for i, size in enumerate(free) if size > level]
    more, todo = k - sum(base), list[tuple[int, ...]]([()])  # 1: one GPU more
    while todo:
        flags = todo.pop()
        left, behind = more - sum(flags), [kinds[i] for i in able[len(flags) :]]
        raised = {kinds[i] for i, flag in zip(able, flags, strict=False) if flag}
        if not sum(kind in raised for kind in behind) <= left <= len(behind):
            continue
        if behind:
            todo += [(*flags, 1), *[(*flags, 0)] * (behind[0] not in raised)]
            continue
        counts = list(base)
        for i, flag in zip(able, flags, strict=True):
            counts[i] += flag
        yield counts
