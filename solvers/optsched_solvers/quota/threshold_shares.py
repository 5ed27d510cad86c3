"""Threshold search over jobs with weights: max-min, Webster's rule and largest remainders.

The k-th further GPU of job j has the key k / w_j (max-min: the level of the job without it) or
(2k + 1) / w_j (Webster's divisor). The answer is the `total` smallest keys: a level is searched in
floating point, and everything near it is decided in integers. Weights are integers of at most
2**32, quotas at most 2**30, so that products of both fit into 63 bits.

Largest remainders round the real shares clip(mu w_j, lo_j, hi_j), mu = R / P with the GPUs
R <= 2**30 that the jobs between their bounds share and the sum P <= 2**56 of their weights.
A bound b is below R w_j / P exactly if min(b, cap) P < R w_j with cap = 2**62 // P + 1.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numba import types

from optsched.kernels.compile import BOOL, INT, INTS, READ, entry, helper

FLOAT: Final = types.float64
FLOATS: Final = types.Array(types.float64, 1, "C")
TABLE: Final = types.Array(types.int64, 2, "C")

MAX_MIN, WEBSTER, REMAINDER = range(3)
"""Rules."""

# what `share` tells in `facts`, and in `values`
FAULT, SHIFT, HOLDS, TOTAL, LEFT, WEIGHT = range(6)
"""Job of a wrong weight (1) or bound (2), see `share`; exponent of the quantised weights; 1 if the
quotas are right; GPUs handed out; R and P."""
VALUE, PRICE = range(2)
FACTS: Final = 6

BITS: Final = 32
"""Bits of the largest weight."""
_INFINITE: Final = np.int64(0x7FF0000000000000)
_MARGIN: Final = 2.0**-50
"""Relative; eight times the rounding errors of a level times a weight."""
_FREE, _LOW, _HIGH = 0, 1, 2


@entry(INT, INT, FLOATS, READ, READ, INT, TABLE, INTS, INTS, FLOATS)
def share(rule, scores, minimum, maximum, budget, jobs, g, facts, values):  # type: ignore[no-untyped-def]
    """Fill in the quotas; 0, or what is wrong with the arguments.

    Wrong is 1: a score (`facts[FAULT]` is its job), 2: bounds of a job, 3: the minima exceed the
    budget. scores: without -0.0. jobs: (3, jobs), filled with weights and bounds. If `facts[TOTAL]`
    is not negative all is filled in already, and the quotas are checked: whether they are right,
    the value and the price (infinite: none).
    """
    w, lo, hi = jobs[0], jobs[1], jobs[2]
    if facts[TOTAL] >= 0:
        if rule == REMAINDER:
            _nearest(w, lo, hi, g, facts, values)
        else:
            _smallest_taken(w, lo, hi, g, rule, facts, values)
        return 0
    n = len(scores)
    shift, wrong = _quantised(scores, rule == MAX_MIN, w)
    facts[SHIFT], facts[FAULT] = shift, wrong
    if wrong >= 0:
        return 1
    least = most = np.int64(0)
    for j in range(n):
        if minimum[j] < 0 or minimum[j] > maximum[j]:
            facts[FAULT] = j
            return 2
        lo[j], hi[j] = min(minimum[j], budget + 1), min(maximum[j], budget)
        least += lo[j]
        most += hi[j]
    if least > budget:
        return 3
    facts[TOTAL] = total = min(budget, most)
    if rule != MAX_MIN:
        least, most = _serve_zeros(w, lo, hi, total)
    if rule == REMAINDER:
        facts[LEFT], facts[WEIGHT] = _largest_remainders(w, lo, hi, total, g)
    else:
        _fill(w, lo, hi, total, least, most, rule, g)
    return 0


@helper(types.UniTuple(INT, 2), FLOATS, BOOL, INTS)
def _quantised(scores, positive, w):  # type: ignore[no-untyped-def]
    """Weights times one power of two, rounded, the largest in 2**31 + 1..2**32; its exponent.

    A power of two keeps the ratios of whole numbers exact: scores 1 and 3 stay 1 to 3, and their
    ties stay ties. Then the first job whose score is negative, infinite, NaN, or 0 where it must be
    positive; -1 if there is none.
    """
    bits = scores.view(np.int64)  # non-negative floats are ordered like their bits
    top, low, at = np.int64(0), np.int64(1), 0
    for j in range(len(bits)):
        low = min(low, bits[j])
        if bits[j] > top:
            top, at = bits[j], j
    if low < (1 if positive else 0) or top >= _INFINITE:
        for j in range(len(bits)):
            if bits[j] < (1 if positive else 0) or bits[j] >= _INFINITE:
                return 0, j
    if top == 0:
        for j in range(len(w)):
            w[j] = 0
        return 0, -1
    mantissa, exponent = math.frexp(scores[at])
    shift = BITS - exponent + (1 if mantissa == 0.5 else 0)
    half = shift // 2  # in two steps: 2**shift itself may overflow
    first, second = math.ldexp(1.0, half), math.ldexp(1.0, shift - half)
    for j in range(len(w)):
        w[j] = max(np.int64(scores[j] * first * second + 0.5), 1 if positive else 0)
    return shift, -1


@helper(types.UniTuple(INT, 2), INTS, INTS, INTS, INT)
def _serve_zeros(w, lo, hi, total):  # type: ignore[no-untyped-def]
    """Apply the rule of zero scores in place; the sums of lo and of the reachable hi.

    If the jobs with a score cannot use the total, they are fixed at hi (weight 0, lo = hi), and the
    others get weight 1. Afterwards lo is the share of every job of weight 0.
    """
    some = np.int64(0)
    for j in range(len(w)):
        some += hi[j] if w[j] > 0 else lo[j]
    if some <= total:
        for j in range(len(w)):
            if w[j] > 0:
                w[j], lo[j] = 0, hi[j]
            else:
                w[j] = 1
    least = most = np.int64(0)
    for j in range(len(w)):
        least += lo[j]
        most += hi[j] if w[j] > 0 else lo[j]
    return least, most


@helper(INT, INTS, INT)
def _ranked(values, rank):  # type: ignore[no-untyped-def]
    """The value at this rank, from 0: a quickselect that ties make faster; reorders the values."""
    low, high = 0, len(values)
    while True:
        a, b, c = values[low], values[(low + high) // 2], values[high - 1]
        pivot = max(min(a, b), min(max(a, b), c))
        above, end, i = low, high, low  # [low, above) < pivot, [above, i) equal, [end, high) beyond
        while i < end:
            v = values[i]
            if v < pivot:
                values[i], values[above] = values[above], v
                above += 1
                i += 1
            elif v == pivot:
                i += 1
            else:
                end -= 1
                values[i], values[end] = values[end], v
        if rank < above:
            high = above
        elif rank < end:
            return pivot
        else:
            low = end


# the smallest keys


@helper(INT, INT, INT, counted=False)
def _number(k, rule):  # type: ignore[no-untyped-def]
    """Of the k-th further GPU: divided by the weight it is the key."""
    return k if rule == MAX_MIN else 2 * k + 1


@helper(INT, FLOAT, INT, FLOAT, INT, INT, counted=False)
def _below(level, w, shift, low, high):  # type: ignore[no-untyped-def]
    """GPUs of a job with a key below a level, within its bounds."""
    x = np.ceil(level * w - shift)
    first, last = np.float64(low), np.float64(high)
    x = first if x < first else x
    return np.int64(last if x > last else x)


@helper(BOOL, INT, INT, INT, INT, INT, INT, INT, counted=False)
def _before(v, m, i, w, n, j, rule):  # type: ignore[no-untyped-def]
    """Whether unit m of job i, of weight v, comes before unit n of job j, of weight w.

    By key, then (max-min) by weight: from equal levels the lighter job rises higher; then by job.
    """
    left = _number(m, rule) * w  # at most (2**31 - 1) * 2**32 < 2**63
    right = _number(n, rule) * v
    if left != right:
        return left < right
    if rule == MAX_MIN and v != w:
        return v < w
    return i < j


@helper(INT, READ, READ, READ, INT, INT, INT, INT, INTS)
def _fill(w, lo, hi, total, least, most, rule, g):  # type: ignore[no-untyped-def]
    """The `total` smallest keys; least, most: sums of lo, and of hi (lo where the weight is 0)."""
    n = len(w)
    if total <= least or total >= most:
        for j in range(n):
            g[j] = lo[j] if total <= least or w[j] == 0 else hi[j]
        return 0
    shift = 0.0 if rule == MAX_MIN else 0.5
    low = 0.0  # levels with too few, and below with enough GPUs
    f_low, f_high = least, most
    slope, lightest = np.int64(0), np.int64(1) << 40
    for j in range(n):
        slope += w[j]
        lightest = min(lightest, w[j] if w[j] > 0 else lightest)
    high = (total + 2.0) / lightest  # there even the lightest job would have more than all
    level = (total + n * (shift - 0.5)) / slope
    narrow = max(64, n // 64)
    push, last_miss = 1.0, np.int64(0)
    for turn in range(300):
        gap = f_high - f_low
        # far more units between the two levels than the slope explains: they are ties
        if gap <= narrow or (gap <= 2 * n and 4.0 * slope * (high - low) < gap):
            break
        if not low < level < high:
            level = 0.5 * (low + high)
            if not low < level < high:
                break
        f = slope = np.int64(0)
        for j in range(n):
            x = np.ceil(level * w[j] - shift)
            first, last = np.float64(lo[j]), np.float64(hi[j])
            slope += w[j] if (x > first) & (x < last) else 0
            x = first if x < first else x
            f += np.int64(last if x > last else x)
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
        if (turn >= 8 and turn % 2 == 0) or slope == 0:
            level = 0.5 * (low + high)
        else:
            up = miss > 0 or (miss == 0 and f_high > f)
            level += (miss + (beyond if up else -beyond)) / slope
    low, high = low * (1.0 - _MARGIN), high * (1.0 + _MARGIN)
    taken = room = np.int64(0)
    for j in range(n):
        g[j] = _below(low, w[j], shift, lo[j], hi[j])
        taken += g[j]
        room += _below(high, w[j], shift, lo[j], hi[j]) - g[j]
    if total > taken:
        _take(w, lo, hi, total - taken, room, high, rule, g)
    return 0


@helper(INT, READ, READ, READ, INT, INT, FLOAT, INT, INTS)
def _take(w, lo, hi, need, room, high, rule, g):  # type: ignore[no-untyped-def]
    """Add the `need` first of the `room` units between g and a level to g."""
    shift = 0.0 if rule == MAX_MIN else 0.5
    owner, number = np.empty(room + 1, np.int64), np.empty(room + 1, np.int64)
    m = differ = 0
    for j in range(len(w)):
        top = _below(high, w[j], shift, lo[j], hi[j])
        owner[m], number[m] = j, _number(g[j], rule)
        m += g[j] < top
        for k in range(g[j] + 1, top):  # rarely any
            owner[m], number[m] = j, _number(k, rule)
            m += 1
    if need >= m:
        for i in range(m):
            g[owner[i]] += 1
        return 0
    for i in range(m):
        differ += number[i] * w[owner[0]] != number[0] * w[owner[i]]
    tied = np.arange(m)
    if differ > 0:
        exact = np.empty(m, np.float64)
        for i in range(m):
            exact[i] = number[i] / w[owner[i]]
        key = exact.view(np.int64)  # non-negative floats are ordered like their bits
        limit = _ranked(key.copy(), need - 1)
        ties = 0
        for i in range(m):  # floats order unequal keys rightly, or not at all
            if key[i] < limit:
                g[owner[i]] += 1
                need -= 1
            elif key[i] == limit:
                tied[ties] = i
                ties += 1
        tied = tied[:ties]
    return _take_tied(w, owner, number, tied, need, rule, g)


@helper(INT, READ, READ, READ, INTS, INT, INT, INTS)
def _take_tied(w, owner, number, tied, need, rule, g):  # type: ignore[no-untyped-def]
    """Add the `need` first of units with one floating-point key, listed by job, to g."""
    ties = len(tied)
    same_key = same_weight = True
    heavy = np.empty(ties, np.int64)
    for t in range(ties):
        one, i = tied[0], tied[t]
        heavy[t] = w[owner[i]]
        same_key = same_key and number[one] * heavy[t] == number[i] * heavy[0]
        same_weight = same_weight and heavy[t] == heavy[0]
    if not same_key:
        _sort(w, owner, number, tied, rule)
    elif rule == MAX_MIN and not same_weight:
        limit = _ranked(heavy.copy(), need - 1)
        rest = 0
        for t in range(ties):  # without branches, which would be guessed wrongly
            one = tied[t]
            g[owner[one]] += heavy[t] < limit
            need -= heavy[t] < limit
            tied[rest] = one
            rest += heavy[t] == limit
    for t in range(need):
        g[owner[tied[t]]] += 1
    return 0


@helper(INT, READ, READ, READ, INTS, INT)
def _sort(w, owner, number, tied, rule):  # type: ignore[no-untyped-def]
    """Insertion sort by exact keys: floats are equal for unequal fractions only by rare chance."""
    for t in range(1, len(tied)):
        one, s = tied[t], t
        i = owner[one]
        while s > 0:
            j = owner[tied[s - 1]]
            left, right = number[one] * w[j], number[tied[s - 1]] * w[i]
            if left > right or (left == right and (rule != MAX_MIN or w[i] >= w[j])):
                break
            tied[s] = tied[s - 1]
            s -= 1
        tied[s] = one
    return 0


@helper(INT, READ, READ, READ, READ, INT, INTS, FLOATS)
def _smallest_taken(w, lo, hi, g, rule, facts, values):  # type: ignore[no-untyped-def]
    """Whether bounds and total hold, and no taken unit comes after an untaken one.

    Price: the key of the first untaken unit, infinite if there is none. Value: the least g / w
    (max-min), else the GPUs.
    Floats decide where they differ (division is monotone), exact products where they are equal.
    """
    spent = wrong = np.int64(0)
    last, first, lowest = -1.0, np.inf, np.inf
    a = b = 0  # the last of the taken, and the first of the untaken
    for j in range(len(w)):
        spent += g[j]
        wrong += (g[j] < lo[j]) | (g[j] > hi[j])
        if w[j] == 0:
            wrong += g[j] != lo[j]
            continue
        lowest = min(lowest, g[j] / w[j])
        if g[j] > lo[j]:
            key = _number(g[j] - 1, rule) / w[j]
            if key > last or (key == last and _before(w[a], g[a] - 1, a, w[j], g[j] - 1, j, rule)):
                a, last = j, key
        if g[j] < hi[j]:
            key = _number(g[j], rule) / w[j]
            if key < first or (key == first and _before(w[j], g[j], j, w[b], g[b], b, rule)):
                b, first = j, key
    values[PRICE], values[VALUE] = first, spent
    if rule == MAX_MIN:
        values[VALUE] = lowest if len(w) > 0 else 0.0
    right = last < first or (last == first and _before(w[a], g[a] - 1, a, w[b], g[b], b, rule))
    facts[HOLDS] = 1 if right and wrong == 0 and spent == facts[TOTAL] else 0
    return 0


# largest remainders


@helper(types.UniTuple(INT, 2), READ, READ, READ, INT, INTS)
def _largest_remainders(w, lo, hi, total, g):  # type: ignore[no-untyped-def]
    """Fill g; (R, P) of the real shares, (R, 0) where all are at their bounds."""
    positive = np.int64(0)
    for j in range(len(w)):
        positive += w[j]
        g[j] = lo[j]  # `_serve_zeros` has put the shares of weight 0 into lo
    if positive == 0:
        return np.int64(0), np.int64(0)
    left, weight = _newton(w, lo, hi, total, positive)
    rest = _round_down(w, lo, hi, total, left, weight, g)
    if rest < 0:
        left, weight = _clip(w, lo, hi, total)
        rest = _round_down(w, lo, hi, total, left, weight, g)
    if rest > 0:
        _give(w, lo, hi, left, weight, rest, g)
    return left, weight


@helper(types.UniTuple(INT, 2), READ, READ, READ, INT, INT, counted=False)
def _newton(w, lo, hi, total, positive):  # type: ignore[no-untyped-def]
    """(R, P) by Newton's method on mu in floating point, guarded by bisection: almost always."""
    mu, low, high = total / positive, 0.0, np.inf
    left, free = np.int64(0), np.int64(0)
    for turn in range(60):
        held = free = np.int64(0)
        for j in range(len(w)):
            x = mu * w[j]
            over, under = x > np.float64(hi[j]), x < np.float64(lo[j])
            free += 0 if over | under else w[j]
            held += hi[j] if over else (lo[j] if under else 0)
        left = total - held
        miss = np.float64(left) - mu * free
        if miss > 0:
            low = mu
        else:
            high = mu
        step = np.float64(left) / np.float64(free) if free > 0 else -1.0
        if miss == 0.0 or abs(step - mu) <= 4e-16 * mu:
            break
        if not low < step < high:
            step = 0.5 * (low + high) if high < np.inf else 2.0 * mu
        elif turn > 8 and turn % 3 == 0 and high < np.inf:
            step = 0.5 * (low + high)
        mu = step
    return left, free


