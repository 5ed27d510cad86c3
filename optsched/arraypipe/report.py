"""Times of a plan and of a run: predicted, measured, waited; the run as a schedule document."""

from __future__ import annotations

import html
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from optsched.arraypipe.plan.types import COPIES
from optsched.io.text import aligned, duration, one_line
from optsched.kernels.cycle_ratio import cycle_time
from optsched.model.schedule import Arcs, Csr, Objective, Resource, Schedule

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from optsched.arraypipe.plan.plan import ExecutionPlan
    from optsched.arraypipe.plan.segments import Segment
    from optsched.arraypipe.plan.types import Copied, Record
    from optsched.model.schedule import IntArray

SERIAL: Final = "monotonic, blocks of all devices one after the other"


class Prediction(NamedTuple):
    """Times of one cycle."""

    period_ns: int  # least one of the plan's orders: what a long run needs by these durations
    load_ns: tuple[int, ...]  # durations of the blocks of every device
    chain_ns: int  # the job with the longest iterations, if no device delays it

    @property
    def bound_ns(self) -> int:
        """No order of these blocks has a shorter period."""
        return max(*self.load_ns, self.chain_ns)


def predict(plan: ExecutionPlan) -> Prediction:
    """Return period and bounds of a plan when it is repeated for ever.

    The period is the maximum cycle ratio of the plan's arcs, those between iterations included, and
    device orders (`optsched.kernels.cycle_ratio`).
    """
    free = cycle_time(plan.graph, None, plan.schedule.offset)
    unit_ns, duration = plan.unit_ns, plan.schedule.duration.tolist()
    return Prediction(
        period_ns=unit_ns * plan.least_period,
        load_ns=tuple(unit_ns * sum(duration[i] for i in row) for row in plan.sequences),
        chain_ns=unit_ns * free.period if free.critical else 0,
    )


def explain(plan: ExecutionPlan) -> str:
    """Describe a plan: its size, the predicted period, the loads of the devices."""
    found = predict(plan)
    gap = found.period_ns / found.bound_ns - 1 if found.bound_ns else 0.0
    loads = ", ".join(f"{load / max(1, found.period_ns):.0%}" for load in found.load_ns)
    return (
        f"{plan.n_jobs} jobs in {plan.n_stages} stages on {len(plan.devices)} devices\n"
        f"predicted period {duration(found.period_ns)}, {gap:.1%} above the bound; longest chain "
        f"{duration(found.chain_ns)}; devices compute {loads} of it"
    )


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
    def devices(self) -> tuple[str, ...]:
        """Names of the devices."""
        return max((part.plan.devices for part in self.segments), key=len)

    @cached_property
    def columns(self) -> dict[str, Any]:
        """Fields of the records, and what their plans say: one value a record; jobs of the run."""
        table = np.array(self.records, np.int64).reshape(-1, 8)
        names = ("segment", "operation", "cycle", "iteration", "start_ns", "end_ns", "waited_ns",
                 "exposed_ns")  # fmt: skip
        columns = dict(zip(names, table.T, strict=True))
        rows = np.zeros((4, len(table)), np.int64)
        kind = np.zeros(len(table), "<U1")
        for k in np.unique(columns["segment"]).tolist():  # those without records have no slots
            part, here = self.segments[k], columns["segment"] == k
            done = columns["operation"][here]
            rows[:, here] = np.array([
                (b.device, part.slots[b.job], b.stage, 0 if b.kind == "U" else b.microbatch)
                for b in part.plan.blocks
            ], np.int64)[done].T  # fmt: skip
            kind[here] = part.plan.schedule.kind.astype("<U1")[done]
        labels = zip(("device", "job", "stage", "microbatch"), rows, strict=True)
        return {**columns, **dict(labels), "kind": kind}

    @cached_property
    def sequences(self) -> Csr:
        """Records of every device in its order."""
        return grouped(self.columns["device"], len(self.devices))

    def __repr__(self) -> str:
        return f"<RunLog {self.name!r:.60}: {len(self.records)} blocks>"

    @cached_property
    def serial(self) -> bool:
        """Whether no two blocks ran at the same time, in the order of the records."""
        start_ns, end_ns = self.columns["start_ns"], self.columns["end_ns"]
        return not self.parallel and bool((start_ns[1:] >= end_ns[:-1]).all())


@dataclass(frozen=True)
class DeviceTime:
    """What a device did: time in blocks, and time that blocks waited for messages and copies.

    `idle` is the share of the run in which the device computed nothing (its *bubble*).
    """

    name: str
    blocks: int
    compute_ns: int
    waited_ns: int
    idle: float


