"""Multiple-choice knapsack: upper hulls, a first solution, and the expansion of a core (Pisinger).

The hulls give a price, a bound and a first solution (Sinha & Zoltners 1979). Every solution is
worth what the relaxation at the price promises, less its losses: for an option other than the base
one, the scaled profit minus price times weight that it gives away; for room left over, the price of
it. A solution worth one unit more than the best known loses at most `allowed`, so all other
options, and most partial solutions, can be forgotten (Pisinger 1995). Rows that are not taken in
yet stand at the centre, a solution that nearly uses up the room.

Weights count from the smallest option of their row, and profits are multiplied by a power of two
(the scale), so that prices are integers and every comparison is exact.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from optsched.kernels.compile import INT, INTS, READ, entry, helper

HEADROOM: Final = 1 << 59
"""Scaled profits of all rows together stay below this; products with prices below four times."""
FINEST: Final = 1 << 30
"""Largest scale: prices this fine cannot be told from exact ones on clusters of that many GPUs."""
NONE: Final = 1 << 60
"""Gradient where there is no move."""

# what `solve` tells in `facts`
SCALE, PRICE, SLACK, GAIN, PROMISE, BEST, PROVED = range(7)
"""Scale; scaled profit of one unit of weight, a little above that of the critical edges (0: all
fits); room that the centre leaves, and its profit above the first options; scaled gain of the
relaxation at the price: no solution gains more; gain of the solution; 1 if it is optimal, 0: too
many partial solutions."""
FACTS: Final = 7
LEAST, MOST, STEP, AT = range(4)
"""What it tells of a check: sums of smallest and largest weights, the greatest common divisor of
weights above the smallest of their row, and the option at which something is wrong."""

LARGE, UNSORTED, SUM = range(1, 4)
"""What is wrong: a weight out of range, one that is not above the last, profits too large."""
LARGEST_WEIGHT: Final = 2**31 - 1


class Rows(NamedTuple):
    """Options of all rows, weights ascending within a row; `hull` holds positions of options."""

    ptr: np.ndarray
    weight: np.ndarray
    profit: np.ndarray
    hull_ptr: np.ndarray
    hull: np.ndarray
    base: np.ndarray
    centre: np.ndarray


class Core(NamedTuple):
    """Rows that have options with little loss besides the centre, and these options (CSR)."""

    row: np.ndarray
    ptr: np.ndarray
    option: np.ndarray


@entry(INT, READ, READ, READ, INT, INT, INTS, INTS)
def solve(ptr, weight, profit, spare, limit, chosen, facts):  # type: ignore[no-untyped-def]
    """A best option of every row within `spare` above the smallest ones.

    chosen: (rows,), filled with positions of options. limit: most partial solutions; if negative,
    the options are only checked: 0, or what is wrong.
    """
    if limit < 0:
        return _check(ptr, weight, profit, facts)
    rows, n = len(ptr) - 1, len(weight)
    given = Rows(
        ptr, weight, profit, np.empty(rows + 1, np.int64), np.empty(n, np.int64),
        np.empty(rows, np.int64), np.empty(rows, np.int64),
    )  # fmt: skip
    _relax(given, spare, facts)
    _first(given, chosen, facts)
    allowed = facts[PROMISE] - facts[SCALE] * (facts[BEST] + 1)
    facts[PROVED] = 1 if allowed < 0 else 0
    if facts[PROVED] == 0 and limit > 0:
        _expand(given, _core(given, spare, facts, allowed), limit, chosen, facts)
    return 0


@helper(INT, READ, READ, READ, INTS, counted=False)
def _check(ptr, weight, profit, facts):  # type: ignore[no-untyped-def]
    """What is wrong with the options, or 0; facts: as named above."""
    least = most = spread = reach = step = np.int64(0)
    for j in range(len(ptr) - 1):
        first = weight[ptr[j]]
        low = high = profit[ptr[j]]
        for i in range(ptr[j], ptr[j + 1]):
            facts[AT] = i
            if weight[i] < 0 or weight[i] > LARGEST_WEIGHT:
                return LARGE
            if i > ptr[j] and weight[i] <= weight[i - 1]:
                return UNSORTED
            low, high = min(low, profit[i]), max(high, profit[i])
            if step != 1:
                rest = weight[i] - first
                while rest > 0:
                    step, rest = rest, step % rest
        least += first
        most += weight[ptr[j + 1] - 1]
        if low < -HEADROOM or high > HEADROOM:
            return SUM
        spread += high - low
        reach += max(abs(low), abs(high))
        if spread >= HEADROOM or reach >= HEADROOM:
            return SUM
    facts[LEAST], facts[MOST], facts[STEP] = least, most, max(step, 1)
    return 0


@helper(INT, INT, INT, INT, INT, counted=False)
def _steeper(rise, run, other_rise, other_run):  # type: ignore[no-untyped-def]
    """1 if rise / run > other_rise / other_run, exactly; rises >= 0 below 2^62, runs below 2^31."""
    if rise < 1 << 31 and other_rise < 1 << 31:
        return 1 if rise * other_run > other_rise * run else 0
    whole, other = rise // run, other_rise // other_run
    if whole != other:
        return 1 if whole > other else 0
    return 1 if (rise - whole * run) * other_run > (other_rise - other * other_run) * run else 0


@helper(INT, READ, READ, READ, INT, INTS, INTS, counted=False)
def _hulls(ptr, weight, profit, spare, hull_ptr, hull):  # type: ignore[no-untyped-def]
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
            if weight[i] - weight[ptr[j]] > spare:
                break
            if profit[i] <= profit[last]:
                continue
            while filled - begin >= 2:
                last, before = hull[filled - 1], hull[filled - 2]
                rise, run = profit[i] - profit[last], weight[i] - weight[last]
                other, length = profit[last] - profit[before], weight[last] - weight[before]
                if _steeper(rise, run, other, length) == 0:
                    break
                filled -= 1
            hull[filled] = i
            filled += 1
        total += profit[hull[filled - 1]] - profit[ptr[j]]
        hull_ptr[j + 1] = filled
    return total


@helper(INT, INTS, INTS, INT, INT, counted=False)
def _critical(key, weight, count, room):  # type: ignore[no-untyped-def]
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


@helper()
def _relax(given, spare, facts):  # type: ignore[no-untyped-def]
    """The linear relaxation: hulls, price, base solution, centre and bound.

    The base solution takes all edges steeper than the critical ones, and maximises scaled profit -
    price * weight in every row; the centre those critical edges besides that fit, rows in order.
    """
    ptr, weight, profit, hull_ptr, hull, base, centre = given
    rows = len(ptr) - 1
    total = _hulls(ptr, weight, profit, spare, hull_ptr, hull)
    scale = 1
    while scale < FINEST and total < HEADROOM // (2 * scale):
        scale *= 2
    edges = hull_ptr[rows]
    key, edge = np.empty(edges, np.int64), np.empty(edges, np.int64)
    length = np.empty(edges, np.int64)
    count = 0
    for j in range(rows):
        for h in range(hull_ptr[j] + 1, hull_ptr[j + 1]):
            i, k = hull[h], hull[h - 1]
            length[count] = weight[i] - weight[k]
            key[count] = scale * (profit[i] - profit[k]) // length[count]
            edge[h] = key[count]
            count += 1
    price = _critical(key, length, count, spare) + 1  # edges at the critical key lose a little
    slack, gain = spare, 0
    for j in range(rows):
        h = hull_ptr[j]
        while h + 1 < hull_ptr[j + 1] and edge[h + 1] >= price:
            h += 1
        base[j] = h
        slack -= weight[hull[h]] - weight[ptr[j]]
        gain += profit[hull[h]] - profit[ptr[j]]
    facts[SCALE], facts[PRICE], facts[PROMISE] = scale, price, scale * gain + price * slack
    for j in range(rows):
        h = base[j]
        while h + 1 < hull_ptr[j + 1] and edge[h + 1] == price - 1:
            run = weight[hull[h + 1]] - weight[hull[h]]
            if run > slack:
                break
            slack -= run
            gain += profit[hull[h + 1]] - profit[hull[h]]
            h += 1
        centre[j] = h
    facts[SLACK], facts[GAIN] = slack, gain


@helper()
def _first(given, chosen, facts):  # type: ignore[no-untyped-def]
    """Spend the centre's slack, rows of the steepest next edge first."""
    ptr, weight, profit, hull_ptr, hull, _, centre = given
    rows, scale, price, slack = len(ptr) - 1, facts[SCALE], facts[PRICE], facts[SLACK]
    gradient = np.empty(rows, np.int64)
    for j in range(rows):
        h = centre[j]
        chosen[j] = hull[h]
        gradient[j] = NONE
        if h + 1 < hull_ptr[j + 1]:
            run = weight[hull[h + 1]] - weight[hull[h]]
            rise = profit[hull[h + 1]] - profit[hull[h]]
            gradient[j] = (price * run - scale * rise) // run
    gain = facts[GAIN]
    for j in np.argsort(gradient, kind="mergesort"):
        if slack == 0 or gradient[j] == NONE:
            break
        now, best = chosen[j], chosen[j]
        for i in range(now + 1, ptr[j + 1]):
            if weight[i] - weight[now] > slack:
                break
            if profit[i] > profit[best]:
                best = i
        slack -= weight[best] - weight[now]
        gain += profit[best] - profit[now]
        chosen[j] = best
    facts[BEST] = gain


