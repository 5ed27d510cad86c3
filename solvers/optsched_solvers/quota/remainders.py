"""Bounded shares rounded by largest remainders, in integers with one common denominator.

With the score s_j <= 2**32 of the unbounded jobs, their sum P <= 2**56 and the GPUs R <= 2**30 that
they share, the real share is R s_j / P: R s_j <= 2**62, and a bound b is below it exactly if
min(b, cap) P < R s_j with cap = 2**62 // P + 1, where the left side is at most 2**62 + 2**56.
"""

from __future__ import annotations

import numpy as np
from numba import types

from optsched.kernels.compile import INT, INTS, READ, entry, helper

_FLOATS = types.Array(types.float64, 1, "C")
_FREE, _LOW, _HIGH = 0, 1, 2


@entry(INT, INTS, INTS, INTS, INT, INTS, counted=False)
def scored(s, lo, hi, total, sums):  # type: ignore[no-untyped-def]
    """Apply the rule of zero scores in place; sums get those of lo and of the reachable hi.

    If the jobs with a score cannot use the total, they are fixed at hi (score 0, lo = hi), and the
    others get score 1. Afterwards lo is the share of every job of score 0.
    """
    some = other = np.int64(0)
    for j in range(len(s)):
        some += hi[j] if s[j] > 0 else 0
        other += lo[j] if s[j] == 0 else 0
    if some + other <= total:
        for j in range(len(s)):
            if s[j] > 0:
                s[j], lo[j] = 0, hi[j]
            else:
                s[j] = 1
    least = most = np.int64(0)
    for j in range(len(s)):
        least += lo[j]
        most += hi[j] if s[j] > 0 else lo[j]
    sums[0], sums[1] = least, most
    return 0


@helper(INT, READ, READ, READ, INT, INTS, counted=False)
def _warm(s, lo, hi, total, share):  # type: ignore[no-untyped-def]
    """Search mu in floating point (Newton, guarded); share gets (R, P) of its free jobs."""
    n = len(s)
    free = np.int64(0)
    for j in range(n):
        free += s[j]
    mu, low, high = total / free, 0.0, np.inf
    for turn in range(60):
        held = free = np.int64(0)
        for j in range(n):
            x = mu * s[j]
            over, under = x > np.float64(hi[j]), x < np.float64(lo[j])
            free += 0 if over | under else s[j]
            held += hi[j] if over else (lo[j] if under else 0)
        share[0], share[1] = total - held, free
        miss = np.float64(total - held) - mu * free
        if miss == 0.0:
            return 0
        if miss > 0:
            low = mu
        else:
            high = mu
        step = np.float64(total - held) / np.float64(free) if free > 0 else -1.0
        if abs(step - mu) <= 4e-16 * mu:
            return 0
        if not low < step < high:
            step = 0.5 * (low + high) if high < np.inf else 2.0 * mu
        elif turn > 8 and turn % 3 == 0 and high < np.inf:
            step = 0.5 * (low + high)
        mu = step
    return 0


@helper(INT, READ, READ, READ, INT, INT, INT, INTS, counted=False)
def _quotas(s, lo, hi, total, left, weight, g):  # type: ignore[no-untyped-def]
    """Round the shares for (R, P) = (left, weight) down; how many GPUs remain, -1 if P is wrong.

    (R, P) is right if R is the total less the bounds of the jobs whose share lies beyond them, and
    P the sum of the scores of all others.
    """
    if weight <= 0 or left < 0:
        return -1
    cap = (np.int64(1) << 62) // weight + 1
    held = free = spent = np.int64(0)
    per = np.float64(left) / np.float64(weight)
    for j in range(len(s)):
        a = left * s[j]
        over = a > min(hi[j], cap) * weight
        under = a < min(lo[j], cap) * weight
        q = np.int64(per * s[j])
        q = q if q < cap else cap
        rest = a - q * weight
        q += 1 if rest >= weight else 0  # the floating-point quotient is wrong by one at most
        q -= 1 if rest < 0 else 0
        q = hi[j] if over else (lo[j] if under else q)
        g[j] = q
        spent += q
        free += 0 if over | under else s[j]
        held += q if over | under else 0
    if free != weight or left != total - held:
        return -1
    return total - spent


@helper(INT, READ, READ, READ, INT, INTS)
def _clip(s, lo, hi, total, share):  # type: ignore[no-untyped-def]
    """Exact clip-and-recompute: fix whichever side is larger, repeat; share gets (R, P)."""
    n = len(s)
    side = np.zeros(n, np.int64)
    for j in range(n):
        if s[j] == 0:
            side[j] = _LOW
    while True:
        left, weight = total, np.int64(0)
        for j in range(n):
            if side[j] == _FREE:
                weight += s[j]
            else:
                left -= hi[j] if side[j] == _HIGH else lo[j]
        share[0], share[1] = left, weight
        if weight == 0:
            return 0
        cap = (np.int64(1) << 62) // weight + 1
        whole = part = np.int64(
            0
        )  # excess less deficit = whole + part / weight, 0 <= part < weight
        any_side = False
        for j in range(n):
            if side[j] != _FREE:
                continue
            a = left * s[j]
            bound = np.int64(-1)
            if a > min(hi[j], cap) * weight:
                bound = hi[j]
            elif a < min(lo[j], cap) * weight:
                bound = lo[j]
            if bound >= 0:
                any_side = True
                whole += a // weight - bound
                part += a % weight
                if part >= weight:
                    part -= weight
                    whole += 1
        if not any_side:
            return 0
        for j in range(n):
            if side[j] == _FREE:
                a = left * s[j]
                if whole >= 0 and a > min(hi[j], cap) * weight:
                    side[j] = _HIGH
                elif whole < 0 and a < min(lo[j], cap) * weight:
                    side[j] = _LOW


