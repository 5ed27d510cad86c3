"""Within a pod: the best value of every number of its free GPUs, and which GPUs give it.

A bottleneck assignment of counts to hosts, by dynamic programming over the automaton of patterns:
after every host, by pattern, the best that the worst bandwidth within a host can be.
"""

# numba compiles the kernels: they are typed by signatures
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import Final

import numpy as np

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
from optsched.bandwidth.search.counts import popcount
from optsched.bandwidth.topology.rates import MOST, NO_LIMIT
from optsched.kernels.compile import INT, INTS, READ, helper

POD: Final = 4
"""Numbers a pod in `PodTables.pods`."""


@helper(INT, READ, INT, INT)
def room_of(words, record, free):  # type: ignore[no-untyped-def]
    """Number of free GPUs of a host, given as a mask or as their number."""
    return popcount(free) if words[record + BY_MASK] == 1 else free


@helper(INT, READ, READ, INT, INT, INT, INTS, INTS, INTS, INTS)
def fill_local(words, masks, n_hosts, k, at, local, best, active, held):  # type: ignore[no-untyped-def]
    """Best value of 2..k GPUs of one pod into ``local[at + count]``, where it is higher.

    words: of the pod's model. masks: free GPUs of its hosts. best: -1 for every state, and so
    left. active, held: as many numbers as there are states (active: twice as many).
    """
    width, step, network = words[WIDTH], words[STEP], words[NETWORK]
    n_states = (network - step) // width
    best[0], active[0], held[0], n_active = NO_LIMIT, 0, 0, 1
    for h in range(n_hosts):
        record = words[RECORDS] + h * RECORD
        row = words[record + BEST] + masks[h] * (words[record + GPUS] + 1)
        room = room_of(words, record, masks[h])
        if room == 0:
            continue
        n_before = n_active
        for i in range(n_before):
            active[n_states + i] = best[active[i]]
        for i in range(n_before):
            state, limit, total = active[i], active[n_states + i], held[i]
            for count in range(1, min(room, k - total) + 1):
                to = words[step + state * width + count]
                value = min(limit, words[row + count])
                if best[to] < value:
                    if best[to] < 0:
                        active[n_active], held[n_active] = to, total + count
                        n_active += 1
                    best[to] = value
    for i in range(n_active):
        state, total = active[i], held[i]
        if total >= 2:
            value = min(words[network + state], best[state], MOST - 1)
            if value > local[at + total]:
                local[at + total] = value
        best[state] = -1
    return n_active


@helper(INT, READ, INT, INT, INT, INT, INTS, INT)
def masks_by_count(words, record, free, most, least, masks, at):  # type: ignore[no-untyped-def]
    """Fill ``masks[at + count]``: lowest ids with a bandwidth >= least, or -1 if there are none."""
    for count in range(most + 1):
        masks[at + count] = -1
    masks[at] = 0
    intra = words[record + INTRA]
    if words[record + BY_MASK] == 0:
        for count in range(1, min(most, free) + 1):
            if words[intra + count] >= least:
                masks[at + count] = count
        return 0
    sub = free
    while sub > 0:
        count = popcount(sub)
        if count <= most and words[intra + sub] >= least:
            differ = sub ^ masks[at + count]
            if masks[at + count] < 0 or (differ & -differ & sub) != 0:
                masks[at + count] = sub
        sub = (sub - 1) & free
    return 0


