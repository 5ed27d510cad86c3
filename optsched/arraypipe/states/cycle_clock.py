"""The time of a cycle as a kernel, and a search for marks that make it shorter.

Decisions and times are those of `Replacement`, `Transfers` and `SimulatedEngine` for a cycle of
visits that repeats. Only where both directions share a link they are estimates: here it serves
copies in the order in which they are queued, and fills no gaps.
"""

from __future__ import annotations

import numpy as np
from numba import types

from optsched.kernels.compile import INT, INTS, copy, entry, helper

REAL = types.float64
REALS = types.Array(types.float64, 1, "C")
READ_REALS = types.Array(types.float64, 1, "C", readonly=True)
TABLE = types.Array(types.int64, 2, "C")
READ_TABLE = types.Array(types.int64, 2, "C", readonly=True)
REAL_TABLE = types.Array(types.float64, 2, "C")
REAL_CUBE = types.Array(types.float64, 3, "C")
READ_REAL_TABLE = types.Array(types.float64, 2, "C", readonly=True)

# columns of the visits; pieces are bits, NAME is the first visit with the same mark
STATE, NEEDS, CHANGES, GRAPH, FIRST, NAME = range(6)
# columns of their times
DURATION, GAP = range(2)
# columns of the rules, one row per pool
SLOTS, LEAD = range(2)
# columns of the moves, one row per visit and pool
SLOT, FETCH, AFTER, VICTIM = range(4)
# columns of the writes that wait
BEFORE, FROM, WHOSE, PIECE = range(4)
# columns of the link
INWARD, OUTWARD, LATENCY, SHARED = range(4)


@helper(INT, READ_TABLE, READ_TABLE, READ_TABLE, READ_TABLE, READ_TABLE, TABLE, TABLE)
def decide(
    visits: np.ndarray,
    following: np.ndarray,
    rules: np.ndarray,
    fixed: np.ndarray,
    leaving: np.ndarray,
    moves: np.ndarray,
    writes: np.ndarray,
) -> int:
    """Fill moves (2T, 4) and writes (T, 4; -1: none) of T visits; 0 if slots do not suffice."""
    n, most, count = len(visits), rules[:, SLOTS].max(), fixed.shape[1]
    state = np.full((2, most), -1)
    present, last = np.zeros((2, most), np.int64), np.zeros((2, most), np.int64)
    turns = np.zeros((2, most), np.int64)
    changed = np.full((most, 4), -1)
    where = np.full((2, count), -1)
    graphs = np.zeros(count, np.int64)
    turn, previous = np.zeros(2, np.int64), np.full(2, -1)
    for t in range(len(writes)):
        i = t % n
        s = visits[i, STATE]
        writes[t] = -1
        for pool in range(2):
            mine = 8 if pool else 7
            m = 2 * t + pool
            moves[m, SLOT] = -1
            needs = visits[i, NEEDS] & mine
            if not needs:
                continue
            if s != previous[pool]:
                previous[pool] = s
                turn[pool] += 1
            k = where[pool, s]
            moves[m, AFTER] = moves[m, VICTIM] = -1
            if k < 0:
                best = (-1, 0, 0)
                for j in range(rules[pool, SLOTS]):
                    other = state[pool, j]
                    if other < 0:
                        k = j
                        break
                    if fixed[pool, other] or (pool == 0 and graphs[other] > 0):
                        continue
                    at, clean = last[pool, j], 1
                    for piece in range(3, 4) if pool else range(3):
                        if changed[j, piece] >= 0:
                            clean = 0
                    if leaving[pool, visits[at % n, NAME]]:
                        rank = (2, -at, 1)
                    elif turn[pool] - turns[pool, j] <= rules[pool, LEAD]:
                        rank = (0, -turns[pool, j], clean)
                    else:
                        rank = (1, at + following[pool, at % n], clean)
                    if rank > best:
                        best, k = rank, j
                if k < 0:
                    return 0
                victim = state[pool, k]
                if victim >= 0:
                    where[pool, victim] = -1
                    moves[m, AFTER], moves[m, VICTIM] = last[pool, k], victim
                    for piece in range(3, 4) if pool else range(3):
                        writes[t, piece] = changed[k, piece]
                        changed[k, piece] = -1
                state[pool, k], present[pool, k], where[pool, s] = s, 0, k
            moves[m, SLOT], moves[m, FETCH] = k, needs & ~present[pool, k]
            present[pool, k] |= needs
            for piece in range(4):
                if visits[i, CHANGES] & mine & (1 << piece):
                    changed[k, piece] = t
            last[pool, k], turns[pool, k] = t, turn[pool]
        if visits[i, FIRST]:
            graphs[s] = 0
        graphs[s] = max(0, graphs[s] + visits[i, GRAPH])
    return 1


