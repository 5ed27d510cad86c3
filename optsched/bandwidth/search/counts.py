"""Exact choice of k GPUs by the numbers of GPUs on every host, with ties broken: the kernel.

For fixed counts the hosts used, the jobs that interfere and their joint limits are fixed, and the
value never falls when the bandwidth within a host rises; so some optimum takes the best subset of
every host, and only counts are to be searched.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from optsched.bandwidth.models.tables import (
    BEST,
    BOUND,
    BY_MASK,
    COLUMNS,
    GPUS,
    HOSTS,
    INTRA,
    JOINT,
    KIND,
    LEFT,
    NETWORK,
    RECORD,
    RECORDS,
    STEP,
    STRIDE,
    WHOLE,
    WIDTH,
)
from optsched.bandwidth.topology.rates import NO_LIMIT
from optsched.kernels.compile import INT, INTS, READ, entry, helper

# what is asked: one array, then the lists by used host
K: Final = 0
N_USED: Final = 1
"""Hosts that may be used; others only carry jobs."""
BALANCE: Final = 2
"""Most difference of counts on hosts that are used."""
MIN_HOSTS: Final = 3
MAX_HOSTS: Final = 4
SAME_TYPE: Final = 5
TOLERANCE: Final = 6
"""Millionths of the best value that a choice may lose for a better rest."""
N_JOBS: Final = 7
FILL_BEST: Final = 8
TWO_SIDED: Final = 9
CROSS_ONLY: Final = 10
"""1: jobs interfere only with choices on two hosts or more."""
UNIT: Final = 11
"""Bandwidths are cut to multiples of this; 1 as a rule."""
SLICE: Final = 12
"""Counts within a slice domain are multiples of this; 0 = no slices."""
LEAVES: Final = 13
"""Most count vectors to evaluate in a pass."""
TIES: Final = 14
"""0: any best choice will do."""
NODES: Final = 15
"""Most levels of the search to enter in both passes together."""
SPREAD: Final = 16
"""What a host that is used adds to the spread of a choice; one that was whole adds 1 more."""
LISTS: Final = 17
"""Where the lists begin, `N_USED` numbers each: hosts, least counts, slice domains, domains, most
counts, and what the domains add that a host does not share with the host before it."""

# what is answered: these, then the chosen masks (or counts) of the used hosts
OPTIMUM: Final = 0
VALUE: Final = 1
STANDALONE: Final = 2
VISITED: Final = 3
COMPLETE: Final = 4
"""2: all was looked at; 1: the value is the optimum, not all that have it were compared."""
CHOSEN: Final = 5

MILLION: Final = 1_000_000

# a level of the search: the counts of the hosts before it are chosen
_STATE: Final = 0
_LEFT: Final = 1
"""GPUs still to be chosen."""
_INTRA: Final = 2
"""Least of the best bandwidths within the hosts."""
_HOSTS: Final = 3
_LEAST: Final = 4
_MOST: Final = 5
_TYPE: Final = 6
_DOMAIN: Final = 7
_COUNT: Final = 8
"""GPUs of the host before this level."""
_NEXT: Final = 9
"""Count to try next on the host of this level."""
_SPREAD: Final = 10
_GAP: Final = 11
"""What the domains add that the next host does not share with the last one used, so far."""
_LEVEL: Final = 12
"""Then for every job its joint allocation (of two-sided ones: S's side, then the job's)."""

_STATE_A: Final = 0
_INTRA_A: Final = 1
_STATE_B: Final = 2
_INTRA_B: Final = 3
_TOUCHED: Final = 4
_AHEAD: Final = 5
"""GPUs that the job has on usable hosts from this level on."""
_JOB: Final = 6

# what a leaf is worth
_D: Final = 0
_ANY: Final = 1
_C: Final = 2
_DEMAND: Final = 3
_NETWORK: Final = 4


@helper(INT, INT, counted=False)
def popcount(mask):  # type: ignore[no-untyped-def]
    """Number of bits of a mask below 2^32."""
    mask = mask - (mask >> 1 & 0x55555555)
    mask = (mask & 0x33333333) + (mask >> 2 & 0x33333333)
    return ((mask + (mask >> 4) & 0x0F0F0F0F) * 0x01010101 & 0xFFFFFFFF) >> 24


@helper(INT, INT, INT, INT, INT, counted=False)
def shared(d, any_job, capacity, total):  # type: ignore[no-untyped-def]
    """What is left of a standalone bandwidth d beside demands `total` - d in a joint capacity."""
    if any_job == 0 or total <= capacity:
        return d
    return d * capacity // total


@helper(INT, READ, INT, INT, INT, counted=False)
def joint_within(words, record, count, best):  # type: ignore[no-untyped-def]
    """Bandwidth within a host of the GPUs that a joint allocation is taken to have there."""
    return words[words[record + JOINT] + best * (words[record + GPUS] + 1) + count]


@helper(INT, READ, INT, INT, INT, INT, INTS, counted=False)
def _pick(words, record, free, count, least, pick):  # type: ignore[no-untyped-def]
    """Among `count` of the free GPUs with intra bandwidth >= least: what leaves the best rest.

    Then, if ``pick[3]`` is 1, the highest bandwidth; then the lowest ids. Fills pick with mask
    (or count), both weights of the rest, and the bandwidth; 0 if there is none.
    """
    whole, left, intra = words[record + WHOLE], words[record + LEFT], words[record + INTRA]
    if count == 0 or words[record + BY_MASK] == 0:
        rest = free - count
        limit = words[intra + count]
        if words[record + BY_MASK] == 1:
            rest, limit = free, NO_LIMIT
        pick[0], pick[1], pick[2] = count, words[whole + rest], words[left + rest]
        pick[4] = limit if count > 1 else NO_LIMIT
        return 1 if pick[4] >= least else 0
    prefer = pick[3] == 1
    found = 0
    sub = free
    while sub > 0:
        if popcount(sub) == count:
            limit = words[intra + sub]
            if limit >= least:
                w, s = words[whole + free - sub], words[left + free - sub]
                better = found == 0 or w > pick[1]
                if not better and w == pick[1]:
                    better = s > pick[2]
                    if not better and s == pick[2]:
                        differ = sub ^ pick[0]
                        lower = (differ & -differ & sub) != 0
                        better = lower
                        if prefer and limit != pick[4]:
                            better = limit > pick[4]
                if better:
                    found = 1
                    pick[0], pick[1], pick[2], pick[4] = sub, w, s, limit
        sub = (sub - 1) & free
    return found


@helper(INT, READ, READ, READ, INTS, INT, INTS, counted=False)
def _worth(words, request, jobs, work, at, leaf):  # type: ignore[no-untyped-def]
    """Value of the count vector whose last level is at `at`; -1 if a pattern is not measured."""
    network, n_jobs, unit = words[NETWORK], request[N_JOBS], request[UNIT]
    limit = words[network + work[at + _STATE]]
    if limit < 0:
        return -1
    d = min(limit, work[at + _INTRA])
    d -= d % unit
    leaf[_D], leaf[_ANY], leaf[_C], leaf[_DEMAND], leaf[_NETWORK] = d, 0, NO_LIMIT, 0, limit
    if work[at + _HOSTS] < 2 and request[CROSS_ONLY] == 1:
        return d
    for j in range(n_jobs):
        a = at + _LEVEL + j * _JOB
        if work[a + _TOUCHED] == 0:
            continue
        limit = words[network + work[a + _STATE_A]]
        joint = min(limit, work[a + _INTRA_A])
        if request[TWO_SIDED] == 1:
            other = words[network + work[a + _STATE_B]]
            limit = min(limit, other)
            joint = min(joint, min(other, work[a + _INTRA_B]))
        if limit < 0:
            return -1
        leaf[_ANY] = 1
        leaf[_C] = min(leaf[_C], joint - joint % unit)
        leaf[_DEMAND] += jobs[j * (words[HOSTS] + 1)]
    return shared(d, leaf[_ANY], leaf[_C], d + leaf[_DEMAND])


@helper(INT, INTS, INT, INT, counted=False)
def _needed(leaf, aim, unit):  # type: ignore[no-untyped-def]
    """Least standalone bandwidth whose share is `aim`, which the leaf's own reaches."""
    low, high = aim, leaf[_D]
    while low < high:
        middle = (low + high) // 2
        d = middle - middle % unit
        if shared(d, leaf[_ANY], leaf[_C], d + leaf[_DEMAND]) >= aim:
            high = middle
        else:
            low = middle + 1
    return low


