"""The records of a run as arrays: devices, times, labels, and the arcs that were obeyed."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from optsched.model.schedule import Rows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from optsched.arraypipe.plan.segments import Segment
    from optsched.arraypipe.plan.types import Copied, Record
    from optsched.model.schedule import IntArray


@dataclass(frozen=True, eq=False)
class RunLog:
    """Records of the blocks of a run; arrays are made on first use."""

    name: str
    segments: Sequence[Segment]  # empty where the records were dropped
    records: Sequence[Record]  # those of one device in its order, of all devices in any
    provenance: Mapping[str, Any] = field(default_factory=dict)
    copies: Sequence[Copied] = ()  # of states
    parallel: bool = False  # devices ran at the same time; implied if blocks overlap
    uncertainty_ns: int = 0  # largest difference between the clocks of two devices
    left_out: int = 0  # earlier blocks without a record

    @cached_property
    def executed(self) -> Executed:
        """The records with their labels."""
        return _executed(self.segments, self.records)


@dataclass(frozen=True, eq=False)
class Executed:
    """Every block that was run, one value per record."""

    devices: tuple[str, ...]  # their names
    segment: IntArray
    cycle: IntArray
    start_ns: IntArray
    end_ns: IntArray
    waited_ns: IntArray  # for messages, before the start
    exposed_ns: IntArray  # for copies of states, before the start
    device: IntArray
    labels: dict[str, Any]  # columns of a schedule; jobs are those of the trainer
    # arcs (tail, head) of the plans, and from a job's last update in one segment to its next F
    tail: IntArray
    head: IntArray

    @property
    def duration_ns(self) -> IntArray:
        """Measured durations."""
        return self.end_ns - self.start_ns

    @cached_property
    def sequences(self) -> Rows:
        """Records of every device in its order."""
        return grouped(self.device, len(self.devices))

    @cached_property
    def serial(self) -> bool:
        """Whether no two blocks ran at the same time, in the order of the records."""
        return bool((self.start_ns[1:] >= self.end_ns[:-1]).all())


def _executed(segments: Sequence[Segment], records: Sequence[Record]) -> Executed:
    table = np.array(records, np.int64).reshape(-1, 8)
    segment, operation, cycle, iteration, start_ns, end_ns, waited_ns, exposed_ns = table.T
    rows = np.zeros((4, len(table)), np.int64)
    kind = np.zeros(len(table), "<U1")
    by_segment = grouped(segment, len(segments)).to_lists()
    for part, ids in zip(segments, by_segment, strict=True):
        if not ids:  # segments without records have no slots
            continue
        blocks, done = part.plan.blocks, operation[ids]
        by_operation = [
            (b.device, part.slots[b.job], b.stage, 0 if b.kind == "U" else b.microbatch)
            for b in blocks
        ]
        rows[:, ids] = np.array(by_operation, np.int64)[done].T
        kind[ids] = part.plan.schedule.kind.astype("<U1")[done]
    device, job, stage, microbatch = rows
    labels = {
        "kind": kind, "job": job, "stage": stage, "microbatch": microbatch, "iteration": iteration
    }  # fmt: skip
    devices = max((part.plan.devices for part in segments), key=len)
    tail, head = _arcs(segments, table, by_segment)
    return Executed(
        devices, segment, cycle, start_ns, end_ns, waited_ns, exposed_ns, device, labels, tail, head
    )


def _arcs(
    segments: Sequence[Segment], table: IntArray, by_segment: list[list[int]]
) -> tuple[IntArray, IntArray]:
    """Arcs within segments; and from an update to the job's next forward, in a later one."""
    found: list[tuple[int, int]] = []
    updated: dict[tuple[int, int, int], int] = {}  # in earlier segments, by the next iteration
    for part, rows in zip(segments, by_segment, strict=True):
        plan, slots = part.plan, part.slots
        waits = [[(arc.tail, arc.tokens) for arc in row] for row in plan.waits]
        done = table[rows, 1:4].tolist()
        place = {(i, cycle): k for k, (i, cycle, _) in zip(rows, done, strict=True)}
        ends: dict[tuple[int, int, int], int] = {}
        for k, (i, cycle, iteration) in zip(rows, done, strict=True):
            before = (place.get((tail, cycle - tokens)) for tail, tokens in waits[i])
            found += [(tail, k) for tail in before if tail is not None]
            block = plan.blocks[i]
            key = (slots[block.job], block.stage, iteration)
            if plan.updates[i]:
                ends[(*key[:2], iteration + 1)] = k
            if key in updated and block.kind == "F" and not block.microbatch:
                found.append((updated[key], k))
        updated |= ends
    tail, head = np.array(found, np.int64).reshape(-1, 2).T
    return tail, head


def grouped(key: IntArray, n: int) -> Rows:
    """Positions of the values 0..n-1 in an array, ascending."""
    indptr = np.zeros(n + 1, np.int64)
    np.cumsum(np.bincount(key, minlength=n), out=indptr[1:])
    return Rows(indptr, np.argsort(key, kind="stable"))
