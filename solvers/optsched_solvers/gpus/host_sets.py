"""Sets of few hosts over which a request is spread evenly: the candidates of BandPilot's EHA."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from optsched.kernels.compile import INT, INTS, READ, entry, helper

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from optsched.model.schedule import IntArray

MOST_ALONE: Final = 16
"""Hosts up to which each counts for itself; beyond, hosts that are alike are one class."""


def fewest(room: IntArray, k: int) -> int:
    """The fewest hosts whose free GPUs reach k; their number + 1 if all do not."""
    return int(np.searchsorted(np.cumsum(-np.sort(-room)), k)) + 1


def previous_alike(kinds: Sequence[Hashable]) -> IntArray:
    """For every host the position of the one before it of the same kind, or -1.

    Of at most `MOST_ALONE` hosts each is a kind of its own.
    """
    before = np.full(len(kinds), -1, np.int64)
    if len(kinds) > MOST_ALONE:
        last: dict[Hashable, int] = {}
        for i, kind in enumerate(kinds):
            before[i] = last.get(kind, -1)
            last[kind] = i
    return before


def candidates(
    room: IntArray, before: IntArray, k: int, m: int, most: int
) -> tuple[IntArray, IntArray]:
    """Sets of m hosts with the counts of an even spread of k, the first `most` of them.

    In lexicographic order of (hosts, counts). Even means: no host could give a GPU to one with two
    less and room for it; every such spread is listed. Of hosts that are alike only the first are
    taken, and of equal spreads over them the first one.

    Parameters
    ----------
    room
        Free GPUs of every host, at least 1.
    before
        Of `previous_alike`.
    k
        GPUs asked.
    m
        Hosts in a set, at most k.
    most
        Most candidates.

    Returns
    -------
    hosts, counts : IntArray, shape (candidates, m)
        Positions in `room`, ascending, and GPUs on them.
    """
    if not 1 <= m <= min(len(room), k) or most < 1:
        return np.zeros((0, max(m, 0)), np.int64), np.zeros((0, max(m, 0)), np.int64)
    hosts, counts = np.empty(most * m, np.int64), np.empty(most * m, np.int64)
    n = spread(room, before, k, m, most, hosts, counts)
    return hosts[: n * m].reshape(n, m), counts[: n * m].reshape(n, m)


@helper(INT, READ, READ, INTS, INT, INT, INTS)
def _reach(room, before, chosen, begin, need, tally):  # type: ignore[no-untyped-def]
    """Most GPUs on `need` more hosts from position `begin` on; -1 if there are too few."""
    if need == 0:
        return 0
    tally[:] = 0
    n = len(room)
    there = 0
    for v in range(begin, n):
        b = before[v]
        if b < 0 or chosen[b] != 0:
            chosen[v] = 2  # can be had: all alike before it are in the set, or can be too
            tally[room[v]] += 1
            there += 1
    for v in range(begin, n):
        if chosen[v] == 2:
            chosen[v] = 0
    if there < need:
        return -1
    total = 0
    size = len(tally) - 1
    while need > 0:
        take = min(need, tally[size])
        total += take * size
        need -= take
        size -= 1
    return total


@helper(INT, READ, READ, INTS, INT, INTS, INT, INT, INT, INTS, INTS, INTS)
def _even(room, before, at, m, flag, k, found, most, hosts, counts, eligible):  # type: ignore[no-untyped-def]
    """Append every even spread over the set `at`; the new number of candidates.

    The level is the highest that all hosts with room can have; r of those with more get one more.
    flag: zeros by position, and again so afterwards. eligible: length m.
    """
    level = k // m
    while True:  # a host too small leaves its share to the others
        total, more = 0, 0
        for i in range(m):
            total += min(room[at[i]], level + 1)
            more += 1 if room[at[i]] > level else 0
        if total > k or more == 0:
            break
        level += 1
    r, n = k, 0
    for i in range(m):
        r -= min(room[at[i]], level)
        if room[at[i]] > level:
            eligible[n] = at[i]
            n += 1
    for i in range(n - r, n):
        flag[eligible[i]] = 1
    while found < most:
        for i in range(m):
            hosts[found * m + i] = at[i]
            counts[found * m + i] = min(room[at[i]], level) + flag[at[i]]
        found += 1
        ones, turned = 0, -1  # of the flags from i on
        for i in range(n - 1, -1, -1):
            if flag[eligible[i]] == 0 and ones > 0:
                # turn it on: behind it one less is left, and all of its kind are on
                flag[eligible[i]] = 1
                forced = 0
                for j in range(i + 1, n):
                    b = before[eligible[j]]
                    on = 1 if b >= 0 and flag[b] == 1 else 0
                    flag[eligible[j]] = on
                    forced += on
                if forced <= ones - 1:
                    left = ones - 1 - forced
                    for j in range(n - 1, i, -1):
                        if left > 0 and flag[eligible[j]] == 0:
                            flag[eligible[j]] = 1
                            left -= 1
                    turned = i
                    break
                flag[eligible[i]] = 0  # the flags behind are written anew before they are read
            elif flag[eligible[i]] == 1:
                ones += 1
        if turned < 0:
            break
    for i in range(n):
        flag[eligible[i]] = 0
    return found


@entry(INT, READ, READ, INT, INT, INT, INTS, INTS)
def spread(room, before, k, m, most, hosts, counts):  # type: ignore[no-untyped-def]
    """Fill `hosts` and `counts` (length most * m, row by row) with `candidates`; their number."""
    n = len(room)
    chosen, flag = np.zeros(n, np.int64), np.zeros(n, np.int64)
    at, placed = np.full(m, -1, np.int64), np.zeros(m, np.int64)
    eligible = np.empty(m, np.int64)
    largest = 0
    for v in range(n):
        largest = max(largest, room[v])
    tally = np.zeros(largest + 1, np.int64)
    level = total = found = 0
    while level >= 0 and found < most:
        u = at[level]
        if placed[level] == 1:
            chosen[u] = placed[level] = 0
            total -= room[u]
        u += 1
        need = m - level - 1
        while u < n - need:
            b = before[u]
            if b < 0 or chosen[b] == 1:
                chosen[u] = 1
                more = _reach(room, before, chosen, u + 1, need, tally)
                if more >= 0 and total + room[u] + more >= k:
                    break
                chosen[u] = 0
            u += 1
        if u >= n - need:
            level -= 1
            continue
        at[level], placed[level] = u, 1
        total += room[u]
        if need > 0:
            level += 1
            at[level] = u
            continue
        found = _even(room, before, at, m, flag, k, found, most, hosts, counts, eligible)
    return found
