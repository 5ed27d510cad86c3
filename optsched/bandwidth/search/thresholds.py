"""The best counts of k GPUs on hosts where the line rate of their cards is the network's limit.

Then only the number of hosts m and the slowest of them matter: a value can be had if m hosts can
give exactly k GPUs, each a number that brings enough to the network and is fast enough within.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from optsched.bandwidth.topology.rates import MOST

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import numpy.typing as npt

    from optsched.model.schedule import IntArray

    Floats = npt.NDArray[np.float64]
    Bools = npt.NDArray[np.bool_]

MOST_BITS: Final = 1 << 28
"""Size of the tables in which exact sums of irregular hosts are looked for."""


def even(room: IntArray, k: int) -> IntArray:
    """Counts up to `room` with sum k, as equal as they can be."""
    low, high = 0, int(room.max())
    while low < high:
        middle = (low + high + 1) // 2
        if np.minimum(room, middle).sum() <= k:
            low = middle
        else:
            high = middle - 1
    counts = np.minimum(room, low)
    more = np.flatnonzero(room > low)[: k - int(counts.sum())]
    counts[more] += 1
    return counts


def bound_within(rows: IntArray, k: int) -> int:
    """The highest bandwidth within hosts that k GPUs can have; `MOST` if nothing within limits."""
    levels = np.unique(np.minimum(rows, MOST))
    low, high = 0, len(levels) - 1
    while low < high:
        middle = (low + high + 1) // 2
        good = rows >= levels[middle]
        good[:, 0] = True
        if (good * np.arange(rows.shape[1])).max(axis=1).sum() >= k:
            low = middle
        else:
            high = middle - 1
    return int(levels[low])


def line(least: Floats | float, n: IntArray | int, m: IntArray | int) -> IntArray:
    """As `optsched.bandwidth.models.prior.line_rate`, rounded as `BottleneckBandwidth` rounds."""
    rate = least * ((n - 1) / n) * (m / (m - 1))
    return np.asarray(np.minimum(np.rint(rate), MOST - 1), np.int64)


def best_by_line_rate(
    rows: IntArray, rates: Floats, k: int, price: IntArray
) -> tuple[IntArray | None, int]:
    """Counts of the highest min(line rate, bandwidths within), and a bound on all (it, if exact).

    Parameters
    ----------
    rows
        Best bandwidth within a host by number of GPUs taken, -1 where too few are free.
    rates
        What so many GPUs of a host bring to the network.
    k
        GPUs.
    price
        Of hosts that suffice the cheapest are taken.
    """
    n_hosts, width = rows.shape
    best, chosen = -1, None
    if k < width:  # one host
        h = int(np.lexsort((price, -rows[:, k]))[0])
        if rows[h, k] >= 0:
            best, chosen = min(int(rows[h, k]), MOST), np.zeros(n_hosts, np.int64)
            chosen[h] = k
    some = np.arange(2, min(n_hosts, k) + 1)
    steps = np.unique(rates[1:width])[::-1]
    lines = np.array([line(np.full(len(some), r), np.full(len(some), k), some) for r in steps])
    levels = np.unique(np.concatenate([rows[rows >= 0], lines.reshape(-1)]))
    levels = levels[(levels > best) & (levels <= MOST)]

    def may_be(value: int) -> bool:
        return any(True for _ in ways(rows, rates, k, steps, lines, value))

    doubtful = False

    def made(value: int) -> IntArray | None:
        nonlocal doubtful
        for good, m in ways(rows, rates, k, steps, lines, value):
            counts = filled(good, m, k, price)
            if counts is not None:
                return counts
            doubtful |= bits(good, m, k) > MOST_BITS
        return None

    upper = _last(levels, may_be)
    if upper is None:
        return chosen, best
    found = made(upper)
    if found is None:
        value = _last(levels[levels < upper], lambda value: made(value) is not None)
        found = None if value is None else made(value)
        upper = upper if doubtful else best if value is None else value
    return (chosen if found is None else found), upper


def _last(levels: IntArray, holds: Callable[[int], bool]) -> int | None:
    """The last level for which it holds, if it holds for all before; None if for none."""
    low, high = 0, len(levels)
    while low < high:
        middle = (low + high) // 2
        if holds(int(levels[middle])):
            low = middle + 1
        else:
            high = middle
    return int(levels[low - 1]) if low else None


def ways(
    rows: IntArray, rates: Floats, k: int, steps: Floats, lines: IntArray, value: int
) -> Iterator[tuple[Bools, int]]:
    """Allowed counts by host, and numbers of hosts, with which k GPUs may have `value` or more.

    What is left out cannot have it: that so many least counts are above k, or most counts below.
    """
    width = rows.shape[1]
    for r, step in enumerate(steps):
        m = int((lines[r] >= value).sum()) + 1  # up to so many hosts
        good = (rows >= value) & (rates[:width] >= step)
        good[:, 0] = False
        able = good.any(axis=1)
        m = min(m, int(able.sum()))
        if m < 2:
            continue
        least = np.cumsum(np.sort(good[able].argmax(axis=1)))[1:m]
        most = np.cumsum(-np.sort(good[able, ::-1].argmax(axis=1) - width + 1))[1:m]
        for i in np.flatnonzero((least <= k) & (most >= k)).tolist():
            yield good, i + 2


def bits(good: Bools, m: int, k: int) -> int:
    """Size of the table in which `filled` looks for sums of irregular hosts."""
    return int((m + 1) * (k + good.shape[1]) * len(good))


def filled(good: Bools, m: int, k: int, price: IntArray) -> IntArray | None:
    """Counts of exactly m hosts with sum k, each good for it; None if none are found."""
    at = np.flatnonzero(good.any(axis=1))
    allowed = good[at]
    least = allowed.argmax(axis=1)
    most = allowed.shape[1] - 1 - allowed[:, ::-1].argmax(axis=1)
    counts = np.zeros(len(good), np.int64)
    if (least == least[0]).all() and (allowed.sum(axis=1) == most - least + 1).all():
        for keys in ((-most, price[at]), (price[at], -most)):
            order = np.lexsort(keys)[:m]
            if most[order].sum() >= k:
                counts[at[order]] = even(most[order], k)
                return counts
        return None
    if bits(good, m, k) > MOST_BITS:
        return None
    row = k + allowed.shape[1]  # bit (hosts used) * row + (GPUs): reached with the hosts so far
    reached = [1]
    kept = sum(((1 << k + 1) - 1) << i * row for i in range(m + 1))
    options = [np.flatnonzero(some).tolist() for some in allowed]
    for some in options:
        now = reached[-1]
        for c in some:
            now |= reached[-1] << row + c
        reached.append(now & kept)
    place = m * row + k
    if not reached[-1] >> place & 1:
        return None
    for i in range(len(at) - 1, -1, -1):
        for c in [0, *options[i]]:
            before = place - (row + c if c else 0)
            if before >= 0 and reached[i] >> before & 1:
                counts[at[i]], place = c, before
                break
    return counts


def fill(allowed: Bools, k: int, groups: Iterable[Sequence[int]], size: int = 1) -> IntArray | None:
    """Counts with sum k, each allowed on its host, of every group whole slices; None: none are.

    The last hosts of the last groups get most.
    """
    mask, whole = (1 << k + 1) - 1, sum(1 << total for total in range(0, k + 1, size))
    reached, steps = 1, []  # bit n: n GPUs with the hosts so far
    for group in groups:
        for i in group:
            options = np.flatnonzero(allowed[i, : k + 1]).tolist()
            steps.append((i, options, reached))
            now = 0
            for c in options:
                now |= reached << c
            reached = now & mask
        reached &= whole
    if not reached >> k & 1:
        return None
    counts, left = np.zeros(len(allowed), np.int64), k
    for i, options, before in reversed(steps):
        c = next(c for c in reversed(options) if c <= left and before >> left - c & 1)
        counts[i] = c
        left -= c
    return counts