@helper()
def _core(given, spare, facts, allowed):  # type: ignore[no-untyped-def]
    """Rows that have options with a loss of at most `allowed` besides the centre.

    By turns the row of the smallest loss per unit upwards, and downwards, comes next: sums of both
    hit the room.
    """
    ptr, weight, profit, _, hull, base, centre = given
    rows, scale, price = len(ptr) - 1, facts[SCALE], facts[PRICE]
    found, first = np.empty(rows, np.int64), np.empty(rows + 1, np.int64)
    up, down = np.empty(rows, np.int64), np.empty(rows, np.int64)
    kept, option = np.empty(len(weight), np.int64), np.empty(len(weight), np.int64)
    count = filled = 0
    for j in range(rows):
        b, c = hull[base[j]], hull[centre[j]]
        begin, rising, falling = filled, NONE, NONE
        most = profit[ptr[j]] - 1
        for i in range(ptr[j], ptr[j + 1]):
            if weight[i] - weight[ptr[j]] > spare:
                break
            if profit[i] <= most:
                continue
            most = profit[i]
            loss = scale * (profit[b] - profit[i]) - price * (weight[b] - weight[i])
            if i != c and loss <= allowed:
                kept[filled] = i
                filled += 1
                if i > c:
                    rising = min(rising, loss // (weight[i] - weight[c]))
                else:
                    falling = min(falling, loss // (weight[c] - weight[i]))
        if filled > begin:
            found[count], first[count] = j, begin
            up[count], down[count] = rising, falling
            count += 1
    first[count] = filled
    row, core_ptr = np.empty(count, np.int64), np.zeros(count + 1, np.int64)
    ups = np.argsort(up[:count], kind="mergesort")
    downs = np.argsort(down[:count], kind="mergesort")
    seen = np.zeros(count, np.bool_)
    u = d = to = 0
    for k in range(count):
        while u < count and seen[ups[u]]:
            u += 1
        while d < count and seen[downs[d]]:
            d += 1
        upward = up[ups[u]] < NONE and (k % 2 == 0 or down[downs[d]] == NONE)
        o = ups[u] if upward else downs[d]
        seen[o] = True
        row[k] = found[o]
        for i in range(first[o], first[o + 1]):
            option[to] = kept[i]
            to += 1
        core_ptr[k + 1] = to
    return Core(row, core_ptr, option)


@helper()
def _expand(given, core, limit, chosen, facts):  # type: ignore[no-untyped-def]
    """Take the core's rows in one after the other, until nothing better is possible.

    A better solution overwrites `chosen`.
    """
    _, weight, profit, _, hull, base, centre = given
    scale, price, slack, gain = facts[SCALE], facts[PRICE], facts[SLACK], facts[GAIN]
    promise, best, rows = facts[PROMISE], facts[BEST], len(core.row)
    steps = np.full((2, rows + 1), NONE, np.int64)  # least loss per unit, up and down, from k on
    down = np.zeros(rows + 1, np.int64)
    begun = np.zeros(rows, np.int64)  # loss of the row at the centre
    widest = 1
    for k in range(rows - 1, -1, -1):
        b, c = hull[base[core.row[k]]], hull[centre[core.row[k]]]
        begun[k] = scale * (profit[b] - profit[c]) - price * (weight[b] - weight[c])
        steps[0, k], steps[1, k] = steps[0, k + 1], steps[1, k + 1]
        drop = 0
        widest = max(widest, core.ptr[k + 1] - core.ptr[k] + 1)
        for i in range(core.ptr[k], core.ptr[k + 1]):
            dw, dp = weight[core.option[i]] - weight[c], profit[core.option[i]] - profit[c]
            loss = begun[k] + price * dw - scale * dp
            side = 0 if dw > 0 else 1
            steps[side, k] = min(steps[side, k], loss // abs(dw))
            drop = max(drop, -dw)
        down[k] = down[k + 1] + drop
    allowed = promise - scale * (best + 1)
    ow, op = np.empty(widest, np.int64), np.empty(widest, np.int64)
    which, head = np.empty(widest, np.int64), np.empty(widest, np.int64)
    room = 1024
    w, p = np.zeros(room, np.int64), np.zeros(room, np.int64)
    to_w, to_p = np.empty(room, np.int64), np.empty(room, np.int64)
    stored = 4096
    parent, taken = np.empty(stored, np.int32), np.empty(stored, np.int32)
    level = np.zeros(rows + 2, np.int64)
    count, filled, k, before = 1, 0, 0, 0
    best_level, best_at = -1, -1
    proved = 1
    while k < rows and allowed >= 0 and count > 0:
        b = hull[centre[core.row[k]]]
        n = 1
        ow[0] = op[0] = 0
        which[0] = b
        for i in range(core.ptr[k], core.ptr[k + 1]):
            dw, dp = weight[core.option[i]] - weight[b], profit[core.option[i]] - profit[b]
            if begun[k] + price * dw - scale * dp <= allowed:
                ow[n], op[n], which[n] = dw, dp, core.option[i]
                n += 1
        if filled + n * count > limit:
            proved = 0
            break
        while filled + n * count > stored:
            stored *= 2
        if stored > len(parent):
            longer, long_taken = np.empty(stored, np.int32), np.empty(stored, np.int32)
            longer[:filled], long_taken[:filled] = parent[:filled], taken[:filled]
            parent, taken = longer, long_taken
        if n * count > len(to_w):
            to_w = np.empty(2 * n * count, np.int64)
            to_p = np.empty(2 * n * count, np.int64)
        before += begun[k]
        up, fall, deepest = min(price, steps[0, k + 1]), steps[1, k + 1], down[k + 1]
        for c in range(n):
            head[c] = 0
        made, top = 0, -NONE * 2
        while allowed >= 0:
            c = -1
            least = most = 0
            for o in range(n):
                if head[o] < count:
                    x, y = w[head[o]] + ow[o], p[head[o]] + op[o]
                    if c < 0 or x < least or (x == least and y > most):
                        c, least, most = o, x, y
            if c < 0:
                break
            at = head[c]
            head[c] += 1
            if most <= top:
                continue  # a smaller one is worth as much
            top = most
            left = slack - least
            loss = before + price * least - scale * most
            if loss > allowed:
                continue
            if left >= 0:
                if gain + most > best:
                    best = gain + most
                    best_level, best_at = k, filled + made
                    allowed = promise - scale * (best + 1)
                elif loss + left * up > allowed:
                    continue
            else:
                over = -left
                if over > deepest:
                    break  # too much even if all rows to come give back what they can
                if fall > 0 and (over > allowed // fall or loss + over * fall > allowed):
                    continue
            to_w[made], to_p[made] = least, most
            parent[filled + made], taken[filled + made] = at, which[c]
            made += 1
        level[k + 1] = filled + made
        filled += made
        count = made
        w, to_w = to_w, w
        p, to_p = to_p, p
        k += 1
    if best_level >= 0:
        for j in range(len(centre)):
            chosen[j] = hull[centre[j]]
        at = best_at
        for k in range(best_level, -1, -1):
            chosen[core.row[k]] = taken[at]
            if k > 0:
                at = level[k - 1] + parent[at]
    facts[PROVED], facts[BEST] = proved, best