@helper(INT, READ, READ, READ, INT, INT, INT, INTS, counted=False)
def _round_down(w, lo, hi, total, left, weight, g):  # type: ignore[no-untyped-def]
    """Round the shares for (R, P) = (left, weight) down; how many GPUs remain, -1 if P is wrong.

    (R, P) is right if R is the total less the bounds of the jobs whose share lies beyond them, and
    P the sum of the weights of all others.
    """
    if weight <= 0 or left < 0:
        return -1
    cap = (np.int64(1) << 62) // weight + 1
    held = free = spent = np.int64(0)
    per = np.float64(left) / np.float64(weight)
    for j in range(len(w)):
        a = left * w[j]
        over = a > min(hi[j], cap) * weight
        under = a < min(lo[j], cap) * weight
        q = np.int64(per * w[j])
        q = q if q < cap else cap
        rest = a - q * weight
        q += 1 if rest >= weight else 0  # the floating-point quotient is wrong by one at most
        q -= 1 if rest < 0 else 0
        q = hi[j] if over else (lo[j] if under else q)
        g[j] = q
        spent += q
        free += 0 if over | under else w[j]
        held += q if over | under else 0
    return total - spent if free == weight and left == total - held else -1


@helper(types.UniTuple(INT, 2), READ, READ, READ, INT)
def _clip(w, lo, hi, total):  # type: ignore[no-untyped-def]
    """(R, P), exactly: clip, fix whichever side is larger, and repeat."""
    n = len(w)
    side = np.zeros(n, np.int64)
    for j in range(n):
        side[j] = _LOW if w[j] == 0 else _FREE
    while True:
        left, weight = total, np.int64(0)
        for j in range(n):
            if side[j] == _FREE:
                weight += w[j]
            else:
                left -= hi[j] if side[j] == _HIGH else lo[j]
        if weight == 0:
            return left, weight
        cap = (np.int64(1) << 62) // weight + 1
        whole = part = np.int64(0)  # excess less deficit = whole + part / weight, part < weight
        any_side = False
        for j in range(n):
            a = left * w[j]
            over, under = a > min(hi[j], cap) * weight, a < min(lo[j], cap) * weight
            if side[j] == _FREE and (over or under):
                any_side = True
                whole += a // weight - (hi[j] if over else lo[j])
                part += a % weight
                if part >= weight:
                    part -= weight
                    whole += 1
        if not any_side:
            return left, weight
        for j in range(n):
            a = left * w[j]
            if side[j] == _FREE and whole >= 0 and a > min(hi[j], cap) * weight:
                side[j] = _HIGH
            elif side[j] == _FREE and whole < 0 and a < min(lo[j], cap) * weight:
                side[j] = _LOW


