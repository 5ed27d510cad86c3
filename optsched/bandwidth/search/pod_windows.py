"""Windows of pods beside tenants: two thresholds, for d and for the joint capacities, at once.

For a set of jobs that may be touched, all of them counted as touched, the value grows with
d = B(S) and with the least joint capacity C, both minima over pods. So for every window of pods and
number m of pods in use: bisect the levels of d; an interval of levels is dropped if no m pods reach
k GPUs with its lowest d and with the C that its highest d needs to beat the incumbent.
"""

# numba compiles the kernels: they are typed by signatures
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import Final

import numpy as np

from optsched.bandwidth.models.pods import UNIT_BITS
from optsched.bandwidth.search.counts import shared
from optsched.bandwidth.search.pod_entries import COUNT, FIRST, JOINT, OWN, TOUCHED
from optsched.bandwidth.search.pod_search import ABOVE, needed
from optsched.bandwidth.topology.rates import MOST, NO_LIMIT
from optsched.kernels.compile import INT, INTS, READ, helper

# of a job: demand, first and last pod, upper bound of its joint capacity
DEMAND: Final = 0
FROM: Final = 1
TO: Final = 2
CAP: Final = 3
JOB: Final = 4

# what is answered, then the chosen entry of every pod (-1: none)
VALUE: Final = 0
COMPLETE: Final = 1
BOUND: Final = 2
SPENT: Final = 3
ENTRIES: Final = 4


