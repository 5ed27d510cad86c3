"""Kernels of the lexicographic max-min over tables of levels.

A table may stand still and then jump (only some sizes are allowed): lifting a job then costs
several GPUs. The level that all can reach is searched; of the jobs on it as many as possible are
lifted, the cheapest first; what is left goes on with those above. Where the cheapest are not the
only way to lift so many, the kernel says so and where.
"""

from __future__ import annotations

import numpy as np

from optsched.kernels.compile import INT, INTS, READ, copy, entry, helper

EXACT, REST, LEVEL = range(3)
"""Places in `facts`: 1 if nothing was ambiguous, GPUs left at the first doubt, bottleneck level."""


@entry(INT, READ, READ, INTS, counted=False)
def falls(ptr, value, facts):  # type: ignore[no-untyped-def]
    """First job whose levels fall, or -1; facts: largest, smallest, 1 if all strictly rise."""
    top = bottom = value[0] if len(value) else 0
    strict = 1
    for j in range(len(ptr) - 1):
        wrong = 0
        for i in range(ptr[j], ptr[j + 1]):
            top, bottom = max(top, value[i]), min(bottom, value[i])
            if i > ptr[j]:
                wrong += value[i] < value[i - 1]
                strict = 0 if value[i] == value[i - 1] else strict
        if wrong > 0:
            return j
    facts[0], facts[1], facts[2] = top, bottom, strict
    return -1


@helper(INT, READ, INT, INT, INT, INT, counted=False)
def _reach(value, p, low, high, level):  # type: ignore[no-untyped-def]
    """First entry of the row at p with at least a level; known to be in low..high."""
    while low < high:
        middle = (low + high) // 2
        if value[p + middle] < level:
            low = middle + 1
        else:
            high = middle
    return low


@helper(INT, READ, READ, READ, INTS, INTS, INTS, INT)
def _search(ptr, value, active, taken, above, top, spare):  # type: ignore[no-untyped-def]
    """Lift all active jobs to the highest common level within `spare`; that level.

    taken: where the jobs are, and then are. above: the first entry beyond the level, or the top.
    top: first entry of the highest level of every row. A job below the level is at its top.
    """
    n = len(taken)
    low, high = np.int64(1) << 62, -(np.int64(1) << 62)
    start = np.empty(n, np.int64)
    base = np.int64(0)
    for j in range(n):
        start[j], above[j] = taken[j], taken[j]
        if active[j] == 1:
            above[j] = top[j]
            low = min(low, value[ptr[j] + taken[j]])
            high = max(high, value[ptr[j] + top[j]])
            base += taken[j]
    high += 1  # more than any job can reach
    tried = np.empty(n, np.int64)
    while high - low > 1:
        level = low + (high - low) // 2
        need = -base
        for j in range(n):
            if active[j] == 1:
                tried[j] = _reach(value, ptr[j], taken[j], above[j], level)
                need += tried[j]
        if need <= spare:
            low = level
            for j in range(n):
                if active[j] == 1:
                    taken[j] = tried[j]
        else:
            high = level
            for j in range(n):
                if active[j] == 1:
                    above[j] = tried[j]
    return low


@entry(INT, READ, READ, INT, INTS, INTS, INTS, INTS)
def climb(ptr, value, spare, taken, active, base, facts):  # type: ignore[no-untyped-def]
    """Raise all rows lexicographically by `spare` entries; taken: (n,), zeros.

    facts gets what is named above; after a doubt `base` holds the entries from which the rest was
    to be shared among the `active`.
    """
    n = len(taken)
    above, top = np.empty(n, np.int64), np.empty(n, np.int64)
    cost, gain = np.empty(n, np.int64), np.empty(n, np.int64)
    facts[EXACT], facts[REST], facts[LEVEL] = 1, 0, 0
    open_jobs = 0
    now = np.empty(n, np.int64)
    for j in range(n):
        size = ptr[j + 1] - ptr[j]
        top[j] = _reach(value, ptr[j], 0, size - 1, value[ptr[j + 1] - 1])
        now[j] = 1 if top[j] > 0 else 0
        open_jobs += now[j]
    before = np.empty(n, np.int64)
    while open_jobs > 0 and spare > 0:
        copy(before, taken)
        level = _search(ptr, value, now, taken, above, top, spare)
        on = 0
        who = np.empty(n, np.int64)
        for j in range(n):
            spare -= taken[j] - before[j]
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
        doubt = facts[EXACT] == 1 and 0 < lifted < on and left > 0
        if doubt and cost[order[lifted]] - cost[order[lifted - 1]] <= left:
            facts[EXACT], facts[REST] = 0, spare
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
    lowest = value[ptr[0] + taken[0]] if n else 0
    for j in range(n):
        lowest = min(lowest, value[ptr[j] + taken[j]])
    facts[LEVEL] = lowest
    return 0


@entry(INT, READ, READ, INT, READ, INT)
def unbeaten(ptr, value, spare, taken, strict):  # type: ignore[no-untyped-def]
    """Whether no answer has a higher lowest level, or fewer jobs on it.

    With strict tables: whether no GPU should have gone elsewhere, that is whether every step taken
    comes before every step left in the order of level before, level after (higher first), job.
    """
    n = len(taken)
    spent = np.int64(0)
    if n == 0:
        return 1
    for j in range(n):
        if taken[j] < 0 or ptr[j] + taken[j] >= ptr[j + 1]:
            return 0
        spent += taken[j]
    if spent > spare:
        return 0
    if strict == 1:
        a = b = -1
        for j in range(n):
            i = ptr[j] + taken[j]
            if taken[j] > 0:
                k = ptr[a] + taken[a] if a >= 0 else 0
                if (
                    a < 0
                    or value[i - 1] > value[k - 1]
                    or (value[i - 1] == value[k - 1] and value[i] <= value[k])
                ):
                    a = j
            if i + 1 < ptr[j + 1]:
                k = ptr[b] + taken[b] if b >= 0 else 0
                if (
                    b < 0
                    or value[i] < value[k]
                    or (value[i] == value[k] and value[i + 1] > value[k + 1])
                ):
                    b = j
        if b < 0:
            return 1
        if spent < spare:
            return 0
        if a < 0:
            return 1
        i, k = ptr[a] + taken[a], ptr[b] + taken[b]
        if value[i - 1] != value[k]:
            return 1 if value[i - 1] < value[k] else 0
        if value[i] != value[k + 1]:
            return 1 if value[i] > value[k + 1] else 0
        return 1 if a < b else 0
    lowest = value[ptr[0] + taken[0]]
    for j in range(n):
        lowest = min(lowest, value[ptr[j] + taken[j]])
    need, on = np.int64(0), 0
    cost = np.empty(n, np.int64)
    stuck = kept = 0
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
    left = spare - need
    order = np.sort(cost[:on])
    lifted = 0
    while lifted < on and order[lifted] <= left:
        left -= order[lifted]
        lifted += 1
    return 1 if kept == stuck + on - lifted and kept > 0 else 0
