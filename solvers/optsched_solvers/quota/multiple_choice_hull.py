"""Multiple-choice knapsack: dominance, upper hulls, the critical price and the linear relaxation.

Sizes are taken from the smallest option of their row, and values are multiplied by a power of two
(the scale), so that prices are integers and every comparison below is exact.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from optsched.kernels.compile import INT, INTS, READ, entry, helper

HEADROOM: Final = 1 << 59
"""Scaled values of all rows together stay below this; products with prices below four times."""
FINEST: Final = 1 << 30
"""Largest scale: prices this fine cannot be told from exact ones on clusters of that many GPUs."""

# what `relax` answers
SCALE: Final = 0
PRICE: Final = 1
"""Scaled value of one unit of size, a little above that of the critical edges; 0: all fits."""
SLACK: Final = 2
"""Budget that the centre leaves."""
GAIN: Final = 3
"""Value of the centre above the first options."""
PROMISE: Final = 4
"""Scaled gain of the relaxation at the price: no solution gains more."""
BOUND: Final = 5
"""Floor of the linear relaxation's gain."""
NUMBERS: Final = 6


@helper(INT, INT, INT, INT, INT, counted=False)
def steeper(rise, run, other_rise, other_run):  # type: ignore[no-untyped-def]
    """1 if rise / run > other_rise / other_run, exactly; rises >= 0 below 2^62, runs below 2^31."""
    if rise < 1 << 31 and other_rise < 1 << 31:
        return 1 if rise * other_run > other_rise * run else 0
    whole, other = rise // run, other_rise // other_run
    if whole != other:
        return 1 if whole > other else 0
    return 1 if (rise - whole * run) * other_run > (other_rise - other * other_run) * run else 0


@helper(INT, READ, READ, READ, INT, INTS, INTS, counted=False)
def hulls(ptr, size, value, spare, hull_ptr, hull):  # type: ignore[no-untyped-def]
    """Options on the upper hull of every row as positions; the sum of the rows' gains.

    An option is left out if a smaller one is worth as much, if it is larger than `spare` above the
    row's smallest, or if it lies strictly below a chord. hull_ptr: (rows + 1,); hull: one number
    an option.
    """
    filled = total = 0
    hull_ptr[0] = 0
    for j in range(len(ptr) - 1):
        begin = filled
        hull[filled] = ptr[j]
        filled += 1
        for i in range(ptr[j] + 1, ptr[j + 1]):
            last = hull[filled - 1]
            if size[i] - size[ptr[j]] > spare:
                break
            if value[i] <= value[last]:
                continue
            while filled - begin >= 2:
                last, before = hull[filled - 1], hull[filled - 2]
                if (
                    steeper(
                        value[i] - value[last],
                        size[i] - size[last],
                        value[last] - value[before],
                        size[last] - size[before],
                    )
                    == 0
                ):
                    break
                filled -= 1
            hull[filled] = i
            filled += 1
        total += value[hull[filled - 1]] - value[ptr[j]]
        hull_ptr[j + 1] = filled
    return total


@helper(INT, INTS, INTS, INT, INT, counted=False)
def critical(key, weight, count, room):  # type: ignore[no-untyped-def]
    """Largest key such that items with at least that key weigh more than `room` in sum; or -1.

    Reorders the first `count` entries of both arrays.
    """
    low, high = 0, count
    random = 88172645463325252
    while low < high:
        random = (random * 1103515245 + 12345) & 0x7FFFFFFF
        pivot = key[low + random % (high - low)]
        above, end, i = low, high, low  # [low, above) > pivot, [above, i) equal, [end, high) below
        heavy = level = 0
        while i < end:
            k, w = key[i], weight[i]
            if k > pivot:
                key[i], weight[i] = key[above], weight[above]
                key[above], weight[above] = k, w
                above += 1
                i += 1
                heavy += w
            elif k == pivot:
                level += w
                i += 1
            else:
                end -= 1
                key[i], weight[i] = key[end], weight[end]
                key[end], weight[end] = k, w
        if heavy > room:
            high = above
        elif heavy + level > room:
            return pivot
        else:
            room -= heavy + level
            low = end
    return -1


@entry(INT, READ, READ, READ, INT, INTS, INTS, INTS, INTS, INTS)
def relax(ptr, size, value, spare, hull_ptr, hull, base, centre, out):  # type: ignore[no-untyped-def]
    """The linear relaxation: hulls, price, base solution, centre and bound.

    base: position in `hull` of every row's option in the base solution, which takes all edges
    steeper than the critical ones, and maximises scaled value - price * size in every row.
    centre: the same with the critical edges that fit, rows in order, a solution.
    out: `NUMBERS` numbers as named above.
    """
    rows = len(ptr) - 1
    total = hulls(ptr, size, value, spare, hull_ptr, hull)
    scale = 1
    while scale < FINEST and total < HEADROOM // (2 * scale):
        scale *= 2
    edges = hull_ptr[rows]
    key, edge = np.empty(edges, np.int64), np.empty(edges, np.int64)
    weight = np.empty(edges, np.int64)
    count = 0
    for j in range(rows):
        for h in range(hull_ptr[j] + 1, hull_ptr[j + 1]):
            i, k = hull[h], hull[h - 1]
            weight[count] = size[i] - size[k]
            key[count] = scale * (value[i] - value[k]) // weight[count]
            edge[h] = key[count]
            count += 1
    price = critical(key, weight, count, spare) + 1  # edges at the critical key lose a little
    slack, gain, ties = spare, 0, 0
    for j in range(rows):
        h = hull_ptr[j]
        while h + 1 < hull_ptr[j + 1] and edge[h + 1] >= price:
            h += 1
        base[j] = h
        slack -= size[hull[h]] - size[ptr[j]]
        gain += value[hull[h]] - value[ptr[j]]
        while h + 1 < hull_ptr[j + 1] and edge[h + 1] == price - 1:
            h += 1
            key[ties] = h
            ties += 1
    bound, room, promise = gain, slack, scale * gain + price * slack
    for j in range(rows):
        h = base[j]
        while h + 1 < hull_ptr[j + 1] and edge[h + 1] == price - 1:
            run = size[hull[h + 1]] - size[hull[h]]
            if run > slack:
                break
            slack -= run
            gain += value[hull[h + 1]] - value[hull[h]]
            h += 1
        centre[j] = h
    # fractions decide among the edges at the critical key; few are taken, so no sort
    while room > 0 and ties > 0:
        best = 0
        for t in range(1, ties):
            h, k = key[t], key[best]
            if (
                steeper(
                    value[hull[h]] - value[hull[h - 1]],
                    size[hull[h]] - size[hull[h - 1]],
                    value[hull[k]] - value[hull[k - 1]],
                    size[hull[k]] - size[hull[k - 1]],
                )
                == 1
            ):
                best = t
        h = key[best]
        rise, run = value[hull[h]] - value[hull[h - 1]], size[hull[h]] - size[hull[h - 1]]
        # all edges of just this slope at once
        kept = 0
        for t in range(ties):
            k = key[t]
            other, length = value[hull[k]] - value[hull[k - 1]], size[hull[k]] - size[hull[k - 1]]
            if steeper(rise, run, other, length) == 1:
                key[kept] = k
                kept += 1
            elif length <= room:
                bound += other
                room -= length
            else:  # the break edge, or what of this slope comes after it
                whole = other // length
                bound += whole * room + (other - whole * length) * room // length
                room = 0
        ties = kept
    out[SCALE], out[PRICE], out[SLACK], out[GAIN] = scale, price, slack, gain
    out[PROMISE], out[BOUND] = promise, bound
    return 0
