"""Depth-first search over hosts and candidate subsets of each: the kernel of `subsets`."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final

import numpy as np

from optsched.bandwidth.counts import shared
from optsched.bandwidth.rates import NO_LIMIT
from optsched.bandwidth.tables import BOUND, COLUMNS, NETWORK, STEP, WIDTH
from optsched.kernels.compile import INT, INTS, READ, entry, helper

if TYPE_CHECKING:
    from optsched.model.schedule import IntArray

# the rules of a request
K: Final = 0
USED: Final = 1
JOBS: Final = 2
BALANCE: Final = 3
MIN_HOSTS: Final = 4
MAX_HOSTS: Final = 5
SAME_TYPE: Final = 6
TWO_SIDED: Final = 7
CROSS_ONLY: Final = 8
UNIT: Final = 9
SLICE: Final = 10

# a host: first candidate, one behind the last, must it be used, type, slice domain, domain, and
# free GPUs of the hosts from here on
HOST: Final = 7

# a candidate: count, own bandwidth, then the joint one with every job
_COUNT: Final = 0
_OWN: Final = 1
_JOINT: Final = 2

# a job: demand, state and limit (of S's side, then its own) on hosts that cannot be used, then its
# GPUs by host of the search
_BASE: Final = 5

# the answer, and where the search stands
VALUE: Final = 0
LEAVES: Final = 1
LEVEL: Final = 2
UPPER: Final = 3
STANDALONE: Final = 4
SHARED: Final = 5
CAPACITY: Final = 6
DEMAND: Final = 7
CHOSEN: Final = 8

# a level: the candidates of the hosts before it are chosen
_STATE: Final = 0
_LEFT: Final = 1
_INTRA: Final = 2
_HOSTS: Final = 3
_LEAST: Final = 4
_MOST: Final = 5
_TYPE: Final = 6
_DOMAIN: Final = 7
_CHOSEN: Final = 8
_NEXT: Final = 9
_END: Final = 10
_LEVEL: Final = 11

_STATE_A: Final = 0
_INTRA_A: Final = 1
_STATE_B: Final = 2
_INTRA_B: Final = 3
_TOUCHED: Final = 4
_AHEAD: Final = 5
_JOB: Final = 6


def level_size(jobs: int) -> int:
    """Numbers that a level of the search takes in its working array."""
    return _LEVEL + _JOB * jobs


@cache
def sizes(n: int) -> IntArray:
    """Number of bits of 0 .. 2^n - 1."""
    found = np.zeros(1 << n, np.int64)
    for i in range(n):
        found[1 << i : 2 << i] = found[: 1 << i] + 1
    return found


def submasks(mask: int) -> IntArray:
    """All subsets of a mask, the empty one included."""
    found = np.zeros(1, np.int64)
    for i in range(mask.bit_length()):
        if mask >> i & 1:
            found = np.concatenate([found, found | 1 << i])
    return found


@entry(INTS, READ, INT)
def pareto(table, width):  # type: ignore[no-untyped-def]
    """Flags of the rows that no other row of the same first number beats or equals in all others.

    table: rows of `width` numbers, sorted by the first, then falling; of equals the first stays.
    """
    rows = len(table) // width
    kept = np.zeros(rows, np.int64)
    first = 0
    for r in range(rows):
        if table[r * width] != table[first * width]:
            first = r
        beaten = 0
        for other in range(first, r):
            if kept[other] == 0:
                continue
            beaten = 1
            for f in range(1, width):
                if table[other * width + f] < table[r * width + f]:
                    beaten = 0
                    break
            if beaten == 1:
                break
        kept[r] = 1 - beaten
    return kept


@helper(INT, READ, READ, READ, READ, READ, INTS, INT, INT)
def _descend(words, rule, hosts, candidates, jobs, work, level, c):  # type: ignore[no-untyped-def]
    """Fill the next level with candidate c of the host of this one; 0 if a rule forbids it."""
    n_jobs, used = rule[JOBS], rule[USED]
    size = _LEVEL + _JOB * n_jobs
    at = level * size
    to = at + size
    host = level * HOST
    row = c * (_JOINT + n_jobs)
    count = candidates[row + _COUNT]
    for f in range(_CHOSEN):
        work[to + f] = work[at + f]
    left = work[at + _LEFT] - count
    ahead = hosts[host + HOST + 6] if level + 1 < used else 0
    if left < 0 or left > ahead:
        return 0
    if count == 0:
        if hosts[host + 2] == 1:
            return 0
    else:
        least, most = min(work[at + _LEAST], count), max(work[at + _MOST], count)
        number = work[at + _HOSTS] + 1
        if most - least > rule[BALANCE] or number > rule[MAX_HOSTS]:
            return 0
        if number > 1 and rule[SAME_TYPE] == 1 and hosts[host + 3] != work[at + _TYPE]:
            return 0
        if number > 1 and hosts[host + 5] != work[at + _DOMAIN]:
            return 0
        work[to + _STATE] = words[words[STEP] + work[at + _STATE] * words[WIDTH] + count]
        work[to + _LEFT] = left
        work[to + _INTRA] = min(work[at + _INTRA], candidates[row + _OWN])
        work[to + _HOSTS], work[to + _LEAST], work[to + _MOST] = number, least, most
        work[to + _TYPE], work[to + _DOMAIN] = hosts[host + 3], hosts[host + 5]
    work[to + _CHOSEN] = c
    for j in range(n_jobs):
        a, b = at + _LEVEL + j * _JOB, to + _LEVEL + j * _JOB
        for f in range(_JOB):
            work[b + f] = work[a + f]
        held = jobs[j * (_BASE + used) + _BASE + level]
        both = held + count
        work[b + _AHEAD] -= held
        if both == 0:
            continue
        limit = candidates[row + _JOINT + j]
        if rule[TWO_SIDED] == 0 or count > 0:
            work[b + _STATE_A] = words[words[STEP] + work[a + _STATE_A] * words[WIDTH] + both]
            work[b + _INTRA_A] = min(work[a + _INTRA_A], limit)
        if held > 0:
            work[b + _STATE_B] = words[words[STEP] + work[a + _STATE_B] * words[WIDTH] + both]
            work[b + _INTRA_B] = min(work[a + _INTRA_B], limit)
            if count > 0:
                work[b + _TOUCHED] = 1
    return 1


@helper(INT, READ, INT, INT)
def _most(words, state, left):  # type: ignore[no-untyped-def]
    """Largest limit of all patterns that contain the state's and have so many GPUs more."""
    columns = words[COLUMNS]
    return words[words[BOUND] + state * columns + (left if columns > 1 else 0)]


