"""Where the time of a run went: predicted, re-evaluated with measured durations, measured."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from optsched.arraypipe.report.executed import virtual_starts
from optsched.io.text import aligned, duration, plain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.arraypipe.report.executed import Executed, RunLog
    from optsched.model.schedule import IntArray


@dataclass(frozen=True)
class Period:
    """Time a cycle of a segment, from the slope of the ends of whole cycles.

    Those count in which the jobs ran that ran together longest, `jobs` by their numbers in the
    trainer, with all their blocks; the first quarter is left out: a pipeline has to fill.
    `planned_ns` is the period that the schedule document claims; None if it has none, or if some of
    its jobs did not run. None elsewhere: fewer than two whole cycles.
    """

    segment: int
    cycles: int
    planned_ns: int | None
    predicted_ns: float | None
    replayed_ns: float | None
    measured_ns: float | None
    jobs: tuple[int, ...] = ()


@dataclass(frozen=True)
class DeviceTime:
    """What a device did all along.

    ``compute_ns + switch_ns + exposed_ns + waiting_ns + host_ns`` is the time of the run. Between
    two blocks a device waits until what the next one needs has been computed; then blocks may have
    to wait for copies of states (`exposed_ns`); what is left is the host's: `switch_ns` before a
    block of another job, `host_ns` before one of the same and before the first. Where devices take
    turns, as on a CPU, `waiting_ns` is the turns of the others.

    `messages_ns` is how long blocks stood at a receive, a part of `waiting_ns` and of the host's
    time; 0 where nothing is sent. `idle` is the share of a cycle, or of the run if no period is
    known, in which the device computes nothing (its *bubble*); on the virtual clock where devices
    take turns.
    """

    name: str
    blocks: int
    compute_ns: int
    switch_ns: int
    exposed_ns: int
    waiting_ns: int
    host_ns: int
    messages_ns: int
    idle: float


@dataclass(frozen=True)
class Report:
    """Predicted against measured.

    All three look at the blocks that were run, in the orders in which they were run. The first gap
    is the error of the durations, the second what the executor added.

    Parameters
    ----------
    serial
        Blocks of several devices took turns, as they do inline on a CPU: then `wall_ns` says
        nothing about parallel devices, and `replayed_ns` is what to look at.
    predicted_ns
        Time of the run with durations, lags and setups of the plans.
    replayed_ns
        The same with the measured durations.
    wall_ns
        As it was.
    periods
        The same per cycle, for every segment.
    devices
        What each device did.
    between_ns
        Median host time between two blocks of a device: what a switch costs.
    cycles
        That the report is about, of all segments.
    left_out
        Blocks of earlier cycles, which a long run does not remember.
    """

    serial: bool
    predicted_ns: int
    replayed_ns: int
    wall_ns: int
    periods: tuple[Period, ...]
    devices: tuple[DeviceTime, ...]
    between_ns: int
    cycles: int = 0
    left_out: int = 0

    @property
    def host_ns(self) -> int:
        """Host time between blocks, of all devices."""
        return sum(d.switch_ns + d.host_ns for d in self.devices)

    @property
    def exposed_ns(self) -> int:
        """Time that blocks waited for copies of states, of all devices; 0 if all are resident."""
        return sum(d.exposed_ns for d in self.devices)

    @property
    def period(self) -> Period | None:
        """The one with the most whole cycles; None if none has two."""
        known = [p for p in self.periods if p.measured_ns is not None]
        return max(known, key=lambda p: p.cycles, default=None)

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready_ns for `json.dumps`."""
        return asdict(self) | {"host_ns": self.host_ns}

    def __str__(self) -> str:
        lines = [*_time_lines(self), *_segment_lines(self), "", *_device_lines(self)]
        lines.append(f"host time between two blocks: median {duration(self.between_ns)}")
        return "\n".join(lines)