@helper(INT, READ, READ, READ, INT, INT, INT, INTS)
def _give(w, lo, hi, left, weight, rest, g):  # type: ignore[no-untyped-def]
    """Add one to the `rest` largest remainders of unbounded jobs, ties by id."""
    n = len(w)
    cap = (np.int64(1) << 62) // weight + 1
    remainder = np.empty(n, np.int64)
    for j in range(n):  # a share beyond a bound has g == bound and a remainder that does not count
        r = left * w[j] - min(g[j], cap) * weight if g[j] < hi[j] else np.int64(-1)
        remainder[j] = r if (r >= 0) & (r < weight) else -1
    limit = _ranked(remainder.copy(), n - rest)
    for j in range(n):
        rest -= remainder[j] > limit
    for j in range(n):
        more = remainder[j] > limit or (remainder[j] == limit and rest > 0)
        g[j] += more
        rest -= remainder[j] == limit
    return 0


@helper(INT, READ, READ, READ, READ, INTS, FLOATS)
def _nearest(w, lo, hi, g, facts, values):  # type: ignore[no-untyped-def]
    """Whether g minimises sum |g - q| for q = clip(left * w / weight, lo, hi), which adds up.

    The sum is separable and convex, so g is best if no exchange of one GPU improves it: with all
    |g - q| < 1 that is max (g_i - q_i) <= 1 + min (g_j - q_j). Value: the sum.
    R and P are checked too.
    """
    total, left, weight = facts[TOTAL], facts[LEFT], facts[WEIGHT]
    wrong = spent = held = free = np.int64(0)
    apart = 0.0
    cap = (np.int64(1) << 62) // max(weight, 1) + 1
    highest, lowest = -weight, weight
    for j in range(len(w)):
        a = left * w[j]
        over = a > min(hi[j], cap) * weight
        under = a < min(lo[j], cap) * weight
        bound = hi[j] if over else lo[j]
        inside = not (over | under) and weight > 0
        d = min(g[j], cap) * weight - a if inside else np.int64(0)
        wrong += (g[j] != bound) & (not inside)
        wrong += (g[j] < lo[j]) | (g[j] > hi[j]) | ((d >= weight) | (d <= -weight)) & inside
        spent += g[j]
        held += 0 if inside else bound
        free += w[j] if inside else 0
        highest = d if d > highest else highest
        lowest = d if d < lowest else lowest
        apart += abs(np.float64(d))
    right = wrong == 0 and spent == total and free == weight and held + left == total
    values[VALUE] = apart / np.float64(max(weight, 1))
    values[PRICE] = left / weight if weight > 0 else np.inf
    facts[HOLDS] = 1 if right and highest - lowest <= weight else 0
    return 0
