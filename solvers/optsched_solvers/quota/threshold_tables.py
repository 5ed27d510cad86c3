"""Threshold search over jobs with tables: lexicographic levels, and concave sums.

A row holds the levels that a job has with its minimum, one GPU more, and so on; it never falls. The
key of a further GPU is the level without it. The threshold is the key at rank `spare` of all keys;
GPUs with smaller keys are handed out.

A row may stand still and then jump (only some sizes are allowed): lifting a job then costs several
GPUs. The level that all can reach is searched; of the jobs on it as many as possible are lifted,
the cheapest first; what is left goes on with those above. Where the cheapest are not the only way
to lift so many, the kernel says so and where.

What every GPU adds to a concave utility, negated, never falls either: GPUs with the smallest of
these keys make the largest sum.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numba import types

from optsched.kernels.compile import INT, INTS, READ, copy, entry, helper

CLIMB, PROVE, SUM, PROVE_SUM = range(4)
"""Tasks of `hand_out`: levels, a proof of their answer, and the same for sums."""

# what `hand_out` tells in `facts`; after a doubt the rest is to be shared anew from `base`
FALLS, TOP, BOTTOM, STRICT, REST, VALUE, HOLDS, LOWEST, BOUND, PRICE = range(10)
"""How often rows fall, or their increments grow; largest and smallest entry; 1 if all rows rise at
every GPU; GPUs left at the first doubt, -1 without one; of the answer: its lowest level or sum, 1
if it is proved, 1 if only the lowest level is, and of a sum its bound and the price of a GPU."""
FACTS: Final = 10
LARGEST: Final = 2**61
"""Beyond it differences of levels could overflow."""

_SAMPLE: Final = 512
_FEW: Final = 256


@entry(INT, INT, READ, READ, INT, INTS, INTS, INTS, INTS)
def hand_out(task, ptr, value, spare, taken, base, active, facts):  # type: ignore[no-untyped-def]
    """Entries of every row, or the proof of those in `taken`; 0 if the rows are right.

    taken: zeros, filled. base, active: after a doubt the entries from which the rest is to be
    shared, and 1 for the jobs that may still rise.
    """
    if task == PROVE:
        facts[STRICT] = 1 if _smaller(ptr, value, 1) == 0 else 0
        _prove(ptr, value, spare, taken, facts)
        return 0
    if task == PROVE_SUM:
        _prove_sum(ptr, value, spare, taken, facts)
        return 0
    top = bottom = value[0] if len(value) else np.int64(0)
    for i in range(len(value)):
        top, bottom = max(top, value[i]), min(bottom, value[i])
    facts[TOP], facts[BOTTOM], facts[REST] = top, bottom, -1
    if task == SUM:
        _largest_sum(ptr, value, spare, taken, base, active, facts)
        return 0
    facts[FALLS] = _smaller(ptr, value, 0)
    if facts[FALLS] > 0 or top > LARGEST or bottom < -LARGEST:
        return 1
    _climb(ptr, value, spare, taken, base, active, facts)
    return 0


@helper(INT, READ, READ, INT, counted=False)
def _smaller(ptr, value, least):  # type: ignore[no-untyped-def]
    """How many steps along rows are smaller than `least`."""
    found = np.int64(0)
    for i in range(1, len(value)):  # across the ends of rows too, which is put right below
        found += value[i] < value[i - 1] + least
    for j in range(1, len(ptr) - 1):
        found -= value[ptr[j]] < value[ptr[j] - 1] + least
    return found


@helper(INT, READ, INT, INT, INT, INT, counted=False)
def _reach(value, p, low, high, key):  # type: ignore[no-untyped-def]
    """GPUs of the row at p with smaller keys; known to be in low..high."""
    while low < high:
        middle = (low + high) // 2
        if value[p + middle] < key:
            low = middle + 1
        else:
            high = middle
    return low


@helper(INT, READ, READ, INTS, INTS, INT)
def _threshold(ptr, value, low, high, spare):  # type: ignore[no-untyped-def]
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
        stride = 1 if left <= _FEW else (8 if left < 8 * _SAMPLE else left // _SAMPLE)
        at, m = stride // 2, 0
        for j in range(n):
            while at < high[j] - low[j] and m < len(sample):
                sample[m] = value[ptr[j] + low[j] + at]
                m += 1
                at += stride
            at -= high[j] - low[j]
        keys = np.sort(sample[:m])
        if stride == 1:
            key = keys[spare]
            for j in range(n):
                low[j] = _reach(value, ptr[j], low[j], high[j], key)
            return key
        part = spare / left
        spread = 1.0 + 2.0 * np.sqrt(m * part * (1.0 - part))
        before = left
        for side in range(2):
            pick = int(part * m + (spread if side == 0 else -spread))
            key = keys[min(max(pick, 0), m - 1)]
            smaller = np.int64(0)
            for j in range(n):
                tried[j] = _reach(value, ptr[j], low[j], high[j], key)
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
                    key = min(key, value[ptr[j] + low[j]])
            return key
        if left == before:  # only ties of the smallest key are left, or nearly so
            key = keys[0]
            smaller = np.int64(0)
            for j in range(n):
                tried[j] = _reach(value, ptr[j], low[j], high[j], key + 1)
                smaller += tried[j] - low[j]
            if smaller > spare:
                return key
            spare -= smaller
            copy(low, tried)


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
        level = _threshold(ptr, value, taken, high, spare)
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
        top[j] = _reach(value, ptr[j], 0, last - ptr[j], value[last])
        now[j] = 1 if top[j] > 0 else 0
        open_jobs += now[j]
    while open_jobs > 0 and spare > 0:
        level, spare = _lift(ptr, value, now, taken, top, spare)
        on = 0
        for j in range(n):
            if now[j] == 1 and taken[j] == top[j]:
                now[j] = 0
            elif now[j] == 1 and value[ptr[j] + taken[j]] == level:
                above[j] = _reach(value, ptr[j], taken[j], top[j], level + 1)
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
def _prove(ptr, value, spare, taken, facts):  # type: ignore[no-untyped-def]
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
        at = _reach(value, ptr[j], 0, last, lowest)
        need += at
        kept += value[ptr[j] + taken[j]] == lowest
        if value[ptr[j] + at] == lowest:
            beyond = _reach(value, ptr[j], at, last, lowest + 1)
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


@helper(INT, READ, READ, INT, INTS, INTS, INTS, INTS)
def _largest_sum(ptr, value, spare, taken, top, active, facts):  # type: ignore[no-untyped-def]
    """Take the `spare` largest positive increments, ties by id (Fox 1966), if they never grow."""
    n, m = len(taken), len(value)
    key = np.empty(m, np.int64)  # of the GPU after every entry, the largest after a row's last one
    for i in range(m - 1):
        key[i] = value[i] - value[i + 1]
    for j in range(n):
        key[ptr[j + 1] - 1] = np.int64(1) << 62
    facts[FALLS] = _smaller(ptr, key, 0)
    if facts[FALLS] > 0:
        return 1
    for j in range(n):
        active[j], top[j] = 1, ptr[j + 1] - ptr[j] - 1
    last, spare = _lift(ptr, key, active, taken, top, spare)
    for j in range(n):
        if last >= 0:  # there are GPUs for all that add something
            taken[j] = _reach(key, ptr[j], 0, top[j], 0)
        elif spare == 0:
            break
        else:
            more = min(_reach(key, ptr[j], taken[j], top[j], last + 1) - taken[j], spare)
            taken[j] += more
            spare -= more
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
