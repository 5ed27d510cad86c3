"""Which nodes: integer quotas onto nodes, with few nodes a job, few moves and whole nodes left."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from optsched.problems.quota.answer import Quotas, kept_gpus

if TYPE_CHECKING:
    import numpy.typing as npt

    from optsched_solvers.quota.arguments import IntArray

ANY, SINGLE, WHOLE = range(3)
"""Localities."""
TRIES: Final = 64
"""Orders tried beyond the standard orders, each with one job moved to the front."""
WORK: Final = 2000
"""Placements of a job that these may take in sum: some hundredths of a second."""


class _Query(NamedTuple):
    """Quotas to place, nodes, present places and localities of the jobs."""

    quota: IntArray
    free: IntArray
    held: Quotas
    locality: IntArray


class _Placed(NamedTuple):
    """A placement in one order."""

    key: tuple[int, ...]
    """Minimised: jobs not placed, nodes spanned, GPUs moved, free GPUs of partly used nodes."""
    failed: int
    quotas: Quotas
    order: IntArray
    stay: npt.NDArray[np.bool_]


def place_quotas(
    quota: IntArray, free: IntArray, held: Quotas, locality: IntArray
) -> tuple[Quotas, int]:
    """Put the GPUs of all jobs on nodes, one job after the other, in the best of some orders.

    Best are in this order: all jobs placed, fewest nodes spanned in sum, fewest GPUs moved, fewest
    free GPUs on nodes that are partly used. The orders are descending by quota, jobs with a
    locality first, jobs that can stay where they are first, and then those with one job moved to
    the front. This is a heuristic: a `single` or `whole` job may fail although some packing
    exists; `any` jobs fail only for lack of GPUs.

    `free` counts GPUs of every node with those that these jobs hold now. `locality` of a job: 0
    any; 1 inside one node whenever the quota is at most the largest ``free``; 2 more than a node
    only as nodes taken wholly, and one remainder. Returns the placement, and -1, or the first job
    that could not be placed (the others are placed as far as possible).
    """
    query = _Query(quota, free, held, locality)
    falling = np.argsort(-quota, kind="stable")
    strict = falling[np.argsort(locality[falling] == ANY, kind="stable")]
    stays = _stays(query)
    never: npt.NDArray[np.bool_] = np.zeros(len(quota), np.bool_)
    best = _try(falling[np.argsort(~stays[falling], kind="stable")], stays, query)
    for order in (falling,) if np.array_equal(strict, falling) else (falling, strict):
        best = min(best, _try(order, never, query), key=lambda one: one.key)
    left = min(TRIES, WORK // max(1, int(np.count_nonzero(quota))))
    fronts = _fronts(best, query)
    while left > 0 and fronts and int(quota.sum()) <= int(free.sum()):
        j = fronts.pop(0)
        order = np.concatenate(([j], best.order[best.order != j]))
        for stay in (best.stay, never):
            left -= 1
            found = _try(order, stay, query)
            if found.key < best.key:
                best, fronts = found, _fronts(found, query)
                break
    return best.quotas, best.failed


def _stays(query: _Query) -> npt.NDArray[np.bool_]:
    """Return which jobs hold as many GPUs as their quota now, placed as well as possible."""
    free, held, jobs = query.free, query.held, len(query.quota)
    largest = max(1, int(free.max(initial=1)))
    total, span = held.gpus, np.diff(held.ptr)
    part = np.bincount(held.rows[held.count < free[held.node]], minlength=jobs)
    badly = (total <= largest) | (span > -(-total // largest))
    badly |= (query.locality == WHOLE) & (part > 1)
    stays: npt.NDArray[np.bool_] = (total == query.quota) & (total > 0) & ~((span > 1) & badly)
    return stays


def _fronts(placed: _Placed, query: _Query) -> list[int]:
    """Return jobs that may gain by coming first: failed, then those that span nodes or moved."""
    span = np.diff(placed.quotas.ptr)
    moved = np.minimum(query.held.gpus, query.quota) - kept_gpus(placed.quotas, query.held)
    worst = sorted(np.flatnonzero((span > 1) | (moved > 0)), key=lambda j: (-span[j], -moved[j]))
    first = [placed.failed] if placed.failed >= 0 else []
    return [*first, *(int(j) for j in worst[:TRIES] if j != placed.failed)]


def _try(order: IntArray, stay: npt.NDArray[np.bool_], query: _Query) -> _Placed:
    """Place the jobs in one order; jobs that stay take the nodes they hold if these are left."""
    quota, free, held, _ = query
    left, largest = free.copy(), int(free.max(initial=0))
    rows: list[tuple[int, int, int]] = []
    lost: list[int] = []
    for j in order[quota[order] > 0].tolist():
        now = slice(held.ptr[j], held.ptr[j + 1])
        if stay[j] and (held.count[now] <= left[held.node[now]]).all():
            parts = list(zip(held.node[now].tolist(), held.count[now].tolist(), strict=True))
        else:
            mine = np.zeros(len(free), np.int64)
            mine[held.node[now]] = held.count[now]
            may_span = query.locality[j] != SINGLE or quota[j] > largest
            whole = query.locality[j] == WHOLE
            parts = _parts(int(quota[j]), left, free, mine, may_span, whole)
        if not parts:
            lost.append(j)
        for n, here in parts:
            left[n] -= here
            rows.append((j, n, here))
    quotas = Quotas.of(len(quota), *np.array(rows, np.int64).reshape(-1, 3).T)
    moved = np.minimum(held.gpus, quotas.gpus) - kept_gpus(quotas, held)
    broken = int(left[(left > 0) & (left < free)].sum())
    key = len(lost), len(rows), int(moved.sum()), broken
    return _Placed(key, lost[0] if lost else -1, quotas, order, stay)


def _parts(
    gpus: int, left: IntArray, free: IntArray, mine: IntArray, may_span: bool, whole: bool
) -> list[tuple[int, int]]:
    """Return nodes and GPUs there for one job, [] if there are none.

    One node that fits: most of its GPUs held already, then fewest left. Else, if the job may span
    nodes, first the node with most GPUs left, then most of them held; `whole` takes idle nodes.
    """
    left = left.copy()
    parts: list[tuple[int, int]] = []
    while gpus:
        fitting = np.flatnonzero(left >= gpus)
        if len(fitting):
            kept = np.minimum(mine[fitting], gpus)
            n = int(fitting[np.lexsort((left[fitting], -kept))[0]])
            return [*parts, (n, gpus)]
        able = np.flatnonzero((left > 0) & ((left == free) | (not whole)))
        if not may_span or not len(able):
            return []
        n = int(able[np.lexsort((-mine[able], -left[able]))[0]])
        parts.append((n, int(left[n])))
        gpus -= int(left[n])
        left[n] = 0
    return parts
