"""Bytes that operations hold over time, and lower bounds of the makespan from them.

Bytes held on a resource from the start of one operation to the end of another are a rectangle,
bytes x time. All rectangles share capacity x makespan. Moreover, rectangles that do not fit side by
side run one after another: give sizes weights such that sizes of total at most C weigh at most W
(dual feasible functions: Fekete & Schepers 2001; Carlier, Clautiaux & Moukrim 2007); then the sum
of weight x time is at most W x makespan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from optsched.model.graph import Evaluation, evaluate

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from optsched.model.schedule import Schedule

_STEPS: Final = 8
"""Step functions that are tried."""
_SIZES: Final = 64
"""Most thresholds of other functions; more distinct sizes are sampled."""


class Holding(NamedTuple):
    """Bytes that stay on a resource from the start of one operation to the end of another."""

    resource: int
    size: int
    first: int
    last: int
    """The operation that frees them; -1 if none does."""


class Residence(NamedTuple):
    """Bytes that stay on a capped resource for at least some time in every schedule."""

    resource: int
    size: int
    first: int
    last: int
    time: int
    """From the start of `first` to the end of `last`, at least."""


def holdings(graph: Schedule) -> list[Holding]:
    """Match acquired bytes with the operations that free them.

    Within one (job, micro-batch, iteration, stage, resource) bytes are freed in the order in which
    they were acquired, by operation id. Bytes that are never freed have `last` = -1.
    """
    found: list[Holding] = []
    groups: dict[tuple[int, ...], list[int]] = {}
    touching = np.flatnonzero((graph.acquire > 0) | (graph.free > 0)).tolist()
    labels = np.stack([graph.job, graph.microbatch, graph.iteration, graph.stage], axis=1).tolist()
    for i in touching:
        for r in graph.op_resources[i].tolist():
            groups.setdefault((*labels[i], r), []).append(i)
    for key, operations in groups.items():
        held: list[list[int]] = []  # [bytes, operation], oldest first
        for i in operations:
            if graph.acquire[i]:
                held.append([int(graph.acquire[i]), i])
            given_back = int(graph.free[i])
            while given_back and held:
                part = min(given_back, held[0][0])
                found.append(Holding(key[-1], part, held[0][1], i))
                given_back -= part
                held[0][0] -= part
                if not held[0][0]:
                    held.pop(0)
        found.extend(Holding(key[-1], size, i, -1) for size, i in held)
    return found


def frees_in_order(
    graph: Schedule, r: int, held: Sequence[Holding], reach: dict[int, dict[int, int]]
) -> bool:
    """Whether all bytes freed on r are freed by a successor of the operation that acquired them.

    Otherwise another order of operations may free bytes sooner than their `Holding`, so that
    residences are no lower bounds. `reach` caches `paths_from` by operation; it grows.
    """
    freed = [h for h in held if h.resource == r and h.last >= 0]
    if sum(h.size for h in freed) != int(graph.free[graph.users[r]].sum()):
        return False
    for h in freed:
        if h.first not in reach:
            reach[h.first] = paths_from(graph, h.first)
        if h.last not in reach[h.first]:
            return False
    return True


def residences(graph: Schedule) -> list[Residence]:
    """Bytes x shortest time on capped resources; see `frees_in_order` for what is left out."""
    if not graph.memory.any():
        return []
    reach: dict[int, dict[int, int]] = {}
    held = [h for h in holdings(graph) if graph.memory[h.resource]]
    sound = {r for r in {h.resource for h in held} if frees_in_order(graph, r, held, reach)}
    found = [
        Residence(r, size, i, k, reach[i][k] + int(graph.duration[k]))
        for r, size, i, k in held
        if r in sound and k >= 0
    ]
    for i in np.flatnonzero(graph.workspace).tolist():
        size, time = int(graph.workspace[i]), int(graph.duration[i])
        users = graph.op_resources[i].tolist()
        found += [Residence(r, size, i, i, time) for r in users if graph.memory[r]]
    return found


def energy_bound(graph: Schedule, paths: Evaluation | None = None) -> int:
    """Per capped resource: least head + least time that all residences need + least tail.

    `paths` is `evaluate` of the graph, if known.
    """
    head, tail = (evaluate(graph) if paths is None else paths)[:2]
    alike: dict[int, dict[int, tuple[int, int, int]]] = {}  # by resource and size: time, ends
    for r, size, i, k, time in residences(graph):
        behind = int(tail[k] - graph.duration[k])
        sizes = alike.setdefault(r, {})
        total, first, last = sizes.get(size, (0, int(head[i]), behind))
        sizes[size] = (total + time, min(first, int(head[i])), min(last, behind))
    best = 0
    for r, sizes in alike.items():
        for weights, capacity in dual_feasible(list(sizes), int(graph.memory[r])):
            weighty = [(w, *of) for w, of in zip(weights, sizes.values(), strict=True) if w]
            if weighty:
                work = sum(weight * total for weight, total, _, _ in weighty)
                ends = min(first for *_, first, _ in weighty) + min(last for *_, last in weighty)
                best = max(best, -(-work // capacity) + ends)
    return best


def least_time(sizes: dict[int, int], capacity: int) -> int:
    """Least makespan of residences with this total time by size: the best of all weights."""
    best = 0
    for weights, most in dual_feasible(list(sizes), capacity):
        work = sum(weight * time for weight, time in zip(weights, sizes.values(), strict=True))
        best = max(best, -(-work // most))
    return best


def dual_feasible(sizes: Sequence[int], capacity: int) -> Iterator[tuple[list[int], int]]:
    """Weights of distinct sizes 1..capacity, and the most that fitting sizes weigh together."""
    yield list(sizes), capacity
    for k in range(1, _STEPS + 1):  # Fekete & Schepers' u: k + 1 of them never fit
        yield (
            [
                x * k if (k + 1) * x % capacity == 0 else (k + 1) * x // capacity * capacity
                for x in sizes
            ],
            k * capacity,
        )
    ranked = sorted(sizes)
    for s in ranked[:: 1 + len(ranked) // _SIZES]:
        if 2 * s > capacity:  # sizes >= s weigh all, sizes that fit beside s nothing
            yield [capacity if x >= s else 0 if x <= capacity - s else x for x in sizes], capacity
        else:  # count the parts of size s that each size displaces
            most = capacity // s
            yield (
                [
                    2 * (x // s) if 2 * x < capacity
                    else most if 2 * x == capacity
                    else 2 * (most - (capacity - x) // s)
                    for x in sizes
                ],
                2 * most,
            )  # fmt: skip


def paths_from(graph: Schedule, source: int) -> dict[int, int]:
    """Longest start-to-start path from source to each of its successors."""
    indptr, other, weight = _successor_lists(graph)
    order: list[int] = []
    seen = {source}
    stack = [(source, indptr[source])]
    while stack:  # depth first, post-order
        i, edge = stack.pop()
        if edge == indptr[i + 1]:
            order.append(i)
            continue
        stack.append((i, edge + 1))
        if other[edge] not in seen:
            seen.add(other[edge])
            stack.append((other[edge], indptr[other[edge]]))
    far = {source: 0}
    for i in reversed(order):
        for edge in range(indptr[i], indptr[i + 1]):
            far[other[edge]] = max(far.get(other[edge], 0), far[i] + weight[edge])
    return far


def _successor_lists(graph: Schedule) -> tuple[list[int], ...]:
    """`Schedule.successors` as lists, cached on the graph: conversion takes O(arcs)."""
    kept: tuple[list[int], ...] | None = graph.__dict__.get("_successor_lists")
    if kept is None:
        kept = tuple(column.tolist() for column in graph.successors)
        graph.__dict__["_successor_lists"] = kept
    return kept
