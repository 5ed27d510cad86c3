"""Depth-first search over the count vectors of several requests at once: the kernels."""

from __future__ import annotations

from typing import Final

import numpy as np

from optsched.bandwidth.counts import shared
from optsched.bandwidth.rates import NO_LIMIT
from optsched.bandwidth.tables import NETWORK, STEP, WIDTH
from optsched.kernels.compile import INT, INTS, READ, entry, helper

MOST_STATES: Final = 20_000
"""Combinations of bandwidths that one matrix of counts may give rise to."""

MOST_EFFORT: Final = 10_000_000
"""Pairs of such a combination and a host's subsets that are tried for one matrix of counts."""

TABLE: Final = 1 << 16
"""Length of a hash table for them."""

RATIO: Final = 10**9
"""See `optsched.problems.gpus.problem.RATIO`."""

# rules
REQUESTS: Final = 0
HOSTS: Final = 1
WIDE: Final = 2
"""Most GPUs a host + 1."""
TWO_SIDED: Final = 3
CROSS_ONLY: Final = 4
SKIP_IDLE: Final = 5
UNIT: Final = 6
MAX_MIN: Final = 7
STATES: Final = 8
"""Usually `MOST_STATES`, and no more."""
EFFORT: Final = 9
"""Usually `MOST_EFFORT`."""

# a request: its first vector, one behind its last, its best value alone, and the most that it and
# all behind it may add to the objective
REQUEST: Final = 4

# a vector, by falling value alone: that value; highest and lowest standalone bandwidth; capacity
# and demand of running jobs; number of hosts
ALONE: Final = 0
HIGH: Final = 1
LOW: Final = 2
CAPACITY: Final = 3
DEMAND: Final = 4
ACROSS: Final = 5
INFO: Final = 6

# a host: free GPUs, the host before it that is its like or -1, 1 if intra depends on counts only,
# and its first place in `starts`
HOST: Final = 4

# answer
BEST: Final = 0
UPPER: Final = 1
LEVEL: Final = 2
LEAVES: Final = 3
LOST: Final = 4
"""1: some matrix had too many combinations; what it may be worth at most is in `LOST_UPPER`."""
LOST_UPPER: Final = 5
CHOSEN: Final = 6
"""Vectors of all requests, then by host a row of subsets (-1: any)."""

_NEXT: Final = 0
_HEAD: Final = 1


@helper(INT, READ, READ, INT, INT)
def judged(rule, requests, r, value):  # type: ignore[no-untyped-def]
    """What a bandwidth of a request counts for the objective."""
    if rule[MAX_MIN] == 0:
        return value
    best = requests[r * REQUEST + 2]
    return value * RATIO // best if best > 0 else RATIO


@helper(INT, READ, INT, INT)
def joined(rule, a, b):  # type: ignore[no-untyped-def]
    """Two parts of the objective together."""
    return min(a, b) if rule[MAX_MIN] == 1 else a + b


@helper(INT, READ, READ, INT, INT)
def _meet(rule, vectors, a, b):  # type: ignore[no-untyped-def]
    """Whether two vectors have a host in common."""
    n = rule[HOSTS]
    for h in range(n):
        if vectors[a * n + h] > 0 and vectors[b * n + h] > 0:
            return 1
    return 0


@helper(INT, READ, READ, READ, READ, INT, INT)
def _joint(words, rule, vectors, inside, a, b):  # type: ignore[no-untyped-def]
    """Bandwidth of the joint allocations of two vectors; -1 if a pattern is not measured."""
    n, wide = rule[HOSTS], rule[WIDE]
    step, network, width = words[STEP], words[NETWORK], words[WIDTH]
    state = other = 0
    limit = NO_LIMIT
    for h in range(n):
        mine, theirs = vectors[a * n + h], vectors[b * n + h]
        both = mine + theirs
        if both == 0:
            continue
        limit = min(limit, inside[h * wide + both])
        if rule[TWO_SIDED] == 0 or mine > 0:
            state = words[step + state * width + both]
        if theirs > 0:
            other = words[step + other * width + both]
    limit = min(limit, words[network + state])
    if rule[TWO_SIDED] == 1:
        limit = min(limit, words[network + other])
    return limit - limit % rule[UNIT] if limit >= 0 else -1