@helper(INT, READ, READ, READ, INT, INT, INT, INTS)
def _give(s, lo, hi, left, weight, rest, g):  # type: ignore[no-untyped-def]
    """Add one to the `rest` largest remainders of unbounded jobs, ties by id."""
    n = len(s)
    cap = (np.int64(1) << 62) // weight + 1
    remainder = np.empty(n, np.int64)
    for j in range(n):  # a share beyond a bound has g == bound and a remainder that does not count
        r = left * s[j] - min(g[j], cap) * weight if g[j] < hi[j] else np.int64(-1)
        remainder[j] = r if (r >= 0) & (r < weight) else -1
    low, high = np.int64(0), weight  # the limit is in low..high-1
    above = np.int64(0)  # remainders >= high
    while True:
        width = (high - low + 1023) // 1024
        count = np.zeros(1024, np.int64)
        per = 1.0 / np.float64(width)
        for j in range(n):
            r = remainder[j]
            if r >= low and r < high:
                if width == 1:
                    count[r - low] += 1
                else:
                    b = np.int64((r - low) * per)
                    b -= 1 if b * width > r - low else 0
                    b += 1 if (b + 1) * width <= r - low else 0
                    count[b] += 1
        b = np.int64(1023)
        while above + count[b] < rest:
            above += count[b]
            b -= 1
        low, high = low + b * width, min(high, low + (b + 1) * width)
        if width == 1 or count[b] <= 64 or above + count[b] == rest:
            break
    if width > 1 and above + count[b] > rest:  # a few remain: their order
        few = np.empty(count[b], np.int64)
        m = 0
        for j in range(n):
            if low <= remainder[j] < high:
                few[m] = -remainder[j]
                m += 1
        few.sort()
        low = -few[rest - above - 1]
        for i in range(m):
            above += -few[i] > low
        high = low + 1
    equal = rest - above
    for j in range(n):
        r = remainder[j]
        if r >= high:
            g[j] += 1
        elif r >= low and equal > 0:
            g[j] += 1
            equal -= 1
    return 0


@entry(INT, READ, READ, READ, INT, INTS, INTS)
def round_shares(s, lo, hi, total, share, g):  # type: ignore[no-untyped-def]
    """Write the quotas of the largest-remainder rule; share gets (R, P), or (0, 0).

    s: int64 in 0..2**32, after `scored`. lo <= hi: int64 in 0..2**30, sum(lo) <= total <= sum(hi).
    """
    n = len(s)
    share[0] = share[1] = 0
    positive = np.int64(0)
    for j in range(n):
        positive += s[j]
    rest = np.int64(-1)
    if positive > 0:
        _warm(s, lo, hi, total, share)
        rest = _quotas(s, lo, hi, total, share[0], share[1], g)
        if rest < 0:
            _clip(s, lo, hi, total, share)
            rest = _quotas(s, lo, hi, total, share[0], share[1], g)
    if share[1] == 0:  # nobody has a score: `scored` has put the shares into lo
        for j in range(n):
            g[j] = lo[j]
        return 0
    if rest > 0:
        _give(s, lo, hi, share[0], share[1], rest, g)
    return 0


@entry(INT, READ, READ, READ, READ, INT, INT, INT, _FLOATS, counted=False)
def nearest(s, lo, hi, g, total, left, weight, distance):  # type: ignore[no-untyped-def]
    """Whether g minimises sum |g - q| for q = clip(left * s / weight, lo, hi), which adds up.

    The sum is separable and convex, so g is best if no exchange of one GPU improves it: with all
    |g - q| < 1 that is max (g_i - q_i) <= 1 + min (g_j - q_j). distance[0] gets the sum.
    """
    wrong = spent = held = free = np.int64(0)
    distance[0] = 0.0
    if weight <= 0:
        for j in range(len(s)):
            wrong += (g[j] != lo[j]) | (s[j] != 0)
            spent += g[j]
        return 1 if wrong == 0 and spent == total else 0
    cap = (np.int64(1) << 62) // weight + 1
    highest, lowest = -weight, weight
    apart = 0.0
    for j in range(len(s)):
        a = left * s[j]
        over = a > min(hi[j], cap) * weight
        under = a < min(lo[j], cap) * weight
        bound = hi[j] if over else lo[j]
        inside = not (over | under)
        near = (g[j] if g[j] < cap else cap) * weight
        d = near - a if inside else np.int64(0)
        wrong += (g[j] != bound) & (over | under)
        wrong += (g[j] < lo[j]) | (g[j] > hi[j]) | (d >= weight) | (d <= -weight)
        spent += g[j]
        held += 0 if inside else bound
        free += s[j] if inside else 0
        highest = d if d > highest else highest
        lowest = d if d < lowest else lowest
        apart += abs(np.float64(d))
    distance[0] = apart / np.float64(weight)
    right = free == weight and held + left == total and spent == total
    return 1 if wrong == 0 and right and highest - lowest <= weight else 0