@helper(INT, INT, TABLE, TABLE, TABLE, INT, TABLE, INT)
def queue(
    t: int,
    moves: np.ndarray,
    writes: np.ndarray,
    waiting: np.ndarray,
    many: int,
    reads: np.ndarray,
    tail: int,
) -> int:
    """Queue the copies of visit t; the number of waiting writes << 32 | the end of the reads."""
    for pool in range(2):
        m = 2 * t + pool
        if moves[m, SLOT] < 0:
            continue
        for piece in range(3, 4) if pool else range(3):
            if writes[t, piece] >= 0:
                waiting[many, BEFORE], waiting[many, PIECE] = writes[t, piece], piece
                waiting[many, FROM], waiting[many, WHOSE] = moves[m, SLOT], moves[m, VICTIM]
                many += 1
        if moves[m, FETCH]:
            reads[tail, 0], reads[tail, 1] = t, pool
            tail += 1
    return many << 32 | tail


@helper(
    INT, INT, INT, INT, READ_TABLE, INT, READ_REALS, REALS, REAL_TABLE, REAL_TABLE, REAL_CUBE,
    TABLE, TABLE,
)  # fmt: skip
def write(
    k: int,
    s: int,
    piece: int,
    sizes: np.ndarray,
    chunk: int,
    link: np.ndarray,
    free: np.ndarray,
    changed: np.ndarray,
    written: np.ndarray,
    vacated: np.ndarray,
    counts: np.ndarray,
    steps: np.ndarray,
) -> int:
    """Copy a piece of state s out of slot k, chunk by chunk; its bytes."""
    size = sizes[s, piece]
    steps[k, piece] = size if chunk == 0 else chunk
    start = count = 0
    if link[SHARED]:
        free[1] = max(free[0], free[1])
    while start < size:
        stop = min(start + steps[k, piece], size)
        copying = link[LATENCY] + (stop - start) / link[OUTWARD]
        free[1] = max(free[1], changed[k, piece]) + copying
        vacated[k, piece, count] = written[s, piece] = free[1]
        start = stop
        count += 1
    counts[k, piece] = count
    if link[SHARED]:
        free[0] = free[1]
    return int(size)


@helper(
    INT, INT, INT, INT, READ_TABLE, INT, READ_REALS, REALS, REAL, REAL_TABLE, REAL_TABLE, REAL_CUBE,
    TABLE, TABLE,
)  # fmt: skip
def read(
    k: int,
    s: int,
    piece: int,
    sizes: np.ndarray,
    chunk: int,
    link: np.ndarray,
    free: np.ndarray,
    used: float,
    arrived: np.ndarray,
    written: np.ndarray,
    vacated: np.ndarray,
    counts: np.ndarray,
    steps: np.ndarray,
) -> int:
    """Copy a piece of state s into slot k, each chunk once its bytes there have left; its bytes."""
    size, count = sizes[s, piece], counts[k, piece]
    step = size if chunk == 0 else chunk
    arrival = vacated[k, piece, count - 1] if count else 0.0
    start = part = 0
    while start < size:
        stop = min(start + step, size)
        while part < count - 1 and (part + 1) * steps[k, piece] < stop:
            part += 1
        ready = max(free[0], used, written[s, piece])
        if count:
            ready = max(ready, vacated[k, piece, part])
        arrival = free[0] = ready + (link[LATENCY] + (stop - start) / link[INWARD])
        start = stop
    arrived[k, piece] = arrival
    if link[SHARED]:
        free[1] = free[0]
    return int(size)


@helper(REAL, INT, READ_TABLE, READ_REAL_TABLE, TABLE, REAL, REAL_TABLE, REAL_TABLE, REAL_TABLE)
def run(
    t: int,
    visits: np.ndarray,
    times: np.ndarray,
    moves: np.ndarray,
    now: float,
    used: np.ndarray,
    changed: np.ndarray,
    arrived: np.ndarray,
) -> float:
    """Wait for the pieces of visit t and run its block; when that ends."""
    i = t % len(visits)
    for pool in range(2):
        k = moves[2 * t + pool, SLOT]
        for piece in range(3, 4) if pool else range(3):
            if k >= 0 and visits[i, NEEDS] & (1 << piece):
                now = max(now, arrived[k, piece])
    now += times[i, DURATION]
    for pool in range(2):
        k = moves[2 * t + pool, SLOT]
        if k >= 0:
            used[pool, k] = now
        for piece in range(3, 4) if pool else range(3):
            if k >= 0 and visits[i, CHANGES] & (1 << piece):
                changed[k, piece] = now
    return now


