"""Integer quotas onto nodes: few nodes a job, few GPUs moved, whole nodes left free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from optsched.errors import InputError
from optsched.kernels.compile import INT, INTS, READ, entry, helper
from optsched_solvers.quota.placement_input import counts, row_pointers

if TYPE_CHECKING:
    from optsched_solvers.quota.placement_input import Ints, IntsLike

ANY: Final = 0
SINGLE: Final = 1
WHOLE: Final = 2

TRIES: Final = 64
"""Orders tried beyond the usual ones, each with one job moved to the front."""
WORK: Final = 2_000_000
"""Jobs times nodes that these may take in sum: some milliseconds."""


def place_quotas(
    quota: IntsLike,
    free: IntsLike,
    held_ptr: IntsLike,
    held_node: IntsLike,
    held_count: IntsLike,
    locality: IntsLike,
) -> tuple[Ints, Ints, Ints, int]:
    """Put every job's GPUs on nodes, one job after the other, in the best of some orders.

    Best are in this order: all jobs placed, fewest nodes spanned in sum, fewest GPUs moved, fewest
    free GPUs left on nodes that are partly taken. The orders are descending by quota, jobs with a
    locality first, jobs that can stay where they are first, and then those with one job moved to
    the front. This is a heuristic: a `single` or `whole` job may fail although some packing
    exists; `any` jobs fail only for want of GPUs.

    Parameters
    ----------
    quota
        GPUs of every job, 0 for jobs that do not run; shape (jobs,).
    free
        GPUs of every node that these jobs may use, with those that they hold now; shape (nodes,).
    held_ptr, held_node, held_count
        Where each job is now: `held_count` GPUs on `held_node`, rows of job j between
        ``held_ptr[j]`` and ``held_ptr[j + 1]``.
    locality
        Of every job: 0 any; 1 inside one node whenever the quota is at most the largest ``free``;
        2 more than a node only as nodes taken wholly, and one remainder.

    Returns
    -------
    tuple of (ptr, node, count, failed)
        GPUs by node of every job as rows (nodes ascending), and -1, or the first job that could
        not be placed (the others are placed as far as possible).

    Raises
    ------
    InputError
        An array is of the wrong shape, negative or not of integers, or a node does not exist.
    """
    wanted, room = counts("quota", quota), counts("free", free)
    ptr = row_pointers("held_ptr", held_ptr, len(wanted))
    node, count = counts("held_node", held_node), counts("held_count", held_count)
    where = counts("locality", locality)
    for name, array, length in (
        ("held_node", node, int(ptr[-1])), ("held_count", count, int(ptr[-1])),
        ("locality", where, len(wanted)),
    ):  # fmt: skip
        if len(array) != length:
            raise InputError(f"{name}: has {len(array)} entries, {length} are needed")
    if len(node) and int(node.max()) >= len(room):
        raise InputError(f"held_node: {int(node.max())} is no node, there are {len(room)}")
    if len(where) and int(where.max()) > WHOLE:
        raise InputError(f"locality: {int(where.max())} is none of 0 (any), 1 (single), 2 (whole)")

    falling = np.argsort(-wanted, kind="stable")
    strict = falling[np.argsort(where[falling] == ANY, kind="stable")]
    stays = _stays(wanted, room, ptr, node, count, where)
    staying = falling[np.argsort(stays[falling] == 0, kind="stable")]
    nobody = np.zeros(len(wanted), np.int64)
    asked = wanted, room, ptr, node, count, where
    tries = [(staying, stays), (falling, nobody)]
    if not np.array_equal(strict, falling):
        tries.append((strict, nobody))
    kept = (*_try(*tries[0], asked), *tries[0])
    for order, stay in tries[1:]:
        found, key = _try(order, stay, asked)
        if key < kept[1]:
            kept = (found, key, order, stay)
    left = min(TRIES, WORK // max(1, len(wanted) * len(room)))
    fronts = _fronts(kept[0], asked)
    while left > 0 and fronts and int(wanted.sum()) <= int(room.sum()):
        j = fronts.pop(0)
        for stay in (kept[3], nobody):
            left -= 1
            order = np.concatenate(([j], kept[2][kept[2] != j]))
            found, key = _try(order, stay, asked)
            if key < kept[1]:
                kept = (found, key, order, stay)
                fronts = _fronts(found, asked)
                break
    return kept[0]


def _fronts(
    found: tuple[Ints, Ints, Ints, int], asked: tuple[Ints, Ints, Ints, Ints, Ints, Ints]
) -> list[int]:
    """Jobs that may gain by coming first: that failed, then those that span nodes or moved."""
    wanted, _, ptr, node, count, _ = asked
    to, where, how, failed = found
    span = np.diff(to)
    held = np.zeros(len(wanted), np.int64)
    np.add.at(held, np.repeat(np.arange(len(wanted)), np.diff(ptr)), count)
    now = {
        (j, n): c
        for j, n, c in zip(
            np.repeat(np.arange(len(wanted)), span).tolist(), where.tolist(), how.tolist(),
            strict=True,
        )
    }  # fmt: skip
    stayed = np.zeros(len(wanted), np.int64)
    rows = np.repeat(np.arange(len(wanted)), np.diff(ptr)).tolist()
    for j, n, c in zip(rows, node.tolist(), count.tolist(), strict=True):
        stayed[j] += min(c, now.get((j, n), 0))
    moved = np.minimum(held, wanted) - stayed
    worst = sorted(np.flatnonzero((span > 1) | (moved > 0)), key=lambda j: (-span[j], -moved[j]))
    first = [failed] if failed >= 0 else []
    return [*first, *(int(j) for j in worst[:TRIES] if j != failed)]


def _try(
    order: Ints, stay: Ints, asked: tuple[Ints, Ints, Ints, Ints, Ints, Ints]
) -> tuple[tuple[Ints, Ints, Ints, int], tuple[int, int, int, int]]:
    """Place in one order; the rows, and what is to be small."""
    wanted, room = asked[0], asked[1]
    most = min(int(wanted.sum()), int(room.sum()))
    most = min(most, len(wanted) * len(room)) + len(wanted)
    ptr = np.zeros(len(wanted) + 1, np.int64)
    rows, result = np.zeros((2, most), np.int64), np.zeros(5, np.int64)
    node, count = rows[0], rows[1]
    _place(order, stay, *asked, ptr, node, count, result)
    total = int(ptr[-1])
    key = (int(result[0]), int(result[1]), int(result[2]), int(result[3]))
    return (ptr, node[:total].copy(), count[:total].copy(), int(result[4])), key


@helper(INT, READ, READ, READ, INT, INT, counted=False)
def _roomiest(left, room, mine, most, idle):  # type: ignore[no-untyped-def]
    """Node with the most GPUs left, at most `most`; then most of them held; -1 if there is none.

    With `idle` only nodes of which nothing is taken.
    """
    best = -1
    for n in range(len(left)):
        if left[n] == 0 or left[n] > most or (idle == 1 and left[n] != room[n]):
            continue
        if best < 0 or left[n] > left[best] or (left[n] == left[best] and mine[n] > mine[best]):
            best = n
    return best


@helper(INT, READ, READ, INT, counted=False)
def _tightest(left, mine, gpus):  # type: ignore[no-untyped-def]
    """Node that fits: most GPUs held already, then fewest left, then the lowest id; or -1."""
    best, kept = -1, -1
    for n in range(len(left)):
        if left[n] < gpus:
            continue
        here = min(mine[n], gpus)
        if here > kept or (here == kept and left[n] < left[best]):
            best, kept = n, here
    return best


@entry(INTS, READ, READ, READ, READ, READ, READ)
def _stays(quota, free, held_ptr, held_node, held_count, locality):  # type: ignore[no-untyped-def]
    """1 for jobs whose present GPUs are as many as their quota, and placed as well as can be."""
    largest = 0
    for n in range(len(free)):
        largest = max(largest, free[n])
    result = np.zeros(len(quota), np.int64)
    left = free.copy()
    for j in range(len(quota)):
        total = span = part = 0
        legal = True
        for i in range(held_ptr[j], held_ptr[j + 1]):
            n, c = held_node[i], held_count[i]
            total += c
            span += 1 if c > 0 else 0
            part += 1 if 0 < c < free[n] else 0
            legal = legal and c <= left[n]
        if total != quota[j] or total == 0 or not legal:
            continue
        if span > 1 and (total <= largest or (locality[j] == WHOLE and part > 1)):
            continue
        if span > 1 and span > (total + largest - 1) // largest:
            continue
        result[j] = 1
        for i in range(held_ptr[j], held_ptr[j + 1]):
            left[held_node[i]] -= held_count[i]
    return result


@entry(
    INT, READ, READ, READ, READ, READ, READ, READ, READ, INTS, INTS, INTS, INTS
)  # fmt: skip
def _place(  # type: ignore[no-untyped-def]
    order, stay, quota, free, held_ptr, held_node, held_count, locality, ptr, node, count, result
):
    """Place the jobs in this order into (ptr, node, count), sorted by job and node.

    result: jobs not placed, nodes spanned, GPUs moved, GPUs free on partly taken nodes, and the
    first job of the order that was not placed, or -1.
    """
    jobs, nodes = len(quota), len(free)
    left, mine = free.copy(), np.zeros(nodes, np.int64)
    took = np.zeros(nodes, np.int64)
    used = np.empty(nodes, np.int64)
    rough_ptr = np.zeros(jobs, np.int64)
    rough_end = np.zeros(jobs, np.int64)
    rough_node = np.empty(len(node), np.int64)
    rough_count = np.empty(len(node), np.int64)
    largest = filled = 0
    for n in range(nodes):
        largest = max(largest, free[n])
    result[:] = 0
    result[4] = -1
    for index in range(jobs):
        j = order[index]
        rest = quota[j]
        held = 0
        for i in range(held_ptr[j], held_ptr[j + 1]):
            mine[held_node[i]] += held_count[i]
            held += held_count[i]
        n_used = 0
        stays = stay[j] == 1
        for i in range(held_ptr[j], held_ptr[j + 1]):  # unless another job came first
            stays = stays and mine[held_node[i]] <= left[held_node[i]]
        if stays:
            for i in range(held_ptr[j], held_ptr[j + 1]):
                n = held_node[i]
                if held_count[i] > 0:
                    if took[n] == 0:
                        used[n_used] = n
                        n_used += 1
                    took[n] += held_count[i]
                    left[n] -= held_count[i]
            rest = 0
        whole = locality[j] == WHOLE
        may_span = locality[j] != SINGLE or quota[j] > largest
        while rest > 0:
            n = _tightest(left, mine, rest)
            here = rest
            if n < 0 and may_span:
                n = _roomiest(left, free, mine, rest, 1 if whole else 0)
                here = left[n] if n >= 0 else 0
            if n < 0:
                break
            used[n_used] = n
            n_used += 1
            took[n] += here
            left[n] -= here
            rest -= here
        if rest > 0:
            for i in range(n_used):
                left[used[i]] += took[used[i]]
                took[used[i]] = 0
            n_used = 0
            result[0] += 1
            if result[4] < 0:
                result[4] = j
        kept = 0
        rough_ptr[j] = filled
        for i in range(1, n_used):  # few nodes a job: insertion sort
            n, k = used[i], i - 1
            while k >= 0 and used[k] > n:
                used[k + 1] = used[k]
                k -= 1
            used[k + 1] = n
        for i in range(n_used):
            n = used[i]
            rough_node[filled], rough_count[filled] = n, took[n]
            kept += min(took[n], mine[n])
            took[n] = 0
            filled += 1
        rough_end[j] = filled
        if n_used > 0:
            result[1] += n_used
            result[2] += min(held, quota[j]) - kept
        for i in range(held_ptr[j], held_ptr[j + 1]):
            mine[held_node[i]] = 0
    for n in range(nodes):
        if 0 < left[n] < free[n]:
            result[3] += left[n]
    ptr[0] = 0
    for j in range(jobs):
        at = ptr[j]
        for i in range(rough_ptr[j], rough_end[j]):
            node[at], count[at] = rough_node[i], rough_count[i]
            at += 1
        ptr[j + 1] = at
    return 0
