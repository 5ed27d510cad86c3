"""Where the time of a run went: predicted, re-evaluated with measured durations, measured."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from optsched.arraypipe.plan.edits import without
from optsched.arraypipe.plan.types import MESSAGES
from optsched.arraypipe.report.executed import executed, grouped, unit
from optsched.arraypipe.report.trace import makespan, virtual_starts
from optsched.io.text import plain

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from optsched.arraypipe.plan.plan import ExecutionPlan
    from optsched.arraypipe.plan.segments import Course, Segment
    from optsched.arraypipe.plan.types import Moved, Record
    from optsched.arraypipe.report.executed import Executed
    from optsched.model.schedule import IntArray


class Stretch(NamedTuple):
    """Cycles of a segment, from one end of a job to the next.

    `seats` are those that ran, and `cycles` the ones in which every block of theirs was run, and no
    other block.
    """

    segment: int
    seats: tuple[int, ...]
    cycles: IntArray


def stretches(course: Course, run: Executed) -> list[Stretch]:
    """Stretches of all segments, in their order.

    Every segment has the one with which it begins; later ones are left out if they have fewer than
    two whole cycles, which give no period.
    """
    found = []
    for number in range(course.forgotten, len(course.segments)):
        segment = course.segments[number]
        here = np.flatnonzero(run.segment == number)
        for k, (seats, begin, end) in enumerate(_spans(segment)):
            cycles = _whole(segment.plan, seats, run.operation[here], run.cycle[here])
            cycles = cycles[(cycles >= begin) & (cycles < end)]
            if not k or len(cycles) >= 2:
                found.append(Stretch(number, seats, cycles))
    return found


def planned_period(plan: ExecutionPlan, seats: tuple[int, ...]) -> int | None:
    """Nanoseconds a cycle by the document, for these jobs alone; None if it has no period."""
    schedule = plan.schedule
    if schedule.period is None:
        return None
    gone = set(range(plan.n_jobs)) - set(seats)
    left = without(schedule, gone) if gone and seats else schedule
    return None if left.period is None else left.period * unit(plan)


def _spans(segment: Segment) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """Which seats run, and in which cycles all blocks of theirs may be, and none of the others."""
    plan = segment.plan
    rows = zip(segment.count, plan.copies, strict=True)
    ends = [-(-count // copies) for count, copies in rows]  # in cycles of the seat itself
    earliest = [min(b.offset for b in plan.blocks if b.job == seat) for seat in range(plan.n_jobs)]
    every = range(plan.n_jobs)
    for end in sorted({e for e in ends if e}) or [0]:
        seats = tuple(seat for seat in every if ends[seat] >= end)
        over = [ends[seat] + segment.latest[seat] for seat in every if 0 < ends[seat] < end]
        begin = max([*over, *(segment.latest[seat] for seat in seats)], default=0)
        yield seats, begin, min((end + earliest[seat] for seat in seats), default=0)


def _whole(
    plan: ExecutionPlan, seats: tuple[int, ...], operation: IntArray, cycle: IntArray
) -> IntArray:
    """Cycles in which all blocks of these seats were run, and no other."""
    if not len(cycle):
        return np.zeros(0, np.int64)
    base = int(cycle.min())
    own = np.array([b.device >= 0 and b.job in seats for b in plan.blocks])
    n = np.bincount(cycle - base)
    n_own = np.bincount(cycle - base, weights=own[operation])
    return np.flatnonzero((n == own.sum()) & (n_own == n)) + base


_UNITS = (("s", 1e9), ("ms", 1e6), ("us", 1e3))
_SEGMENTS = 8  # shown, if there are more


def text(report: Report) -> str:
    """Periods, devices, and the worst predictions."""
    lines = [*_time_lines(report), *_segment_lines(report), "", *_device_lines(report)]
    lines.append(f"host time between two blocks: median {duration(report.between)}")
    if report.launching is not None:
        lines.append(f"host time for launching a cycle: {duration(report.launching)}")
    if report.host_bound:
        lines.append(
            'host-bound: use the process backend (backend="process"), one host thread a device'
        )
    if report.messages:
        lines += ["", *_message_lines(report)]
    if report.largest_errors:
        lines += ["", "blocks whose duration was predicted worst (median of the measured)"]
        for error in report.largest_errors:
            change = _change(error.measured, error.predicted)
            times = f"{duration(error.predicted)} -> {duration(error.measured)}"
            lines.append(f"  {plain(error.block, 200)}: {times}{change}")
    return "\n".join(lines)


def duration(nanoseconds: float) -> str:
    """Three digits and a unit."""
    for name, size in _UNITS:
        if abs(nanoseconds) >= size * 0.9995:
            value = nanoseconds / size
            return f"{value:.0f} {name}" if value >= 999.5 else f"{value:.3g} {name}"
    return f"{nanoseconds:.0f} ns"


def _time_lines(report: Report) -> list[str]:
    """Whole run and period of a cycle, side by side."""
    period = report.period
    rows = [["", "its end" if report.left_out else "whole run", "a cycle", ""]]
    predicted = (report.predicted, None if period is None else period.predicted)
    replayed = (report.replayed, None if period is None else period.replayed)
    wall = (report.wall, None if period is None else period.measured)
    which = 1 if period is not None else 0
    rows.append(["predicted", *map(_known, predicted), "durations of the plan"])
    gap = _change(replayed[which], predicted[which])
    rows.append(["with measured durations", *map(_known, replayed), f"error of the durations{gap}"])
    if report.serial:
        rows.append(["measured", *map(_known, wall), "devices took turns, so this is no period"])
    else:
        gap = _change(wall[which], replayed[which])
        rows.append(["measured", *map(_known, wall), f"added by the executor{gap}"])
    lines = _table(rows, right=(1, 2))
    if report.serial:
        lines.append("(the first two on a virtual clock: as devices in parallel would have run)")
    if report.left_out:
        lines.append(
            f"(the last {report.cycles} cycles of the run; "
            f"{report.left_out} blocks before them are left out)"
        )
    if period is None:
        lines.append("(no whole cycles after each other: the run is too short for a period)")
    else:
        where = ""
        if len(report.periods) > 1:
            where = f" of segment {period.segment} with {len(period.jobs)} jobs"
        lines.append(f"(a cycle: from the slope of {period.cycles} whole cycles{where})")
    return lines


def _segment_lines(report: Report) -> list[str]:
    """Periods of the segments and their parts, the longest ones if there are many."""
    known = [p for p in report.periods if p.measured is not None]
    if len(report.periods) < 2 or not known:
        return []
    longest = sorted(known, key=lambda p: -p.cycles)[:_SEGMENTS]
    rows = [["segment", "jobs", "whole cycles", "predicted", "re-evaluated", "measured"]]
    for p in [p for p in known if p in longest]:
        times = (p.predicted, p.replayed, p.measured)
        rows.append([str(p.segment), str(len(p.jobs)), str(p.cycles), *map(_known, times)])
    lines = ["", *_table(rows, right=range(1, 6))]
    if len(rows) - 1 < len(report.periods):
        lines.append(f"({len(report.periods) - len(rows) + 1} other parts are shorter)")
    return lines


def _device_lines(report: Report) -> list[str]:
    others = "others' turns" if report.serial else "waiting"
    rows = [["device", "compute", "switch", "copies", others, "host", "idle a cycle", "", ""]]
    rows.append(["", "", "", "", "", "", "predicted", "re-evaluated", "measured"])
    for d in report.devices:
        idle = [d.idle_predicted, d.idle_replayed, d.idle_measured]
        shares = [f"{share:.1%}" for share in idle[: 2 if report.serial else 3]]
        times = [d.compute, d.switch, d.exposed, d.waiting, d.host]
        rows.append([plain(d.name), *map(duration, times), *shares, *[""] * (3 - len(shares))])
    if report.serial:
        rows[1][-1] = ""
    return _table(rows, right=range(1, 9))


def _message_lines(report: Report) -> list[str]:
    """What went between devices, by kind."""
    rows = [["messages", "number", "awaited", "median", "exposed"]]
    rows += [
        [plain(m.kind), str(m.number), share, _known(m.median), _known(m.exposed)]
        for m in report.messages
        for share in [f"{m.awaited / m.number:.0%}" if m.number else "-"]
    ]
    return _table(rows, right=range(1, 5))


def _known(value: float | None) -> str:
    return "-" if value is None else duration(value)


def _change(new: float | None, old: float | None) -> str:
    """How much more, in percent; as a factor where percents would be hard to read."""
    if not new or not old:
        return ""
    ratio = new / old
    if 0.1 < ratio < 10:
        return f" ({ratio - 1:+.1%})"
    return f" ({ratio:.3g}x)"


def _table(rows: Sequence[Sequence[str]], right: Sequence[int]) -> list[str]:
    widths = [max(len(row[c]) for row in rows) for c in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if c in right else cell.ljust(width)
            for c, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


_LARGEST: Final = 5


@dataclass(frozen=True)
class BlockError:
    """A block with its predicted and its median measured duration in nanoseconds."""

    block: str
    predicted: int
    measured: int


@dataclass(frozen=True)
class Period:
    """Nanoseconds a cycle while the same jobs ran, from the slope of the ends of whole cycles.

    A segment has another one after the end of a job that others outlive. `jobs` are those that ran,
    by their numbers in the trainer; `cycles` have all their blocks. The first quarter is left out:
    a pipeline has to fill. `planned` is the period that the schedule document claims, without the
    jobs that had ended; None if it has none. None elsewhere: fewer than two whole cycles.
    """

    segment: int
    cycles: int
    planned: int | None
    predicted: float | None
    replayed: float | None
    measured: float | None
    jobs: tuple[int, ...] = ()


@dataclass(frozen=True)
class DeviceTime:
    """What a device did all along, in nanoseconds.

    ``compute + switch + exposed + waiting + host`` is the time of the run. Between two blocks a
    device waits until what the next one needs is there; then blocks may have to wait for copies of
    states (`exposed`); what is left is the host's: `switch` before a block of another job, `host`
    before one of the same and before the first. Where devices take turns, as on a CPU, `waiting`
    is the turns of the others.

    The last three are shares of a cycle in which the device computes nothing (its *bubble*), of the
    period of that name, or of the whole run if no period is known.
    """

    name: str
    blocks: int
    compute: int
    switch: int
    exposed: int
    waiting: int
    host: int
    compute_predicted: int
    idle_predicted: float
    idle_replayed: float
    idle_measured: float


@dataclass(frozen=True)
class MessageTimes:
    """Messages of one kind between devices, times in nanoseconds.

    For `awaited` of them a block stood waiting when they left: both ends were seen, and `median`
    is theirs (None without any). `exposed` is how long blocks waited for messages on their way.
    Where no host waits, on GPUs, all count as seen, and `exposed` is None.
    """

    kind: str
    number: int
    awaited: int
    median: int | None
    exposed: int | None


@dataclass(frozen=True)
class Report:
    """Predicted against measured; times in nanoseconds.

    All three look at the blocks that were run, in the orders in which they were run. The first gap
    is the error of the durations, the second what the executor added.

    Parameters
    ----------
    serial
        Blocks of several devices took turns, as they do inline on a CPU: then `wall` says nothing
        about parallel devices, and `replayed` is what to look at.
    predicted
        Time of the run with durations, lags and setups of the plans.
    replayed
        The same with the measured durations.
    wall
        As it was.
    periods
        The same per cycle, for every segment, and for what came after the end of a job in it.
    devices
        What each device did.
    between
        Median host time between two blocks of a device: what a switch costs.
    launching
        Host time for launching the blocks of a cycle, if it was measured; None if not.
    largest_errors
        Blocks whose duration was predicted worst.
    messages
        Of every kind that went between devices; empty where nothing has to go.
    cycles
        That the report is about, of all segments.
    left_out
        Blocks of earlier cycles, which a long run does not remember.
    """

    serial: bool
    predicted: int
    replayed: int
    wall: int
    periods: tuple[Period, ...]
    devices: tuple[DeviceTime, ...]
    between: int
    launching: float | None
    largest_errors: tuple[BlockError, ...]
    messages: tuple[MessageTimes, ...] = ()
    cycles: int = 0
    left_out: int = 0

    @property
    def host(self) -> int:
        """Host time between blocks, of all devices."""
        return sum(d.switch + d.host for d in self.devices)

    @property
    def exposed(self) -> int:
        """Time that blocks waited for copies of states, of all devices; 0 if all are resident."""
        return sum(d.exposed for d in self.devices)

    @property
    def period(self) -> Period | None:
        """The one with the most whole cycles; None if none has two."""
        known = [p for p in self.periods if p.measured is not None]
        return max(known, key=lambda p: p.cycles, default=None)

    @property
    def host_bound(self) -> bool:
        """Whether one host takes longer to launch a cycle than the devices to compute it."""
        period = self.period
        return (
            self.launching is not None
            and period is not None
            and period.replayed is not None
            and len(self.devices) > 1
            and self.launching > period.replayed
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for `json.dumps`."""
        return asdict(self) | {"host": self.host, "host_bound": self.host_bound}

    def __str__(self) -> str:
        return text(self)


