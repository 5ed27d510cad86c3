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

Flags = npt.NDArray[np.bool_]


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
        return executed(self.segments, self.records)


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
        ids, bounds = self.sequences.ids, self.sequences.indptr
        inside = np.ones(max(0, len(ids) - 1), np.bool_)
        inside[bounds[(bounds > 0) & (bounds < len(ids))] - 1] = False
        return ids[:-1][inside], ids[1:][inside]

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


def executed(segments: Sequence[Segment], records: Sequence[Record]) -> Executed:
    """Label the records of a run; those of one device are in its own order, of all in any."""
    table = np.array(records, np.int64).reshape(-1, 7)
    segment, operation, cycle, iteration, start, end, waited = table.T
    tables: dict[int, _Table] = {}
    columns = np.zeros((len(_COLUMNS), len(table)), np.int64)
    kind = np.zeros(len(table), "<U1")
    pieces = []
    for k, rows in enumerate(grouped(segment, len(segments)).to_lists()):
        part, own = segments[k], np.array(rows, np.int64)
        known = tables.get(id(part.plan)) or tables.setdefault(id(part.plan), _Table(part))
        columns[:, own] = known.labels[:, operation[own]]
        kind[own] = known.kind[operation[own]]
        pieces.append(known.waits(own, operation[own], cycle[own]))
        _seat(part, columns, own)
    named = dict(zip(_COLUMNS, columns, strict=True))
    ends, begins = named.pop("ends") == 1, named.pop("begins") == 1
    pieces.append(_between_segments(segment, named["job"], named["stage"], iteration, ends, begins))
    waits = Waits(*(np.concatenate(column) for column in zip(*pieces, strict=True)))
    devices = max((part.plan.devices for part in segments), key=len)
    return Executed(
        devices, segment, operation, cycle, iteration, start, end, waited,
        kind=kind, waits=waits, **named,
    )  # fmt: skip


def grouped(key: IntArray, n: int) -> Rows:
    """Positions of the values 0..n-1 in an array, ascending."""
    indptr = np.zeros(n + 1, np.int64)
    np.cumsum(np.bincount(key, minlength=n), out=indptr[1:])
    return Rows(indptr, np.argsort(key, kind="stable"))


def unit(plan: ExecutionPlan) -> int:
    """Nanoseconds of the plan's unit of time."""
    return NANOSECONDS[plan.schedule.time_unit]


_COLUMNS: Final = (
    "device", "job", "stage", "microbatch", "planned", "setup_in", "setup_out", "family",
    "ends", "begins",
)  # fmt: skip


class _Table:
    """What records of one plan look up by operation."""

    def __init__(self, part: Segment) -> None:
        plan = part.plan
        given, scale, blocks = plan.schedule, unit(plan), plan.blocks
        self.kind = np.array([b.kind[:1] for b in blocks], "<U1")
        self.labels = np.array(
            [
                [b.device for b in blocks],
                [b.job for b in blocks],
                [b.stage for b in blocks],
                [0 if b.kind == "U" else b.microbatch for b in blocks],
                given.duration * scale,
                given.setup_in * scale,
                given.setup_out * scale,
                given.family,
                part.updates,
                [b.operation in plan.first_forwards for b in blocks],
            ],
            np.int64,
        )
        arcs = np.array(plan.arcs, np.int64).reshape(-1, 4)
        arcs = arcs[np.argsort(arcs[:, 1], kind="stable")]
        self.arcs, self.lag = arcs, arcs[:, 3] * scale
        self.indptr = np.zeros(len(blocks) + 1, np.int64)
        np.cumsum(np.bincount(arcs[:, 1], minlength=len(blocks)), out=self.indptr[1:])

    def waits(self, own: IntArray, operation: IntArray, cycle: IntArray) -> Waits:
        """Arcs between the records `own` of one segment, which are these instances."""
        if not len(own):
            return Waits(own, own, own)
        cycle = cycle - cycle.min()  # which is large if the beginning has been left out
        place = np.full((len(self.indptr) - 1, int(cycle.max()) + 1), -1)
        place[operation, cycle] = own
        counts = self.indptr[operation + 1] - self.indptr[operation]
        row = np.repeat(np.arange(len(own)), counts)
        arc = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        arc += self.indptr[operation[row]]
        before = cycle[row] - self.arcs[arc, 2]
        tail = place[self.arcs[arc, 0], before.clip(0, place.shape[1] - 1)]
        there = (tail >= 0) & (before >= 0) & (before < place.shape[1])
        return Waits(tail[there], own[row[there]], self.lag[arc[there]])


def _seat(part: Segment, columns: IntArray, own: IntArray) -> None:
    """Turn the seats of a plan into jobs, and families that are seats too."""
    job, family = _COLUMNS.index("job"), _COLUMNS.index("family")
    seats = np.array(part.seats, np.int64)
    if np.array_equal(columns[family, own], columns[job, own]):
        columns[family, own] = seats[columns[job, own]]
    columns[job, own] = seats[columns[job, own]]


def _between_segments(
    segment: IntArray, job: IntArray, stage: IntArray, iteration: IntArray, ends: Flags,
    begins: Flags,
) -> Waits:  # fmt: skip
    """From the update of a stage to the job's next forward there, if that is in a later segment."""
    none = np.zeros(0, np.int64)
    if not len(segment) or segment.max() == segment.min() or not ends.any():
        return Waits(none, none, none)
    following = iteration + ends
    key = (job * (int(stage.max()) + 1) + stage) * (int(following.max()) + 1) + following
    tails, heads = np.flatnonzero(ends), np.flatnonzero(begins)
    tails = tails[np.argsort(key[tails], kind="stable")]
    at = np.searchsorted(key[tails], key[heads]).clip(0, len(tails) - 1)
    found = tails[at]
    later = (key[found] == key[heads]) & (segment[found] < segment[heads])
    return Waits(found[later], heads[later], np.zeros(int(later.sum()), np.int64))
