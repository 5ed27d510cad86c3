"""The records of a run as arrays: labels, what waited for what, and the virtual clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from optsched.errors import InternalError
from optsched.model.schedule import Rows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from optsched.arraypipe.plan.plan import ExecutionPlan
    from optsched.arraypipe.plan.segments import Segment
    from optsched.arraypipe.plan.types import Copied, Record
    from optsched.model.schedule import IntArray


NANOSECONDS: Final = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9}
_LABELS: Final = (
    "device", "job", "stage", "microbatch", "planned", "setup_in", "setup_out", "family",
)  # fmt: skip


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
    operation: IntArray
    cycle: IntArray
    iteration: IntArray
    start: IntArray
    end: IntArray
    waited: IntArray
    # labels; jobs are those of the trainer
    device: IntArray
    kind: npt.NDArray[np.str_]
    job: IntArray
    stage: IntArray
    microbatch: IntArray
    # durations and setups of the plan; blocks of one family need no setup between them
    planned: IntArray
    setup_in: IntArray
    setup_out: IntArray
    family: IntArray
    # arcs of the plans, and from a job's last update in one segment to its first forward after it
    waits: Waits

    def __len__(self) -> int:
        return len(self.segment)

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
    needed = run.family[before] != run.family[after]
    setup = np.where(needed, run.setup_out[before] + run.setup_in[after], 0)
    tail = np.concatenate((run.waits.tail, before))
    head = np.concatenate((run.waits.head, after))
    lag = np.maximum(run.waits.lag, -duration[run.waits.tail])
    weight = np.concatenate((lag, setup)) + duration[tail]
    by_tail = np.argsort(tail, kind="stable")
    heads, weights = head[by_tail].tolist(), weight[by_tail].tolist()
    bounds = np.searchsorted(tail[by_tail], np.arange(len(run) + 1)).tolist()
    waiting = np.bincount(head, minlength=len(run)).tolist()
    start = [0] * len(run)
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
    segment, operation = table[:, 0], table[:, 1]
    labels = np.zeros((len(_LABELS), len(table)), np.int64)
    kind = np.zeros(len(table), "<U1")
    for part, rows in zip(segments, grouped(segment, len(segments)).to_lists(), strict=True):
        if not rows:  # of a segment of which nothing is remembered there are no seats
            continue
        done = operation[rows]
        labels[:, rows] = _labels(part)[:, done]
        kind[rows] = np.array([b.kind[:1] for b in part.plan.blocks], "<U1")[done]
    named: dict[str, Any] = dict(zip(_LABELS, labels, strict=True))
    named |= {"kind": kind, "waits": _waits(segments, table)}
    return Executed(max((part.plan.devices for part in segments), key=len), *table.T, **named)


def _labels(part: Segment) -> IntArray:
    """By operation of a segment; jobs for the seats of its plan, also as families."""
    given, scale, blocks = part.plan.schedule, unit(part.plan), part.plan.blocks
    seats, seat = np.array(part.seats, np.int64), np.array([b.job for b in blocks], np.int64)
    rows = [
        [b.device for b in blocks],
        seats[seat],
        [b.stage for b in blocks],
        [0 if b.kind == "U" else b.microbatch for b in blocks],
        given.duration * scale,
        given.setup_in * scale,
        given.setup_out * scale,
        seats[seat] if np.array_equal(given.family, seat) else given.family,
    ]
    return np.array(rows, np.int64)


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