@helper(INT, READ, READ, READ, INTS, INTS, INT, INTS, INTS, INT, counted=False)
def _pick_all(words, request, masks, work, leaf, least, pick, picked, size):  # type: ignore[no-untyped-def]
    """Pick on every used host, each for itself; the standalone bandwidth of the choice.

    Fills `picked` with the masks (or counts) and, behind them, the two sums of weights.
    """
    used, unit = request[N_USED], request[UNIT]
    lowest = leaf[_NETWORK]
    picked[used] = picked[used + 1] = 0
    for u in range(used):
        host = request[LISTS + u]
        record = words[RECORDS] + host * RECORD
        _pick(words, record, masks[host], work[(u + 1) * size + _COUNT], least, pick)
        picked[u] = pick[0]
        picked[used] += pick[1]
        picked[used + 1] += pick[2]
        lowest = min(lowest, pick[4])
    return lowest - lowest % unit


@helper(INT, READ, READ, INTS, INTS, counted=False)
def _lower_ids(words, request, picked, best):  # type: ignore[no-untyped-def]
    """Whether `picked` has the lowest GPU in which the two differ."""
    first, lower = NO_LIMIT, 0
    for u in range(request[N_USED]):
        a, b, host = picked[u], best[u], request[LISTS + u]
        if a != b and host < first:
            first = host
            differ = a ^ b
            lower = 1 if (differ & -differ & a) != 0 else 0
            if words[words[RECORDS] + host * RECORD + BY_MASK] == 0:
                lower = 1 if a > b else 0
    return lower


