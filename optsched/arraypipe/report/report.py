"""Where the time of a run went: predicted, re-evaluated with measured durations, measured."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from optsched.arraypipe.report.executed import unit, virtual_starts
from optsched.io.text import plain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.arraypipe.report.executed import Executed, RunLog
    from optsched.model.schedule import IntArray


@dataclass(frozen=True)
class Period:
    """Nanoseconds a cycle of a segment, from the slope of the ends of whole cycles.

    Those count in which the jobs ran that ran together longest, `jobs` by their numbers in the
    trainer, with all their blocks; the first quarter is left out: a pipeline has to fill.
    `planned` is the period that the schedule document claims; None if it has none, or if some of
    its jobs did not run. None elsewhere: fewer than two whole cycles.
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
    device waits until what the next one needs has been computed; then blocks may have to wait for
    copies of states (`exposed`); what is left is the host's: `switch` before a block of another
    job, `host` before one of the same and before the first. Where devices take turns, as on a CPU,
    `waiting` is the turns of the others.

    `messages` is how long blocks stood at a receive, a part of `waiting` and of the host's time; 0
    where nothing is sent. `idle` is the share of a cycle, or of the run if no period is known, in
    which the device computes nothing (its *bubble*); on the virtual clock where devices take turns.
    """

    name: str
    blocks: int
    compute: int
    switch: int
    exposed: int
    waiting: int
    host: int
    messages: int
    idle: float


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
        The same per cycle, for every segment.
    devices
        What each device did.
    between
        Median host time between two blocks of a device: what a switch costs.
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

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for `json.dumps`."""
        return asdict(self) | {"host": self.host}

    def __str__(self) -> str:
        return text(self)


def compare(log: RunLog) -> Report:
    """Compare a run with its prediction."""
    run = log.executed
    ends = {
        "predicted": virtual_starts(run, run.planned) + run.planned,
        "replayed": run.replayed + run.duration,
        "measured": run.end,
    }
    whole = {k: _whole_cycles(log, k) for k, part in enumerate(log.segments) if part.seats}
    periods = tuple(_period(log, k, *found, ends) for k, found in whole.items())
    serial = run.serial and not log.parallel
    wall = int(run.end.max() - run.start.min()) if len(run) else 0
    gaps = _Gaps(run, log.exposed, serial)
    # what idle is a share of: the cycles of the period, else the run
    clock = "replayed" if serial else "measured"
    inside, span = np.ones(len(run), np.bool_), float(ends["replayed"].max(initial=0))
    steady = max(periods, key=lambda p: p.cycles)
    if steady.measured is not None:
        first, last = _steady(whole[steady.segment][1])
        inside = (run.segment == steady.segment) & (run.cycle > first) & (run.cycle <= last)
        span = getattr(steady, clock) * (last - first)
    elif not serial:
        span = wall
    return Report(
        serial=serial and len(run.devices) > 1,
        predicted=int(ends["predicted"].max(initial=0)),
        replayed=int(ends["replayed"].max(initial=0)),
        wall=wall,
        periods=periods,
        devices=_devices(run, gaps, wall, inside, span),
        between=round(float(np.median(gaps.host[gaps.later]))) if gaps.later.any() else 0,
        cycles=len({*zip(run.segment.tolist(), run.cycle.tolist(), strict=True)}),
        left_out=log.left_out,
    )


