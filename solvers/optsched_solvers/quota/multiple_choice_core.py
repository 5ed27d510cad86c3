"""Multiple-choice knapsack: a first solution, the core around the price, and its expansion.

Every solution is worth what the relaxation at the price promises, less its losses: for an option
other than the base one, the scaled value minus price times size that it gives away; for budget
left over, the price of it. A solution worth one unit more than the best known loses at most
`allowed`, so all other options, and most partial solutions, can be forgotten (Pisinger 1995).
Rows that are not taken in yet stand at the centre, a solution that nearly uses up the budget.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from optsched.kernels.compile import INT, INTS, READ, entry
from optsched_solvers.quota.multiple_choice_hull import GAIN, PRICE, PROMISE, SCALE, SLACK

NONE: Final = 1 << 60
"""Gradient where there is no move."""

# what `expand` answers
PROVED: Final = 0
"""1: the best solution is optimal; 0: too many partial solutions."""
BEST: Final = 1
"""Its gain."""
ALLOWED: Final = 2
"""Loss that a better one may have."""
STATES: Final = 3


@entry(INT, READ, READ, READ, READ, READ, READ, INT, INT, INT, INTS)
def fill(ptr, size, value, hull_ptr, hull, centre, scale, price, slack, chosen):  # type: ignore[no-untyped-def]
    """Spend the centre's slack, rows of the steepest next edge first; what it gains.

    chosen: filled with the position of every row's option.
    """
    rows = len(ptr) - 1
    gradient = np.empty(rows, np.int64)
    for j in range(rows):
        h = centre[j]
        chosen[j] = hull[h]
        gradient[j] = NONE
        if h + 1 < hull_ptr[j + 1]:
            run = size[hull[h + 1]] - size[hull[h]]
            rise = value[hull[h + 1]] - value[hull[h]]
            gradient[j] = (price * run - scale * rise) // run
    gain = 0
    for j in np.argsort(gradient, kind="mergesort"):
        if slack == 0 or gradient[j] == NONE:
            break
        now, best = chosen[j], chosen[j]
        for i in range(now + 1, ptr[j + 1]):
            if size[i] - size[now] > slack:
                break
            if value[i] > value[best]:
                best = i
        slack -= size[best] - size[now]
        gain += value[best] - value[now]
        chosen[j] = best
    return gain


@entry(INT, READ, READ, READ, READ, READ, READ, INT, INT, INT, INT, INTS, INTS, INTS)
def core(ptr, size, value, hull, base, centre, spare, scale, price, allowed, row, core_ptr, option):  # type: ignore[no-untyped-def]
    """Rows that have options with a loss of at most `allowed` besides the centre; their number.

    By turns the row of the smallest loss per unit upwards, and downwards, comes next: sums of both
    hit the budget. row: (rows,); core_ptr: (rows + 1,); option: one number an option; all filled
    in front.
    """
    rows = len(ptr) - 1
    found, first = np.empty(rows, np.int64), np.empty(rows + 1, np.int64)
    up, down = np.empty(rows, np.int64), np.empty(rows, np.int64)
    kept = np.empty(len(option), np.int64)
    count = filled = 0
    for j in range(rows):
        b, c = hull[base[j]], hull[centre[j]]
        begin, rising, falling = filled, NONE, NONE
        most = value[ptr[j]] - 1
        for i in range(ptr[j], ptr[j + 1]):
            if size[i] - size[ptr[j]] > spare:
                break
            if value[i] <= most:
                continue
            most = value[i]
            loss = scale * (value[b] - value[i]) - price * (size[b] - size[i])
            if i != c and loss <= allowed:
                kept[filled] = i
                filled += 1
                if i > c:
                    rising = min(rising, loss // (size[i] - size[c]))
                else:
                    falling = min(falling, loss // (size[c] - size[i]))
        if filled > begin:
            found[count], first[count] = j, begin
            up[count], down[count] = rising, falling
            count += 1
    first[count] = filled
    to = 0
    core_ptr[0] = 0
    ups = np.argsort(up[:count], kind="mergesort")
    downs = np.argsort(down[:count], kind="mergesort")
    seen = np.zeros(count, np.bool_)
    u = d = 0
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
    return count


@entry(
    INT, READ, READ, READ, READ, READ, READ, READ, READ, INT, READ, INT, INT, INTS, INTS
)  # fmt: skip
def expand(  # type: ignore[no-untyped-def]
    size, value, hull, base, centre, row, core_ptr, option, rows, numbers, best, limit, chosen, out
):
    """Take the core's rows in one after the other, until nothing better is possible.

    rows: of the core; numbers: what `relax` answered; best: gain of the known solution, which
    `chosen` holds and which is overwritten by a better one. limit: most partial solutions.
    out: as named above.
    """
    scale, price, slack, gain = numbers[SCALE], numbers[PRICE], numbers[SLACK], numbers[GAIN]
    promise = numbers[PROMISE]
    steps = np.full((2, rows + 1), NONE, np.int64)  # least loss per unit, up and down, from k on
    down = np.zeros(rows + 1, np.int64)
    begun = np.zeros(rows, np.int64)  # loss of the row at the centre
    widest = 1
    for k in range(rows - 1, -1, -1):
        b, c = hull[base[row[k]]], hull[centre[row[k]]]
        begun[k] = scale * (value[b] - value[c]) - price * (size[b] - size[c])
        steps[0, k], steps[1, k] = steps[0, k + 1], steps[1, k + 1]
        drop = 0
        widest = max(widest, core_ptr[k + 1] - core_ptr[k] + 1)
        for i in range(core_ptr[k], core_ptr[k + 1]):
            dw, dp = size[option[i]] - size[c], value[option[i]] - value[c]
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
        b = hull[centre[row[k]]]
        n = 1
        ow[0] = op[0] = 0
        which[0] = b
        for i in range(core_ptr[k], core_ptr[k + 1]):
            dw, dp = size[option[i]] - size[b], value[option[i]] - value[b]
            if begun[k] + price * dw - scale * dp <= allowed:
                ow[n], op[n], which[n] = dw, dp, option[i]
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
            chosen[row[k]] = taken[at]
            if k > 0:
                at = level[k - 1] + parent[at]
    out[PROVED], out[BEST], out[ALLOWED], out[STATES] = proved, best, allowed, filled
    return 0