@helper(INT, READ, INTS, INT, INT, counted=False)
def _in_slices(request, work, at, size):  # type: ignore[no-untyped-def]
    """Whether the counts of every slice domain are whole slices."""
    used = request[N_USED]
    for u in range(used):
        total = 0
        for w in range(used):
            if request[LISTS + 2 * used + w] == request[LISTS + 2 * used + u]:
                total += work[(w + 1) * size + _COUNT]
        if total % request[SLICE] != 0:
            return 0
    return 1


@helper(INT, READ, READ, READ, INTS, counted=False)
def _begin(words, request, jobs, work):  # type: ignore[no-untyped-def]
    """Level 0: nothing is chosen; jobs stand on the hosts that cannot be used."""
    n_hosts, used = words[HOSTS], request[N_USED]
    work[_STATE], work[_LEFT], work[_INTRA] = 0, request[K], NO_LIMIT
    work[_HOSTS], work[_LEAST], work[_MOST] = 0, NO_LIMIT, 0
    work[_TYPE] = work[_DOMAIN] = -1
    work[_COUNT] = work[_NEXT] = work[_SPREAD] = work[_GAP] = 0
    for j in range(request[N_JOBS]):
        state, limit = 0, NO_LIMIT
        for host in range(n_hosts):
            held = jobs[j * (n_hosts + 1) + 1 + host]
            usable = False
            for u in range(used):
                usable = usable or request[LISTS + u] == host
            if held > 0 and not usable:
                state = words[words[STEP] + state * words[WIDTH] + held]
                record = words[RECORDS] + host * RECORD
                limit = min(limit, joint_within(words, record, held, request[FILL_BEST]))
        a = _LEVEL + j * _JOB
        two = request[TWO_SIDED] == 1  # S's side holds nothing outside the hosts of S
        work[a + _STATE_A], work[a + _INTRA_A] = (0, NO_LIMIT) if two else (state, limit)
        work[a + _STATE_B], work[a + _INTRA_B], work[a + _TOUCHED] = state, limit, 0
        work[a + _AHEAD] = 0
        for u in range(used):
            work[a + _AHEAD] += jobs[j * (n_hosts + 1) + 1 + request[LISTS + u]]
    return 0


