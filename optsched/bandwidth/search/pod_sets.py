"""Exact choice of k GPUs across pods beside running jobs: all sets of jobs that may be touched.

To count all jobs of such a set as touched is never more than the truth, and is the truth for the
set that the best choice touches. Sets grow job by job, the smallest first; those are left out
whose bound is not above the best value so far, by the room that is left and by the span of pods.
"""

# numba compiles the kernels: they are typed by signatures
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import Final

import numpy as np

from optsched.bandwidth.models.pods import UNIT_BITS
from optsched.bandwidth.search.counts import shared
from optsched.bandwidth.search.pod_entries import COUNT, OWN, TOUCHED
from optsched.bandwidth.search.pod_search import needed
from optsched.bandwidth.search.pod_windows import (
    BOUND,
    CAP,
    COMPLETE,
    DEMAND,
    FROM,
    JOB,
    SPENT,
    TO,
    VALUE,
    base_need,
    capacity_needed,
    fits_entry,
    search_beside,
)
from optsched.bandwidth.topology.rates import NO_LIMIT
from optsched.kernels.compile import INT, INTS, READ, entry, helper

MOST_JOBS: Final = 62
MOST_SETS: Final = 1 << 17
MOST_UNDECIDED: Final = 10
"""Pods of jobs over several pods whose use is enumerated."""