def compare(
    course: Course,
    records: Sequence[Record],
    *,
    parallel: bool = False,
    exposed: Sequence[int] | None = None,
    launching: Sequence[int] | None = None,
    messages: Sequence[Moved] = (),
    left_out: int = 0,
) -> Report:
    """Compare a run with its prediction.

    Parameters
    ----------
    course, records
        What was run; the records of one device in its own order.
    parallel
        Devices ran by themselves; taken for granted if blocks overlap.
    exposed
        Nanoseconds that each block waited for copies of states, before its start. None: all states
        were resident.
    launching
        Nanoseconds that the host spent on launching each block, if devices run them later.
    messages
        Those between devices.
    left_out
        Blocks that were run before and have no record.
    """
    run = executed(course, records)
    real, planned = run.duration, run.planned
    starts = {
        "predicted": virtual_starts(run, planned),
        "replayed": virtual_starts(run, real),
        "measured": run.start,
    }
    ends = {
        "predicted": starts["predicted"] + planned,
        "replayed": starts["replayed"] + real,
        "measured": run.end,
    }
    parts = stretches(course, run)
    periods = tuple(_period(course, run, part, ends) for part in parts)
    wall = int(run.end.max() - run.start.min()) if len(run) else 0
    waited = np.zeros(len(run), np.int64) if exposed is None else np.array(exposed, np.int64)
    spans = {
        "predicted": makespan(starts["predicted"], planned),
        "replayed": makespan(starts["replayed"], real),
        "measured": wall,
    }
    serial = run.serial and not parallel
    gaps = _gaps(run, waited, serial)
    steady = max(range(len(parts)), key=lambda k: len(parts[k].cycles))
    return Report(
        serial=serial and len(run.devices) > 1,
        predicted=spans["predicted"],
        replayed=spans["replayed"],
        wall=wall,
        periods=periods,
        devices=_devices(run, gaps, wall, spans, periods[steady], parts[steady].cycles),
        between=round(float(np.median(gaps.host[gaps.later]))) if gaps.later.any() else 0,
        launching=_launching(run, launching, parts[steady]),
        largest_errors=_largest_errors(course, run),
        messages=_messages(course, messages),
        cycles=len(set(zip(run.segment.tolist(), run.cycle.tolist(), strict=True))),
        left_out=left_out,
    )