@dataclass(frozen=True)
class Report:
    """Predicted against measured.

    Parameters
    ----------
    serial
        All devices of the plan shared one device, so that blocks took turns.
    predicted_ns
        Time of a cycle by the durations of the plan: the period of its orders; if serial, the sum
        of all blocks. None if the plan has no times.
    measured_ns
        The same as it was, from the ends of whole cycles; None with fewer than two.
    waited_ns, exposed_ns
        Time that blocks waited for messages and copies of states, of all devices; and its part for
        copies.
    wall_ns
        From the first block to the end of the last.
    devices
        What each device did.
    cycles, left_out
        Cycles in the log, and earlier blocks that a long run no longer has in it.

    Examples
    --------
    >>> from optsched.arraypipe import Report
    >>> print(Report(True, 2e6, 3e6, waited_ns=0, exposed_ns=0, wall_ns=10**7, devices=()))
    a cycle: predicted 2 ms, measured 3 ms (+50.0%); waited 0 ns (0.0%) for messages and copies
    device  blocks  compute  waited  idle
    (one device runs the blocks of all in turn)
    """

    serial: bool
    predicted_ns: float | None
    measured_ns: float | None
    waited_ns: int
    exposed_ns: int
    wall_ns: int
    devices: tuple[DeviceTime, ...]
    cycles: int = 0
    left_out: int = 0

    def __repr__(self) -> str:
        return f"<Report of {len(self.devices)} devices: {str(self).splitlines()[0]}>"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def __str__(self) -> str:
        predicted, measured = (
            "-" if time is None else duration(time)
            for time in (self.predicted_ns, self.measured_ns)
        )
        if self.measured_ns and self.predicted_ns:
            ratio = self.measured_ns / self.predicted_ns
            measured += f" ({ratio - 1:+.1%})" if 0.1 < ratio < 10 else f" ({ratio:.3g}x)"
        total_ns = self.wall_ns * (1 if self.serial else len(self.devices))
        share = self.waited_ns / total_ns if total_ns else 0.0
        rows = [["device", "blocks", "compute", "waited", "idle"]]
        for d in self.devices:
            times = (duration(d.compute_ns), duration(d.waited_ns))
            rows.append([one_line(d.name), str(d.blocks), *times, f"{d.idle:.1%}"])
        lines = [
            f"a cycle: predicted {predicted}, measured {measured}; waited "
            f"{duration(self.waited_ns)} ({share:.1%}) for messages and copies",
            *aligned(rows),
        ]
        if self.serial:
            lines.append("(one device runs the blocks of all in turn)")
        if self.left_out:
            lines.append(f"(the last {self.cycles} cycles; {self.left_out} blocks before them)")
        return "\n".join(lines)


def compare(log: RunLog) -> Report:
    """Compare a run with the prediction of its plan."""
    run, serial = log.columns, log.serial and len(log.devices) > 1
    start_ns, end_ns, waited_ns = run["start_ns"], run["end_ns"], run["waited_ns"]
    waited_ns = waited_ns + run["exposed_ns"]
    wall_ns = int(end_ns.max() - start_ns.min()) if len(start_ns) else 0
    devices = []
    for name, row in zip(log.devices, log.sequences.to_lists(), strict=True):
        compute_ns = int((end_ns - start_ns)[row].sum())
        idle = max(0.0, 1 - compute_ns / wall_ns) if wall_ns else 0.0
        devices.append(DeviceTime(name, len(row), compute_ns, int(waited_ns[row].sum()), idle))
    found = [_cycles(log, k) for k in range(len(log.segments))]
    _, longest, measured_ns = max(found, key=lambda one: one[0])
    plan = log.segments[longest].plan
    predicted_ns = None
    if plan.schedule.duration.any():
        predicted = predict(plan)
        predicted_ns = float(sum(predicted.load_ns) if serial else predicted.period_ns)
    return Report(
        serial=serial,
        predicted_ns=predicted_ns,
        measured_ns=measured_ns,
        waited_ns=int(waited_ns.sum()),
        exposed_ns=int(run["exposed_ns"].sum()),
        wall_ns=wall_ns,
        devices=tuple(devices),
        cycles=len({*zip(run["segment"].tolist(), run["cycle"].tolist(), strict=True)}),
        left_out=log.left_out,
    )