def compare(log: RunLog) -> Report:
    """Compare a run with its prediction."""
    run = log.executed
    ends = {
        "predicted_ns": virtual_starts(run, run.planned_ns) + run.planned_ns,
        "replayed_ns": run.replayed_ns + run.duration_ns,
        "measured_ns": run.end_ns,
    }
    known = [_period(log, k, ends) for k, part in enumerate(log.segments) if part.seats]
    serial = run.serial and not log.parallel
    wall_ns = int(run.end_ns.max() - run.start_ns.min()) if len(run.start_ns) else 0
    # what idle is a share of: the cycles of the period, else the run
    inside, span_ns = np.ones(len(run.start_ns), np.bool_), wall_ns
    if serial:
        span_ns = int(ends["replayed_ns"].max(initial=0))
    steady, window = max(known, key=lambda row: row[0].cycles)
    if steady.measured_ns is not None:
        first, last = window
        inside = (run.segment == steady.segment) & (run.cycle > first) & (run.cycle <= last)
        period_ns = steady.replayed_ns if serial else steady.measured_ns
        span_ns = round((period_ns or 0) * (last - first))
    copies_ns, host_ns = _gaps(run, log.exposed_ns, serial)
    after = run.neighbours[1]
    return Report(
        serial=serial and len(run.devices) > 1,
        predicted_ns=int(ends["predicted_ns"].max(initial=0)),
        replayed_ns=int(ends["replayed_ns"].max(initial=0)),
        wall_ns=wall_ns,
        periods=tuple(period for period, _ in known),
        devices=_devices(run, copies_ns, host_ns, wall_ns, inside, span_ns),
        between_ns=round(float(np.median(host_ns[after]))) if len(after) else 0,
        cycles=len({*zip(run.segment.tolist(), run.cycle.tolist(), strict=True)}),
        left_out=log.left_out,
    )