@helper(INT, READ, READ, READ, READ, INTS, INT, INT, INT, counted=False)
def _descend(words, request, masks, jobs, work, at, level, count):  # type: ignore[no-untyped-def]
    """Fill the next level with `count` GPUs on the host of this one; 0 if a rule forbids it."""
    used, n_jobs = request[N_USED], request[N_JOBS]
    size = _LEVEL + _JOB * n_jobs
    to = at + size
    host = request[LISTS + level]
    record = words[RECORDS] + host * RECORD
    if count < request[LISTS + used + level] or count > request[LISTS + 4 * used + level]:
        return 0
    gap = max(work[at + _GAP], request[LISTS + 5 * used + level])
    if count == 0:
        for f in range(_COUNT):
            work[to + f] = work[at + f]
        work[to + _SPREAD], work[to + _GAP] = work[at + _SPREAD], gap
    else:
        least, most = min(work[at + _LEAST], count), max(work[at + _MOST], count)
        kind, domain = words[record + KIND], request[LISTS + 3 * used + level]
        hosts = work[at + _HOSTS] + 1
        if most - least > request[BALANCE] or hosts > request[MAX_HOSTS]:
            return 0
        if hosts > 1:
            if request[SAME_TYPE] == 1 and kind != work[at + _TYPE]:
                return 0
            if domain != work[at + _DOMAIN]:
                return 0
        n = words[record + GPUS]
        best = words[words[record + BEST] + masks[host] * (n + 1) + count]
        work[to + _STATE] = words[words[STEP] + work[at + _STATE] * words[WIDTH] + count]
        work[to + _LEFT] = work[at + _LEFT] - count
        work[to + _INTRA] = min(work[at + _INTRA], best)
        work[to + _HOSTS], work[to + _LEAST], work[to + _MOST] = hosts, least, most
        work[to + _TYPE], work[to + _DOMAIN] = kind, domain
        every = (1 << n) - 1 if words[record + BY_MASK] == 1 else n
        whole = 1 if masks[host] == every else 0
        work[to + _SPREAD] = work[at + _SPREAD] + gap + request[SPREAD] + whole
        work[to + _GAP] = 0
    work[to + _COUNT] = count
    for j in range(n_jobs):
        a, b = at + _LEVEL + j * _JOB, to + _LEVEL + j * _JOB
        for f in range(_JOB):
            work[b + f] = work[a + f]
        held = jobs[j * (words[HOSTS] + 1) + 1 + host]
        both = held + count
        work[b + _AHEAD] -= held
        if both == 0:
            continue
        limit = joint_within(words, record, both, request[FILL_BEST])
        if request[TWO_SIDED] == 0 or count > 0:
            work[b + _STATE_A] = words[words[STEP] + work[a + _STATE_A] * words[WIDTH] + both]
            work[b + _INTRA_A] = min(work[a + _INTRA_A], limit)
        if held > 0:
            work[b + _STATE_B] = words[words[STEP] + work[a + _STATE_B] * words[WIDTH] + both]
            work[b + _INTRA_B] = min(work[a + _INTRA_B], limit)
            if count > 0:
                work[b + _TOUCHED] = 1
    return 1


@helper(INT, READ, INT, INT, counted=False)
def _most(words, state, left):  # type: ignore[no-untyped-def]
    """The most that the network allows any completion of a state by `left` GPUs."""
    columns, bound = words[COLUMNS], words[BOUND]
    if columns > 1:
        return words[bound + state * columns + left]
    return words[bound + words[bound + state] + left * words[STRIDE]]


@helper(INT, READ, READ, READ, INTS, INT, counted=False)
def _hope(words, request, jobs, work, at):  # type: ignore[no-untyped-def]
    """Upper bound of the value of every count vector below the level at `at`."""
    left = work[at + _LEFT]
    d = min(work[at + _INTRA], _most(words, work[at + _STATE], left))
    if request[N_JOBS] == 0 or d <= 0:
        return d
    if request[CROSS_ONLY] == 1 and work[at + _HOSTS] < 2 and left == 0:
        return d
    any_job, capacity, demand = 0, NO_LIMIT, 0
    for j in range(request[N_JOBS]):
        a = at + _LEVEL + j * _JOB
        if work[a + _TOUCHED] == 1:
            any_job = 1
            demand += jobs[j * (words[HOSTS] + 1)]
            capacity = min(capacity, work[a + _INTRA_A])
            if request[TWO_SIDED] == 0:
                joint = _most(words, work[a + _STATE_A], left + work[a + _AHEAD])
                capacity = min(capacity, joint)
            else:
                capacity = min(capacity, work[a + _INTRA_B])
    return shared(d, any_job, capacity, d + demand)