def _cycles(log: RunLog, segment: int) -> tuple[int, int, float | None]:
    """Number of cycles in which all blocks of a segment's plan ran, the segment, time of a cycle.

    The time is the slope of their ends, without the first quarter, which fills the pipeline.
    """
    here = log.columns["segment"] == segment
    cycle, end_ns = log.columns["cycle"][here], log.columns["end_ns"][here]
    needed = sum(block.device >= 0 for block in log.segments[segment].plan.blocks)
    whole = sorted(c for c, n in Counter(cycle.tolist()).items() if n == needed)
    if len(whole) < 2:
        return len(whole), segment, None
    first, last = whole[len(whole) // 4], whole[-1]
    ends = [int(end_ns[cycle == c].max()) for c in (first, last)]
    return len(whole), segment, (ends[1] - ends[0]) / (last - first)


def measured(log: RunLog) -> Schedule:
    """Make the schedule of a run as it was; the clock starts with the first block or copy.

    Blocks keep the arcs of their plans, without lags and setups. Clocks of several hosts agree up
    to an uncertainty, so a block may seem to start before one that it waited for has ended. Such an
    arc has a negative lag; where it seems to start even before that one started, the arc is left
    out. The provenance counts both. Operation k is record k; copies of states follow, on one
    resource for every direction of every device.
    """
    run, (tail, head) = log.columns, _arcs(log)
    start, end = _in_order(log)
    origin = min([*start.tolist(), *(c.start_ns for c in log.copies)], default=0)
    start, duration = start - origin, end - start
    early = np.minimum(start[head] - (start + duration)[tail], 0)
    kept = early >= -duration[tail]
    clock: dict[str, Any] = {"clock": SERIAL}
    if not log.serial:
        clock = {
            "clock": "monotonic clocks of the devices, shifted to one",
            "clock_uncertainty_ns": log.uncertainty_ns,
            "arcs_of_negative_lag": int(((early < 0) & kept).sum()),
            "arcs_left_out": int((~kept).sum()),
            "most_negative_lag_ns": int(early.min(initial=0)),
        }
    labels = ("kind", "job", "stage", "microbatch", "iteration")
    columns = {**{key: run[key] for key in labels}, "start": start, "duration": duration}
    resources, owner = list(log.devices), run["device"]
    if log.copies:
        clock["copied_bytes"] = {
            key: sum(c.size for c in log.copies if c.direction == key) for key in COPIES
        }
        *rows, links = zip(*_copies(log, resources, origin), strict=True)
        owner = np.append(owner, links)
        columns = {
            key: np.append(column, row)
            for (key, column), row in zip(columns.items(), rows, strict=True)
        }
    ends = columns["start"] + columns["duration"]
    return Schedule(
        name=log.name,
        time_unit="ns",
        resources=tuple(map(Resource, resources)),
        op_resources=Csr(np.arange(len(owner) + 1), owner),
        arcs=Arcs(tail[kept], head[kept], early[kept], np.zeros(int(kept.sum()), np.int64)),
        sequences=grouped(owner, len(resources)),
        objective=Objective("makespan", int(ends.max(initial=0))),
        provenance={**log.provenance, **clock},
        **columns,
    )


def grouped(key: IntArray, n: int) -> Csr:
    """Return positions of the values 0..n-1 in an array, ascending."""
    indptr = np.zeros(n + 1, np.int64)
    np.cumsum(np.bincount(key, minlength=n), out=indptr[1:])
    return Csr(indptr, np.argsort(key, kind="stable"))


def _arcs(log: RunLog) -> IntArray:
    """Arcs (tail, head) within segments; and from an update to the job's F in a later one."""
    found: list[tuple[int, int]] = []
    updated: dict[tuple[int, int, int], int] = {}  # in earlier segments, by the next iteration
    columns = (log.columns[key].tolist() for key in ("operation", "cycle", "iteration"))
    instances = [*zip(*columns, strict=True)]
    for k, part in enumerate(log.segments):
        rows = np.flatnonzero(log.columns["segment"] == k).tolist()
        plan, slots = part.plan, part.slots
        place = {instances[row][:2]: row for row in rows}
        ends: dict[tuple[int, int, int], int] = {}
        for row in rows:
            i, cycle, iteration = instances[row]
            before = (place.get((arc.tail, cycle - arc.tokens)) for arc in plan.waits[i])
            found += [(tail, row) for tail in before if tail is not None]
            block = plan.blocks[i]
            key = (slots[block.job], block.stage, iteration)
            if plan.updates[i]:
                ends[(*key[:2], iteration + 1)] = row
            if key in updated and block.kind == "F" and not block.microbatch:
                found.append((updated[key], row))
        updated |= ends
    return np.array(found, np.int64).reshape(-1, 2).T


def _in_order(log: RunLog) -> tuple[IntArray, IntArray]:
    """Starts and ends without overlaps on a device; events may overlap by their resolution."""
    start, end = log.columns["start_ns"].copy(), log.columns["end_ns"].copy()
    for row in log.sequences.to_lists():
        over = np.maximum.accumulate(np.maximum(start[row], end[row]))
        end[row] = over
        start[row[1:]] = np.maximum(start[row[1:]], over[:-1])
    return start, end


def _copies(log: RunLog, resources: list[str], origin: int) -> list[tuple[Any, ...]]:
    """Return copies of states as rows of operations; their links are added to the resources."""
    rows, free = [], dict[str, int]()
    for c in sorted(log.copies, key=lambda c: (c.start_ns, c.end_ns)):
        link = f"{log.devices[c.device]} {'from' if c.direction == 'in' else 'to'} host"
        if link in log.devices:  # a device may have any name
            link += " (link)"
        if link not in free:
            resources.append(link)
        start = max(c.start_ns, free.get(link, c.start_ns))
        free[link] = max(start, c.end_ns)
        labels = (COPIES[c.direction], c.job, c.stage, 0, 0)
        rows.append((*labels, start - origin, free[link] - start, resources.index(link)))
    return rows
