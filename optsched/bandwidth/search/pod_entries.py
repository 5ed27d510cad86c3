"""What a pod may contribute to a choice beside tenants: its count vectors that none dominates."""

# numba compiles the kernels: they are typed by signatures
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import Final

import numpy as np

from optsched.bandwidth.models.pods import UNIT_BITS
from optsched.bandwidth.models.tables import (
    BEST,
    BY_MASK,
    GPUS,
    INTRA,
    NETWORK,
    RECORD,
    RECORDS,
    STEP,
    WIDTH,
)
from optsched.bandwidth.search.counts import shared
from optsched.bandwidth.search.pod_local import POD, masks_by_count, room_of
from optsched.bandwidth.topology.rates import MOST, NO_LIMIT
from optsched.kernels.compile import INT, INTS, READ, entry, helper

# an entry: these, then the joint value with every job of the pod
COUNT: Final = 0
TOUCHED: Final = 1
"""Jobs that it shares a host with, as a mask."""
OWN: Final = 2
"""Value of the best subsets."""
FIRST: Final = 3
"""Value of the first local ids: what a joint allocation has in a pod without the job."""
CODE: Final = 4
"""The counts by host, mixed radix: free GPUs + 1."""
JOINT: Final = 5

# of a level of the search, by job of the pod and once for none: state, intra
_OWN_STATE: Final = 0
_OWN_INTRA: Final = 1
_TOTAL: Final = 2
_HOSTS: Final = 3
_SHARES: Final = 4
_LEVEL: Final = 5


@helper(INT, READ, INT, INT)
def _first_ids(words, record, count):  # type: ignore[no-untyped-def]
    """Bandwidth within a host of its first `count` GPUs."""
    if words[record + BY_MASK] == 1:
        return words[words[record + INTRA] + (1 << count) - 1]
    return words[words[record + INTRA] + count]


@helper(INT, READ, INT, INT, INT, INT)
def _value(words, state, intra, total, single):  # type: ignore[no-untyped-def]
    """Value of a part of an allocation that has GPUs in other pods too; -1: not measured."""
    if total == 1:
        return single
    return min(words[words[NETWORK] + state], intra, MOST - 1)


@entry(INT, READ, READ, INT, INT, INT)
def held_value(words, held, at, n_hosts, single):  # type: ignore[no-untyped-def]
    """Value of a job's first local ids in one pod, ``held[at + host]`` of them."""
    state, intra, total = 0, NO_LIMIT, 0
    for i in range(n_hosts):
        count = held[at + i]
        if count > 0:
            state = words[words[STEP] + state * words[WIDTH] + count]
            intra = min(intra, _first_ids(words, words[RECORDS] + i * RECORD, count))
            total += count
    return _value(words, state, intra, total, single)


@helper(INT, INTS, INT, INT)
def _dominates(entries, a, b):  # type: ignore[no-untyped-def]
    """Whether entry a is as good as entry b in all; both as places, `entries[0]` is their size."""
    if (entries[a + TOUCHED] & ~entries[b + TOUCHED]) != 0:
        return 0
    for f in range(OWN, entries[0]):
        if f != CODE and entries[a + f] < entries[b + f]:
            return 0
    return 1


@helper(INT, INTS, INT, READ, READ, INT)
def _alone(entries, e, jobs, rest, n_hosts):  # type: ignore[no-untyped-def]
    """Value of an entry that is the whole choice; -1: a joint allocation is not measured."""
    d, demand, capacity = entries[e + OWN], 0, NO_LIMIT
    if n_hosts < 2 or entries[e + TOUCHED] == 0:
        return d
    for j in range(len(jobs)):
        if entries[e + TOUCHED] >> jobs[j] & 1:
            joint = min(entries[e + JOINT + j], rest[3 * j + 1])
            if joint < 0:
                return -1
            capacity = min(capacity, joint * rest[3 * j] >> UNIT_BITS)
            demand += rest[3 * j + 2]
    return shared(d, 1, capacity, d + demand)


