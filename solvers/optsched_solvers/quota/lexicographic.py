"""The exact rest of a max-min over tables, where lifting jobs costs unequal numbers of GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from optsched_solvers.quota.inputs import IntArray

MOST_WORK: Final = 5 * 10**6
"""Limit of the programme, about half a second: additions, each as dear as 32 words of a number."""


def best_rest(
    rows: IntArray, values: IntArray, base: IntArray, active: IntArray, rest: int,
    most_work: int | None = None,
) -> IntArray | None:  # fmt: skip
    """Entries per row whose sorted levels are lexicographically largest; None if too much work.

    A dynamic programme over GPUs. A vector of levels is one integer in base n + 1, whose digits
    count the jobs on every level, the lowest level first: the smallest integer is the best vector.

    Parameters
    ----------
    rows, values
        Tables, as in `max_min_table`.
    base, active
        Entries reached, and 1 for every job that may still rise.
    rest
        GPUs to share among them.
    most_work
        Limit of the programme; `MOST_WORK` by default.
    """
    limit = MOST_WORK if most_work is None else most_work
    jobs = np.flatnonzero(active == 1)
    if len(jobs) * (rest + 1) > limit:  # without even looking at the rows
        return None
    options: list[list[tuple[int, int]]] = []
    for j in jobs:
        row = values[rows[j] + base[j] : rows[j + 1]]
        rises = np.flatnonzero(np.diff(row) > 0) + 1
        sizes = [0, *rises[rises <= rest].tolist()]
        options.append([(k, int(row[k])) for k in sizes])
    levels = sorted({level for steps in options for _, level in steps})
    size = len(jobs) + 1
    words = 1 + len(levels) * size.bit_length() // 64
    additions = sum(len(steps) for steps in options) * (rest + 1)
    if additions * (1 + words // 32) > limit:
        return None
    digit = {level: size ** (len(levels) - 1 - at) for at, level in enumerate(levels)}
    best = np.zeros(rest + 1, object)
    chosen = []
    for steps in options:
        better, pick = best + digit[steps[0][1]], np.zeros(rest + 1, np.int64)
        for k, level in steps[1:]:
            lifted = best[: rest + 1 - k] + digit[level]
            smaller = np.flatnonzero(lifted < better[k:])
            better[k + smaller] = lifted[smaller]
            pick[k + smaller] = k
        best = better
        chosen.append(pick)
    taken = base.copy()
    left = min(range(rest + 1), key=lambda b: best[b])
    for j, pick in zip(jobs[::-1], chosen[::-1], strict=True):
        taken[j] += pick[left]
        left -= int(pick[left])
    return taken