@helper(INT, READ, READ, READ, INTS, INT)
def _hope(words, rule, jobs, work, at):  # type: ignore[no-untyped-def]
    """Upper bound of the value of every choice below the level at `at`; negative: there is none."""
    left = work[at + _LEFT]
    d = min(work[at + _INTRA], _most(words, work[at + _STATE], left))
    if d <= 0 or (rule[CROSS_ONLY] == 1 and work[at + _HOSTS] < 2 and left == 0):
        return d
    any_job, capacity, demand = 0, NO_LIMIT, 0
    for j in range(rule[JOBS]):
        a = at + _LEVEL + j * _JOB
        if work[a + _TOUCHED] == 0:
            continue
        any_job = 1
        demand += jobs[j * (_BASE + rule[USED])]
        capacity = min(capacity, work[a + _INTRA_A])
        if rule[TWO_SIDED] == 1:
            capacity = min(capacity, work[a + _INTRA_B])
        else:
            joint = _most(words, work[a + _STATE_A], left + work[a + _AHEAD])
            capacity = min(capacity, joint)
    return shared(d, any_job, capacity, d + demand)


@helper(INT, READ, READ, READ, INTS, INT, INTS)
def _worth(words, rule, jobs, work, at, leaf):  # type: ignore[no-untyped-def]
    """Value of the choice that ends at `at`, -1 if a pattern is not measured; fills `leaf`."""
    limit, unit = words[words[NETWORK] + work[at + _STATE]], rule[UNIT]
    if limit < 0:
        return -1
    d = min(limit, work[at + _INTRA])
    d -= d % unit
    leaf[0], leaf[1], leaf[2], leaf[3] = d, 0, NO_LIMIT, 0
    if rule[CROSS_ONLY] == 1 and work[at + _HOSTS] < 2:
        return d
    for j in range(rule[JOBS]):
        a = at + _LEVEL + j * _JOB
        if work[a + _TOUCHED] == 0:
            continue
        limit = words[words[NETWORK] + work[a + _STATE_A]]
        joint = min(limit, work[a + _INTRA_A])
        if rule[TWO_SIDED] == 1:
            other = words[words[NETWORK] + work[a + _STATE_B]]
            limit = min(limit, other)
            joint = min(joint, min(other, work[a + _INTRA_B]))
        if limit < 0:
            return -1
        leaf[1] = 1
        leaf[2] = min(leaf[2], joint - joint % unit)
        leaf[3] += jobs[j * (_BASE + rule[USED])]
    return shared(d, leaf[1], leaf[2], d + leaf[3])


