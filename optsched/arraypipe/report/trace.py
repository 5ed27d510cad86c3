"""The records of a run as arrays, and as a schedule document that `optsched.verify` checks."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.arraypipe.plan.types import COPIES
from optsched.model.schedule import Arcs, Objective, Resource, Rows, Schedule

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from optsched.arraypipe.plan.segments import Segment
    from optsched.arraypipe.plan.types import Copied, Record
    from optsched.model.schedule import IntArray


SERIAL: Final = "monotonic, blocks of all devices one after the other"


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


def measured(log: RunLog) -> Schedule:
    """Make the schedule of a run as it was; the clock starts with the first block or copy.

    Blocks keep the arcs of their plans, without lags and setups. Clocks of several hosts agree up
    to an uncertainty, so a block may seem to start before one that it waited for has ended. Such an
    arc has a negative lag; where it seems to start even before that one started, the arc is left
    out. The provenance counts both. Operation k is record k; copies of states follow, on one
    resource for every direction of every device.
    """
    run = log.executed
    start, end = _in_order(run)
    begins = np.append(start, np.array([c.start_ns for c in log.copies], np.int64))
    origin = int(begins.min()) if len(begins) else 0
    start, duration = start - origin, end - start
    early = np.minimum(start[run.head] - (start + duration)[run.tail], 0)
    lost = early < -duration[run.tail]
    clock: dict[str, Any] = {"clock": SERIAL}
    if log.parallel or not run.serial:
        clock = {
            "clock": "monotonic clocks of the devices, shifted to one",
            "clock_uncertainty_ns": log.uncertainty_ns,
            "arcs_of_negative_lag": int(((early < 0) & ~lost).sum()),
            "arcs_left_out": int(lost.sum()),
            "most_negative_lag_ns": int(early.min(initial=0)),
        }
    columns = {**run.labels, "start": start, "duration": duration}
    resources, owner = list(run.devices), run.device
    if log.copies:
        clock["copied_bytes"] = {
            key: sum(c.size for c in log.copies if c.direction == key) for key in COPIES
        }
        rows = _copies(log, resources, origin)
        owner = np.append(owner, rows.pop("owner"))
        columns = {key: np.append(column, rows[key]) for key, column in columns.items()}
    ends = columns["start"] + columns["duration"]
    none = np.zeros(int((~lost).sum()), np.int64)
    return Schedule(
        name=log.name,
        time_unit="ns",
        resources=tuple(map(Resource, resources)),
        op_resources=Rows(np.arange(len(owner) + 1), owner),
        arcs=Arcs(run.tail[~lost], run.head[~lost], early[~lost], none),
        sequences=grouped(owner, len(resources)),
        objective=Objective("makespan", int(ends.max(initial=0))),
        provenance={**log.provenance, **clock},
        **columns,
    )


def _in_order(run: Executed) -> tuple[IntArray, IntArray]:
    """Starts and ends without overlaps on a device; events may overlap by their resolution."""
    start, end = run.start_ns.copy(), run.end_ns.copy()
    for row in run.sequences.to_lists():
        ids = np.array(row, np.int64)
        if not len(ids):
            continue
        over = np.maximum.accumulate(np.maximum(start[ids], end[ids]))
        end[ids] = over
        start[ids[1:]] = np.maximum(start[ids[1:]], over[:-1])
    return start, end


def _copies(log: RunLog, resources: list[str], origin: int) -> dict[str, tuple[Any, ...]]:
    """Columns of the copies of states; their links are added to the resources."""
    devices, suffix = log.executed.devices, {"in": "from host", "out": "to host"}
    rows = []
    free: dict[str, int] = {}
    for c in sorted(log.copies, key=lambda c: (c.start_ns, c.end_ns)):
        link = f"{devices[c.device]} {suffix[c.direction]}"
        if link in devices:  # a device may have any name
            link += " (link)"
        if link not in free:
            resources.append(link)
        start = max(c.start_ns, free.get(link, c.start_ns))
        free[link] = max(start, c.end_ns)
        labels = (COPIES[c.direction], c.job, c.stage, 0, 0)
        rows.append((*labels, start - origin, free[link] - start, resources.index(link)))
    names = (*log.executed.labels, "start", "duration", "owner")
    return dict(zip(names, zip(*rows, strict=True), strict=True))