@entry(INT, READ, READ, READ, READ, INTS)
def choose(words, request, masks, jobs, out):  # type: ignore[no-untyped-def]
    """Best S of k free GPUs by value under contention, spread, what it leaves; 0 if there is none.

    words: `CountTables.words`. request: as named above. masks: free GPUs a host (mask or number),
    shape (hosts,). jobs: demand, then GPUs by host, of every job that may interfere, length
    N_JOBS * (hosts + 1). out: at least CHOSEN + N_USED numbers, filled as named above.
    """
    used = request[N_USED]
    size = _LEVEL + _JOB * request[N_JOBS]
    work = np.empty((used + 1) * size, np.int64)
    room = np.zeros(used + 1, np.int64)  # free GPUs of the hosts from here on
    picked, best_picked = np.empty(used + 2, np.int64), np.empty(used + 2, np.int64)
    leaf, pick = np.zeros(5, np.int64), np.zeros(5, np.int64)
    kept = np.empty(used + 5, np.int64)  # counts and leaf of the best of the first pass
    for u in range(used - 1, -1, -1):
        host = request[LISTS + u]
        free = masks[host]
        by_mask = words[words[RECORDS] + host * RECORD + BY_MASK] == 1
        room[u] = room[u + 1] + (popcount(free) if by_mask else free)
    out[VISITED], out[COMPLETE] = 0, 0
    nodes = request[NODES]
    best, threshold, answered, spread = -1, 0, 0, NO_LIMIT  # of the best choice so far
    if room[0] < request[K]:
        out[COMPLETE] = 2
        return 0
    _begin(words, request, jobs, work)
    for turn in range(1 + request[TIES]):
        if turn == 1:
            if best < 0:
                break
            threshold = best - best * request[TOLERANCE] // MILLION
        visited = level = 0
        work[_NEXT] = max(0, request[K] - room[1])
        while level >= 0:
            at = level * size
            nodes -= 1
            if nodes < 0:
                break
            if level < used:
                count = work[at + _NEXT]
                if count > min(work[at + _LEFT], room[level] - room[level + 1]):
                    level -= 1
                    continue
                work[at + _NEXT] += 1
                if _descend(words, request, masks, jobs, work, at, level, count) == 1:
                    if turn == 1 and work[at + size + _SPREAD] > spread:
                        continue
                    hope = _hope(words, request, jobs, work, at + size)
                    if (turn == 0 and hope > best) or (turn == 1 and hope >= threshold):
                        level += 1
                        if level < used:
                            work[level * size + _NEXT] = max(
                                0, work[level * size + _LEFT] - room[level + 1]
                            )
                continue
            level -= 1
            visited += 1
            if visited > request[LEAVES]:
                break
            if work[at + _HOSTS] < request[MIN_HOSTS]:
                continue
            if request[SLICE] > 0 and _in_slices(request, work, at, size) == 0:
                continue
            value = _worth(words, request, jobs, work, at, leaf)
            if turn == 0:
                if value <= best:
                    continue
                best = value
            elif value < threshold:
                continue
            if request[TIES] == 0:
                pick[3] = 0
                least = _needed(leaf, value, request[UNIT])
                d = _pick_all(words, request, masks, work, leaf, least, pick, picked, size)
            elif turn == 0:
                for u in range(used):
                    kept[u] = work[(u + 1) * size + _COUNT]
                for f in range(5):
                    kept[used + f] = leaf[f]
                continue
            else:
                pick[3] = 1 if request[TOLERANCE] > 0 else 0
                least = _needed(leaf, threshold, request[UNIT])
                d = _pick_all(words, request, masks, work, leaf, least, pick, picked, size)
                value = shared(d, leaf[_ANY], leaf[_C], d + leaf[_DEMAND])
                if request[TOLERANCE] > 0:  # that value again, now with the lowest ids
                    pick[3] = 0
                    least = _needed(leaf, value, request[UNIT])
                    d = _pick_all(words, request, masks, work, leaf, least, pick, picked, size)
                    value = shared(d, leaf[_ANY], leaf[_C], d + leaf[_DEMAND])
                if answered == 1 and work[at + _SPREAD] == spread:
                    better = picked[used] - best_picked[used]
                    if better == 0:
                        better = picked[used + 1] - best_picked[used + 1]
                    if better == 0:
                        better = value - out[VALUE]
                    if better == 0:
                        better = _lower_ids(words, request, picked, best_picked)
                    if better <= 0:
                        continue
            answered, spread = 1, work[at + _SPREAD]
            best_picked, picked = picked, best_picked
            out[VALUE], out[STANDALONE] = value, d
        out[VISITED] += visited
        if level >= 0:
            break
        out[COMPLETE] = 2 if turn == request[TIES] or best < 0 else 1
    out[OPTIMUM] = best
    if answered == 0 and best >= 0:  # stopped before any choice was compared
        for u in range(used):
            work[(u + 1) * size + _COUNT] = kept[u]
        for f in range(5):
            leaf[f] = kept[used + f]
        answered, pick[3] = 1, 0
        least = _needed(leaf, best, request[UNIT])
        d = _pick_all(words, request, masks, work, leaf, least, pick, best_picked, size)
        out[VALUE], out[STANDALONE] = best, d
    if answered == 1:
        for u in range(used):
            out[CHOSEN + u] = best_picked[u]
    return answered
