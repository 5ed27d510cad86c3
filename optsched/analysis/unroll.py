"""A periodic schedule written out: some of its cycles as an ordinary one-shot schedule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from optsched.errors import InputError
from optsched.io.values import integer
from optsched.model.arrays import grouped
from optsched.model.schedule import COLUMNS, Arcs, Csr, IntArray, Objective, Schedule

_MAX_OPERATIONS = 10_000_000


def unroll(schedule: Schedule, cycles: int) -> Schedule:
    """Write the first cycles of a periodic schedule, from an empty start.

    Operation i is in every cycle c >= offset[i], at ``start[i] + c * period``, where it runs
    iteration ``(c - offset[i]) * n + iteration[i]`` of its job (n copies a cycle). Iterations
    before the first, and arcs from them, are left out: this is the prologue. Operations are
    numbered cycle by cycle.

    With correct offsets and setups that satisfy the triangle inequality the result is correct if
    the periodic schedule is, and, from ``max(offset) + max(2, max(distance) + 1)`` cycles on, only
    if. `InputError`: no period, no starts, or cycles below 1 or so many that times exceed 2^53.
    """
    s = schedule
    if s.period is None or s.start is None or s.sequences is None:
        lack = "period" if s.period is None else "sequences and starts"
        raise InputError(f"unroll: the schedule has no {lack}")
    integer("unroll: cycles", cycles, 1)
    if cycles * max(s.n_operations, 1) > _MAX_OPERATIONS:
        raise InputError(
            f"unroll: cycles: {cycles} times {s.n_operations} operations are more than "
            f"{_MAX_OPERATIONS}"
        )
    cycles = int(cycles)
    cycle, operation = instances(s, cycles)
    number = np.full((cycles, s.n_operations), -1, np.int64)
    number[cycle, operation] = np.arange(len(operation))
    if len(cycle) and int(cycle[-1]) * s.period > np.iinfo(np.int64).max - s.period:
        raise InputError(f"unroll: cycles: {cycles} periods of {s.period} are more than 2^53")
    start = s.start[operation] + cycle * s.period
    end = start + s.duration[operation]
    columns: dict[str, Any] = {
        key: getattr(s, key)[operation] for key in COLUMNS if key != "iteration"
    }
    columns |= dict.fromkeys(("period", "offset", "release", "deadline"))  # back to the default
    return replace(
        s,
        **columns,
        iteration=(cycle - s.offset[operation]) * copies(s)[operation] + s.iteration[operation],
        op_resources=_resources(s.op_resources, operation),
        arcs=_arcs(s, number),
        sequences=_sequences(s.sequences, number),
        start=start,
        objective=Objective("makespan", int(end.max(initial=0))),
        provenance={**s.provenance, "unrolled_cycles": cycles},
    )


def instances(schedule: Schedule, cycles: int) -> tuple[IntArray, IntArray]:
    """Cycle and operation of all executions in the first cycles, numbered as in `unroll`."""
    cycle, operation = np.nonzero(np.arange(cycles)[:, None] >= schedule.offset[None, :])
    return cycle.astype(np.int64), operation.astype(np.int64)


def copies(schedule: Schedule) -> IntArray:
    """Iterations that the job of every operation runs in one cycle."""
    _, job = np.unique(schedule.job, return_inverse=True)
    found = np.zeros(schedule.n_operations, np.int64)
    np.maximum.at(found, job, schedule.iteration + 1)
    return found[job]


def _resources(rows: Csr, operation: IntArray) -> Csr:
    length = np.diff(rows.indptr)[operation]
    indptr = np.zeros(len(operation) + 1, np.int64)
    np.cumsum(length, out=indptr[1:])
    place = np.arange(indptr[-1]) - np.repeat(indptr[:-1], length)
    return Csr(indptr, rows.ids[np.repeat(rows.indptr[:-1][operation], length) + place])


def _arcs(s: Schedule, number: IntArray) -> Arcs:
    """Iteration t of the head follows iteration t - distance of the tail."""
    cycles = len(number)
    tail, head, lag, distance = s.arcs
    parts = []
    for t in range(cycles):
        tail_cycle, head_cycle = t - distance + s.offset[tail], t + s.offset[head]
        a = np.flatnonzero((t >= distance) & (tail_cycle < cycles) & (head_cycle < cycles))
        parts.append((number[tail_cycle[a], tail[a]], number[head_cycle[a], head[a]], lag[a]))
    tails, heads, lags = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Arcs(tails, heads, lags, np.zeros(len(lags), np.int64))


def _sequences(rows: Csr, number: IntArray) -> Csr:
    row = np.repeat(np.arange(len(rows)), np.diff(rows.indptr))
    instance = number[:, rows.ids]  # cycle by cycle, in the order of the sequences
    rows_of, kept = np.broadcast_to(row, instance.shape)[instance >= 0], instance[instance >= 0]
    indptr, order = grouped(rows_of, len(rows))
    return Csr(indptr, kept[order])