@helper(INT, READ, READ, INT, INT, INT)
def _tenant(rule, info, mine, theirs, demand):  # type: ignore[no-untyped-def]
    """Whether one vector, with this demand, is a tenant to another that it meets."""
    if info[theirs * INFO + ACROSS] < 2 or (demand == 0 and rule[SKIP_IDLE] == 1):
        return 0
    return 1 if info[mine * INFO + ACROSS] >= 2 or rule[CROSS_ONLY] == 0 else 0


@helper(INT, READ, READ, READ, READ, READ, READ, READ, INTS, INT, INT)
def _place(words, rule, requests, vectors, info, hosts, inside, work, level, v):  # type: ignore[no-untyped-def]
    """Give request `level` the vector v; the bound of what is placed, -1 if it cannot be."""
    n, many = rule[HOSTS], rule[REQUESTS]
    size = _HEAD + 2 * n + 2 * many
    at, to = level * size, (level + 1) * size
    for h in range(n):
        count = vectors[v * n + h]
        load = work[at + _HEAD + h] + count
        if load > hosts[h * HOST]:
            return -1
        work[to + _HEAD + h] = load
        like = hosts[h * HOST + 1]
        same = work[at + _HEAD + n + h]
        if same == 1:
            if count > vectors[v * n + like]:  # hosts that are alike get falling counts
                return -1
            if count < vectors[v * n + like]:
                same = 0
        work[to + _HEAD + n + h] = same
    limits, demands = to + _HEAD + 2 * n, to + _HEAD + 2 * n + many
    before = at + _HEAD + 2 * n
    for r in range(level):
        work[limits + r], work[demands + r] = work[before + r], work[before + many + r]
    work[limits + level], work[demands + level] = info[v * INFO + CAPACITY], info[v * INFO + DEMAND]
    for r in range(level):
        other = work[r * size + _NEXT] - 1
        if _meet(rule, vectors, v, other) == 0:
            continue
        mine = _tenant(rule, info, v, other, info[other * INFO + LOW])
        theirs = _tenant(rule, info, other, v, info[v * INFO + LOW])
        if mine + theirs == 0:
            continue
        joint = _joint(words, rule, vectors, inside, v, other)
        if joint < 0:
            return -1
        if mine == 1:
            work[limits + level] = min(work[limits + level], joint)
            work[demands + level] += info[other * INFO + LOW]
        if theirs == 1:
            work[limits + r] = min(work[limits + r], joint)
            work[demands + r] += info[v * INFO + LOW]
    bound = NO_LIMIT if rule[MAX_MIN] == 1 else 0
    for r in range(level + 1):
        own = v if r == level else work[r * size + _NEXT] - 1
        d = info[own * INFO + HIGH]
        d -= d % rule[UNIT]
        value = shared(d, 1, work[limits + r], d + work[demands + r])
        bound = joined(rule, bound, judged(rule, requests, r, value))
    return bound


@helper(INT, READ, READ, READ, READ, READ, INTS, INTS, INT)
def _exactly(rule, requests, info, chosen, pairs, d, lowest, final):  # type: ignore[no-untyped-def]
    """Objective of vectors with standalone bandwidths d; with `final` 0 a bound for d' <= d.

    pairs: joint bandwidth by two requests, -2 where they do not meet. lowest: of all d'.
    """
    many = rule[REQUESTS]
    total = NO_LIMIT if rule[MAX_MIN] == 1 else 0
    for r in range(many):
        v = chosen[r]
        own = d[r] - d[r] % rule[UNIT]
        capacity, demand = info[v * INFO + CAPACITY], info[v * INFO + DEMAND]
        for other in range(many):
            joint = pairs[r * many + other]
            if other == r or joint == -2:
                continue
            wanted = d[other] if final == 1 else lowest[other]
            if _tenant(rule, info, v, chosen[other], wanted) == 0:
                continue
            if joint < 0:
                return -1
            capacity = min(capacity, joint)
            demand += wanted
        value = shared(own, 1, capacity, own + demand)
        total = joined(rule, total, judged(rule, requests, r, value))
    return total


