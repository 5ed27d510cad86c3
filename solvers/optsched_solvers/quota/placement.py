"""Which nodes: integer quotas onto nodes, with few nodes a job, few moves and whole nodes left."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from optsched.kernels.compile import INT, INTS, READ, entry, helper
from optsched.problems.quota.answer import Quotas, kept_gpus

if TYPE_CHECKING:
    from optsched_solvers.quota.arguments import IntArray

ANY, SINGLE, WHOLE = range(3)
"""Localities."""

TRIES: Final = 64
"""Orders tried beyond the usual ones, each with one job moved to the front."""
WORK: Final = 2_000_000
"""Jobs times nodes that these may take in sum: some milliseconds."""


class _Asked(NamedTuple):
    """What is to be placed, as `_place` takes it."""

    quota: IntArray
    free: IntArray
    ptr: IntArray
    node: IntArray
    held: IntArray
    locality: IntArray


class _Found(NamedTuple):
    """A placement in one order."""

    key: tuple[int, ...]
    """What is to be small: jobs not placed, nodes spanned, GPUs moved, GPUs of broken nodes."""
    failed: int
    quotas: Quotas
    order: IntArray
    stay: IntArray


def place_quotas(
    quota: IntArray, free: IntArray, held: Quotas, locality: IntArray
) -> tuple[Quotas, int]:
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
    held
        Where each job is now.
    locality
        Of every job: 0 any; 1 inside one node whenever the quota is at most the largest ``free``;
        2 more than a node only as nodes taken wholly, and one remainder.

    Returns
    -------
    tuple of (quotas, failed)
        GPUs by node of every job, and -1, or the first job that could not be placed (the others are
        placed as far as possible).
    """
    asked = _Asked(quota, free, held.ptr, held.node, held.count, locality)
    falling = np.argsort(-quota, kind="stable")
    strict = falling[np.argsort(locality[falling] == ANY, kind="stable")]
    stays = _stays(asked, held)
    nobody = np.zeros(len(quota), np.int64)
    best = _try(falling[np.argsort(stays[falling] == 0, kind="stable")], stays, asked)
    for order in (falling,) if np.array_equal(strict, falling) else (falling, strict):
        best = min(best, _try(order, nobody, asked), key=lambda one: one.key)
    left = min(TRIES, WORK // max(1, len(quota) * len(free)))
    fronts = _fronts(best, quota, held)
    while left > 0 and fronts and int(quota.sum()) <= int(free.sum()):
        j = fronts.pop(0)
        order = np.concatenate(([j], best.order[best.order != j]))
        for stay in (best.stay, nobody):
            left -= 1
            found = _try(order, stay, asked)
            if found.key < best.key:
                best, fronts = found, _fronts(found, quota, held)
                break
    return best.quotas, best.failed


def _stays(asked: _Asked, held: Quotas) -> IntArray:
    """1 for jobs whose present GPUs are as many as their quota, and placed as well as can be."""
    largest = max(1, int(asked.free.max(initial=1)))
    count, total, jobs = held.count, held.gpus, len(asked.quota)
    span = np.bincount(held.rows[count > 0], minlength=jobs)
    part = np.bincount(held.rows[(count > 0) & (count < asked.free[held.node])], minlength=jobs)
    badly = (total <= largest) | (span > -(-total // largest))
    badly |= (asked.locality == WHOLE) & (part > 1)
    stays = (total == asked.quota) & (total > 0) & ~((span > 1) & badly)
    found: IntArray = stays.astype(np.int64)
    return found


def _fronts(found: _Found, quota: IntArray, held: Quotas) -> list[int]:
    """Jobs that may gain by coming first: that failed, then those that span nodes or moved."""
    span = np.diff(found.quotas.ptr)
    moved = np.minimum(held.gpus, quota) - kept_gpus(found.quotas, held)
    worst = sorted(np.flatnonzero((span > 1) | (moved > 0)), key=lambda j: (-span[j], -moved[j]))
    first = [found.failed] if found.failed >= 0 else []
    return [*first, *(int(j) for j in worst[:TRIES] if j != found.failed)]


def _try(order: IntArray, stay: IntArray, asked: _Asked) -> _Found:
    """Place in one order."""
    jobs, nodes = len(asked.quota), len(asked.free)
    most = min(int(asked.quota.sum()), int(asked.free.sum()), jobs * nodes) + 1
    job, node, count = np.empty((3, most), np.int64)
    result = np.zeros(6, np.int64)
    _place(order, stay, *asked, job, node, count, result)
    *key, failed, entries = result.tolist()
    quotas = Quotas.of(jobs, job[:entries], node[:entries], count[:entries])
    return _Found(tuple(key), failed, quotas, order, stay)


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


@entry(INT, READ, READ, READ, READ, READ, READ, READ, READ, INTS, INTS, INTS, INTS)
def _place(  # type: ignore[no-untyped-def]
    order, stay, quota, free, ptr, held_node, held_count, locality, job, node, count, result
):
    """Place the jobs in this order into rows of (job, node, count).

    stay: 1 for jobs that stay where they are if they can. result: jobs not placed, nodes spanned,
    GPUs moved, GPUs free on partly taken nodes, the first job of the order that was not placed, or
    -1, and the number of rows.
    """
    left, mine = free.copy(), np.zeros(len(free), np.int64)
    largest = filled = 0
    for n in range(len(free)):
        largest = max(largest, free[n])
    result[4] = -1
    for j in order:
        rest, held, first = quota[j], 0, filled
        stays = stay[j] == 1
        for i in range(ptr[j], ptr[j + 1]):
            mine[held_node[i]] += held_count[i]
            held += held_count[i]
            stays = stays and held_count[i] <= left[held_node[i]]  # unless others came first
        whole = locality[j] == WHOLE
        may_span = locality[j] != SINGLE or quota[j] > largest
        at = ptr[j]
        while rest > 0:
            if stays:
                n, here = held_node[at], held_count[at]
                at += 1
                if here == 0:
                    continue
            else:
                n, here = _tightest(left, mine, rest), rest
                if n < 0 and may_span:
                    n = _roomiest(left, free, mine, rest, 1 if whole else 0)
                    here = left[n] if n >= 0 else 0
            if n < 0:
                break
            job[filled], node[filled], count[filled] = j, n, here
            left[n] -= here
            rest -= here
            filled += 1
        if rest > 0:
            for i in range(first, filled):
                left[node[i]] += count[i]
            filled = first
            result[0] += 1
            result[4] = j if result[4] < 0 else result[4]
        elif quota[j] > 0:
            result[1] += filled - first
            result[2] += min(held, quota[j])
            for i in range(first, filled):
                result[2] -= min(count[i], mine[node[i]])
        for i in range(ptr[j], ptr[j + 1]):
            mine[held_node[i]] = 0
    for n in range(len(free)):
        if 0 < left[n] < free[n]:
            result[3] += left[n]
    result[5] = filled
    return 0