@helper(INT, READ, INT, INT, INTS)
def _least_steps(rooms, banned, k, by_pod):  # type: ignore[no-untyped-def]
    """Fill in span and number of pods that k GPUs need at least; 0 if there are fewer.

    rooms: free GPUs, jobs (as a mask) and pod of every host, of which those with a banned job are
    left out. by_pod: scratch, as many numbers as pods, then span and number.
    """
    n_pods = len(by_pod) - 2
    for p in range(n_pods):
        by_pod[p] = 0
    for h in range(len(rooms) // 3):
        if (rooms[3 * h + 1] & banned) == 0:
            by_pod[rooms[3 * h + 2]] += rooms[3 * h]
    span, first, room = n_pods, 0, 0
    for p in range(n_pods):
        room += by_pod[p]
        while room - by_pod[first] >= k:
            room -= by_pod[first]
            first += 1
        if room >= k:
            span = min(span, p - first)
    if span == n_pods:
        return 0
    by_pod[:n_pods].sort()
    number, room = 0, 0
    while room < k:
        number += 1
        room += by_pod[n_pods - number]
    by_pod[n_pods], by_pod[n_pods + 1] = span, number
    return 1


@helper(INT, READ, INT, INT, READ, READ, INT, READ, INT, INT, INTS)
def _bound(rooms, banned, k, jobs, team, n_team, powers, most, idle, by_pod):  # type: ignore[no-untyped-def]
    """Upper bound of choices over several pods that touch the team and no banned job.

    -1: none is measured; -2: there is no room for any.

    most: highest value of a pod. idle: best value without jobs.
    """
    if _least_steps(rooms, banned, k, by_pod) == 0:
        return -2
    n_pods = len(by_pod) - 2
    first, last, cap, demand = n_pods, 0, NO_LIMIT, 0
    for i in range(n_team):
        j = team[i]
        first, last = min(first, jobs[j * JOB + TO]), max(last, jobs[j * JOB + FROM])
        cap, demand = min(cap, jobs[j * JOB + CAP]), demand + jobs[j * JOB + DEMAND]
    number = max(2, by_pod[n_pods + 1])
    span = max(by_pod[n_pods], number - 1, last - first)
    power = powers[min(span + number - 2, len(powers) - 1)]
    d = min(idle, most * power >> UNIT_BITS)
    if n_team == 0:
        return d
    return -1 if cap < 0 else shared(d, 1, cap * power >> UNIT_BITS, d + demand)


@entry(INT, READ, READ, READ, INT, READ, READ, READ, READ, INT, INT, INT, INT, INT, INTS)
def search_sets(  # type: ignore[no-untyped-def]
    entries, begin, slots, n_jobs, jobs, static, powers, rooms, width, fewest, k, idle, work, out
):
    """Best value over all sets of touched jobs; `out` as named above, its value being the bar.

    entries: of all pods, ``entries[begin[p]:begin[p + 1]]`` those of pod p, each of `entries[0]`
    numbers. slots: place of job j among those of pod p at ``p * n_jobs + j``, or -1. jobs: `JOB`
    numbers each, by rising demand. rooms: free GPUs, jobs (as a mask) and pod of every host. width:
    most GPUs a pod + 1. fewest: pods that k GPUs need. idle: best value without jobs. work: about
    how many steps.
    """
    size, n_pods = entries[0], len(begin) - 1
    total = (begin[n_pods] - begin[0]) // size
    live, ends = np.empty(total, np.int64), np.zeros(n_pods + 1, np.int64)
    sel, starts = np.empty(total, np.int64), np.zeros(n_pods + 1, np.int64)
    levels, n_live = np.empty(total, np.int64), 0
    for p in range(n_pods):
        for e in range(begin[p], begin[p + 1], size):
            if entries[e + COUNT] > 0:
                live[n_live], levels[n_live], n_live = e, entries[e + OWN], n_live + 1
        ends[p + 1] = n_live
    levels = np.unique(levels[:n_live])
    most = levels[-1] if n_live > 0 else -1
    if n_live == 0 or fewest > n_pods:
        out[COMPLETE], out[BOUND], out[SPENT] = 1, out[VALUE], 0
        return out[VALUE]
    queue, last = np.zeros(MOST_SETS, np.int64), np.zeros(MOST_SETS, np.int64)
    team, must = np.zeros(n_jobs + 1, np.int64), np.zeros(n_pods, np.int64)
    by_pod = np.zeros(n_pods + 2, np.int64)
    undecided, reach = np.zeros(n_pods, np.int64), np.zeros(n_pods, np.int64)
    need = np.zeros(max(1, n_jobs), np.int64)
    allowed = np.zeros(n_pods * width, np.int64)
    layers, picked = np.empty((n_pods + 1) * (k + 1), np.int64), np.empty(n_pods, np.int64)
    limits = np.zeros(4, np.int64)
    limits[1], limits[3] = width, work
    out[COMPLETE], out[BOUND] = 1, -1
    n_queue, at = 1, 0
    while at < n_queue:
        chosen = queue[at]
        n_team, demand = 0, 0
        for j in range(n_jobs):
            if chosen >> j & 1:
                team[n_team], n_team = j, n_team + 1
                demand += jobs[j * JOB + DEMAND]
        at += 1
        banned = ((1 << last[at - 1]) - 1) & ~chosen  # by all sets that grow from this one
        bound = _bound(rooms, banned, k, jobs, team, n_team, powers, most, idle, by_pod)
        limits[2] += len(rooms)
        if bound <= out[VALUE]:
            continue
        if limits[2] > limits[3]:
            out[COMPLETE], out[BOUND] = 0, max(out[BOUND], bound)
            continue
        for j in range(last[at - 1], n_jobs):
            team[n_team] = j
            banned = ((1 << j) - 1) & ~chosen
            grown = _bound(rooms, banned, k, jobs, team, n_team + 1, powers, most, idle, by_pod)
            limits[2] += len(rooms)
            if grown == -2:  # nor is there if more are left out
                break
            if grown <= out[VALUE]:
                continue
            if n_queue < MOST_SETS:
                queue[n_queue], last[n_queue], n_queue = chosen | 1 << j, j + 1, n_queue + 1
            else:
                out[COMPLETE], out[BOUND] = 0, max(out[BOUND], grown)
        bound = _bound(rooms, ~chosen, k, jobs, team, n_team, powers, most, idle, by_pod)
        if bound <= out[VALUE]:
            continue
        # what any window and any number of pods would need
        power = powers[2 * fewest - 3]
        capacity = capacity_needed(out[VALUE] + 1, idle, demand) if n_team > 0 else 0
        limits[0] = needed(out[VALUE] + 1, power)
        for i in range(n_team):
            need[team[i]] = needed(capacity, power)
        n_sel = 0
        for p in range(n_pods):
            base, largest = base_need(slots, p * n_jobs, team, n_team, need), 0
            for i in range(ends[p], ends[p + 1]):
                e = live[i]
                if (entries[e + TOUCHED] & ~chosen) == 0 and (
                    fits_entry(entries, e, slots, p * n_jobs, team, n_team, need, limits, base) == 1
                ):
                    sel[n_sel], n_sel = e, n_sel + 1
                    largest = max(largest, entries[e + COUNT])
            starts[p + 1], reach[p] = n_sel, -largest
        limits[2] += n_live
        reach.sort()
        parts, room = 0, 0
        while parts < n_pods and room < k:
            room -= reach[parts]
            parts += 1
        if room < k:
            continue
        parts = max(parts, 2)
        for p in range(n_pods):
            must[p] = 0
        for i in range(n_team):
            if jobs[team[i] * JOB + FROM] == jobs[team[i] * JOB + TO]:
                must[jobs[team[i] * JOB + FROM]] = 1
        n_open = 0
        for p in range(n_pods):
            wanted = 0
            for i in range(n_team):
                j = team[i]
                if jobs[j * JOB + FROM] < jobs[j * JOB + TO] and slots[p * n_jobs + j] >= 0:
                    wanted = 1
            if wanted == 1 and must[p] == 0:
                undecided[n_open], n_open = p, n_open + 1
        if n_open > MOST_UNDECIDED:
            out[COMPLETE], out[BOUND] = 0, max(out[BOUND], bound)
        else:
            for way in range(1 << n_open):
                for i in range(n_open):
                    must[undecided[i]] = 1 if way >> i & 1 else -1
                met = 0
                for i in range(n_team):
                    for p in range(n_pods):
                        if must[p] == 1 and slots[p * n_jobs + team[i]] >= 0:
                            met += 1
                            break
                if met == n_team and search_beside(
                    entries, sel, starts, slots, n_jobs, team, n_team, demand, must, jobs, static,
                    powers, levels, parts, k, allowed, layers, limits, picked, out,
                ) == 0:  # fmt: skip
                    out[COMPLETE], out[BOUND] = 0, max(out[BOUND], bound)
                    break
    out[BOUND] = max(out[BOUND], out[VALUE])
    out[SPENT] = limits[2]
    return out[VALUE]