@entry(INT, READ, READ, READ, INT, INT, INT, READ, READ, INTS, INT, INTS, INTS)
def pod_entries(words, free, held, n_hosts, k, single, jobs, rest, entries, end, after, head):  # type: ignore[no-untyped-def]
    """Add the entries of one pod behind `end`; the new end.

    free: GPUs of its hosts. held: of every job of the pod, by host. jobs: their numbers. rest: for
    each of them power, value outside the pod and demand, for choices that lie in this pod alone.
    entries: size of one, best value of k GPUs in one pod alone (-1: none), its code, its pod (-1:
    this one; the caller notes it), then entries. after, head: room for lists by count.
    """
    n_jobs, size = len(jobs), entries[0]
    step, width = words[STEP], words[WIDTH]
    level_size = _LEVEL + 2 * (n_jobs + 1) + 2
    work = np.zeros((n_hosts + 1) * level_size, np.int64)
    tried = np.zeros(n_hosts + 1, np.int64)
    codes, radix = np.zeros(n_hosts + 1, np.int64), np.ones(n_hosts + 1, np.int64)
    room = np.zeros(n_hosts, np.int64)
    for h in range(n_hosts):
        room[h] = room_of(words, words[RECORDS] + h * RECORD, free[h])
        radix[h + 1] = radix[h] * (room[h] + 1)
    work[_OWN_INTRA] = NO_LIMIT
    for j in range(n_jobs + 1):
        work[_LEVEL + 2 * j + 1] = NO_LIMIT
    for c in range(len(head)):
        head[c] = -1
    level = 0
    while level >= 0:
        at = level * level_size
        if level < n_hosts:
            count = tried[level]
            if count > min(room[level], k - work[at + _TOTAL]):
                level -= 1
                continue
            tried[level] += 1
            to = at + level_size
            record = words[RECORDS] + level * RECORD
            for f in range(level_size):
                work[to + f] = work[at + f]
            if count > 0:
                best = words[record + BEST] + free[level] * (words[record + GPUS] + 1)
                work[to + _OWN_STATE] = words[step + work[at + _OWN_STATE] * width + count]
                work[to + _OWN_INTRA] = min(work[at + _OWN_INTRA], words[best + count])
                work[to + _TOTAL] += count
                work[to + _HOSTS] += 1
            for j in range(n_jobs + 1):
                both = count
                if j < n_jobs:
                    its = held[j * n_hosts + level]
                    both += its
                    if its > 0 and count > 0:
                        work[to + _SHARES] |= 1 << jobs[j]
                if both > 0:
                    a = to + _LEVEL + 2 * j
                    work[a] = words[step + work[a] * width + both]
                    work[a + 1] = min(work[a + 1], _first_ids(words, record, both))
            codes[level + 1] = codes[level] + count * radix[level]
            level += 1
            tried[level] = 0
            continue
        level -= 1
        total = work[at + _TOTAL]
        own = _value(words, work[at + _OWN_STATE], work[at + _OWN_INTRA], total, single)
        if total == 0 or own < 0:
            continue
        new = end
        entries[new + COUNT], entries[new + TOUCHED] = total, work[at + _SHARES]
        entries[new + OWN], entries[new + CODE] = own, codes[n_hosts]
        a = at + _LEVEL + 2 * n_jobs
        entries[new + FIRST] = _value(words, work[a], work[a + 1], total, single)
        for f in range(JOINT, size):
            entries[new + f] = 0
        for j in range(n_jobs):
            its = 0
            for h in range(n_hosts):
                its += held[j * n_hosts + h]
            a = at + _LEVEL + 2 * j
            entries[new + JOINT + j] = _value(words, work[a], work[a + 1], total + its, single)
        if total == k:
            value = _alone(entries, new, jobs, rest, work[at + _HOSTS])
            if value > entries[1]:
                entries[1], entries[2], entries[3] = value, codes[n_hosts], -1
        e, before, worse = head[total], -1, 0
        while e >= 0:
            if _dominates(entries, e, new) == 1:
                worse = 1
                break
            if _dominates(entries, new, e) == 1:
                entries[e + COUNT] = 0
                if before < 0:
                    head[total] = after[e // size]
                else:
                    after[before // size] = after[e // size]
            else:
                before = e
            e = after[e // size]
        if worse == 0:
            after[new // size] = head[total]
            head[total] = new
            end += size
    return end


@entry(INT, READ, READ, READ, INT, INT, READ, INTS)
def decode(words, pods, hosts, p, code, masks, chosen):  # type: ignore[no-untyped-def]
    """Fill in the best subsets of a pod's entry by host of the cluster, of equals lowest ids."""
    table = words[pods[p * POD] : pods[p * POD + 1]]
    by_count = np.empty(table[WIDTH], np.int64)
    for i in range(pods[p * POD + 3]):
        record = table[RECORDS] + i * RECORD
        host = hosts[pods[p * POD + 2] + i]
        room = room_of(table, record, masks[host])
        count = code % (room + 1)
        code //= room + 1
        row = table[record + BEST] + masks[host] * (table[record + GPUS] + 1)
        masks_by_count(table, record, masks[host], room, table[row + count], by_count, 0)
        chosen[host] = by_count[count]
    return code