@entry(
    REAL, READ_TABLE, READ_REAL_TABLE, READ_TABLE, READ_TABLE, READ_TABLE, READ_TABLE, READ_TABLE,
    INT, READ_REALS, INT, INT, INTS,
)  # fmt: skip
def cycle_time(
    visits: np.ndarray,
    times: np.ndarray,
    following: np.ndarray,
    sizes: np.ndarray,
    rules: np.ndarray,
    fixed: np.ndarray,
    leaving: np.ndarray,
    chunk: int,
    link: np.ndarray,
    cycles: int,
    settled: int,
    copied: np.ndarray,
) -> float:
    """Mean time of the cycles after the settled ones, from empty slots; -1: too few slots.

    copied (1,) becomes the bytes of all cycles, both directions.
    """
    n, most = len(visits), rules[:, SLOTS].max()
    total = (cycles + 2) * n
    moves, writes = np.empty((2 * total, 4), np.int64), np.empty((total, 4), np.int64)
    if not decide(visits, following, rules, fixed, leaving, moves, writes):
        return -1.0
    waiting, reads = np.empty((4 * total, 4), np.int64), np.empty((2 * total, 2), np.int64)
    used, changed, arrived = np.zeros((2, most)), np.zeros((most, 4)), np.zeros((most, 4))
    written = np.zeros((len(sizes), 4))
    # of the last write out of a slot: when its chunks have left, how many there are, and their size
    vacated = np.zeros((most, 4, 1 if chunk == 0 else max(1, -(-sizes.max() // chunk))))
    counts, steps = np.zeros((most, 4), np.int64), np.zeros((most, 4), np.int64)
    free = np.zeros(2)  # when the last copy in, and out, ends
    now = begun = 0.0
    many = head = tail = decided = 0
    room = rules[:, SLOTS].sum()
    copied[0] = 0
    for t in range(cycles * n):
        i = t % n
        if t == settled * n:
            begun = now
        now += times[i, GAP]
        for over in (t, t + 1):
            if over > t:  # the block has run
                now = run(t, visits, times, moves, now, used, changed, arrived)
            while decided <= t or (
                over > t and tail - head <= room and decided <= t + 2 * n + 1 and decided < total
            ):
                both = queue(decided, moves, writes, waiting, many, reads, tail)
                many, tail = both >> 32, both & 0xFFFFFFFF
                decided += 1
            left = 0
            for w in range(many):
                if waiting[w, BEFORE] >= over:
                    copy(waiting[left], waiting[w])
                    left += 1
                    continue
                copied[0] += write(
                    waiting[w, FROM], waiting[w, WHOSE], waiting[w, PIECE], sizes, chunk, link,
                    free, changed, written, vacated, counts, steps,
                )  # fmt: skip
            many = left
            while head < tail and moves[2 * reads[head, 0] + reads[head, 1], AFTER] < over:
                s, pool = visits[reads[head, 0] % n, STATE], reads[head, 1]
                m = 2 * reads[head, 0] + pool
                head += 1
                for piece in range(4):
                    if moves[m, FETCH] & (1 << piece):
                        copied[0] += read(
                            moves[m, SLOT], s, piece, sizes, chunk, link, free,
                            used[pool, moves[m, SLOT]], arrived, written, vacated, counts, steps,
                        )  # fmt: skip
    return (now - begun) / (cycles - settled)


@entry(
    REAL, READ_TABLE, READ_REAL_TABLE, READ_TABLE, READ_TABLE, READ_TABLE, READ_TABLE, TABLE,
    INT, READ_REALS, INT, INT, INTS, READ_TABLE, REAL,
)  # fmt: skip
def improve(
    visits: np.ndarray,
    times: np.ndarray,
    following: np.ndarray,
    sizes: np.ndarray,
    rules: np.ndarray,
    fixed: np.ndarray,
    leaving: np.ndarray,
    chunk: int,
    link: np.ndarray,
    cycles: int,
    settled: int,
    copied: np.ndarray,
    flips: np.ndarray,
    enough: float,
) -> float:
    """Flip marks (pool * n + visit; -1: none), a row at a time; undo what is slower or copies more.

    Returns the time of the marks that are left in `leaving`; ends early when it is enough.
    """
    n = len(visits)
    best = cycle_time(
        visits, times, following, sizes, rules, fixed, leaving, chunk, link, cycles, settled, copied
    )  # fmt: skip
    least = copied[0]
    for row in range(len(flips)):
        if best <= enough:
            break
        for mark in flips[row]:
            if mark >= 0:
                leaving[mark // n, mark % n] ^= 1
        found = cycle_time(
            visits, times, following, sizes, rules, fixed, leaving, chunk, link, cycles, settled,
            copied,
        )  # fmt: skip
        same = found <= best * (1 + 1e-9) and copied[0] <= least
        if found >= 0 and (same or found < best * (1 - 1e-9)):
            best, least = found, copied[0]
        else:
            for mark in flips[row]:
                if mark >= 0:
                    leaving[mark // n, mark % n] ^= 1
    return best
