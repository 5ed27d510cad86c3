"""Kernels of the largest concave sum: what one GPU more adds to a job, and the best of these."""

from __future__ import annotations

import numpy as np

from optsched.kernels.compile import BOOL, INT, INTS, READ, copy, entry, helper

_SAMPLE = 512
_FEW = 2048


@entry(INT, READ, READ, INTS, counted=False)
def survey(ptr, value, facts):  # type: ignore[no-untyped-def]
    """Facts: triples of a row in which the increment grows, largest and smallest value."""
    n = len(value)
    growing, top, bottom = np.int64(0), value[0] if n else 0, value[0] if n else 0
    for i in range(n):
        top, bottom = max(top, value[i]), min(bottom, value[i])
    for i in range(1, n - 1):
        growing += value[i + 1] - value[i] > value[i] - value[i - 1]
    for j in range(len(ptr) - 1):  # triples that reach into another row do not count
        first, last = ptr[j], ptr[j + 1] - 1
        if 0 < first < n - 1:
            growing -= value[first + 1] - value[first] > value[first] - value[first - 1]
        if first != last and 0 < last < n - 1:
            growing -= value[last + 1] - value[last] > value[last] - value[last - 1]
    facts[0], facts[1], facts[2] = growing, top, bottom
    return 0


@helper(BOOL, READ, READ, INT, INT, counted=False)
def _first(gain, owner, a, b):  # type: ignore[no-untyped-def]
    """Whether heap place a goes before b: larger gain, then lower id."""
    return gain[a] > gain[b] or (gain[a] == gain[b] and owner[a] < owner[b])


@helper(INT, INTS, INTS, INT, INT, counted=False)
def _sift(gain, owner, at, size):  # type: ignore[no-untyped-def]
    """Let the entry at a place sink."""
    while True:
        child = 2 * at + 1
        if child >= size:
            return 0
        if child + 1 < size and _first(gain, owner, child + 1, child):
            child += 1
        if not _first(gain, owner, child, at):
            return 0
        gain[at], gain[child] = gain[child], gain[at]
        owner[at], owner[child] = owner[child], owner[at]
        at = child