@helper(
    INT, READ, READ, READ, READ, READ, READ, READ, READ, READ, READ, INTS, INTS, INTS, INT, INTS
)
def _subsets(  # type: ignore[no-untyped-def]
    words,
    rule,
    requests,
    vectors,
    info,
    hosts,
    inside,
    own,
    starts,
    rows,
    states,
    table,
    chosen,
    most,
    out,
):
    """Best disjoint subsets for fixed count vectors: all reachable tuples of bandwidths, by host.

    states: space for MOST_STATES * (requests + 2) numbers a host and one more. table: TABLE numbers
    -1, left as they were. most: the bound of these vectors. Improves `out`; how much was tried.
    """
    many, n, wide = rule[REQUESTS], rule[HOSTS], rule[WIDE]
    length = many + 2
    pairs, lowest = np.full(many * many, -2, np.int64), np.empty(many, np.int64)
    for r in range(many):
        lowest[r] = info[chosen[r] * INFO + LOW]
        for other in range(r):
            if _meet(rule, vectors, chosen[r], chosen[other]) == 1:
                joint = _joint(words, rule, vectors, inside, chosen[r], chosen[other])
                pairs[r * many + other] = pairs[other * many + r] = joint
    used = np.empty(MOST_STATES, np.int64)
    d = np.empty(many, np.int64)
    ends = np.empty(n + 1, np.int64)
    for r in range(many):
        states[r] = info[chosen[r] * INFO + HIGH]
    states[many] = states[many + 1] = -1
    ends[0] = 1
    begin = effort = 0
    for h in range(n):
        code, empty = 0, 1
        for r in range(many - 1, -1, -1):
            count = vectors[chosen[r] * n + h]
            code = code * wide + count
            if count > 0:
                empty = 0
        first, last = 0, 1
        single = empty == 1 or hosts[h * HOST + 2] == 1
        if not single:
            place = hosts[h * HOST + 3] + code
            first, last = starts[place], starts[place + 1]
        kept = np.empty(last - first, np.int64)
        rows_kept = 0
        for row in range(first, last):
            for r in range(many):
                d[r] = states[r] if single else min(states[r], rows[row * many + r])
            if _exactly(rule, requests, info, chosen, pairs, d, lowest, 0) > out[BEST]:
                kept[rows_kept] = row
                rows_kept += 1
        end = ends[h]
        fresh = 0
        effort += last - first + (end - begin) * rows_kept
        if effort > rule[EFFORT]:
            out[LOST] = 1
            out[LOST_UPPER] = max(out[LOST_UPPER], most)
            return effort
        for s in range(begin, end):
            for i in range(rows_kept):
                row = kept[i]
                key = 0
                for r in range(many):
                    limit = NO_LIMIT
                    if not single:
                        limit = rows[row * many + r]
                    elif empty == 0:
                        limit = own[h * wide + vectors[chosen[r] * n + h]]
                    d[r] = min(states[s * length + r], limit)
                    key = (key * 1_000_003 + d[r]) & 0x3FFFFFFFFFFF
                bound = _exactly(rule, requests, info, chosen, pairs, d, lowest, 0)
                if bound <= out[BEST]:
                    continue
                slot = (key ^ key >> 17) & (TABLE - 1)
                found = 0
                while table[slot] >= 0 and found == 0:
                    found = 1
                    for r in range(many):
                        if states[table[slot] * length + r] != d[r]:
                            found = 0
                    if found == 0:
                        slot = (slot + 1) & (TABLE - 1)
                if found == 1:
                    continue
                if fresh == rule[STATES]:
                    out[LOST] = 1
                    out[LOST_UPPER] = max(out[LOST_UPPER], bound)
                    continue
                to = end + fresh
                for r in range(many):
                    states[to * length + r] = d[r]
                states[to * length + many] = s
                states[to * length + many + 1] = -1 if single else row
                table[slot], used[fresh] = to, slot
                fresh += 1
        for i in range(fresh):
            table[used[i]] = -1
        begin = end
        ends[h + 1] = end + fresh
    for s in range(ends[n - 1], ends[n]):
        for r in range(many):
            d[r] = states[s * length + r]
        value = _exactly(rule, requests, info, chosen, pairs, d, lowest, 1)
        if value <= out[BEST]:
            continue
        out[BEST] = value
        for r in range(many):
            out[CHOSEN + r] = chosen[r]
        at = s
        for h in range(n - 1, -1, -1):
            out[CHOSEN + many + h] = states[at * length + many + 1]
            at = states[at * length + many]
    return effort


