"""The report of a run in plain text, for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optsched.io.text import plain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.arraypipe.reporting.report import Report

_UNITS = (("s", 1e9), ("ms", 1e6), ("us", 1e3))
_SEGMENTS = 8  # shown, if there are more


def text(report: Report) -> str:
    """Periods, devices, and the worst predictions."""
    lines = [*_times(report), *_segments(report), "", *_devices(report)]
    lines.append(f"host time between two blocks: median {duration(report.between)}")
    if report.launching is not None:
        lines.append(f"host time for launching a cycle: {duration(report.launching)}")
    if report.host_bound:
        lines.append(
            'host-bound: use the process backend (backend="process"), one host thread a device'
        )
    if report.messages:
        lines += ["", *_messages(report)]
    if report.largest_errors:
        lines += ["", "blocks whose duration was predicted worst (median of the measured)"]
        for error in report.largest_errors:
            change = _change(error.measured, error.predicted)
            times = f"{duration(error.predicted)} -> {duration(error.measured)}"
            lines.append(f"  {plain(error.block, 200)}: {times}{change}")
    return "\n".join(lines)


def duration(nanoseconds: float) -> str:
    """Three digits and a unit."""
    for unit, size in _UNITS:
        if abs(nanoseconds) >= size * 0.9995:
            value = nanoseconds / size
            return f"{value:.0f} {unit}" if value >= 999.5 else f"{value:.3g} {unit}"
    return f"{nanoseconds:.0f} ns"


def _times(report: Report) -> list[str]:
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


def _segments(report: Report) -> list[str]:
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


def _devices(report: Report) -> list[str]:
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


def _messages(report: Report) -> list[str]:
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