@entry(INT, READ, READ, INT, INTS)
def by_heap(ptr, value, spare, taken):  # type: ignore[no-untyped-def]
    """Give `spare` GPUs one by one to the largest positive increment; taken: (n,), zeros."""
    n = len(taken)
    gain, owner = np.empty(n, np.int64), np.empty(n, np.int64)
    size = 0
    for j in range(n):
        p = ptr[j]
        if ptr[j + 1] - p > 1 and value[p + 1] > value[p]:
            gain[size], owner[size] = value[p + 1] - value[p], j
            size += 1
    for at in range(size // 2 - 1, -1, -1):
        _sift(gain, owner, at, size)
    while spare > 0 and size > 0:
        j = owner[0]
        taken[j] += 1
        spare -= 1
        i = ptr[j] + taken[j]
        more = value[i + 1] - value[i] if i + 1 < ptr[j + 1] else 0
        if more > 0:
            gain[0] = more
        else:
            size -= 1
            gain[0], owner[0] = gain[size], owner[size]
        _sift(gain, owner, 0, size)
    return 0


@helper(INT, READ, INT, INT, INT, INT, counted=False)
def _above(value, p, low, high, price):  # type: ignore[no-untyped-def]
    """Number of increments above a price, known to be in low..high, of the row at p."""
    while low < high:
        middle = (low + high) // 2
        if value[p + middle + 1] - value[p + middle] > price:
            low = middle + 1
        else:
            high = middle
    return low


@helper(INT, READ, READ, READ, READ, INT, INTS)
def _sample(ptr, value, low, high, stride, sample):  # type: ignore[no-untyped-def]
    """Every stride-th undecided increment, in descending order; how many."""
    at, m = stride // 2, 0
    for j in range(len(low)):
        open_here = high[j] - low[j]
        while at < open_here and m < len(sample):
            i = ptr[j] + low[j] + at
            sample[m] = value[i] - value[i + 1]
            m += 1
            at += stride
        at -= open_here
    sample[:m].sort()
    for i in range(m):
        sample[i] = -sample[i]
    return m


@helper(INT, READ, READ, READ, READ, INT, INTS)
def _finish(ptr, value, low, high, spare, taken):  # type: ignore[no-untyped-def]
    """Take the `spare` largest of the few undecided increments, ties by id."""
    m = 0
    for j in range(len(low)):
        m += high[j] - low[j]
    gain, owner = np.empty(m, np.int64), np.empty(m, np.int64)
    m = 0
    for j in range(len(low)):
        taken[j] = low[j]
        for k in range(ptr[j] + low[j], ptr[j] + high[j]):
            gain[m], owner[m] = value[k] - value[k + 1], j
            m += 1
    order = np.argsort(gain, kind="mergesort")
    for i in range(min(m, spare)):
        taken[owner[order[i]]] += 1
    return 0


@entry(INT, READ, READ, INT, INTS)
def by_price(ptr, value, spare, taken):  # type: ignore[no-untyped-def]
    """Take the `spare` largest positive increments: narrow their number in every row by prices.

    low and high: increments certainly taken, and those not yet refused. Prices are picked from a
    sample on either side of the aim, so two of them leave few increments open.
    """
    n = len(taken)
    low, high = np.zeros(n, np.int64), np.empty(n, np.int64)
    more, equal = np.empty(n, np.int64), np.empty(n, np.int64)
    sample = np.empty(2 * _SAMPLE, np.int64)
    sure, hope = np.int64(0), np.int64(0)
    for j in range(n):
        high[j] = _above(value, ptr[j], 0, ptr[j + 1] - ptr[j] - 1, 0)
        hope += high[j]
    if hope <= spare:
        copy(taken, high)
        return 0
    while hope - sure > _FEW:
        open_now = hope - sure
        m = _sample(ptr, value, low, high, max(1, open_now // _SAMPLE), sample)
        part = (spare - sure) / open_now
        spread = 1.0 + 2.0 * np.sqrt(m * part * (1.0 - part))
        for side in range(2):
            pick = np.int64(part * m + (spread if side == 1 else -spread))
            price = sample[min(max(pick, 0), m - 1)]
            strict = ties = np.int64(0)
            for j in range(n):
                c = _above(value, ptr[j], low[j], high[j], price)
                more[j] = c
                if c < high[j] and value[ptr[j] + c + 1] - value[ptr[j] + c] == price:
                    c = _above(value, ptr[j], c + 1, high[j], price - 1)
                equal[j] = c
                strict += more[j]
                ties += c
            if strict >= spare:
                high, more, hope = more, high, strict
            elif ties <= spare:
                low, equal, sure = equal, low, ties
            else:  # the price: ties by id
                rest = spare - strict
                for j in range(n):
                    extra = min(rest, equal[j] - more[j])
                    taken[j] = more[j] + extra
                    rest -= extra
                return 0
            if hope == spare or sure == spare:
                break
        if hope == spare or sure == spare:
            break
    if hope == spare:
        copy(taken, high)
    else:
        _finish(ptr, value, low, high, spare - sure, taken)
    return 0


@entry(INT, READ, READ, INT, READ, INTS, counted=False)
def dual_bound(ptr, value, spare, taken, proof):  # type: ignore[no-untyped-def]
    """Whether the sum equals its Lagrangian bound at the largest increment left (or 0).

    proof gets sum, bound and price. The bound sum_j max_k (u_j(k) - price k) + price * spare holds
    for all utilities, concave or not.
    """
    price = total = spent = wrong = np.int64(0)
    for j in range(len(taken)):
        i = ptr[j] + taken[j]
        wrong += (taken[j] < 0) | (i >= ptr[j + 1])
        if wrong == 0:
            total += value[i]
            spent += taken[j]
            if i + 1 < ptr[j + 1]:
                price = max(price, value[i + 1] - value[i])
    bound = price * spare
    for j in range(len(taken)):
        p = ptr[j]
        best = value[p]
        for k in range(ptr[j + 1] - p):
            net = value[p + k] - price * k
            best = net if net > best else best
        bound += best
    proof[0], proof[1], proof[2] = total, bound, price
    return 1 if wrong == 0 and spent <= spare and total == bound else 0
