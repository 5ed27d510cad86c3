"""GPUs of several types under `sia` and `allocation`: a budget by type, speeds by job and type.

A configuration is a size on one type (a job never spans types), as in Sia (Jayaram Subramanya et
al., SOSP 2023); speeds by job and type are the matrix of Gavel (Narayanan et al., OSDI 2020). One
type is the special case that is compiled; with several the same functions run in Python.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from optsched.cluster.determined.fitting import pieces
from optsched.cluster.policies.elastic_rule import LAST, PINNED, total
from optsched.cluster.world.policy import Decision
from optsched.kernels.compile import helper

if TYPE_CHECKING:
    from optsched.cluster.world.policy import ClusterView
    from optsched.model.schedule import IntArray


class Types(NamedTuple):
    """GPUs of every type, and what the jobs have of them."""

    held: Any
    """Type of the GPUs of every job; -1 for one that holds none."""
    rate: Any
    """Speed at each of ``view.size``, type after type; 0: the job does not run on it."""
    free: Any
    gpus: Any
    node: Any
    """Of every type: free GPUs, all, those of the largest node."""


@helper()
def one_type(view):  # type: ignore[no-untyped-def]
    """All GPUs as one type."""
    held, node = np.full(len(view.job), -1), np.ones(1, np.int64)
    for i in range(len(held)):
        if view.gpus[i] > 0:
            held[i] = 0
    for n in range(len(view.capacity)):
        node[0] = max(node[0], view.capacity[n])
    return Types(
        held, view.rate, np.full(1, total(view.free)), np.full(1, total(view.capacity)), node
    )


def types_of(view: ClusterView) -> Types | None:
    """All types of GPUs; None if there is only one."""
    kinds = range(int(view.node_type.max(initial=0)) + 1)
    if len(kinds) == 1:
        return None
    held = np.full(len(view.job), -1, np.int64)
    rows = np.repeat(np.arange(len(view.job)), np.diff(view.held_ptr))
    held[rows] = view.node_type[view.held_node]
    held[view.gpus == 0] = -1
    work, lengths = view.workload, np.diff(view.size_ptr)
    source = np.repeat(work.size_ptr[view.job] - view.size_ptr[:-1], lengths)
    source += np.arange(len(view.size))
    names = dict.fromkeys(view.nodes.types)  # type: ignore[union-attr]
    rate = np.concatenate([work.rates_on(name)[source] for name in names])
    on = [view.node_type == kind for kind in kinds]
    free, gpus = (
        np.array([column[some].sum() for some in on]) for column in (view.free, view.capacity)
    )
    node = np.array([max(int(view.capacity[some].max()), 1) for some in on])
    return Types(held, rate, free, gpus, node)


def assigned(view: ClusterView, types: Types, fixed: IntArray) -> IntArray:
    """A type for every job: by arrival where it is fastest of those with enough GPUs; -1: none.

    A running job stays on its type.
    """
    chosen: IntArray = types.held.copy()
    left, sizes = types.free.copy(), len(view.size)
    first = view.size_ptr[:-1]
    for i in np.flatnonzero((chosen >= 0) & (fixed != PINNED)).tolist():
        left[chosen[i]] += view.gpus[i]
        left[chosen[i]] -= view.gpus[i] if fixed[i] == LAST else view.size[first[i]]
    for i in np.flatnonzero((chosen < 0) & (np.diff(view.size_ptr) > 0)).tolist():
        speed = types.rate[first[i] :: sizes]
        for kind in np.argsort(-speed, kind="stable").tolist():
            if speed[kind] > 0 and view.size[first[i]] <= left[kind]:
                chosen[i], left[kind] = kind, left[kind] - view.size[first[i]]
                break
    return chosen


def decision(view: ClusterView, types: Types, quota: IntArray, kind: IntArray) -> Decision:
    """GPUs of these types: jobs that start, move or change their size, the largest first."""
    changes = (quota > 0) & ((quota != view.gpus) | (kind != types.held))
    free, nodes = view.free.copy(), dict[int, dict[int, int]]()
    takes = view.capacity > 0
    for i in np.flatnonzero((view.gpus > 0) & ((quota == 0) | changes)).tolist():
        rows = slice(view.held_ptr[i], view.held_ptr[i + 1])
        np.add.at(free, view.held_node[rows], view.held_count[rows] * takes[view.held_node[rows]])
    for i in sorted(np.flatnonzero(changes).tolist(), key=lambda i: -quota[i]):
        if places := pieces(np.where(view.node_type == kind[i], free, 0), int(quota[i])):
            nodes[i] = dict(sorted(places))
            for node, count in places:
                free[node] -= count
    quota = np.where(np.diff(view.size_ptr) == 0, -1, quota)
    return Decision(quota, nodes=nodes, best_effort=True)