def _whole_cycles(log: RunLog, number: int) -> tuple[tuple[int, ...], IntArray]:
    """The jobs that ran together longest in a segment, and the cycles that have all their blocks.

    A cycle counts if every job that has a block in it has all of them.
    """
    part, run = log.segments[number], log.executed
    here = run.segment == number
    if not here.any():
        return (), np.zeros(0, np.int64)
    blocks = [b for b in part.plan.blocks if b.device >= 0]
    every = np.bincount([b.job for b in blocks], minlength=len(part.seats))
    seat_of = np.array([b.job for b in part.plan.blocks])
    base = int(run.cycle[here].min())
    seats = len(part.seats)
    at = (run.cycle[here] - base) * seats + seat_of[run.operation[here]]
    n = np.bincount(at, minlength=-(-(int(at.max()) + 1) // seats) * seats).reshape(-1, seats)
    cycles = np.flatnonzero(((n == 0) | (n == every)).all(axis=1) & n.any(axis=1))
    if not len(cycles):
        return (), cycles
    kinds, of, counts = np.unique(n[cycles] > 0, axis=0, return_inverse=True, return_counts=True)
    longest = max(range(len(kinds)), key=lambda k: (counts[k], kinds[k].sum()))
    jobs = tuple(part.seats[seat] for seat in np.flatnonzero(kinds[longest]))
    return jobs, cycles[of.ravel() == longest] + base


def _steady(cycles: IntArray) -> tuple[int, int]:
    """The whole cycles between whose ends a period is measured."""
    return int(cycles[len(cycles) // 4]), int(cycles[-1])


def _period(
    log: RunLog, number: int, jobs: tuple[int, ...], cycles: IntArray, ends: dict[str, IntArray]
) -> Period:
    part, run = log.segments[number], log.executed
    slopes: dict[str, float | None] = dict.fromkeys(ends)
    if len(cycles) >= 2:
        first, last = _steady(cycles)
        here = run.segment == number
        one, other = (here & (run.cycle == c) for c in (first, last))
        for name, end in ends.items():
            slopes[name] = int(end[other].max() - end[one].max()) / (last - first)
    planned = part.plan.schedule.period
    if planned is not None:
        planned = planned * unit(part.plan) if len(jobs) == len(part.seats) else None
    return Period(number, len(cycles), planned, **slopes, jobs=jobs)


class _Gaps:
    """What lies before every block on its device, in nanoseconds."""

    def __init__(self, run: Executed, exposed: Sequence[int] | None, serial: bool) -> None:
        n = len(run)
        self.exposed = np.zeros(n, np.int64) if exposed is None else np.array(exposed, np.int64)
        self.switches = np.zeros(n, np.bool_)  # another job ran before
        self.later = np.zeros(n, np.bool_)  # not the first of its device
        before, after = run.neighbours
        previous = np.full(n, run.start.min() if n else 0)
        previous[after] = run.end[before]
        self.later[after] = True
        self.switches[after] = run.job[before] != run.job[after]
        if serial:  # one host does everything: the time between two blocks belongs to the second
            ready = np.append(run.start[:1], run.end[:-1])
        else:
            ready = previous.copy()
            np.maximum.at(ready, run.waits.head, run.end[run.waits.tail])
        gap = np.maximum(run.start - previous, 0)
        waiting = np.clip(np.minimum(ready, run.start) - previous, 0, gap)
        self.exposed = np.minimum(self.exposed, gap - waiting)
        self.host = gap - waiting - self.exposed


def _devices(
    run: Executed, gaps: _Gaps, wall: int, inside: npt.NDArray[np.bool_], span: float
) -> tuple[DeviceTime, ...]:
    """Of every device; `idle` is what the blocks `inside` leave of a span."""
    rows = []
    for name, row in zip(run.devices, run.sequences.to_lists(), strict=True):
        own = np.array(row, np.int64)
        compute = int(run.duration[own].sum())
        switches = gaps.switches[own]
        switch = int(gaps.host[own][switches].sum())
        host = int(gaps.host[own][~switches].sum())
        copies = int(gaps.exposed[own].sum())
        busy = float(run.duration[own][inside[own]].sum())
        rows.append(
            DeviceTime(
                name, len(own), compute, switch, copies, wall - compute - switch - host - copies,
                host, int(run.waited[own].sum()), max(0.0, 1 - busy / span) if span else 0.0,
            )
        )  # fmt: skip
    return tuple(rows)


_UNITS: Final = (("s", 1e9), ("ms", 1e6), ("us", 1e3))
_SEGMENTS: Final = 8  # shown, if there are more


def duration(nanoseconds: float) -> str:
    """Three digits and a unit."""
    for name, size in _UNITS:
        if abs(nanoseconds) >= size * 0.9995:
            value = nanoseconds / size
            return f"{value:.0f} {name}" if value >= 999.5 else f"{value:.3g} {name}"
    return f"{nanoseconds:.0f} ns"


def text(report: Report) -> str:
    """Periods, segments and devices."""
    lines = [*_time_lines(report), *_segment_lines(report), "", *_device_lines(report)]
    lines.append(f"host time between two blocks: median {duration(report.between)}")
    return "\n".join(lines)


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
    """Periods of the segments, the longest ones if there are many."""
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
        lines.append(f"({len(report.periods) - len(rows) + 1} other segments are shorter)")
    return lines


def _device_lines(report: Report) -> list[str]:
    others = "others' turns" if report.serial else "waiting"
    rows = [["device", "compute", "switch", "copies", others, "host", "messages", "idle a cycle"]]
    for d in report.devices:
        times = [d.compute, d.switch, d.exposed, d.waiting, d.host, d.messages]
        rows.append([plain(d.name), *map(duration, times), f"{d.idle:.1%}"])
    return _table(rows, right=range(1, 8))


def _known(value: float | None) -> str:
    return "-" if value is None else duration(value)


def _change(new: float | None, old: float | None) -> str:
    """How much more, in percent; as a factor where percents would be hard to read."""
    if not new or not old:
        return ""
    ratio = new / old
    return f" ({ratio - 1:+.1%})" if 0.1 < ratio < 10 else f" ({ratio:.3g}x)"


def _table(rows: Sequence[Sequence[str]], right: Sequence[int]) -> list[str]:
    widths = [max(len(row[c]) for row in rows) for c in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if c in right else cell.ljust(width)
            for c, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
