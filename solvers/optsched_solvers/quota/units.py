"""Hands out GPUs one by one to the lowest key, without doing so one by one.

The k-th further GPU of job j has the key (step*k + offset) / w_j. With step 1, offset 0 the key is
the level that the job has without it: weighted max-min. With step 2, offset 1 it is Webster's
divisor rule. The answer is the `total` smallest keys; a level is searched in floating point, and
everything near it is decided in integers.
"""

from __future__ import annotations

import numpy as np
from numba import types

from optsched.kernels.compile import BOOL, INT, INTS, READ, entry, helper
from optsched_solvers.quota.scores import FLOAT

_FLOATS = types.Array(types.float64, 1, "C")
_MARGIN = 2.0**-50
"""Relative; eight times the rounding errors of a level times a weight."""


@helper(INT, READ, READ, READ, FLOAT, FLOAT, INTS, counted=False)
def _below(w, lo, hi, level, shift, out):  # type: ignore[no-untyped-def]
    """GPUs with a key below a level; out[0] gets the weights of the jobs between their bounds."""
    total = slope = np.int64(0)
    for j in range(len(w)):
        x = np.ceil(level * w[j] - shift)
        low, high = np.float64(lo[j]), np.float64(hi[j])
        slope += w[j] if (x > low) & (x < high) else 0
        x = low if x < low else x
        x = high if x > high else x
        total += np.int64(x)
    out[0] = slope
    return total


@helper(BOOL, INT, INT, INT, INT, INT, INT, INT, INT, INT, counted=False)
def _before(v, m, i, w, n, j, step, offset, by_weight):  # type: ignore[no-untyped-def]
    """Whether unit m of job i, of weight v, comes before unit n of job j, of weight w.

    By key, then (max-min) by weight: from equal levels the lighter job rises higher; then by job.
    """
    left = (step * m + offset) * w  # at most (2**31 - 1) * 2**32 < 2**63
    right = (step * n + offset) * v
    if left != right:
        return left < right
    if by_weight and v != w:
        return v < w
    return i < j