def _period(log: RunLog, number: int, ends: dict[str, IntArray]) -> tuple[Period, tuple[int, int]]:
    """The period of a segment, and the whole cycles between whose ends it is measured.

    A cycle counts if every job that has a block in it has all of them, and if those are the jobs
    that ran together longest.
    """
    part, run = log.segments[number], log.executed
    every = Counter(part.seats[b.job] for b in part.plan.blocks if b.device >= 0)
    here = run.segment == number
    done = Counter(zip(run.cycle[here].tolist(), run.job[here].tolist(), strict=True))
    jobs_of: dict[int, set[int]] = defaultdict(set)
    for cycle, job in done:
        jobs_of[cycle].add(job)
    together: dict[frozenset[int], list[int]] = defaultdict(list)
    for cycle, there in sorted(jobs_of.items()):
        if all(done[cycle, job] == every[job] for job in there):
            together[frozenset(there)].append(cycle)
    longest = max(together, key=lambda jobs: (len(together[jobs]), len(jobs)), default=frozenset())
    jobs, cycles = tuple(job for job in part.seats if job in longest), together[longest]
    slopes: dict[str, float | None] = dict.fromkeys(ends)
    first, last = (cycles[len(cycles) // 4], cycles[-1]) if cycles else (0, 0)
    if len(cycles) >= 2:
        one, other = (here & (run.cycle == c) for c in (first, last))
        for name, end in ends.items():
            slopes[name] = int(end[other].max() - end[one].max()) / (last - first)
    planned_ns = part.plan.schedule.period
    if planned_ns is not None:
        planned_ns = planned_ns * part.plan.unit_ns if len(jobs) == len(part.seats) else None
    return Period(number, len(cycles), planned_ns, **slopes, jobs=jobs), (first, last)


def _gaps(
    run: Executed, exposed_ns: Sequence[int] | None, serial: bool
) -> tuple[IntArray, IntArray]:
    """Times before every block that are for copies of states, and that are the host's."""
    before, after = run.neighbours
    previous_ns = np.full(len(run.start_ns), run.start_ns.min(initial=np.iinfo(np.int64).max))
    previous_ns[after] = run.end_ns[before]
    if serial:  # one host does everything: the time between two blocks belongs to the second
        ready_ns = np.append(run.start_ns[:1], run.end_ns[:-1])
    else:
        ready_ns = previous_ns.copy()
        np.maximum.at(ready_ns, run.waits.head, run.end_ns[run.waits.tail])
    gap_ns = np.maximum(run.start_ns - previous_ns, 0)
    left_ns = gap_ns - np.clip(np.minimum(ready_ns, run.start_ns) - previous_ns, 0, gap_ns)
    copies_ns = np.minimum(
        np.zeros(len(run.start_ns), np.int64) if exposed_ns is None else exposed_ns, left_ns
    )
    return copies_ns, left_ns - copies_ns


def _devices(
    run: Executed,
    copies_ns: IntArray,
    host_ns: IntArray,
    wall_ns: int,
    inside: npt.NDArray[np.bool_],
    span_ns: int,
) -> tuple[DeviceTime, ...]:
    """Of every device; `idle` is what the blocks `inside` leave of a span."""
    before, after = run.neighbours
    switch = np.zeros(len(run.start_ns), np.bool_)
    switch[after[run.job[before] != run.job[after]]] = True
    rows = []
    for name, row in zip(run.devices, run.sequences.to_lists(), strict=True):

        def total(values: IntArray, row: list[int] = row) -> int:
            return int(values[row].sum())

        compute_ns, exposed_ns = total(run.duration_ns), total(copies_ns)
        idle = 1 - total(run.duration_ns * inside) / span_ns if span_ns else 0.0
        rows.append(
            DeviceTime(
                name, len(row), compute_ns, total(host_ns * switch), exposed_ns,
                wall_ns - compute_ns - exposed_ns - total(host_ns), total(host_ns * ~switch),
                total(run.waited_ns),
                max(0.0, idle),
            )
        )  # fmt: skip
    return tuple(rows)


_SEGMENTS: Final = 8  # shown, if there are more


def _time_lines(report: Report) -> list[str]:
    """Whole run and period of a cycle, side by side."""
    period = report.period
    whole = (report.predicted_ns, report.replayed_ns, report.wall_ns)
    cycle = (
        (None,) * 3
        if period is None
        else (period.predicted_ns, period.replayed_ns, period.measured_ns)
    )
    predicted, replayed, wall = whole if period is None else cycle
    notes = [
        "", "durations of the plan", f"error of the durations{_change(replayed, predicted)}",
        "devices took turns, so this is no period" if report.serial
        else f"added by the executor{_change(wall, replayed)}",
    ]  # fmt: skip
    names = ("predicted", "with measured durations", "measured")
    rows = [["", "its end" if report.left_out else "whole run", "a cycle"]]
    rows += [[name, *map(_known, times)] for name, *times in zip(names, whole, cycle, strict=True)]
    lines = [f"{row}  {note}".rstrip() for row, note in zip(aligned(rows), notes, strict=True)]
    if report.serial:
        lines.append("(the first two on a virtual clock: as devices in parallel would have run)")
    if report.left_out:
        lines.append(
            f"(the last {report.cycles} cycles of the run; "
            f"{report.left_out} blocks before them are left out)"
        )
    if period is None:
        return [*lines, "(no whole cycles after each other: the run is too short for a period)"]
    several = len(report.periods) > 1
    where = f" of segment {period.segment} with {len(period.jobs)} jobs" if several else ""
    return [*lines, f"(a cycle: from the slope of {period.cycles} whole cycles{where})"]


def _segment_lines(report: Report) -> list[str]:
    """Periods of the segments, the longest ones if there are many."""
    known = [p for p in report.periods if p.measured_ns is not None]
    if len(report.periods) < 2 or not known:
        return []
    longest = sorted(known, key=lambda p: -p.cycles)[:_SEGMENTS]
    rows = [["segment", "jobs", "whole cycles", "predicted", "re-evaluated", "measured"]]
    for p in sorted(longest, key=lambda p: p.segment):
        times = (p.predicted_ns, p.replayed_ns, p.measured_ns)
        rows.append([str(p.segment), str(len(p.jobs)), str(p.cycles), *map(_known, times)])
    lines = ["", *aligned(rows)]
    if len(longest) < len(report.periods):
        lines.append(f"({len(report.periods) - len(longest)} other segments are shorter)")
    return lines


def _device_lines(report: Report) -> list[str]:
    others = "others' turns" if report.serial else "waiting"
    rows = [["device", "compute", "switch", "copies", others, "host", "messages", "idle a cycle"]]
    for d in report.devices:
        times = [d.compute_ns, d.switch_ns, d.exposed_ns, d.waiting_ns, d.host_ns, d.messages_ns]
        rows.append([plain(d.name), *map(duration, times), f"{d.idle:.1%}"])
    return aligned(rows)


def _known(value: float | None) -> str:
    return "-" if value is None else duration(value)


def _change(new: float | None, old: float | None) -> str:
    """How much more, in percent; as a factor where percents would be hard to read."""
    if not new or not old:
        return ""
    ratio = new / old
    return f" ({ratio - 1:+.1%})" if 0.1 < ratio < 10 else f" ({ratio:.3g}x)"