@helper(INT, INT, INT, INT)
def capacity_needed(value, d, demand):  # type: ignore[no-untyped-def]
    """Least C with which d >= value beside `demand` gives `value` or more; `MOST`: none does."""
    if value <= 0:
        return 0
    whole, rest = demand // d, demand % d
    if whole > MOST // value:
        return MOST
    return min(MOST, value + value * whole + (value * rest + d - 1) // d)


@helper(INT, READ, INT, READ, INT, READ, INT, READ, READ, INT)
def fits_entry(entries, e, slots, at, team, n_team, need, limits, base):  # type: ignore[no-untyped-def]
    """Whether an entry of the pod with `slots[at + job]` reaches the thresholds."""
    if entries[e + OWN] < limits[0] or entries[e + FIRST] < base:
        return 0
    for i in range(n_team):
        slot = slots[at + team[i]]
        if slot >= 0 and entries[e + JOINT + slot] < need[team[i]]:
            return 0
    return 1


@helper(INT, READ, INT, READ, INT, READ)
def base_need(slots, at, team, n_team, need):  # type: ignore[no-untyped-def]
    """What a pod's joint allocation with jobs that are not in it must reach; -1: nothing."""
    base = -1
    for i in range(n_team):
        if slots[at + team[i]] < 0:
            base = max(base, need[team[i]])
    return base


@helper(
    INT, READ, READ, READ, READ, INT, READ, INT, INT, INT, INT, READ, READ, INT, INTS, INTS, INTS
)
def _reach(  # type: ignore[no-untyped-def]
    entries,
    sel,
    begin,
    slots,
    n_jobs,
    team,
    n_team,
    a,
    b,
    m,
    must,
    need,
    k,
    allowed,
    layers,
    limits,
):
    """Fewest pods of a..b that reach k GPUs and all thresholds, `ABOVE` if not even m do.

    sel, begin: places of the entries that may be used, by pod. must: 1 in use, 0 free, -1 not in
    use. need: joint value by job. limits: least own value, width of a row of `allowed`, scans.
    """
    width = limits[1]
    top = np.zeros(width, np.int64)
    forced, reach = 0, 0
    for p in range(a, b + 1):
        if must[p] < 0:
            continue
        at = p * width
        for c in range(width):
            allowed[at + c] = 0
        base, most = base_need(slots, p * n_jobs, team, n_team, need), 0
        for s in range(begin[p], begin[p + 1]):
            count = entries[sel[s] + COUNT]
            if allowed[at + count] == 0 and (
                fits_entry(entries, sel[s], slots, p * n_jobs, team, n_team, need, limits, base)
                == 1
            ):
                allowed[at + count] = 1
                most = max(most, count)
        limits[2] += begin[p + 1] - begin[p]
        if must[p] == 1 or p in (a, b):
            if most == 0:
                return ABOVE
            forced, reach = forced + 1, reach + most
        else:
            top[most] += 1
    left = m - forced
    if left < 0:
        return ABOVE
    for c in range(width - 1, 0, -1):
        take = min(left, top[c])
        reach, left = reach + take * c, left - take
    if reach < k:
        return ABOVE
    row, at, grown = k + 1, 0, 0
    for t in range(row):
        layers[t] = ABOVE
    layers[0] = 0
    for p in range(b, a - 1, -1):
        to = at + row
        stays = must[p] != 1 and p != a and p != b
        for t in range(row):
            layers[to + t] = layers[at + t] if stays else ABOVE
        most = 0
        if must[p] >= 0:
            for c in range(1, min(width - 1, k) + 1):
                if allowed[p * width + c] == 1:
                    most = c
                    for t in range(min(grown, k - c) + 1):
                        layers[to + c + t] = min(layers[to + c + t], layers[at + t] + 1)
            limits[2] += row
        grown += most
        at = to
    return min(layers[at + k], ABOVE)


@helper(INT, READ, READ, READ, READ, INT, READ, INT, INT, INT, READ, INT, READ, READ, READ, INTS)
def _spread(  # type: ignore[no-untyped-def]
    entries, sel, begin, slots, n_jobs, team, n_team, a, b, need, k, allowed, layers, limits, picked
):
    """Entries of the answer that `_reach` found: many GPUs in the first pods, best own values."""
    width, left, row = limits[1], k, k + 1
    for p in range(len(picked)):
        picked[p] = -1
    for p in range(a, b + 1):
        at = (b - p + 1) * row
        count = 0
        for c in range(min(width - 1, left), 0, -1):
            before = layers[at - row + left - c]
            if allowed[p * width + c] == 1 and before + 1 == layers[at + left]:
                count = c
                break
        if count == 0:
            continue
        left -= count
        base = base_need(slots, p * n_jobs, team, n_team, need)
        for s in range(begin[p], begin[p + 1]):
            e = sel[s]
            if entries[e + COUNT] == count and (
                picked[p] < 0 or entries[e + OWN] > entries[picked[p] + OWN]
            ):
                fits = fits_entry(entries, e, slots, p * n_jobs, team, n_team, need, limits, base)
                picked[p] = e if fits == 1 else picked[p]
    return left


@helper(INT, READ, READ, READ, INT, READ, READ, READ)
def contended_value(entries, picked, slots, n_jobs, jobs, static, powers):  # type: ignore[no-untyped-def]
    """Value of a choice over several pods, by their entries; -1: something is not measured.

    static: value of job j's own GPUs in pod p at ``j * pods + p``, `NO_LIMIT` where it has none.
    """
    n_pods = len(picked)
    first, last, m, d, touched = n_pods, 0, 0, NO_LIMIT, 0
    for p in range(n_pods):
        if picked[p] >= 0:
            first, last, m = min(first, p), p, m + 1
            d = min(d, entries[picked[p] + OWN])
            touched |= entries[picked[p] + TOUCHED]
    d = d * powers[last - first + m - 2] >> UNIT_BITS
    demand, capacity = 0, NO_LIMIT
    for j in range(n_jobs):
        if touched >> j & 1 == 0:
            continue
        joint, pods = NO_LIMIT, m
        for p in range(n_pods):
            if picked[p] >= 0:
                slot = slots[p * n_jobs + j]
                joint = min(joint, entries[picked[p] + (FIRST if slot < 0 else JOINT + slot)])
            elif static[j * n_pods + p] != NO_LIMIT:
                joint, pods = min(joint, static[j * n_pods + p]), pods + 1
        if joint < 0:
            return -1
        span = max(last, jobs[j * JOB + TO]) - min(first, jobs[j * JOB + FROM])
        capacity = min(capacity, joint * powers[span + pods - 2] >> UNIT_BITS)
        demand += jobs[j * JOB + DEMAND]
    return shared(d, 1 if touched != 0 else 0, capacity, d + demand)


@helper(INT, READ, INT, INT, INT, INT, READ, INT, READ, READ, READ, INTS)
def _thresholds(powers, a, b, m, capacity, team, n_team, jobs, static, must, need):  # type: ignore[no-untyped-def]
    """Joint values that pods must reach for a capacity, by job; 0 if held GPUs prevent it."""
    n_pods = len(must)
    for i in range(n_team):
        j = team[i]
        outside = 0
        for p in range(n_pods):
            if must[p] < 0 and static[j * n_pods + p] != NO_LIMIT:
                outside += 1
        span = max(b, jobs[j * JOB + TO]) - min(a, jobs[j * JOB + FROM])
        need[j] = needed(capacity, powers[span + m + outside - 2])
        if need[j] >= MOST:
            return 0
        for p in range(n_pods):
            if must[p] < 0 and static[j * n_pods + p] < need[j]:
                return 0
    return 1


@helper(
    INT,
    READ,
    READ,
    READ,
    READ,
    INT,
    READ,
    INT,
    INT,
    READ,
    READ,
    READ,
    READ,
    READ,
    INT,
    INT,
    INTS,
    INTS,
    INTS,
    INTS,
    INTS,
)
def search_beside(  # type: ignore[no-untyped-def]
    entries,
    sel,
    begin,
    slots,
    n_jobs,
    team,
    n_team,
    demand,
    must,
    jobs,
    static,
    powers,
    levels,
    fewest,
    k,
    allowed,
    layers,
    limits,
    picked,
    out,
):
    """Improve the answer with choices that touch at most the team, pods in use as `must` has it.

    limits: scratch, width, scans so far, most scans. out: as named above. 0 if it was given up.
    """
    n_pods, n_levels = len(must), len(levels)
    need = np.zeros(max(1, n_jobs), np.int64)
    lows, highs = np.empty(200, np.int64), np.empty(200, np.int64)
    least_a, most_b = n_pods, 0
    for p in range(n_pods):
        if must[p] == 1:
            least_a, most_b = min(least_a, p), max(most_b, p)
    for span in range(max(1, fewest - 1), n_pods):
        if needed(out[VALUE] + 1, powers[span + fewest - 2]) > levels[n_levels - 1]:
            break
        for a in range(n_pods - span):
            b = a + span
            if must[a] < 0 or must[b] < 0 or a > least_a or b < most_b:
                continue
            for m in range(fewest, span + 2):
                power = powers[span + m - 2]
                if needed(out[VALUE] + 1, power) > levels[n_levels - 1]:
                    break
                lows[0], highs[0], depth = 0, n_levels - 1, 1
                while depth > 0:
                    if limits[2] > limits[3]:
                        return 0
                    depth -= 1
                    low, high = lows[depth], highs[depth]
                    least = needed(out[VALUE] + 1, power)
                    low = max(low, np.searchsorted(levels, least))
                    if low > high:
                        continue
                    aim = out[VALUE] + 1
                    d = levels[high] * power >> UNIT_BITS
                    capacity = capacity_needed(aim, d, demand) if n_team > 0 else 0
                    limits[2] += 10
                    if capacity >= MOST:
                        continue
                    if _thresholds(powers, a, b, m, capacity, team, n_team, jobs, static, must,
                                   need) == 0:  # fmt: skip
                        continue
                    limits[0] = levels[low]
                    if _reach(entries, sel, begin, slots, n_jobs, team, n_team, a, b, m, must, need,
                              k, allowed, layers, limits) > m:  # fmt: skip
                        continue
                    _spread(entries, sel, begin, slots, n_jobs, team, n_team, a, b, need, k,
                            allowed, layers, limits, picked)  # fmt: skip
                    value = contended_value(entries, picked, slots, n_jobs, jobs, static, powers)
                    if value > out[VALUE]:
                        out[VALUE] = value
                        for p in range(n_pods):
                            out[ENTRIES + p] = picked[p]
                        lows[depth], highs[depth], depth = low, high, depth + 1
                    elif low < high:
                        middle = (low + high) // 2
                        lows[depth], highs[depth] = low, middle
                        lows[depth + 1], highs[depth + 1] = middle + 1, high
                        depth += 2
    return 1