def _steady(cycles: IntArray) -> tuple[int, int]:
    """The whole cycles between whose ends a period is measured."""
    return int(cycles[len(cycles) // 4]), int(cycles[-1])


def _period(course: Course, run: Executed, part: Stretch, ends: dict[str, IntArray]) -> Period:
    segment, cycles = course.segments[part.segment], part.cycles
    slopes: dict[str, float | None] = dict.fromkeys(ends)
    if len(cycles) >= 2:
        first, last = _steady(cycles)
        here = run.segment == part.segment
        one, other = (here & (run.cycle == c) for c in (first, last))
        for name, end in ends.items():
            slopes[name] = int(end[other].max() - end[one].max()) / (last - first)
    planned = planned_period(segment.plan, part.seats)
    jobs = tuple(segment.seats[seat] for seat in part.seats)
    return Period(part.segment, len(cycles), planned, **slopes, jobs=jobs)


class _Gaps:
    """What lies before every block on its device, in nanoseconds."""

    def __init__(self, n: int) -> None:
        self.waiting, self.exposed, self.host = (np.zeros(n, np.int64) for _ in range(3))
        self.switches = np.zeros(n, np.bool_)  # another job ran before
        self.later = np.zeros(n, np.bool_)  # not the first of its device


def _gaps(run: Executed, exposed: IntArray, serial: bool) -> _Gaps:
    found = _Gaps(len(run))
    if not len(run):
        return found
    before, after = run.neighbours
    previous = np.full(len(run), run.start.min())
    previous[after] = run.end[before]
    found.later[after] = True
    found.switches[after] = run.job[before] != run.job[after]
    if serial:  # one host does everything: the time between two blocks belongs to the second
        ready = np.append(run.start[:1], run.end[:-1])
    else:
        ready = previous.copy()
        np.maximum.at(ready, run.waits.head, run.end[run.waits.tail])
    gap = np.maximum(run.start - previous, 0)
    found.waiting = np.clip(np.minimum(ready, run.start) - previous, 0, gap)
    found.exposed = np.minimum(exposed, gap - found.waiting)
    found.host = gap - found.waiting - found.exposed
    return found


def _devices(
    run: Executed,
    gaps: _Gaps,
    wall: int,
    spans: dict[str, int],
    period: Period,
    cycles: IntArray,
) -> tuple[DeviceTime, ...]:
    load = {"predicted": run.planned, "replayed": run.duration, "measured": run.duration}
    inside, n = np.ones(len(run), np.bool_), 1
    per_cycle: dict[str, float] = {name: float(span) for name, span in spans.items()}
    if period.measured is not None:
        first, last = _steady(cycles)
        inside = (run.segment == period.segment) & (run.cycle > first) & (run.cycle <= last)
        n = last - first
        per_cycle = {name: getattr(period, name) for name in spans}
    rows = []
    for name, row in zip(run.devices, run.sequences.to_lists(), strict=True):
        own = np.array(row, np.int64)
        compute = int(run.duration[own].sum())
        switches = gaps.switches[own]
        switch = int(gaps.host[own][switches].sum())
        host = int(gaps.host[own][~switches].sum())
        copies = int(gaps.exposed[own].sum())
        idle = {
            f"idle_{key}": _idle(float(load[key][own][inside[own]].sum()) / n, per_cycle[key])
            for key in spans
        }
        rows.append(
            DeviceTime(
                name, len(own), compute, switch, copies, wall - compute - switch - host - copies,
                host, int(run.planned[own].sum()), **idle,
            )
        )  # fmt: skip
    return tuple(rows)


def _idle(load: float, span: float) -> float:
    return max(0.0, 1 - load / span) if span else 0.0


def _launching(run: Executed, given: Sequence[int] | None, part: Stretch) -> float | None:
    if given is None or not len(part.cycles):
        return None
    inside = (run.segment == part.segment) & np.isin(run.cycle, part.cycles)
    return float(np.array(given, np.int64)[inside].sum()) / len(part.cycles)


def _largest_errors(course: Course, run: Executed) -> tuple[BlockError, ...]:
    """Blocks of the largest difference between prediction and median, at most one a block."""
    if not len(run):
        return ()
    plans: dict[int, int] = {}  # segments that repeat a plan share its blocks
    alike = np.array([plans.setdefault(id(p.plan), k) for k, p in enumerate(course.segments)])
    key = np.stack((alike[run.segment], run.operation, run.job))
    _, block = np.unique(key, axis=1, return_inverse=True)
    found = []
    for rows in grouped(block.ravel(), int(block.max()) + 1).to_lists():
        median = round(float(np.median(run.duration[rows])))
        found.append((abs(median - int(run.planned[rows[0]])), -rows[0], median))
    errors = []
    for _, first, median in sorted(found, reverse=True)[:_LARGEST]:
        k = -first
        block_of = course.segments[int(run.segment[k])].plan.blocks[int(run.operation[k])]
        named = str(block_of._replace(job=int(run.job[k])))
        errors.append(BlockError(named, int(run.planned[k]), median))
    return tuple(errors)


def _messages(course: Course, given: Sequence[Moved]) -> tuple[MessageTimes, ...]:
    """By kind, in the order of the kinds."""
    kinds: dict[str, list[Moved]] = {}
    for m in given:
        kind = course.segments[m.segment].routes.messages[m.message].kind
        kinds.setdefault(kind, []).append(m)
    return tuple(_times(kind, kinds[kind]) for kind in MESSAGES if kind in kinds)


def _times(kind: str, given: Sequence[Moved]) -> MessageTimes:
    whole = [m.end - m.start for m in given if m.asked is None or m.asked <= m.start]
    waits = [m.end - max(m.start, m.asked) for m in given if m.asked is not None]
    return MessageTimes(
        kind, len(given), len(whole), round(statistics.median(whole)) if whole else None,
        sum(waits) if waits else None,
    )  # fmt: skip
