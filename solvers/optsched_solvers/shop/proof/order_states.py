"""Kernel of `pipeline_bounds`: the earliest end of every multiset of rows on one machine.

A state says how many copies of each kind of row have passed the machine: once (single), or with
their first and with their last operation there (pairs). States are numbered so that every step
leads upwards; the kernel runs over them in slices and keeps everything in arrays.
"""

from __future__ import annotations

from typing import Final

from optsched.kernels.compile import INT, INTS, READ, entry, helper

KINDS, PAIRS, DEADLINE, AT, STATES, CAPACITY, LEVEL = range(7)
GROUPS: Final = 7
"""``general[GROUPS:GROUPS + 5]``: where the four groups of families begin, and their end."""
FIRST, LAST, BETWEEN, OUT, BYTES = range(5)
COLUMNS: Final = 5
"""Columns of the table of kinds: durations of both operations, least gap before a row that follows
another (may be negative), setup behind it, bytes held between them."""
NEVER: Final = 2**62


@helper(INT, INTS, READ, READ, INTS, INTS, INT, INT, INT)
def _shift(general, table, weight, sums, digits, k, first, last):  # type: ignore[no-untyped-def]
    """Change the two counts of kind k, and every sum that depends on them."""
    n = general[KINDS]
    digits[2 * k] += first
    digits[2 * k + 1] += last
    general[LEVEL] += (first - last) * table[COLUMNS * k + BYTES]
    if first:
        for f in range(general[GROUPS], general[GROUPS + 1]):
            sums[f] += first * weight[f * n + k]
        for f in range(general[GROUPS + 1], general[GROUPS + 2]):
            sums[f] -= first * weight[f * n + k]
    if last:
        for f in range(general[GROUPS + 2], general[GROUPS + 3]):
            sums[f] += last * weight[f * n + k]
        for f in range(general[GROUPS + 3], general[GROUPS + 4]):
            sums[f] -= last * weight[f * n + k]
    return 0


@entry(INT, INTS, READ, READ, READ, READ, READ, INTS, INTS, INTS, INT)
def explore(general, count, stride, table, base, weight, sums, digits, finish, steps):  # type: ignore[no-untyped-def]
    """Expand the next `steps` states; returns the end of the last state once it is reached.

    Families f say, per kind k: a row may start no earlier than ``base[f, k]`` + the weights of all
    rows ahead (groups 0 and 2: first and last operation), or its end plus ``base[f, k]`` + the
    weights of all rows behind must not exceed the deadline (groups 1 and 3). Returns -1 while
    states are left, NEVER if no order meets the deadline.
    """
    n, pairs, deadline = general[KINDS], general[PAIRS], general[DEADLINE]
    g0, g1, g2 = general[GROUPS], general[GROUPS + 1], general[GROUPS + 2]
    g3, g4 = general[GROUPS + 3], general[GROUPS + 4]
    last = general[STATES] - 1
    s = general[AT]
    until = min(s + steps, last)
    while s < until:
        ready = finish[s]
        if ready < NEVER:
            for k in range(n):
                first_done, last_done = digits[2 * k], digits[2 * k + 1]
                at = COLUMNS * k
                if first_done < count[k] and (
                    general[CAPACITY] == 0
                    or general[LEVEL] + table[at + BYTES] <= general[CAPACITY]
                ):
                    begin = ready + table[at + BETWEEN] if s > 0 else 0
                    for f in range(g0, g1):
                        begin = max(begin, base[f * n + k] + sums[f])
                    end = begin + table[at + FIRST]
                    fits = True
                    for f in range(g1, g2):
                        if end + base[f * n + k] + sums[f] - weight[f * n + k] > deadline:
                            fits = False
                            break
                    if fits and pairs == 0:
                        # both operations at once: the way round through the other machines too
                        start = 0
                        for f in range(g2, g3):
                            start = max(start, base[f * n + k] + sums[f])
                        for f in range(g3, g4):
                            behind = base[f * n + k] + sums[f] - weight[f * n + k]
                            if start + table[at + LAST] + behind > deadline:
                                fits = False
                                break
                    if fits:
                        to = s + stride[k] * (first_done + 1 if pairs else 1)
                        finish[to] = min(finish[to], end + table[at + OUT])
                if pairs and last_done < first_done:
                    begin = ready
                    for f in range(g2, g3):
                        begin = max(begin, base[f * n + k] + sums[f])
                    end = begin + table[at + LAST]
                    fits = True
                    for f in range(g3, g4):
                        if end + base[f * n + k] + sums[f] - weight[f * n + k] > deadline:
                            fits = False
                            break
                    if fits:
                        to = s + stride[k]
                        finish[to] = min(finish[to], end)
        s += 1
        k = 0
        while True:
            if digits[2 * k + (1 if pairs else 0)] < count[k]:
                break
            _shift(general, table, weight, sums, digits, k, -count[k], -count[k])
            k += 1
        if pairs and digits[2 * k + 1] == digits[2 * k]:
            _shift(general, table, weight, sums, digits, k, 1, -digits[2 * k + 1])
        elif pairs:
            _shift(general, table, weight, sums, digits, k, 0, 1)
        else:
            _shift(general, table, weight, sums, digits, k, 1, 1)
    general[AT] = s
    return finish[last] if s == last else -1
