"""The records of a run as arrays: labels, what waited for what, and the virtual clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from optsched.errors import InternalError
from optsched.model.schedule import Rows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from optsched.arraypipe.plan.plan import ExecutionPlan
    from optsched.arraypipe.plan.segments import Segment
    from optsched.arraypipe.plan.types import Copied, Record
    from optsched.model.schedule import IntArray


NANOSECONDS: Final = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9}


class Waits(NamedTuple):
    """Arcs between records: `head` waits for `tail`; `lag` is that of the plan, in nanoseconds."""

    tail: IntArray
    head: IntArray
    lag: IntArray


@dataclass(frozen=True, eq=False)
class RunLog:
    """What a run leaves of its blocks; nothing is worked out before it is asked for."""

    name: str
    segments: Sequence[Segment]  # empty ones where nothing is remembered
    records: Sequence[Record]  # those of one device in its own order, of all in any
    provenance: Mapping[str, Any] = field(default_factory=dict)
    copies: Sequence[Copied] = ()  # of states
    exposed: Sequence[int] | None = None  # per record: nanoseconds it waited for copies
    parallel: bool = False  # devices ran by themselves; taken for granted if blocks overlap
    uncertainty: int = 0  # how far the clocks of two devices may be apart, in nanoseconds
    left_out: int = 0  # blocks that were run before and have no record

    @cached_property
    def executed(self) -> Executed:
        """The records with their labels."""
        return _executed(self.segments, self.records)


@dataclass(frozen=True, eq=False)
class Executed:
    """Every block that was run, one value a record; times are in nanoseconds."""

    devices: tuple[str, ...]  # their names
    # as in the records
    segment: IntArray
    cycle: IntArray
    start: IntArray
    end: IntArray
    waited: IntArray
    # of the plan
    device: IntArray
    planned: IntArray  # durations
    labels: dict[str, Any]  # columns of a schedule; jobs are those of the trainer
    setups: dict[str, Any]  # likewise; blocks of one family need none between them
    # arcs of the plans, and from a job's last update in one segment to its first forward after it
    waits: Waits

    @property
    def job(self) -> IntArray:
        """Number of the job in the trainer."""
        job: IntArray = self.labels["job"]
        return job

    @property
    def duration(self) -> IntArray:
        """Measured durations."""
        return self.end - self.start

    @cached_property
    def sequences(self) -> Rows:
        """Records of every device in its own order."""
        return grouped(self.device, len(self.devices))

    @cached_property
    def neighbours(self) -> tuple[IntArray, IntArray]:
        """Records that follow each other on a device: the first and the second of every pair."""
        ids = self.sequences.ids
        same = self.device[ids[:-1]] == self.device[ids[1:]]
        return ids[:-1][same], ids[1:][same]

    @cached_property
    def serial(self) -> bool:
        """Whether no two blocks ran at the same time, in the order of the records."""
        return bool((self.start[1:] >= self.end[:-1]).all())

    @cached_property
    def replayed(self) -> IntArray:
        """Starts on a virtual clock, with the measured durations."""
        return virtual_starts(self, self.duration)


def virtual_starts(run: Executed, duration: IntArray) -> IntArray:
    """Earliest starts of all records if their blocks take so long, in nanoseconds.

    Longest paths over the arcs of the plans, with their lags, and over the orders of the devices,
    with their setups.
    """
    before, after = run.neighbours
    family, setup_in, setup_out = run.setups.values()
    needed = family[before] != family[after]
    setup = np.where(needed, setup_out[before] + setup_in[after], 0)
    tail = np.concatenate((run.waits.tail, before))
    head = np.concatenate((run.waits.head, after))
    lag = np.maximum(run.waits.lag, -duration[run.waits.tail])
    weight = np.concatenate((lag, setup)) + duration[tail]
    by_tail = np.argsort(tail, kind="stable")
    heads, weights = head[by_tail].tolist(), weight[by_tail].tolist()
    bounds = np.searchsorted(tail[by_tail], np.arange(len(run.start) + 1)).tolist()
    waiting = np.bincount(head, minlength=len(run.start)).tolist()
    start = [0] * len(run.start)
    order = [k for k, n in enumerate(waiting) if not n]
    for k in order:  # grows while it is walked: Kahn's algorithm
        here = start[k]
        for e in range(bounds[k], bounds[k + 1]):
            j = heads[e]
            if here + weights[e] > start[j]:
                start[j] = here + weights[e]
            waiting[j] -= 1
            if not waiting[j]:
                order.append(j)
    if len(order) < len(start):
        raise InternalError("blocks that were run are said to wait for each other")
    return np.array(start, np.int64)


def _executed(segments: Sequence[Segment], records: Sequence[Record]) -> Executed:
    table = np.array(records, np.int64).reshape(-1, 7)
    segment, operation, cycle, iteration, start, end, waited = table.T
    rows = np.zeros((8, len(table)), np.int64)
    kind = np.zeros(len(table), "<U1")
    for part, own in zip(segments, grouped(segment, len(segments)).to_lists(), strict=True):
        if not own:  # of a segment of which nothing is remembered there are no seats
            continue
        done, blocks, given = operation[own], part.plan.blocks, part.plan.schedule
        seats, seat = np.array(part.seats, np.int64), np.array([b.job for b in blocks], np.int64)
        by_operation = [
            [b.device for b in blocks],
            seats[seat],
            [b.stage for b in blocks],
            [0 if b.kind == "U" else b.microbatch for b in blocks],
            seats[seat] if np.array_equal(given.family, seat) else given.family,
            *np.array([given.setup_in, given.setup_out, given.duration]) * unit(part.plan),
        ]
        rows[:, own] = np.array(by_operation, np.int64)[:, done]
        kind[own] = np.array([b.kind[:1] for b in blocks], "<U1")[done]
    device, job, stage, microbatch, family, setup_in, setup_out, planned = rows
    labels = {"kind": kind, "job": job, "stage": stage, "microbatch": microbatch}
    labels["iteration"] = iteration
    setups = {"family": family, "setup_in": setup_in, "setup_out": setup_out}
    devices = max((part.plan.devices for part in segments), key=len)
    return Executed(
        devices, segment, cycle, start, end, waited, device, planned, labels, setups,
        _waits(segments, table),
    )  # fmt: skip


def _waits(segments: Sequence[Segment], table: IntArray) -> Waits:
    """Arcs within segments; and from an update to the job's next forward, in a later one."""
    found: list[tuple[int, int, int]] = []
    updated: dict[tuple[int, int, int], int] = {}  # in the segments before, by the next iteration
    for part, rows in zip(segments, grouped(table[:, 0], len(segments)).to_lists(), strict=True):
        scale, seats, blocks = unit(part.plan), part.seats, part.plan.blocks
        waits = [[(a.tail, a.tokens, a.lag * scale) for a in row] for row in part.plan.waits]
        done = table[rows, 1:4].tolist()
        place = {(i, cycle): k for k, (i, cycle, _) in zip(rows, done, strict=True)}
        ends: dict[tuple[int, int, int], int] = {}
        for k, (i, cycle, iteration) in zip(rows, done, strict=True):
            for tail, tokens, lag in waits[i]:
                before = place.get((tail, cycle - tokens))
                if before is not None:
                    found.append((before, k, lag))
            if part.plan.updates[i]:
                ends[seats[blocks[i].job], blocks[i].stage, iteration + 1] = k
            if updated and blocks[i].kind == "F" and not blocks[i].microbatch:
                before = updated.get((seats[blocks[i].job], blocks[i].stage, iteration))
                if before is not None:
                    found.append((before, k, 0))
        updated |= ends
    return Waits(*np.array(found, np.int64).reshape(-1, 3).T)


def grouped(key: IntArray, n: int) -> Rows:
    """Positions of the values 0..n-1 in an array, ascending."""
    indptr = np.zeros(n + 1, np.int64)
    np.cumsum(np.bincount(key, minlength=n), out=indptr[1:])
    return Rows(indptr, np.argsort(key, kind="stable"))


def unit(plan: ExecutionPlan) -> int:
    """Nanoseconds of the plan's unit of time."""
    return NANOSECONDS[plan.schedule.time_unit]
