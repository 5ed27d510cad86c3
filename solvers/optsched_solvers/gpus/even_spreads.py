"""Even spreads of k GPUs over sets of hosts: the candidates of `eha`."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

    from optsched.model.schedule import IntArray


def fewest(free: IntArray, k: int) -> int:
    """Least number of hosts whose free GPUs reach k; the number of hosts + 1 if all do not."""
    return int(np.searchsorted(np.cumsum(-np.sort(-free)), k)) + 1


def candidates(
    free: IntArray, kinds: Sequence[Hashable], k: int, m: int, most: int
) -> tuple[IntArray, IntArray]:
    """Sets of m hosts with an even spread of k over them, the first `most` in lexicographic order.

    A spread is even if no GPU can move to a host with a free GPU and at least two GPUs less. Of
    equivalent hosts (the same kind, as many free GPUs) only the first are used, and of equivalent
    spreads only the first. Returned are positions in `free`, ascending, and GPUs on them, both of
    shape (candidates, m).
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


def _host_sets(free: list[int], kinds: Sequence[Hashable], k: int, m: int) -> Iterator[list[int]]:
    """Sets of m hosts with k free GPUs in lexicographic order, of equivalent hosts the first."""
    members: dict[Hashable, list[int]] = {}
    for h, kind in enumerate(kinds):
        members.setdefault(kind, []).append(h)
    by_free = sorted(members, key=lambda kind: -free[members[kind][0]])
    taken = dict.fromkeys(members, 0)

    def most_behind(first: int, need: int) -> int:
        """Most free GPUs of `need` hosts from `first` on; -k if there are fewer hosts."""
        total = 0
        for kind in by_free:
            left = members[kind][taken[kind] :]
            if need and left and left[0] >= first:
                total += min(need, len(left)) * free[left[0]]
                need -= min(need, len(left))
        return -k if need else total

    chosen: list[int] = []
    total, h = 0, 0
    while True:
        need = m - len(chosen) - 1
        while h < len(free) - need:
            kind = kinds[h]
            at = taken[kind]
            if at < len(members[kind]) and members[kind][at] == h:
                taken[kind] += 1
                if total + free[h] + most_behind(h + 1, need) >= k:
                    break
                taken[kind] -= 1
            h += 1
        if h < len(free) - need:
            chosen.append(h)
            total += free[h]
            if need:
                h += 1
                continue
            yield list(chosen)
        elif not chosen:
            return
        h = chosen.pop()
        total -= free[h]
        taken[kinds[h]] -= 1
        h += 1


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
    before: list[int | None] = []
    for j, i in enumerate(able):
        before.append(next((q for q in range(j - 1, -1, -1) if kinds[able[q]] == kinds[i]), None))
    more = k - sum(base)
    flags = [0] * (len(able) - more) + [1] * more
    while True:
        counts = list(base)
        for i, flag in zip(able, flags, strict=True):
            counts[i] += flag
        yield counts
        behind = 0
        for i in range(len(able) - 1, -1, -1):
            if flags[i]:
                behind += 1
                continue
            if not behind:
                continue
            # set this flag and those of its kind behind it, the others as far behind as possible
            tried = [*flags[:i], 1]
            for q in range(i + 1, len(able)):
                b = before[q]
                tried.append(1 if b is not None and tried[b] else 0)
            left = behind - 1 - sum(tried[i + 1 :])
            if left < 0:
                continue
            for q in range(len(able) - 1, i, -1):
                if left and not tried[q]:
                    tried[q] = 1
                    left -= 1
            flags = tried
            break
        else:
            return