@helper(FLOAT, _FLOATS, INT)
def _smallest(values, rank):  # type: ignore[no-untyped-def]
    """The rank-th smallest value, rank >= 1 (Hoare's selection); reorders the values."""
    left, right = 0, len(values) - 1
    while left < right:
        pivot = values[(left + right) // 2]
        i, j = left, right
        while i <= j:
            while values[i] < pivot:
                i += 1
            while values[j] > pivot:
                j -= 1
            if i <= j:
                values[i], values[j] = values[j], values[i]
                i += 1
                j -= 1
        if rank - 1 <= j:
            right = j
        elif rank - 1 >= i:
            left = i
        else:
            break
    return values[rank - 1]


@helper(INT, READ, READ, READ, INTS, INT, INT, INT)
def _sort(w, owner, number, tied, step, offset, by_weight):  # type: ignore[no-untyped-def]
    """Insertion sort by exact keys: floats are equal for unequal fractions only by rare chance."""
    for t in range(1, len(tied)):
        one, s = tied[t], t
        i = owner[one]
        while s > 0:
            other = tied[s - 1]
            j = owner[other]
            if not _before(w[i], number[one], i, w[j], number[other], j, step, offset, by_weight):
                break
            tied[s] = other
            s -= 1
        tied[s] = one
    return 0


@helper(INT, READ, INT)
def _lightest(heavy, rank):  # type: ignore[no-untyped-def]
    """The rank-th smallest weight; fast if there are few different ones."""
    limit, found = np.int64(0), 0
    for _ in range(8):
        lowest = np.int64(1) << 40
        for t in range(len(heavy)):
            x = heavy[t] if heavy[t] > limit else np.int64(1) << 40
            lowest = x if x < lowest else lowest
        limit = lowest
        for t in range(len(heavy)):
            found += heavy[t] == limit
        if found >= rank:
            return limit
    return np.int64(_smallest(heavy.astype(np.float64), rank))


@helper(INT, READ, READ, READ, INTS, INT, INT, INT, INT, INTS)
def _take_tied(w, owner, number, tied, need, step, offset, by_weight, g):  # type: ignore[no-untyped-def]
    """Add the `need` first of units with one floating-point key, listed by job, to g."""
    ties = len(tied)
    same_key = same_weight = True
    first = tied[0] if ties > 0 else 0
    for t in range(1, ties):
        i = tied[t]
        left = (step * number[first] + offset) * w[owner[i]]
        same_key = same_key and left == (step * number[i] + offset) * w[owner[first]]
        same_weight = same_weight and w[owner[first]] == w[owner[i]]
    if same_key and by_weight and not same_weight:
        heavy = np.empty(ties, np.int64)
        for t in range(ties):
            heavy[t] = w[owner[tied[t]]]
        limit = _lightest(heavy, need)
        rest = 0
        for t in range(ties):  # without branches, which would be guessed wrongly
            one = tied[t]
            g[owner[one]] += heavy[t] < limit
            need -= heavy[t] < limit
            tied[rest] = one
            rest += heavy[t] == limit
    elif not same_key:
        _sort(w, owner, number, tied, step, offset, by_weight)
    for t in range(need):
        g[owner[tied[t]]] += 1
    return 0


@helper(INT, READ, READ, READ, INT, INT, FLOAT, INT, INT, INT, INTS)
def _take(w, lo, hi, need, room, high, step, offset, by_weight, g):  # type: ignore[no-untyped-def]
    """Add the `need` first of the `room` units between g and a level to g."""
    shift = offset / step
    owner, number = np.empty(room + 1, np.int64), np.empty(room + 1, np.int64)
    m = differ = 0
    for j in range(len(w)):
        b = np.ceil(high * w[j] - shift)
        first, last = np.float64(lo[j]), np.float64(hi[j])
        b = first if b < first else (last if b > last else b)
        top = np.int64(b)
        owner[m], number[m] = j, g[j]
        m += g[j] < top
        for k in range(g[j] + 1, top):  # rarely any
            owner[m], number[m] = j, k
            m += 1
    if need >= m:
        for i in range(m):
            g[owner[i]] += 1
        return 0
    tied = np.arange(m)
    for i in range(m):
        left = (step * number[i] + offset) * w[owner[0]]
        differ += left != (step * number[0] + offset) * w[owner[i]]
    if differ == 0:
        _take_tied(w, owner, number, tied, need, step, offset, by_weight, g)
        return 0
    key = np.empty(m, np.float64)
    for i in range(m):
        key[i] = (step * number[i] + offset) / w[owner[i]]
    limit = _smallest(key.copy(), need)
    ties = 0
    for i in range(m):  # floats order unequal keys rightly, or not at all
        if key[i] < limit:
            g[owner[i]] += 1
            need -= 1
        elif key[i] == limit:
            tied[ties] = i
            ties += 1
    _take_tied(w, owner, number, tied[:ties].copy(), need, step, offset, by_weight, g)
    return 0


@entry(INT, READ, READ, READ, READ, INT, INT, INT, INT, INTS)
def fill(w, lo, hi, total_lo_hi, total, step, offset, by_weight, g):  # type: ignore[no-untyped-def]
    """Write the quotas: sum(lo) <= total <= sum(hi), jobs of weight 0 have lo == hi or stay at lo.

    w: int64 in 0..2**32. lo, hi: int64 in 0..2**30. total_lo_hi: sums of lo and hi (those of
    weight 0 count with lo in both).
    """
    n = len(w)
    if total <= total_lo_hi[0]:
        for j in range(n):
            g[j] = lo[j]
        return 0
    if total >= total_lo_hi[1]:
        for j in range(n):
            g[j] = hi[j] if w[j] > 0 else lo[j]
        return 0
    shift = offset / step
    slope = np.empty(1, np.int64)
    low = 0.0  # levels with too few, and below with enough GPUs
    f_low, f_high = total_lo_hi[0], total_lo_hi[1]
    weights, least = np.int64(0), np.int64(1) << 40
    for j in range(n):
        weights += w[j]
        least = min(least, w[j] if w[j] > 0 else least)
    top = (total + 2.0) / least
    high = top  # there even the lightest job would have more than all
    level = (total + n * (shift - 0.5)) / weights
    slope[0] = weights
    narrow = max(64, n // 64)
    push, last_miss = 1.0, np.int64(0)
    for turn in range(300):
        gap = f_high - f_low
        # far more units between the two levels than the slope explains: they are ties
        if gap <= narrow or (gap <= 2 * n and 4.0 * slope[0] * (high - low) < gap):
            break
        if not low < level < high:
            level = 0.5 * (low + high)
            if not low < level < high:
                break
        f = _below(w, lo, hi, level, shift, slope)
        if f <= total:
            low, f_low = level, f
        if f >= total:
            high, f_high = level, f
        miss = total - f
        # a little beyond the aim, so that the next one bounds it from the other side; farther and
        # farther on a step
        push = 2.0 * push if miss == last_miss else 1.0
        last_miss = miss
        beyond = (0.1 * abs(miss) + 0.2 * narrow) * push
        if (turn >= 8 and turn % 2 == 0) or slope[0] == 0:
            level = 0.5 * (low + high)
        else:
            up = miss > 0 or (miss == 0 and f_high > f)
            level += (miss + (beyond if up else -beyond)) / slope[0]
    low, high = low * (1.0 - _MARGIN), high * (1.0 + _MARGIN)
    taken = room = np.int64(0)
    for j in range(n):
        a = np.ceil(low * w[j] - shift)
        b = np.ceil(high * w[j] - shift)
        first, last = np.float64(lo[j]), np.float64(hi[j])
        a = first if a < first else (last if a > last else a)
        b = first if b < first else (last if b > last else b)
        g[j] = np.int64(a)
        taken += np.int64(a)
        room += np.int64(b) - np.int64(a)
    need = total - taken
    if need > 0:
        _take(w, lo, hi, need, room, high, step, offset, by_weight, g)
    return 0


@helper(INT, READ, READ, READ, READ, FLOAT, INT, INT, INT, counted=False)
def _exactly(w, lo, hi, g, first, step, offset, by_weight):  # type: ignore[no-untyped-def]
    """Whether the last taken unit comes before the first untaken one, of equal floats `first`."""
    n, ref = len(w), 0
    while w[ref] == 0 or g[ref] >= hi[ref] or (step * g[ref] + offset) / w[ref] != first:
        ref += 1
    number, weight = step * g[ref] + offset, w[ref]
    late = early = heavy = np.int64(0)
    light = np.int64(1) << 40
    for j in range(n):  # all against one of the untaken: without branches
        aim = number * w[j]
        down, up = (step * (g[j] - 1) + offset) * weight, (step * g[j] + offset) * weight
        taken, left = (g[j] > lo[j]) & (w[j] > 0), (g[j] < hi[j]) & (w[j] > 0)
        late += taken & (down > aim)
        early += left & (up < aim)
        heavy = w[j] if taken & (down == aim) & (w[j] > heavy) else heavy
        light = w[j] if left & (up == aim) & (w[j] < light) else light
    if early == 0 and late > 0:
        return 0
    if early == 0 and (heavy == 0 or (by_weight and heavy != light)):
        return 1 if heavy < light else 0
    if early == 0:  # ids decide among those of the same level, and weight
        a, b = n - 1, 0
        while (step * (g[a] - 1) + offset) * weight != number * w[a] or (
            g[a] <= lo[a] or (by_weight and w[a] != heavy)
        ):
            a -= 1
        while (step * g[b] + offset) * weight != number * w[b] or (
            g[b] >= hi[b] or (by_weight and w[b] != light)
        ):
            b += 1
        return 1 if a < b else 0
    a = b = -1  # the last of the taken, and the first of the untaken
    for j in range(n):
        if w[j] == 0:
            continue
        k = g[j] - 1
        if k >= lo[j] and (
            a < 0 or _before(w[a], g[a] - 1, a, w[j], k, j, step, offset, by_weight)
        ):
            a = j
        k = g[j]
        if k < hi[j] and (b < 0 or _before(w[j], k, j, w[b], g[b], b, step, offset, by_weight)):
            b = j
    if a < 0 or b < 0:
        return 1
    return 1 if _before(w[a], g[a] - 1, a, w[b], g[b], b, step, offset, by_weight) else 0


@entry(INT, READ, READ, READ, READ, INT, INT, INT, INT, _FLOATS)
def smallest_taken(w, lo, hi, g, total, step, offset, by_weight, price):  # type: ignore[no-untyped-def]
    """Whether bounds and total hold, and no taken unit comes after an untaken one.

    price gets the key of the first untaken unit, infinite if there is none, and the least g/w.
    Floats decide where they differ (division is monotone), exact products where they are equal.
    """
    n = len(w)
    spent = wrong = np.int64(0)
    last, first, lowest = -1.0, np.inf, np.inf
    for j in range(n):
        spent += g[j]
        wrong += (g[j] < lo[j]) | (g[j] > hi[j])
        if w[j] > 0:
            down = np.divide(step * (g[j] - 1) + offset, w[j]) if g[j] > lo[j] else -1.0
            up = np.divide(step * g[j] + offset, w[j]) if g[j] < hi[j] else np.inf
            last = down if down > last else last
            first = up if up < first else first
            level = np.divide(g[j], w[j])
            lowest = level if level < lowest else lowest
        else:
            wrong += g[j] != lo[j]
    price[0], price[1] = first, lowest if n > 0 else 0.0
    if wrong > 0 or spent != total or last > first:
        return 0
    if last < first:
        return 1
    return _exactly(w, lo, hi, g, first, step, offset, by_weight)