@helper(INT, READ, READ, INT, INT, INT, INTS)
def assign_local(words, masks, n_hosts, count, least, chosen):  # type: ignore[no-untyped-def]
    """Lowest ids of one pod: `count` GPUs with value >= least; 0 if there are none.

    chosen: masks (or counts) of the pod's hosts. Depth-first over hosts, each (host, state) once.
    """
    width, step, network = words[WIDTH], words[STEP], words[NETWORK]
    n_states = (network - step) // width
    by_count = np.empty(n_hosts * width, np.int64)
    order = np.zeros(n_hosts * width, np.int64)
    room = np.zeros(n_hosts + 1, np.int64)
    for h in range(n_hosts - 1, -1, -1):
        record = words[RECORDS] + h * RECORD
        free = room_of(words, record, masks[h])
        room[h] = room[h + 1] + free
        at = h * width
        masks_by_count(words, record, masks[h], min(width - 1, count), least, by_count, at)
        for i in range(min(width - 1, count) + 1):  # by preference: lowest ids first
            order[at + i] = min(width - 1, count) - i
            while i > 0:
                a, b = by_count[at + order[at + i]], by_count[at + order[at + i - 1]]
                before = a > b
                if words[record + BY_MASK] == 1:
                    differ = a ^ b
                    before = b < 0 or (a >= 0 and (differ & -differ & a) != 0)
                if not before:
                    break
                order[at + i], order[at + i - 1] = order[at + i - 1], order[at + i]
                i -= 1
    failed = np.zeros((n_hosts + 1) * n_states, np.int8)
    states, totals = np.zeros(n_hosts + 1, np.int64), np.zeros(n_hosts + 1, np.int64)
    tried = np.zeros(n_hosts + 1, np.int64)
    most = min(width - 1, count)
    level = 0
    while level >= 0:
        if level == n_hosts:
            if totals[level] == count and words[network + states[level]] >= least:
                for h in range(n_hosts):
                    chosen[h] = by_count[h * width + order[h * width + tried[h] - 1]]
                return 1
            level -= 1
            continue
        if tried[level] > most:
            failed[level * n_states + states[level]] = 1
            level -= 1
            continue
        c = order[level * width + tried[level]]
        tried[level] += 1
        total = totals[level] + c
        if by_count[level * width + c] < 0 or total > count or total + room[level + 1] < count:
            continue
        to = words[step + states[level] * width + c]
        if to < 0 or failed[(level + 1) * n_states + to] == 1:
            continue
        level += 1
        states[level], totals[level] = to, total
        if level < n_hosts:
            tried[level] = 0
    return 0


@helper(INT, READ, READ, READ, READ, READ, INT, INT, INTS)
def local_values(words, pods, hosts, single, masks, k, width, local):  # type: ignore[no-untyped-def]
    """Fill L_p(c) for every pod and count up to k, in rows of `width` numbers."""
    n_pods = len(pods) // POD
    n_states, most = 0, 0
    for p in range(n_pods):
        at = pods[p * POD]
        n_states = max(n_states, (words[at + NETWORK] - words[at + STEP]) // words[at + WIDTH])
        most = max(most, pods[p * POD + 3])
    best = np.full(n_states, -1, np.int64)
    active, held = np.empty(2 * n_states, np.int64), np.empty(n_states, np.int64)
    free = np.zeros(most, np.int64)
    for p in range(n_pods):
        table = words[pods[p * POD] : pods[p * POD + 1]]
        first, n_hosts = pods[p * POD + 2], pods[p * POD + 3]
        some = 0
        for i in range(n_hosts):
            free[i] = masks[hosts[first + i]]
            some |= free[i]
        if some == 0:
            continue
        like = -1  # a pod before this one with the same model and free GPUs
        for q in range(p):
            if pods[q * POD] == pods[p * POD] and like < 0:
                same = True
                for i in range(n_hosts):
                    same = same and masks[hosts[pods[q * POD + 2] + i]] == free[i]
                if same:
                    like = q
        if like >= 0:
            for c in range(width):
                local[p * width + c] = local[like * width + c]
        else:
            fill_local(table, free, n_hosts, k, p * width, local, best, active, held)
            local[p * width + 1] = single[p]
    return 0


@helper(INT, READ, READ, READ, READ, INT, INT, INT, INTS)
def assign_pod(words, pods, hosts, masks, p, count, least, chosen):  # type: ignore[no-untyped-def]
    """Fill in the GPUs of one pod by host of the cluster; 0 if there are none of that value."""
    table = words[pods[p * POD] : pods[p * POD + 1]]
    first, n_hosts = pods[p * POD + 2], pods[p * POD + 3]
    free, picked = np.empty(n_hosts, np.int64), np.zeros(n_hosts, np.int64)
    for i in range(n_hosts):
        free[i] = masks[hosts[first + i]]
    found = assign_local(table, free, n_hosts, count, -1 if count == 1 else least, picked)
    for i in range(n_hosts):
        chosen[hosts[first + i]] = picked[i]
    return found
