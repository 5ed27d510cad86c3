"""Nodes by number of free GPUs, as bitmaps: the fullest node that fits without a scan.

One int64 array: for every count a bitmap of its nodes, above it a bitmap of that one's words that
are not zero, and one bitmap of the counts that have nodes. Words carry 32 bits.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from optsched.kernels.compile import INT, INTS, READ, entry, helper

COUNTS: Final = 0
"""Largest count."""
LOW: Final = 1
"""Words of a count's bitmap."""
HIGH: Final = 2
"""Words of the bitmap above it."""
START: Final = 3

ALL: Final = 0xFFFFFFFF


@helper(INT, INT, counted=False)
def lowest(word):  # type: ignore[no-untyped-def]
    """Position of the lowest bit of a word that is not zero."""
    at = 0
    if word & 0xFFFF == 0:
        word >>= 16
        at += 16
    if word & 0xFF == 0:
        word >>= 8
        at += 8
    if word & 0xF == 0:
        word >>= 4
        at += 4
    if word & 0x3 == 0:
        word >>= 2
        at += 2
    return at + 1 - (word & 1)


@helper(INT, INT, counted=False)
def highest(word):  # type: ignore[no-untyped-def]
    """Position of the highest bit of a word that is not zero."""
    at = 0
    for step in (16, 8, 4, 2, 1):
        if word >> step != 0:
            word >>= step
            at += step
    return at


@helper(INTS, INT, INT)
def make(nodes, counts):  # type: ignore[no-untyped-def]
    """Buckets for node ids below `nodes` and counts up to `counts`, all empty."""
    low = (nodes + 31) // 32
    high = (low + 31) // 32
    words = np.zeros(START + counts // 32 + 1 + (counts + 1) * (low + high), np.int64)
    words[COUNTS], words[LOW], words[HIGH] = counts, low, high
    return words


@helper(INT, INTS, INT, INT, counted=False)
def insert(words, count, node):  # type: ignore[no-untyped-def]
    """Put a node into the bucket of a count."""
    at = START + words[COUNTS] // 32 + 1 + count * (words[LOW] + words[HIGH])
    words[at + (node >> 5)] |= 1 << (node & 31)
    words[at + words[LOW] + (node >> 10)] |= 1 << (node >> 5 & 31)
    words[START + (count >> 5)] |= 1 << (count & 31)
    return 0


@helper(INT, INTS, INT, INT, counted=False)
def remove(words, count, node):  # type: ignore[no-untyped-def]
    """Take a node out of the bucket of a count."""
    at = START + words[COUNTS] // 32 + 1 + count * (words[LOW] + words[HIGH])
    words[at + (node >> 5)] &= ALL ^ (1 << (node & 31))
    if words[at + (node >> 5)] != 0:
        return 0
    words[at + words[LOW] + (node >> 10)] &= ALL ^ (1 << (node >> 5 & 31))
    for i in range(words[HIGH]):
        if words[at + words[LOW] + i] != 0:
            return 0
    words[START + (count >> 5)] &= ALL ^ (1 << (count & 31))
    return 0


@helper(INT, INTS, INT, counted=False)
def first(words, count):  # type: ignore[no-untyped-def]
    """Lowest node of a bucket that is not empty."""
    at = START + words[COUNTS] // 32 + 1 + count * (words[LOW] + words[HIGH])
    high = 0
    while words[at + words[LOW] + high] == 0:
        high += 1
    low = (high << 5) + lowest(words[at + words[LOW] + high])
    return (low << 5) + lowest(words[at + low])


@helper(INT, INTS, INT, counted=False)
def least(words, count):  # type: ignore[no-untyped-def]
    """Smallest count of at least `count` that has nodes, or -1."""
    if count > words[COUNTS]:
        return -1
    at = count >> 5
    word = words[START + at] & (ALL ^ ((1 << (count & 31)) - 1))
    while word == 0:
        at += 1
        if at > words[COUNTS] >> 5:
            return -1
        word = words[START + at]
    return (at << 5) + lowest(word)


@helper(INT, INTS, INT, counted=False)
def greatest(words, count):  # type: ignore[no-untyped-def]
    """Largest count of at most `count` that has nodes, or -1."""
    count = min(count, words[COUNTS])
    if count < 0:
        return -1
    at = count >> 5
    word = words[START + at] & ((2 << (count & 31)) - 1)
    while word == 0:
        at -= 1
        if at < 0:
            return -1
        word = words[START + at]
    return (at << 5) + highest(word)


@entry(INT, READ, READ, READ, INT, INTS)
def single(free, gpus, events, worst, node):  # type: ignore[no-untyped-def]
    """Place every task on one node by best (0) or worst (1) fit; -1 where it does not fit.

    events: task numbers in order of arrival; ~i where task i gives its GPUs back.
    """
    left = free.copy()
    counts = 0
    for n in range(len(free)):
        counts = max(counts, free[n])
    words = make(len(free), counts)
    for n in range(len(free)):
        insert(words, left[n], n)
    node[:] = -1
    for e in events:
        i = e if e >= 0 else ~e
        if e < 0:
            n, change = node[i], gpus[i]
        else:
            n, change = -1, -gpus[i]
            at = greatest(words, counts) if worst == 1 else least(words, gpus[i])
            if at >= gpus[i]:
                n = first(words, at)
            node[i] = n
        if n >= 0:
            remove(words, left[n], n)
            left[n] += change
            insert(words, left[n], n)
    return 0


@entry(INT, READ, READ, READ, READ, READ, INTS, INTS, INTS)
def whole(free, capacity, gpus, events, start, node, count, span):  # type: ignore[no-untyped-def]
    """Place tasks on one node by best fit, else on whole idle nodes and one remainder.

    Rows of task i begin at ``start[i]`` of node and count; span: their number, 0 where the task
    does not fit. Idle nodes of the greatest capacity within what is left come first, lowest id.
    """
    left = free.copy()
    counts = 0
    for n in range(len(free)):
        counts = max(counts, max(free[n], capacity[n]))
    words, idle = make(len(free), counts), make(len(free), counts)
    for n in range(len(free)):
        insert(words, left[n], n)
        if left[n] == capacity[n] and left[n] > 0:
            insert(idle, left[n], n)
    span[:] = 0
    for e in events:
        i = e if e >= 0 else ~e
        at, end = start[i], start[i] + span[i]
        rest = 0
        if e >= 0:
            rest, end = gpus[i], start[i]
            while rest > 0:
                c = least(words, rest)
                n = first(words, c) if c > 0 else -1
                take = rest
                if n < 0:
                    c = greatest(idle, rest)
                    if c <= 0:
                        break
                    n, take = first(idle, c), c
                remove(words, left[n], n)
                if left[n] == capacity[n]:
                    remove(idle, left[n], n)
                left[n] -= take
                insert(words, left[n], n)
                node[end], count[end] = n, take
                end += 1
                rest -= take
            span[i] = end - at
        if e < 0 or rest > 0:  # it ends, or does not fit after all
            for k in range(at, end):
                n = node[k]
                remove(words, left[n], n)
                left[n] += count[k]
                insert(words, left[n], n)
                if left[n] == capacity[n]:
                    insert(idle, left[n], n)
            if e >= 0:
                span[i] = 0
    return 0
