"""Bitmaps of free GPUs and heaps of pending jobs against plain lists."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from lucid_tick_oracle import place as consolidated

from optsched.cluster.queue_twin_nodes import (
    ANYWHERE,
    CONSOLIDATED,
    FREE,
    FREE_TOTAL,
    board,
    place,
    release,
)
from optsched.cluster.srtf_twin_pending import (
    HEAD_KEY,
    SIZE,
    first_fitting,
    insert,
    line_for,
    take_first,
)
from optsched.kernels.compile import INT, INTS, entry


@entry(INT, INTS, INT, INT, INTS, INTS, INT)
def placed(board, gpus, rule, nodes, counts, begin):
    """A door to `place`."""
    return place(board, gpus, rule, nodes, counts, begin)


@entry(INT, INTS, INTS, INTS, INT, INT)
def released(board, nodes, counts, begin, end):
    """A door to `release`."""
    return release(board, nodes, counts, begin, end)


def anywhere(free: list[int], gpus: int) -> dict[int, int] | None:
    """The fullest node that fits; else the emptiest wholly, and again."""
    if sum(free) < gpus:
        return None
    free, where = list(free), {}
    while True:
        fits = [(f, n) for n, f in enumerate(free) if f >= gpus]
        if fits:
            where[min(fits)[1]] = gpus
            return where
        node = min((-f, n) for n, f in enumerate(free))[1]
        where[node] = free[node]
        gpus -= free[node]
        free[node] = 0


@given(st.data())
def test_placement_equals_lists(data):
    """Both rules, on up to 200 nodes, through starts and ends."""
    rule = data.draw(st.sampled_from([ANYWHERE, CONSOLIDATED]))
    count = data.draw(st.sampled_from([1, 3, 8, 64, 65, 200]))
    random = data.draw(st.randoms(use_true_random=False))
    sizes = [8] if rule == CONSOLIDATED else [1, 3, 8, 70, 130]
    free = [random.choice(sizes) for _ in range(count)]
    slow = consolidated if rule == CONSOLIDATED else anywhere
    fast, live = board(free), []
    nodes, counts = np.zeros(2000, np.int64), np.zeros(2000, np.int64)
    for _ in range(60):
        if live and random.random() < 0.4:
            where = live.pop(random.randrange(len(live)))
            nodes[: len(where)], counts[: len(where)] = list(where), list(where.values())
            released(fast, nodes, counts, 0, len(where))
            sign = 1
        else:
            gpus = random.choice([1, 2, 4, 8, 9, 16, 24, random.randint(1, max(sum(free), 1))])
            end, where = placed(fast, gpus, rule, nodes, counts, 5), slow(free, gpus)
            found = list(zip(nodes[5:end].tolist(), counts[5:end].tolist(), strict=True))
            assert found == sorted((where or {}).items())
            if where is None:
                continue
            live.append(where)
            sign = -1
        for node, gpus in where.items():
            free[node] += sign * gpus
        assert fast[FREE : FREE + count].tolist() == free
        assert fast[FREE_TOTAL] == sum(free)


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=25),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 7)), max_size=60),
)
def test_heaps_equal_lists(gang, steps):
    """The first job that fits, by (key, number), whatever came and went."""
    line, record = line_for(np.array(gang, np.int64))
    waiting: dict[int, tuple[int, int]] = {}
    coming = list(range(len(gang)))
    for key, gpus in steps:
        if coming:
            job = coming.pop()
            insert(line, record[job], job, key, job)
            waiting[job] = (key, job)
        fits = [(order, job) for job, order in waiting.items() if gang[job] <= gpus]
        found = first_fitting(line, gpus)
        if not fits:
            assert found == 0
            continue
        (order, job) = min(fits)
        assert (line[found + SIZE], line[found + HEAD_KEY]) == (gang[job], order[0])
        assert take_first(line, found) == job
        del waiting[job]
        if key == 2:
            coming.append(job)