@helper(INT, READ, READ, READ, INTS, INT)
def _in_slices(rule, hosts, candidates, work, size):  # type: ignore[no-untyped-def]
    """Whether the counts of every slice domain are whole slices."""
    used = rule[USED]
    for u in range(used):
        total = 0
        for w in range(used):
            if hosts[w * HOST + 4] == hosts[u * HOST + 4]:
                c = work[(w + 1) * size + _CHOSEN]
                total += candidates[c * (_JOINT + rule[JOBS]) + _COUNT]
        if total % rule[SLICE] != 0:
            return 0
    return 1


@helper(INT, READ, READ, READ, READ, READ, INTS, INTS, INT, INT)
def _open(words, rule, hosts, candidates, jobs, work, order, level, best):  # type: ignore[no-untyped-def]
    """List the candidates of a level whose bound is above `best`, by falling bound."""
    size = _LEVEL + _JOB * rule[JOBS]
    at, row = level * size, level * (len(order) // rule[USED])
    found = 0
    for c in range(hosts[level * HOST], hosts[level * HOST + 1]):
        if _descend(words, rule, hosts, candidates, jobs, work, level, c) == 0:
            continue
        hope = _hope(words, rule, jobs, work, at + size)
        if hope <= best:
            continue
        i = found
        while i > 0 and order[row + 2 * i - 1] < hope:
            order[row + 2 * i], order[row + 2 * i + 1] = (
                order[row + 2 * i - 2],
                order[row + 2 * i - 1],
            )
            i -= 1
        order[row + 2 * i], order[row + 2 * i + 1] = c, hope
        found += 1
    work[at + _NEXT], work[at + _END] = 0, found
    return found


@entry(INT, READ, READ, READ, READ, READ, INTS, INTS, INTS, INT)
def search(words, rule, hosts, candidates, jobs, work, order, out, nodes):  # type: ignore[no-untyped-def]
    """Go on with the search for so many nodes; 1 if it is finished.

    words: `CountTables.words`. rule, hosts, candidates, jobs: as named above, flat. work: a level
    for every host and one. order: candidate and bound for every host and candidate. out: as named
    above; LEVEL -1 begins.
    """
    used, n_jobs = rule[USED], rule[JOBS]
    size = _LEVEL + _JOB * n_jobs
    wide = len(order) // used
    leaf = np.zeros(4, np.int64)
    level = out[LEVEL]
    if level < 0:
        level = 0
        work[_STATE], work[_LEFT], work[_INTRA], work[_HOSTS] = 0, rule[K], NO_LIMIT, 0
        work[_LEAST], work[_MOST], work[_TYPE], work[_DOMAIN] = NO_LIMIT, 0, -1, -1
        for j in range(n_jobs):
            a, base = _LEVEL + j * _JOB, j * (_BASE + used)
            for f in range(4):
                work[a + f] = jobs[base + 1 + f]
            work[a + _TOUCHED] = work[a + _AHEAD] = 0
            for u in range(used):
                work[a + _AHEAD] += jobs[base + _BASE + u]
        _open(words, rule, hosts, candidates, jobs, work, order, 0, out[VALUE])
    while level >= 0 and nodes > 0:
        at = level * size
        i = work[at + _NEXT]
        if i >= work[at + _END] or order[level * wide + 2 * i + 1] <= out[VALUE]:
            level -= 1
            continue
        nodes -= 1
        work[at + _NEXT] += 1
        if level == 0:
            out[UPPER] = order[1 + 2 * i]
        c = order[level * wide + 2 * i]
        _descend(words, rule, hosts, candidates, jobs, work, level, c)
        if level + 1 < used:
            level += 1
            _open(words, rule, hosts, candidates, jobs, work, order, level, out[VALUE])
            continue
        end = at + size
        out[LEAVES] += 1
        if work[end + _HOSTS] < rule[MIN_HOSTS]:
            continue
        if rule[SLICE] > 0 and _in_slices(rule, hosts, candidates, work, size) == 0:
            continue
        value = _worth(words, rule, jobs, work, end, leaf)
        if value > out[VALUE]:
            out[VALUE], out[STANDALONE], out[SHARED] = value, leaf[0], leaf[1]
            out[CAPACITY], out[DEMAND] = leaf[2], leaf[3]
            for u in range(used):
                out[CHOSEN + u] = work[(u + 1) * size + _CHOSEN]
    out[LEVEL] = level
    out[UPPER] = max(out[UPPER], out[VALUE])
    return 1 if level < 0 else 0