@entry(INT, READ, READ, READ, READ, READ, READ, READ, READ, READ, READ, INTS, INTS, INTS, INT)
def search(  # type: ignore[no-untyped-def]
    words, rule, requests, vectors, info, hosts, inside, own, starts, rows, states, work, out, nodes
):
    """Go on for so many nodes; 1 if the search is finished.

    All arrays flat, as named above; inside: joint bandwidth by host and count; own: by host and
    count the bandwidth where subsets are alike; starts, rows: subsets of hosts where they are not.
    work: (requests + 1) * (1 + 2 * hosts + 2 * requests) numbers. out[LEVEL] -1 begins.
    """
    many, n = rule[REQUESTS], rule[HOSTS]
    size = _HEAD + 2 * n + 2 * many
    chosen, table = np.empty(many, np.int64), np.full(TABLE, -1, np.int64)
    level = out[LEVEL]
    if level < 0:
        level = 0
        work[_NEXT] = requests[0]
        for h in range(n):
            work[_HEAD + h] = 0
            work[_HEAD + n + h] = 1 if hosts[h * HOST + 1] >= 0 else 0
        work[size - 1] = 0
    while level >= 0 and nodes > 0:
        v = work[level * size + _NEXT]
        if v >= requests[level * REQUEST + 1]:
            level -= 1
            continue
        ahead = judged(rule, requests, level, info[v * INFO + ALONE])
        if level + 1 < many:
            ahead = joined(rule, ahead, requests[(level + 1) * REQUEST + 3])
        if level == 0:
            out[UPPER] = max(ahead, out[BEST])
        else:
            placed = NO_LIMIT if rule[MAX_MIN] == 1 else 0
            for r in range(level):
                d = info[(work[r * size + _NEXT] - 1) * INFO + HIGH]
                d -= d % rule[UNIT]
                base = level * size + _HEAD + 2 * n
                value = shared(d, 1, work[base + r], d + work[base + many + r])
                placed = joined(rule, placed, judged(rule, requests, r, value))
            ahead = joined(rule, ahead, placed)
        if ahead <= out[BEST]:  # and all vectors behind are worth no more
            level -= 1
            continue
        nodes -= 1
        work[level * size + _NEXT] += 1
        bound = _place(words, rule, requests, vectors, info, hosts, inside, work, level, v)
        if bound < 0:
            continue
        if level + 1 < many:
            bound = joined(rule, bound, requests[(level + 1) * REQUEST + 3])
        if bound <= out[BEST]:
            continue
        if level + 1 < many:
            level += 1
            work[level * size + _NEXT] = requests[level * REQUEST]
            continue
        out[LEAVES] += 1
        sure = 1
        for r in range(many):
            chosen[r] = work[r * size + _NEXT] - 1
            if info[chosen[r] * INFO + HIGH] != info[chosen[r] * INFO + LOW]:
                sure = 0
        if sure == 1:
            out[BEST] = bound
            for r in range(many):
                out[CHOSEN + r] = chosen[r]
            for h in range(n):
                out[CHOSEN + many + h] = -1
        else:
            effort = _subsets(
                words, rule, requests, vectors, info, hosts, inside, own, starts, rows, states,
                table, chosen, bound, out,
            )  # fmt: skip
            nodes -= effort // 8
    out[LEVEL] = level
    if level < 0:
        out[UPPER] = out[BEST]
    return 1 if level < 0 else 0


@entry(INT, READ, READ, INT, INT, INT, INTS, INTS)
def assignments(places, intra, many, wide, full, codes, values):  # type: ignore[no-untyped-def]
    """All ways to give a host's free GPUs to requests or nobody: counts as a code, bandwidths.

    places: free local ids. intra: by mask, its `full` numbers. codes: (many + 1)^len(places).
    values: `many` for each.
    """
    masks, counts = np.empty(many, np.int64), np.empty(many, np.int64)
    for a in range(len(codes)):
        for r in range(many):
            masks[r] = counts[r] = 0
        rest = a
        for i in range(len(places)):
            r = rest % (many + 1) - 1
            rest //= many + 1
            if r >= 0:
                masks[r] |= 1 << places[i]
                counts[r] += 1
        code = 0
        for r in range(many - 1, -1, -1):
            code = code * wide + counts[r]
            values[a * many + r] = intra[masks[r]] if masks[r] < full else NO_LIMIT
        codes[a] = code
    return 0
