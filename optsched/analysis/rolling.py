"""Periodic schedules from orders: the least period, starts within it, and the offsets that fit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from optsched.kernels.cycle_ratio import cycle_arcs, cycle_time, lower_starts
from optsched.model.schedule import Csr, Objective

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from optsched.kernels.cycle_ratio import CycleTime
    from optsched.model.schedule import IntArray, Schedule


def rolling(
    graph: Schedule,
    sequences: Csr | Sequence[Sequence[int]],
    offsets: IntArray | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> Schedule:
    """Make the schedule of least period that repeats the given orders for ever.

    Every iteration ends as early as the orders allow, and starts as late as possible before that.
    Starts are reduced modulo the period, which rotates sequences and changes offsets only. The
    least offset of every job is 0; if arcs connect jobs, the least of all. Held memory is not
    checked. Errors are those of `optsched.kernels.cycle_ratio.cycle_time`.
    """
    if not isinstance(sequences, Csr):
        sequences = Csr.of(sequences)
    found = cycle_time(graph, sequences, offsets)
    given = np.zeros(graph.n_operations, np.int64) if offsets is None else np.asarray(offsets)
    start = _compact(graph, sequences, given, found)
    cycle = start // found.period
    turns = cycle - found.late
    offset = given + turns
    job = _independent(graph)
    least = np.full(graph.n_operations, np.iinfo(np.int64).max)
    np.minimum.at(least, job, offset)
    return graph.with_cycle(
        found.period,
        offset - least[job],
        _rotated(sequences, turns),
        start - cycle * found.period,
        Objective("period", found.period, None, "feasible"),
        provenance,
    )


def _compact(graph: Schedule, sequences: Csr, offset: IntArray, found: CycleTime) -> IntArray:
    """Starts with the same ends of iterations, all other operations as late as possible."""
    tail, head, _, distance = graph.arcs
    _, iteration = np.unique(np.stack((graph.job, graph.iteration)), axis=1, return_inverse=True)
    iteration = iteration.ravel()
    has_successor = np.zeros(graph.n_operations, np.bool_)
    has_successor[tail[(iteration[tail] == iteration[head]) & (distance == 0)]] = True
    last = np.zeros(graph.n_operations, np.int64)
    np.maximum.at(last, iteration, found.start + graph.duration)
    start = np.where(has_successor, last[iteration] - graph.duration, found.start)
    order = np.flatnonzero(has_successor)
    order = order[np.argsort(-found.start[order], kind="stable")]
    arcs = cycle_arcs(graph, sequences, offset).shifted(found.late)
    lower_starts(arcs, found.period, order, start)
    return start


def _independent(graph: Schedule) -> IntArray:
    """A component number per operation: the job, if no arc connects jobs, else 0."""
    if (graph.job[graph.arcs.tail] != graph.job[graph.arcs.head]).any():
        return np.zeros(graph.n_operations, np.int64)
    numbers: IntArray = np.unique(graph.job, return_inverse=True)[1].astype(np.int64)
    return numbers


def _rotated(rows: Csr, turns: IntArray) -> Csr:
    """Each row rotated to its first operation of a later cycle; a row spans at most two cycles."""
    ids = rows.ids.copy()
    for r in range(len(rows)):
        row = rows[r]
        if len(row) and turns[row[-1]] != turns[row[0]]:
            at = int(np.argmax(turns[row] != turns[row[0]]))
            ids[rows.indptr[r] : rows.indptr[r + 1]] = np.roll(row, -at)
    return Csr(rows.indptr, ids)
