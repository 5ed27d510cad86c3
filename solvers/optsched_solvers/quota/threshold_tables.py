"""Threshold search over jobs with tables: the largest concave sum, and lexicographic levels.

A row holds what a job has with its minimum, one GPU more, and so on. Every further GPU has a key
that never falls along a row: the level without it, or (sums) what it adds, negated. The threshold
is the key at rank `spare` of all keys; GPUs with smaller keys are handed out.

A table of levels may stand still and then jump (only some sizes are allowed): lifting a job then
costs several GPUs. The level that all can reach is searched; of the jobs on it as many as possible
are lifted, the cheapest first; what is left goes on with those above. Where the cheapest are not
the only way to lift so many, the kernel says so and where.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numba import types

from optsched.kernels.compile import INT, INTS, READ, copy, entry, helper

SUM, LEVELS = range(2)
"""Goals."""

# what `hand_out` tells in `facts`; after a doubt the rest is to be shared anew from `base`
FAULT, TOP, BOTTOM, STRICT, REST, VALUE, BOUND, PRICE, HOLDS, LOWEST = range(10)
"""How often rows are none of the goal's; largest and smallest entry; 1 if all rows rise at
every GPU; GPUs left at the first doubt, -1 without one; of the answer: value, bound, price of a
GPU, 1 if it is proved, 1 if only the lowest level is."""
FACTS: Final = 10

_SAMPLE: Final = 512
_FEW: Final = 2048


@entry(INT, INT, INT, READ, READ, INT, INTS, INTS, INTS, INTS)
def hand_out(goal, prove, ptr, value, spare, taken, base, active, facts):  # type: ignore[no-untyped-def]
    """Entries of every row, or the proof of those in `taken`; 0 if the rows are of the goal.

    taken: zeros, filled. base, active: after a doubt the entries from which the rest is to be
    shared, and 1 for the jobs that may still rise.
    """
    if prove == 1:
        if goal == SUM:
            _prove_sum(ptr, value, spare, taken, facts)
        else:
            _prove_levels(ptr, value, spare, taken, facts)
        return 0
    _survey(goal, ptr, value, facts)
    large = np.int64(1) << 61  # beyond it differences could overflow
    if facts[FAULT] > 0 or facts[TOP] > large or facts[BOTTOM] < -large:
        return 1
    if goal == SUM:
        _largest_sum(ptr, value, spare, taken)
    else:
        _climb(ptr, value, spare, taken, base, active, facts)
    return 0


@helper(INT, INT, READ, READ, INTS, counted=False)
def _survey(goal, ptr, value, facts):  # type: ignore[no-untyped-def]
    """What the rows are like: the first four facts."""
    n = len(value)
    top = bottom = value[0] if n else np.int64(0)
    wrong = flat = np.int64(0)
    for i in range(n):
        top, bottom = max(top, value[i]), min(bottom, value[i])
    for i in range(1, n):  # across the ends of rows too, which is put right below
        flat += value[i] <= value[i - 1]
    if goal == SUM:
        for i in range(1, n - 1):
            wrong += value[i + 1] - value[i] > value[i] - value[i - 1]
    else:
        for i in range(1, n):
            wrong += value[i] < value[i - 1]
    for j in range(len(ptr) - 1):
        wrong -= _outside(goal, value, ptr[j], ptr[j + 1], n)
        flat -= ptr[j] > 0 and value[ptr[j]] <= value[ptr[j] - 1]
    facts[FAULT], facts[TOP], facts[BOTTOM] = wrong, top, bottom
    facts[STRICT] = 1 if flat == 0 else 0
    facts[REST] = -1
    return 0


@helper(INT, INT, READ, INT, INT, INT, counted=False)
def _outside(goal, value, first, end, n):  # type: ignore[no-untyped-def]
    """What `_survey` counts wrongly where a row begins and ends."""
    if goal == LEVELS:
        return 1 if first > 0 and value[first] < value[first - 1] else 0
    count = 0
    if 0 < first < n - 1:
        count += value[first + 1] - value[first] > value[first] - value[first - 1]
    if first != end - 1 and 0 < end - 1 < n - 1:
        count += value[end] - value[end - 1] > value[end - 1] - value[end - 2]
    return count


@helper(INT, READ, INT, INT, counted=False)
def _key(value, i, goal):  # type: ignore[no-untyped-def]
    """Of the GPU after entry i."""
    return value[i] if goal == LEVELS else value[i] - value[i + 1]


@helper(INT, READ, INT, INT, INT, INT, INT, counted=False)
def _reach(value, p, low, high, key, goal):  # type: ignore[no-untyped-def]
    """GPUs of the row at p with smaller keys; known to be in low..high."""
    while low < high:
        middle = (low + high) // 2
        if _key(value, p + middle, goal) < key:
            low = middle + 1
        else:
            high = middle
    return low


@helper(INT, READ, READ, INTS, INTS, INT, INT)
def _threshold(ptr, value, low, high, spare, goal):  # type: ignore[no-untyped-def]
    """The key at rank `spare`, of all GPUs between `low` and `high` of every row.

    There are more than `spare` of them. low: moved up to all that have smaller keys; high: moved
    down to what may have keys of at most the threshold. Keys to try are picked from a sample on
    either side of the aim, so two of them leave few GPUs open.
    """
    n = len(low)
    sample = np.empty(max(2 * _SAMPLE, _FEW) + 1, np.int64)
    tried = np.empty(n, np.int64)
    while True:
        left = np.int64(0)
        for j in range(n):
            left += high[j] - low[j]
        stride = 1 if left <= _FEW else left // _SAMPLE
        at, m = stride // 2, 0
        for j in range(n):
            while at < high[j] - low[j] and m < len(sample):
                sample[m] = _key(value, ptr[j] + low[j] + at, goal)
                m += 1
                at += stride
            at -= high[j] - low[j]
        keys = np.sort(sample[:m])
        if stride == 1:
            key = keys[spare]
            for j in range(n):
                low[j] = _reach(value, ptr[j], low[j], high[j], key, goal)
            return key
        part = spare / left
        spread = 1.0 + 2.0 * np.sqrt(m * part * (1.0 - part))
        before = left
        for side in range(2):
            pick = int(part * m + (spread if side == 0 else -spread))
            key = keys[min(max(pick, 0), m - 1)]
            smaller = np.int64(0)
            for j in range(n):
                tried[j] = _reach(value, ptr[j], low[j], high[j], key, goal)
                smaller += tried[j] - low[j]
            if smaller > spare:
                copy(high, tried)
                left = smaller
            else:
                spare -= smaller
                left -= smaller
                copy(low, tried)
        if spare == 0:  # the first of what is left
            key = np.int64(1) << 62
            for j in range(n):
                if low[j] < high[j]:
                    key = min(key, _key(value, ptr[j] + low[j], goal))
            return key
        if left == before:  # only ties of the smallest key are left, or nearly so
            key = keys[0]
            smaller = np.int64(0)
            for j in range(n):
                tried[j] = _reach(value, ptr[j], low[j], high[j], key + 1, goal)
                smaller += tried[j] - low[j]
            if smaller > spare:
                return key
            spare -= smaller
            copy(low, tried)


# sums


@helper(INT, READ, READ, INT, INTS)
def _largest_sum(ptr, value, spare, taken):  # type: ignore[no-untyped-def]
    """Take the `spare` largest positive increments, ties by id (Fox 1966)."""
    n = len(taken)
    high = np.empty(n, np.int64)
    hope = np.int64(0)
    for j in range(n):
        high[j] = _reach(value, ptr[j], 0, ptr[j + 1] - ptr[j] - 1, 0, SUM)
        hope += high[j]
    if hope <= spare:
        copy(taken, high)
        return 0
    key = _threshold(ptr, value, taken, high, spare, SUM)
    for j in range(n):
        spare -= taken[j]
    for j in range(n):
        if spare == 0:
            break
        more = _reach(value, ptr[j], taken[j], high[j], key + 1, SUM) - taken[j]
        taken[j] += min(more, spare)
        spare -= min(more, spare)
    return 0


@helper(INT, READ, READ, INT, INTS, INTS, counted=False)
def _prove_sum(ptr, value, spare, taken, facts):  # type: ignore[no-untyped-def]
    """Whether the sum equals its Lagrangian bound at the largest increment left (or 0).

    The bound sum_j max_k (u_j(k) - price k) + price * spare holds for all utilities, concave or
    not.
    """
    price = total = spent = wrong = np.int64(0)
    for j in range(len(taken)):
        i = ptr[j] + taken[j]
        wrong += (taken[j] < 0) | (i >= ptr[j + 1])
        if wrong == 0:
            total += value[i]
            spent += taken[j]
            if i + 1 < ptr[j + 1]:
                price = max(price, value[i + 1] - value[i])
    bound = price * spare
    for j in range(len(taken)):
        p = ptr[j]
        best = value[p]
        for k in range(ptr[j + 1] - p):
            net = value[p + k] - price * k
            best = net if net > best else best
        bound += best
    facts[VALUE], facts[BOUND], facts[PRICE] = total, bound, price
    facts[HOLDS] = 1 if wrong == 0 and spent <= spare and total == bound else 0
    return 0


# levels


@helper(types.UniTuple(INT, 2), READ, READ, INTS, INTS, INTS, INT)
def _lift(ptr, value, active, taken, top, spare):  # type: ignore[no-untyped-def]
    """Lift all active jobs to the highest common level within `spare`; it, and GPUs left.

    taken: where the jobs are, and then are. top: first entry of the highest level of every row. A
    job below the level is at its top.
    """
    n = len(taken)
    high = np.empty(n, np.int64)
    keys, spent = np.int64(0), np.int64(0)
    for j in range(n):
        high[j] = top[j] if active[j] == 1 else taken[j]
        keys += high[j] - taken[j]
        spent -= taken[j]
    level = np.int64(1) << 62
    if keys <= spare:
        copy(taken, high)
    else:
        level = _threshold(ptr, value, taken, high, spare, LEVELS)
    for j in range(n):
        spent += taken[j]
    return level, spare - spent


@helper(INT, READ, READ, INT, INTS, INTS, INTS, INTS)
def _climb(ptr, value, spare, taken, base, active, facts):  # type: ignore[no-untyped-def]
    """Raise all rows lexicographically by `spare` entries."""
    n = len(taken)
    above, top, now = np.empty(n, np.int64), np.empty(n, np.int64), np.empty(n, np.int64)
    cost, gain, who = np.empty(n, np.int64), np.empty(n, np.int64), np.empty(n, np.int64)
    open_jobs = 0
    for j in range(n):
        last = ptr[j + 1] - 1
        top[j] = _reach(value, ptr[j], 0, last - ptr[j], value[last], LEVELS)
        now[j] = 1 if top[j] > 0 else 0
        open_jobs += now[j]
    while open_jobs > 0 and spare > 0:
        level, spare = _lift(ptr, value, now, taken, top, spare)
        on = 0
        for j in range(n):
            if now[j] == 1 and taken[j] == top[j]:
                now[j] = 0
            elif now[j] == 1 and value[ptr[j] + taken[j]] == level:
                above[j] = _reach(value, ptr[j], taken[j], top[j], level + 1, LEVELS)
                cost[on], gain[on] = above[j] - taken[j], -value[ptr[j] + above[j]]
                who[on] = j
                on += 1
        order = np.argsort(gain[:on], kind="mergesort")
        order = order[np.argsort(cost[:on][order], kind="mergesort")]
        left, lifted = spare, 0
        while lifted < on and cost[order[lifted]] <= left:
            left -= cost[order[lifted]]
            lifted += 1
        doubt = facts[REST] < 0 and 0 < lifted < on and left > 0
        if doubt and cost[order[lifted]] - cost[order[lifted - 1]] <= left:
            facts[REST] = spare
            copy(base, taken)
            copy(active, now)
        for i in range(on):
            j = who[order[i]]
            if i < lifted:
                taken[j] = above[j]
            if i >= lifted or taken[j] == top[j]:
                now[j] = 0
        spare = left
        open_jobs = 0
        for j in range(n):
            open_jobs += now[j]
    return 0


@helper(INT, READ, READ, INT, INTS, INTS)
def _prove_levels(ptr, value, spare, taken, facts):  # type: ignore[no-untyped-def]
    """Whether no answer has a higher lowest level, or fewer jobs on it.

    With rows that rise at every GPU: whether no GPU should have gone elsewhere, that is whether
    every step taken comes before every step left in the order of level before, level after (higher
    first), job.
    """
    n = len(taken)
    facts[HOLDS] = facts[LOWEST] = 0
    spent = np.int64(0)
    lowest = value[ptr[0] + taken[0]] if n else 0
    for j in range(n):
        if taken[j] < 0 or ptr[j] + taken[j] >= ptr[j + 1]:
            return 0
        spent += taken[j]
        lowest = min(lowest, value[ptr[j] + taken[j]])
    facts[VALUE] = lowest
    if spent > spare:
        return 0
    need, on, stuck, kept = np.int64(0), 0, 0, 0
    cost = np.empty(n, np.int64)
    for j in range(n):  # all at or above the lowest level, then as many as possible beyond it
        last = ptr[j + 1] - ptr[j] - 1
        at = _reach(value, ptr[j], 0, last, lowest, LEVELS)
        need += at
        kept += value[ptr[j] + taken[j]] == lowest
        if value[ptr[j] + at] == lowest:
            beyond = _reach(value, ptr[j], at, last, lowest + 1, LEVELS)
            if value[ptr[j] + beyond] > lowest:
                cost[on] = beyond - at
                on += 1
            else:
                stuck += 1
    left, lifted = spare - need, 0
    order = np.sort(cost[:on])
    while lifted < on and order[lifted] <= left:
        left -= order[lifted]
        lifted += 1
    facts[LOWEST] = 1 if n == 0 or stuck > 0 or lifted < on else 0
    facts[HOLDS] = 1 if n == 0 or (kept == stuck + on - lifted and kept > 0) else 0
    if facts[STRICT] == 1:
        facts[HOLDS] = _in_order(ptr, value, spare - spent, taken)
    return 0


@helper(INT, READ, READ, INT, INTS, counted=False)
def _in_order(ptr, value, rest, taken):  # type: ignore[no-untyped-def]
    """1 if every step taken comes before every step left, and a rest finds none."""
    a = b = -1  # jobs of the last step taken, and of the first one left
    for j in range(len(taken)):
        i = ptr[j] + taken[j]
        if taken[j] > 0 and (a < 0 or _precedes(value, ptr[a] + taken[a] - 1, i - 1) == 1):
            a = j
        if i + 1 < ptr[j + 1] and (b < 0 or _precedes(value, ptr[b] + taken[b], i) == 0):
            b = j
    if b < 0:
        return 1
    if rest > 0 or a < 0:
        return 0 if rest > 0 else 1
    i, k = ptr[a] + taken[a] - 1, ptr[b] + taken[b]
    equal = value[i] == value[k] and value[i + 1] == value[k + 1]
    return (1 if a < b else 0) if equal else _precedes(value, i, k)


@helper(INT, READ, INT, INT, counted=False)
def _precedes(value, i, k):  # type: ignore[no-untyped-def]
    """1 if the step from entry i comes before that from k, or is its equal."""
    if value[i] != value[k]:
        return 1 if value[i] < value[k] else 0
    return 1 if value[i + 1] >= value[k + 1] else 0
