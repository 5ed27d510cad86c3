"""A bound of routing: batches of one segment share its instances, all else runs alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from optsched.model.schedule import IntArray
    from optsched.problems.routing import Routing
    from optsched.problems.routing.plan import Plan

STATES: Final = (300, 2000)
"""States per request, in two rounds; when there are more, some are merged, which lowers it."""

PIVOTS: Final = 200
"""Cheapest states that others are compared with, whether they are dominated."""


class Hosts(NamedTuple):
    """Instances of a segment on servers of one kind."""

    server: int
    """One of them."""
    machines: int
    width: int
    """Of the widest."""


def kinds(problem: Routing) -> list[int]:
    """Of every server the first one that takes the same times."""
    times = [(int(a), b.tobytes()) for a, b in zip(problem.launch, problem.cost, strict=True)]
    return [times.index(one) for one in times]


def hosts_of(problem: Routing, plan: Plan, room: Sequence[int]) -> list[list[Hosts]]:
    """Per segment the plan's instances by kind of server, and those that could be loaded besides.

    `room` is the memory that the plan leaves on every server, kB.
    """
    kind = kinds(problem)
    found = []
    for k, sizes in enumerate(problem.vram.tolist()):
        rows = []
        for at in sorted(set(kind)):
            widths = [w for s, k2, w in plan.instances if k2 == k and kind[s] == at]
            for s, free in enumerate(room):
                if kind[s] == at and free >= sizes[0]:
                    more = min(free // sizes[0] if sizes[0] else free, problem.n_requests)
                    widths += [max(w for w, size in enumerate(sizes) if size <= free)] * more
            if widths:
                rows.append(Hosts(at, min(len(widths), problem.n_requests), max(widths)))
        found.append(rows)
    return found


def lost_ns(problem: Routing) -> IntArray:
    """What a tuple's lost accuracy costs at least, ns."""
    found: IntArray = np.floor(problem.lost).astype(np.int64)
    return found


def steps(problem: Routing, hosts: list[list[Hosts]]) -> IntArray:
    """Least ns of a lone request, [tuple][segment]; a width that nothing runs takes for ever."""
    found = np.full(problem.tuples.shape, 2**40)
    for k, rows in enumerate(hosts):
        for s, _, widest in rows:
            cost = problem.padded_cost[s, k, problem.inputs[:, k], problem.tuples[:, k]]
            took = np.ceil(int(problem.launch[s]) + cost).astype(np.int64)
            took[problem.tuples[:, k] > widest] = 2**40
            found[:, k] = np.minimum(found[:, k], took)
    return found


def one_segment_bound(
    problem: Routing, hosts: list[list[Hosts]], upper: int, stop: Callable[[], bool],
    rounds: int = len(STATES),
) -> int:  # fmt: skip
    """The best bound of all segments, or `upper` if nothing is below it.

    Of the second round only the segment that was best in the first has a part.
    """
    if not problem.n_requests:
        return 0
    found = [_segment(problem, hosts, k, upper, STATES[0], stop) for k in range(problem.n_segments)]
    best = int(np.argmax(found))
    more = [_segment(problem, hosts, best, upper, states, stop) for states in STATES[1:rounds]]
    return max(*found, *more)


def _segment(
    problem: Routing,
    hosts: list[list[Hosts]],
    k: int,
    upper: int,
    states: int,
    stop: Callable[[], bool],
) -> int:
    """Requests wait for instances of segment k only: exact up to merged states.

    A request costs its time from arrival to the batch's start, but at least `head`, and what
    server, width and size of the batch add. That is convex in the start and the same for all
    requests, so batches are consecutive in order of arrival, and start in that order.
    """
    n, alone = problem.n_requests, steps(problem, hosts)
    before, after = alone[:, :k].sum(axis=1), alone[:, k + 1 :].sum(axis=1) + lost_ns(problem)
    inputs = problem.inputs[:, k]
    images = np.arange(1, min(n, problem.max_batch) + 1)
    options: list[tuple[int, IntArray, IntArray]] = []
    head, first = 2**62, 0
    for s, count, widest in hosts[k]:
        for w in range(widest + 1):
            own = np.flatnonzero(problem.tuples[:, k] == w)
            cost = problem.padded_cost[s, k, :, w]
            work = cost[inputs[own], None] + (images - 1) * cost.min()
            took = np.ceil(int(problem.launch[s]) + work - 1e-3).astype(np.int64)
            rest = after[own, None] + took
            least = rest.min(axis=0)
            head = min(head, int(((before[own, None] + rest).min(axis=0) - least).min()))
            busy = np.ceil(int(problem.launch[s]) + images * cost.min() - 1e-3).astype(np.int64)
            options.append((first, busy, least))
        first += count
    ends = np.cumsum([0, *(one.machines for one in hosts[k])])
    lone = int((before + alone[:, k] + after).min())
    arrival = problem.arrival
    ready = np.append(arrival + before.min(), 2**61)
    layers: list[list[tuple[Any, Any]]] = [[] for _ in range(n + 1)]
    layers[0].append((np.zeros(1, np.int64), np.full((1, first), ready[0])))
    grain = 0
    for j in range(n):
        if stop():
            return 0
        if not layers[j]:
            continue
        cost, free, grain = _merged(layers[j], int(ready[j]), max(0, grain - 2), states)
        layers[j] = []
        for at, busy, least in options:
            group = slice(at, int(ends[np.searchsorted(ends, at, "right")]))
            for b in range(1, min(len(images), n - j) + 1):
                start = np.maximum(free[:, at], ready[j + b - 1])
                waited = np.maximum(start[:, None] - arrival[j : j + b], head).sum(axis=1)
                total = cost + waited + b * least[b - 1]
                keep = total + lone * (n - j - b) < upper
                if not keep.any():
                    continue
                later = free[keep]
                later[:, at] = start[keep] + busy[b - 1]
                later[:, group].sort(axis=1)
                soonest = np.maximum(start[keep], ready[j + b] if j + b < n else 0)
                layers[j + b].append((total[keep], np.maximum(later, soonest[:, None])))
    return min((int(cost.min()) for cost, _ in layers[n]), default=upper)


def _merged(
    pieces: list[tuple[Any, Any]], base: int, grain: int, states: int
) -> tuple[Any, Any, int]:
    """States that are not dominated, times rounded down such that few are left."""
    all_costs = np.concatenate([piece[0] for piece in pieces])
    all_free = np.concatenate([piece[1] for piece in pieces]) - base
    while True:
        free = all_free >> grain
        order = np.lexsort((all_costs, *free.T))
        free = free[order]
        new = np.append(True, (np.diff(free, axis=0) != 0).any(axis=1))
        cost, free = all_costs[order][new], free[new]
        if len(cost) <= 20 * states:
            order = np.argsort(cost, kind="stable")
            cost, free = cost[order], free[order]
            for i in range(PIVOTS):
                if i >= len(cost) - 1:
                    break
                worse = (free[i + 1 :] >= free[i]).all(axis=1)
                kept = np.append(np.full(i + 1, True), ~worse)
                cost, free = cost[kept], free[kept]
            if len(cost) <= states:
                return cost, (free << grain) + base, grain
        grain += 1 + (len(cost) > 4 * states)
