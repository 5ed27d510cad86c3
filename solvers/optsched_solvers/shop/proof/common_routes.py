"""Rows of operations that visit the same machines in the same order, as in a pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from optsched.model.graph import evaluate
from optsched.model.memory_bounds import frees_in_order, holdings

if TYPE_CHECKING:
    from optsched.model.schedule import IntArray, Schedule

CHAIN_KINDS: Final = ("F", "B", "I")
"""Blocks that form the chain of a micro-batch; updates and weight gradients hang beside it."""


class Routes(NamedTuple):
    """One row per (job, iteration, micro-batch), one column per position; times of the graph.

    Position v of every row is on ``machine[v]``, and
    ``start[k, v + 1] >= end[k, v] + lag[k, v]``.
    """

    operation: IntArray
    machine: IntArray
    duration: IntArray
    lag: IntArray
    """Shape (rows, positions - 1)."""
    head: IntArray
    """Longest path to the start."""
    after: IntArray
    """Longest path from the end to the end of everything."""
    setup_out: IntArray
    setup_in: IntArray
    """Zeros unless every row is a family of its own."""

    def reversed(self) -> Routes:
        """The same rows run backwards in time: bounds of the makespan stay what they are."""
        columns = (self.operation, self.duration, self.lag, self.after, self.head)
        operation, duration, lag, head, after = (
            np.ascontiguousarray(column[:, ::-1]) for column in columns
        )
        into = np.ascontiguousarray(self.setup_out[:, ::-1])
        out = np.ascontiguousarray(self.setup_in[:, ::-1])
        machine = np.ascontiguousarray(self.machine[::-1])
        return Routes(operation, machine, duration, lag, head, after, out, into)


def common_routes(graph: Schedule) -> Routes | None:
    """The rows of a graph if all of them take the same route, else None.

    Blocks of kind F, B and I, or all operations where there are none of these. Two rows at least,
    every operation on exactly one machine, every two neighbours in a row joined by an arc; the lag
    between them counts paths through one operation beside the row (a recomputation) too.
    """
    if graph.period is not None or not (np.diff(graph.op_resources.indptr) <= 1).all():
        return None
    chosen = np.flatnonzero(np.isin(graph.kind, CHAIN_KINDS))
    if not len(chosen):
        chosen = np.arange(graph.n_operations)
    if not len(chosen) or (graph.single_resource[chosen] < 0).any():
        return None
    paths = evaluate(graph)
    place = np.empty(graph.n_operations, np.int64)
    place[paths.order] = np.arange(graph.n_operations)
    labels = (graph.microbatch[chosen], graph.iteration[chosen], graph.job[chosen])
    chosen = chosen[np.lexsort((place[chosen], *labels))]
    rows = np.stack([graph.job[chosen], graph.iteration[chosen], graph.microbatch[chosen]], axis=1)
    first = np.flatnonzero(np.r_[True, (rows[1:] != rows[:-1]).any(axis=1)])
    length = len(chosen) // len(first)
    if len(first) < 2 or (np.diff(np.r_[first, len(chosen)]) != length).any():
        return None
    operation = chosen.reshape(len(first), length)
    machine = graph.single_resource[operation]
    lag = _lags(graph, operation)
    if (machine != machine[0]).any() or lag is None:
        return None
    setup_out, setup_in = _setups(graph, operation)
    return Routes(
        operation,
        machine[0].copy(),
        graph.duration[operation],
        lag,
        paths.head[operation],
        (paths.tail - graph.duration)[operation],
        setup_out,
        setup_in,
    )


def held_bytes(graph: Schedule, routes: Routes, p: int, q: int) -> IntArray:
    """Bytes that each row surely holds on a machine from its position p to its position q.

    Zeros where the memory is unlimited, or where another order could free the bytes sooner.
    """
    size = np.zeros(len(routes.operation), np.int64)
    r = int(routes.machine[p])
    if not graph.memory[r]:
        return size
    held = holdings(graph)
    if not frees_in_order(graph, r, held, {}):
        return size
    rows = {int(i): k for k, i in enumerate(routes.operation[:, p])}
    for h in held:
        if h.resource == r and h.first in rows:
            k = rows[h.first]
            if h.last in (-1, int(routes.operation[k, q])):
                size[k] += h.size
    return size


def _lags(graph: Schedule, operation: IntArray) -> IntArray | None:
    """Time between neighbours in a row that the arcs demand; None if some are not joined."""
    tails, heads = operation[:, :-1].ravel(), operation[:, 1:].ravel()
    weight: dict[tuple[int, int], int] = {}
    inside = np.zeros(graph.n_operations, bool)
    inside[operation.ravel()] = True
    into: dict[int, list[tuple[int, int]]] = {}
    beyond: list[tuple[int, int, int]] = []
    arcs = graph.arcs
    direct = graph.duration[arcs.tail] + arcs.lag
    for i, k, far, near, joins in zip(
        arcs.tail.tolist(), arcs.head.tolist(), direct.tolist(),
        inside[arcs.tail].tolist(), inside[arcs.head].tolist(), strict=True,
    ):  # fmt: skip
        if near and joins:
            weight[i, k] = max(far, weight.get((i, k), far))
        elif near:
            into.setdefault(k, []).append((i, far))
        elif joins:
            beyond.append((i, k, far))
    for x, k, far in beyond:  # from a row to x beside it and back
        for i, near_x in into.get(x, ()):
            weight[i, k] = max(near_x + far, weight.get((i, k), near_x + far))
    pairs = list(zip(tails.tolist(), heads.tolist(), strict=True))
    if any(pair not in weight for pair in pairs):
        return None
    apart = np.array([weight[pair] for pair in pairs], np.int64) - graph.duration[tails]
    return apart.reshape(len(operation), -1)


def _setups(graph: Schedule, operation: IntArray) -> tuple[IntArray, IntArray]:
    """Least setup out of and into each row's family on the machine of each position.

    Zeros unless every row is a family that no other row shares.
    """
    none = np.zeros_like(operation), np.zeros_like(operation)
    family = graph.family[operation]
    if not graph.has_setups or (family != family[:, :1]).any():
        return none
    if len(np.unique(family[:, 0])) < len(family):
        return none
    machine = graph.single_resource
    known: dict[tuple[int, int], tuple[int, int]] = {}
    for f, r, out, into in zip(
        graph.family.tolist(), machine.tolist(), graph.setup_out.tolist(), graph.setup_in.tolist(),
        strict=True,
    ):  # fmt: skip
        least = known.get((f, r), (out, into))
        known[f, r] = (min(out, least[0]), min(into, least[1]))
    pairs = zip(family.ravel().tolist(), machine[operation].ravel().tolist(), strict=True)
    found = np.array([known[pair] for pair in pairs], np.int64).reshape(*operation.shape, 2)
    return found[..., 0].copy(), found[..., 1].copy()
