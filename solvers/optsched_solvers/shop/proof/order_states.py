"""Kernel of `pipeline_bounds`: the earliest end of every multiset of rows on one machine.

A state is how many copies of each kind of row have passed the machine: once (single), or with
their first and with their last operation there (pairs). States are numbered so that every step
leads upwards; the kernel runs over them in slices and keeps everything in arrays.
"""

from __future__ import annotations

from typing import Final

from optsched.kernels.compile import INT, INTS, READ, entry, helper, record, records

FIRST, LAST, BETWEEN, OUT, BYTES = range(5)
COLUMNS: Final = 5
"""Columns of the table of kinds: durations of both operations, least gap before a row that follows
another (may be negative), setup behind it, bytes held between them."""
NEVER: Final = 2**62

SEARCH: Final = record("pairs deadline at states capacity level f0 f1 f2 f3 f4")
"""A search: `at` is the state that is next, `level` the bytes held in it; ``f0 .. f3``: where the
four groups of families begin, `f4` their end."""
KIND: Final = record("count stride first last between out bytes n_first n_last")
"""A kind of row: its copies, the distance of states that differ by one of them, its columns of the
table, and how many have passed with their first and with their last operation in this state."""

_SEARCH, _KINDS = records(SEARCH), records(KIND)


@helper(INT, _SEARCH, _KINDS, READ, INTS, INT, INT, INT)
def _shift(search, kind, weight, sums, k, first, last):  # type: ignore[no-untyped-def]
    """Change the two counts of kind k, and every sum that depends on them."""
    n, space = len(kind), search[0]
    kind[k].n_first += first
    kind[k].n_last += last
    space.level += (first - last) * kind[k].bytes
    if first:
        for f in range(space.f0, space.f1):
            sums[f] += first * weight[f * n + k]
        for f in range(space.f1, space.f2):
            sums[f] -= first * weight[f * n + k]
    if last:
        for f in range(space.f2, space.f3):
            sums[f] += last * weight[f * n + k]
        for f in range(space.f3, space.f4):
            sums[f] -= last * weight[f * n + k]
    return 0


@entry(INT, _SEARCH, _KINDS, READ, READ, INTS, INTS, INT)
def explore(search, kind, base, weight, sums, finish, steps):  # type: ignore[no-untyped-def]
    """Expand the next `steps` states; returns the end of the last state once it is reached.

    Families f give, per kind k: a row may start no earlier than ``base[f, k]`` + the weights of all
    rows ahead (groups 0 and 2: first and last operation), or its end plus ``base[f, k]`` + the
    weights of all rows behind must not exceed the deadline (groups 1 and 3). Returns -1 while
    states are left, NEVER if no order meets the deadline.
    """
    n, space = len(kind), search[0]
    pairs, deadline, capacity = space.pairs, space.deadline, space.capacity
    f0, f1, f2, f3, f4 = space.f0, space.f1, space.f2, space.f3, space.f4
    last = space.states - 1
    s = space.at
    until = min(s + steps, last)
    while s < until:
        ready = finish[s]
        if ready < NEVER:
            for k in range(n):
                row = kind[k]
                if row.n_first < row.count and (
                    capacity == 0 or space.level + row.bytes <= capacity
                ):
                    begin = ready + row.between if s > 0 else 0
                    for f in range(f0, f1):
                        begin = max(begin, base[f * n + k] + sums[f])
                    end = begin + row.first
                    fits = True
                    for f in range(f1, f2):
                        if end + base[f * n + k] + sums[f] - weight[f * n + k] > deadline:
                            fits = False
                            break
                    if fits and pairs == 0:
                        # both operations at once: the way round through the other machines too
                        start = 0
                        for f in range(f2, f3):
                            start = max(start, base[f * n + k] + sums[f])
                        for f in range(f3, f4):
                            behind = base[f * n + k] + sums[f] - weight[f * n + k]
                            if start + row.last + behind > deadline:
                                fits = False
                                break
                    if fits:
                        to = s + row.stride * (row.n_first + 1 if pairs else 1)
                        finish[to] = min(finish[to], end + row.out)
                if pairs and row.n_last < row.n_first:
                    begin = ready
                    for f in range(f2, f3):
                        begin = max(begin, base[f * n + k] + sums[f])
                    end = begin + row.last
                    fits = True
                    for f in range(f3, f4):
                        if end + base[f * n + k] + sums[f] - weight[f * n + k] > deadline:
                            fits = False
                            break
                    if fits:
                        to = s + row.stride
                        finish[to] = min(finish[to], end)
        s += 1
        k = 0
        while (kind[k].n_last if pairs else kind[k].n_first) == kind[k].count:
            _shift(search, kind, weight, sums, k, -kind[k].count, -kind[k].count)
            k += 1
        if pairs and kind[k].n_last == kind[k].n_first:
            _shift(search, kind, weight, sums, k, 1, -kind[k].n_last)
        elif pairs:
            _shift(search, kind, weight, sums, k, 0, 1)
        else:
            _shift(search, kind, weight, sums, k, 1, 1)
    space.at = s
    return finish[last] if s == last else -1
