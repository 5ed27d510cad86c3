"""The records of a run as arrays: labels, what waited for what, and the virtual clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from optsched.errors import InternalError
from optsched.model.schedule import Rows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from optsched.arraypipe.plan.segments import Segment
    from optsched.arraypipe.plan.types import Copied, Record
    from optsched.model.schedule import IntArray


class Waits(NamedTuple):
    """Arcs between records: `head` waits for `tail`; `lag_ns` is that of the plan."""

    tail: IntArray
    head: IntArray
    lag_ns: IntArray


@dataclass(frozen=True, eq=False)
class RunLog:
    """What a run leaves of its blocks; nothing is worked out before it is asked for."""

    name: str
    segments: Sequence[Segment]  # empty ones where nothing is remembered
    records: Sequence[Record]  # those of one device in its own order, of all in any
    provenance: Mapping[str, Any] = field(default_factory=dict)
    copies: Sequence[Copied] = ()  # of states
    exposed_ns: Sequence[int] | None = None  # per record: how long it waited for copies
    parallel: bool = False  # devices ran by themselves; taken for granted if blocks overlap
    uncertainty_ns: int = 0  # how far the clocks of two devices may be apart
    left_out: int = 0  # blocks that were run before and have no record

    @cached_property
    def executed(self) -> Executed:
        """The records with their labels."""
        return _executed(self.segments, self.records)


@dataclass(frozen=True, eq=False)
class Executed:
    """Every block that was run, one value a record."""

    devices: tuple[str, ...]  # their names
    # as in the records
    segment: IntArray
    cycle: IntArray
    start_ns: IntArray
    end_ns: IntArray
    waited_ns: IntArray
    # of the plan
    device: IntArray
    planned_ns: IntArray  # durations
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
    def duration_ns(self) -> IntArray:
        """Measured durations."""
        return self.end_ns - self.start_ns

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
        return bool((self.start_ns[1:] >= self.end_ns[:-1]).all())

    @cached_property
    def replayed_ns(self) -> IntArray:
        """Starts on a virtual clock, with the measured durations."""
        return virtual_starts(self, self.duration_ns)


def virtual_starts(run: Executed, duration_ns: IntArray) -> IntArray:
    """Earliest starts of all records if their blocks take so long.

    Longest paths over the arcs of the plans, with their lags, and over the orders of the devices,
    with their setups.
    """
    before, after = run.neighbours
    family, setup_in_ns, setup_out_ns = run.setups.values()
    needed = family[before] != family[after]
    setup_ns = np.where(needed, setup_out_ns[before] + setup_in_ns[after], 0)
    tail = np.concatenate((run.waits.tail, before))
    head = np.concatenate((run.waits.head, after))
    lag_ns = np.maximum(run.waits.lag_ns, -duration_ns[run.waits.tail])
    weight_ns = np.concatenate((lag_ns, setup_ns)) + duration_ns[tail]
    by_tail = np.argsort(tail, kind="stable")
    heads, weights_ns = head[by_tail].tolist(), weight_ns[by_tail].tolist()
    bounds = np.searchsorted(tail[by_tail], np.arange(len(run.start_ns) + 1)).tolist()
    waiting = np.bincount(head, minlength=len(run.start_ns)).tolist()
    start_ns = [0] * len(run.start_ns)
    order = [k for k, n in enumerate(waiting) if not n]
    for k in order:  # grows while it is walked: Kahn's algorithm
        here_ns = start_ns[k]
        for e in range(bounds[k], bounds[k + 1]):
            j = heads[e]
            if here_ns + weights_ns[e] > start_ns[j]:
                start_ns[j] = here_ns + weights_ns[e]
            waiting[j] -= 1
            if not waiting[j]:
                order.append(j)
    if len(order) < len(start_ns):
        raise InternalError("blocks that were run are said to wait for each other")
    return np.array(start_ns, np.int64)


def _executed(segments: Sequence[Segment], records: Sequence[Record]) -> Executed:
    table = np.array(records, np.int64).reshape(-1, 7)
    segment, operation, cycle, iteration, start_ns, end_ns, waited_ns = table.T
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
            *np.array([given.setup_in, given.setup_out, given.duration]) * part.plan.unit_ns,
        ]
        rows[:, own] = np.array(by_operation, np.int64)[:, done]
        kind[own] = given.kind.astype("<U1")[done]
    device, job, stage, microbatch, family, setup_in_ns, setup_out_ns, planned_ns = rows
    labels = {"kind": kind, "job": job, "stage": stage, "microbatch": microbatch}
    labels["iteration"] = iteration
    setups = {"family": family, "setup_in": setup_in_ns, "setup_out": setup_out_ns}
    devices = max((part.plan.devices for part in segments), key=len)
    return Executed(
        devices, segment, cycle, start_ns, end_ns, waited_ns, device, planned_ns, labels, setups,
        _waits(segments, table),
    )  # fmt: skip


def _waits(segments: Sequence[Segment], table: IntArray) -> Waits:
    """Arcs within segments; and from an update to the job's next forward, in a later one."""
    found: list[tuple[int, int, int]] = []
    updated: dict[tuple[int, int, int], int] = {}  # in the segments before, by the next iteration
    for part, rows in zip(segments, grouped(table[:, 0], len(segments)).to_lists(), strict=True):
        unit_ns, seats, blocks = part.plan.unit_ns, part.seats, part.plan.blocks
        waits = [[(a.tail, a.tokens, a.lag * unit_ns) for a in row] for row in part.plan.waits]
        done = table[rows, 1:4].tolist()
        place = {(i, cycle): k for k, (i, cycle, _) in zip(rows, done, strict=True)}
        ends: dict[tuple[int, int, int], int] = {}
        for k, (i, cycle, iteration) in zip(rows, done, strict=True):
            for tail, tokens, lag_ns in waits[i]:
                before = place.get((tail, cycle - tokens))
                if before is not None:
                    found.append((before, k, lag_ns))
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
