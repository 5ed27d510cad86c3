"""The records of a run as arrays: labels, durations of the plan, what had to wait for what."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from optsched.model.schedule import Rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.arraypipe.plan.plan import ExecutionPlan
    from optsched.arraypipe.plan.segments import Course, Segment
    from optsched.arraypipe.plan.types import Record
    from optsched.model.schedule import IntArray


NANOSECONDS: Final = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9}

Flags = npt.NDArray[np.bool_]


class Waits(NamedTuple):
    """Arcs between records: `head` waits for `tail`; `lag` is that of the plan, in nanoseconds."""

    tail: IntArray
    head: IntArray
    lag: IntArray


@dataclass(frozen=True, eq=False)
class Executed:
    """Every block that was run, one value a record; made by `executed`.

    Those of one device are in the order in which it ran them; times are in nanoseconds.

    Parameters
    ----------
    devices
        Names of the devices.
    segment, operation, cycle, iteration, start, end
        As in the records.
    device, kind, job, stage, microbatch
        Labels; jobs are those of the trainer.
    planned, setup_in, setup_out
        Duration and setups of the plan.
    family
        Blocks of one family need no setup between them.
    waits
        Arcs of the plans, and from a job's last update in one segment to its first forward in the
        next.
    """

    devices: tuple[str, ...]
    segment: IntArray
    operation: IntArray
    cycle: IntArray
    iteration: IntArray
    start: IntArray
    end: IntArray
    device: IntArray
    kind: npt.NDArray[np.str_]
    job: IntArray
    stage: IntArray
    microbatch: IntArray
    planned: IntArray
    setup_in: IntArray
    setup_out: IntArray
    family: IntArray
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

    def setup(self, before: IntArray, after: IntArray) -> IntArray:
        """Setups of the plan between neighbours."""
        needed = self.family[before] != self.family[after]
        return np.where(needed, self.setup_out[before] + self.setup_in[after], 0)


def executed(course: Course, records: Sequence[Record]) -> Executed:
    """Label the records of a run; those of one device are in its own order, of all in any."""
    table = np.array(records, np.int64).reshape(-1, 6)
    segment, operation, cycle, iteration, start, end = table.T
    tables: dict[int, _Table] = {}
    columns = np.zeros((len(_COLUMNS), len(table)), np.int64)
    kind = np.zeros(len(table), "<U1")
    pieces = []
    for k, rows in enumerate(grouped(segment, len(course.segments)).to_lists()):
        part, own = course.segments[k], np.array(rows, np.int64)
        known = tables.get(id(part.plan)) or _Table(part.plan)
        tables[id(part.plan)] = known
        columns[:, own] = known.labels[:, operation[own]]
        kind[own] = known.kind[operation[own]]
        pieces += known.waits(own, operation[own], cycle[own])
        _seat(part, columns, own)
    named = dict(zip(_COLUMNS, columns, strict=True))
    ends, begins = named.pop("ends") == 1, named.pop("begins") == 1
    pieces.append(_between_segments(segment, named["job"], named["stage"], iteration, ends, begins))
    waits = Waits(*(np.concatenate(column) for column in zip(*pieces, strict=True)))
    devices = max((part.plan.devices for part in course.segments), key=len)
    return Executed(
        devices, segment, operation, cycle, iteration, start, end, kind=kind, waits=waits, **named
    )


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

    def __init__(self, plan: ExecutionPlan) -> None:
        self.plan = plan
        given, scale = plan.schedule, unit(plan)
        blocks = plan.blocks
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
                [_ends_iteration(plan, b.operation) for b in blocks],
                [b.operation in plan.first_forwards for b in blocks],
            ],
            np.int64,
        )
        arcs = np.array(plan.arcs, np.int64).reshape(-1, 4)
        barrier = self._of_barrier(arcs)
        self.barrier = arcs[barrier]
        arcs = arcs[~barrier]
        arcs = arcs[np.argsort(arcs[:, 1], kind="stable")]
        self.arcs, self.lag = arcs, arcs[:, 3] * scale
        self.indptr = np.zeros(len(blocks) + 1, np.int64)
        np.cumsum(np.bincount(arcs[:, 1], minlength=len(blocks)), out=self.indptr[1:])

    def waits(self, own: IntArray, operation: IntArray, cycle: IntArray) -> list[Waits]:
        """Arcs between the records `own` of one segment, which are these instances."""
        if not len(own):
            return []
        base = int(cycle.min())  # large if the beginning has been left out
        cycle = cycle - base
        place = np.full((len(self.plan.blocks), int(cycle.max()) + 1), -1)
        place[operation, cycle] = own
        counts = self.indptr[operation + 1] - self.indptr[operation]
        row = np.repeat(np.arange(len(own)), counts)
        arc = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        arc += self.indptr[operation[row]]
        before = cycle[row] - self.arcs[arc, 2]
        tail = place[self.arcs[arc, 0], before.clip(0, place.shape[1] - 1)]
        there = (tail >= 0) & (before >= 0) & (before < place.shape[1])
        found = [Waits(tail[there], own[row[there]], self.lag[arc[there]])]
        if len(self.barrier):
            found += self._barriers(place, base)
        return found

    def _of_barrier(self, arcs: IntArray) -> Flags:
        """Which arcs are there only because all jobs wait for each other after a cycle."""
        if not self.plan.barrier:
            return np.zeros(len(arcs), np.bool_)
        job, begins = self.labels[_COLUMNS.index("job")], self.labels[_COLUMNS.index("begins")]
        tail, head, tokens, lag = arcs.T
        offset = np.array([b.offset for b in self.plan.blocks])
        following = tokens == 1 + offset[head] - offset[tail]
        found: Flags = (job[tail] != job[head]) & (begins[head] == 1) & following & (lag == 0)
        return found

    def _barriers(self, place: IntArray, base: int) -> list[Waits]:
        """Those arcs, cycle by cycle: the device orders imply all but one a pair of devices."""
        tails, heads = np.unique(self.barrier[:, 0]), np.unique(self.barrier[:, 1])
        offset = np.array([b.offset for b in self.plan.blocks])
        found = []
        for c in range(-min(base, int(offset.max(initial=0))), place.shape[1]):
            last = self._outermost(place, tails, c - 1 + offset[tails], -1)
            first = self._outermost(place, heads, c + offset[heads], 0)
            pairs = np.array([(i, j) for i in last for j in first], np.int64).reshape(-1, 2)
            found.append(Waits(pairs[:, 0], pairs[:, 1], np.zeros(len(pairs), np.int64)))
        return found

    def _outermost(
        self, place: IntArray, operations: IntArray, cycles: IntArray, which: int
    ) -> list[int]:
        """The first (0) or last (-1) record of these instances on every device."""
        inside = (cycles >= 0) & (cycles < place.shape[1])
        rows = place[operations[inside], cycles[inside]]
        device = self.labels[0][operations[inside]][rows >= 0]
        rows = rows[rows >= 0]
        return [int(np.sort(rows[device == d])[which]) for d in np.unique(device)]


def _ends_iteration(plan: ExecutionPlan, operation: int) -> bool:
    """Whether it updates its stage."""
    block = plan.blocks[operation]
    if block.kind != "B" or block.job in plan.updated:
        return block.kind == "U"
    return operation in plan.last_backwards


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
