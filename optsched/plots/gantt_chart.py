"""A Gantt chart as a PNG, SVG or PDF file: one lane per resource, one colour per job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.analysis.occupancy import Bars, bars, horizon, left_out, setups
from optsched.analysis.report import Report, report
from optsched.errors import InputError
from optsched.io.text import Unit, bytes_text, one_line, readable_unit
from optsched.plots.look import colour, is_dark, shade, shades, worth
from optsched.plots.picture import GRID, INK, MUTED, picture, suffix_of

if TYPE_CHECKING:
    import os

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from optsched.model.schedule import Schedule


def gantt(
    schedule: Schedule,
    path: str | os.PathLike[str] | None = None,
    *,
    width: float | None = None,
    cycles: int = 3,
) -> Figure:
    """Draw a schedule, also into a picture file; its suffix chooses PNG, SVG or PDF.

    One row per resource; a bar in the colour of its job, F light and B dark, other kinds in
    between or hatched; setups as thin hatched bars before the operation they prepare; busy shares
    at the right. A periodic schedule is drawn in its steady state, with a line where a cycle ends;
    hollow bars belong to iterations before the first, which a cold start leaves out. The same
    schedule gives the same bytes.

    Parameters
    ----------
    schedule
        A scheduled graph; it is not verified.
    path
        File to write, ``.png``, ``.svg`` or ``.pdf``; None: only the figure is returned.
    width
        Width of the picture in inches; by default it grows with the number of operations.
    cycles
        Periods to draw of a periodic schedule.

    Raises
    ------
    InputError
        The graph is not scheduled, the suffix is none of the three, or the file cannot be written.
    MissingExtra
        matplotlib is not installed.

    Examples
    --------
    >>> shop = optsched.JobShop([[(0, 3), (1, 2)], [(1, 4), (0, 1)]])
    >>> figure = optsched.plots.gantt(optsched.solve(shop).schedule, width=8)
    >>> float(figure.get_figwidth())
    8.0
    """
    if path is not None:
        suffix_of(path)
    if width is not None and not 2 <= width <= 200:
        raise InputError(f"width: expected 2..200 inches, got {width}")
    summary = report(schedule)
    return picture(lambda: _draw(schedule, summary, width, cycles), path)


_BACKGROUND = "#f6f7f9"
_SETUP: Final[dict[str, Any]] = {
    "facecolor": "#d1d5db", "edgecolor": "#4b5563", "hatch": "//////", "linewidth": 0.3,
}  # fmt: skip


def _draw(schedule: Schedule, summary: Report, width: float | None, cycles: int) -> Figure:
    from matplotlib.figure import Figure

    chart = bars(schedule, cycles)
    rows = schedule.n_resources + bool((chart.resource < 0).any())
    span = max(horizon(schedule, cycles), 1)
    unit = readable_unit(schedule.time_unit, span)
    wide = width or float(np.clip(9 + len(chart.operation) / 110, 11, 22))
    high = float(np.clip(9 / max(rows, 1), 0.16, 0.5))  # inches of a row
    tall = min(high * max(rows, 1), 60.0) + 1.75
    figure = Figure(figsize=(wide, tall), facecolor="white")
    names = [one_line(r.name, 28) for r in schedule.resources]
    names += ["no resource"] * (rows - len(names))
    left = 0.35 + 0.085 * max((len(name) for name in names), default=4)
    axes = figure.add_axes((left / wide, 0.82 / tall, (wide - left - 0.75) / wide, 1 - 1.75 / tall))
    axes.set(xlim=(0, span / unit.ticks), ylim=(max(rows, 1) - 0.5, -0.5))
    _dress(axes, names, unit, summary)
    if schedule.period is not None:
        _cycles(axes, schedule.period, cycles, unit, (wide - left - 0.75) / cycles)
    _setups(axes, schedule, cycles, unit)
    _bars(axes, schedule, chart, unit)
    inches_per_time = (wide - left - 0.75) / (span / unit.ticks)
    _labels(axes, schedule, chart, unit, inches_per_time, span, high)
    if _one_job(schedule):
        axes.set_xlabel(f"{axes.get_xlabel()}; numbers are micro-batches")
    _title(figure, summary, wide, tall, left)
    _job_key(figure, schedule, wide, tall, left + 0.115 * len(one_line(summary.name)))
    _legend(figure, schedule, bool(left_out(schedule, chart).any()), wide, tall, left)
    return figure


def _dress(axes: Axes, names: list[str], unit: Unit, summary: Report) -> None:
    """Axes, rows and the busy shares at the right end."""
    rows = len(names)
    size = float(np.clip(340 / max(rows, 1), 5, 9))
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.barh(range(rows), axes.get_xlim()[1], height=0.9, color=_BACKGROUND, zorder=0)
    axes.set_yticks(range(rows), names, fontsize=size, color=INK)
    axes.tick_params(axis="y", length=0, pad=6)
    axes.tick_params(axis="x", length=3, color=MUTED, labelcolor=MUTED, labelsize=8)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}".replace(",", "\u202f"))
    axes.xaxis.grid(True, color=GRID, lw=0.8, zorder=0.5)
    axes.set_axisbelow(False)
    axes.set_xlabel(
        "time" + f" in {unit.name}" * bool(unit.name), fontsize=8, color=MUTED, labelpad=4
    )
    edge = axes.get_yaxis_transform()
    for r, resource in enumerate(summary.resources):
        text = f"{100 * resource.busy_share:.0f} %"
        axes.text(1.008, r, text, transform=edge, va="center", fontsize=size, color=MUTED)
    if summary.resources:
        axes.text(1.008, -0.5, "busy", transform=edge, va="bottom", fontsize=7.5, color=MUTED)


def _cycles(axes: Axes, period: int, cycles: int, unit: Unit, inches: float) -> None:
    """Draw a line at the start of every cycle, numbered if a cycle is wide enough."""
    edge = axes.get_xaxis_transform()
    every = max(1, round(0.6 / inches))
    for c in range(cycles):
        at = c * period / unit.ticks
        if c:
            axes.axvline(at, color=INK, lw=1, ls=(0, (4, 3)), zorder=6, gid=f"cycle-{c}")
        if c % every == 0:
            axes.plot([at, at], [1, 1.02], transform=edge, color=INK, lw=1, clip_on=False)
            axes.text(
                at, 1.0, f" cycle {c}", transform=edge, va="bottom", fontsize=7.5, color=MUTED
            )


def _bars(axes: Axes, schedule: Schedule, chart: Bars, unit: Unit) -> None:
    """One polygon per bar, collected by look; a thin mark for what lasts no time."""
    from matplotlib.collections import LineCollection, PolyCollection

    look = shades(schedule)
    rows = np.where(chart.resource < 0, schedule.n_resources, chart.resource)
    lasting = chart.end > chart.start
    hatches = np.array([look[str(kind)].hatch for kind in schedule.kind[chart.operation]], np.str_)
    hollow = left_out(schedule, chart)
    looks = sorted(set(zip(hatches[lasting].tolist(), hollow[lasting].tolist(), strict=True)))
    for group, (hatch, is_hollow) in enumerate(looks):
        chosen = np.flatnonzero(lasting & (hatches == hatch) & (hollow == is_hollow))
        left, right = chart.start[chosen] / unit.ticks, chart.end[chosen] / unit.ticks
        corners = _corners(left, right, rows[chosen], 0.41)
        fill = _colours(schedule, chart.operation[chosen])
        border = "white" if len(chart.operation) <= 4000 else "none"
        axes.add_collection(
            PolyCollection(
                corners,
                facecolors=_BACKGROUND if is_hollow else fill,
                edgecolors=fill if is_hollow else border,
                linewidths=0.7 if is_hollow else 0.5,
                hatch=hatch or None,
                gid=f"bars-{group}",
                zorder=3.2 if is_hollow else 3,
            ),
            autolim=False,
        )
    marks = np.flatnonzero(~lasting)
    if len(marks):
        at = chart.start[marks] / unit.ticks
        ends = [[(x, row - 0.41), (x, row + 0.41)] for x, row in zip(at, rows[marks], strict=True)]
        dark = _colours(schedule, chart.operation[marks])
        axes.add_collection(
            LineCollection(ends, colors=dark, linewidths=1.6, gid="marks", zorder=4, clip_on=False),
            autolim=False,
        )


def _corners(left: Any, right: Any, row: Any, half: float) -> list[Any]:
    """Corners of rectangles of this half height."""
    pairs = ((left, row - half), (right, row - half), (right, row + half), (left, row + half))
    return list(np.stack([np.stack(pair, axis=1) for pair in pairs], axis=1))


def _setups(axes: Axes, schedule: Schedule, cycles: int, unit: Unit) -> None:
    from matplotlib.collections import PolyCollection

    found = setups(schedule, cycles)
    if not len(found.start):
        return
    left, right = found.start / unit.ticks, found.end / unit.ticks
    corners = _corners(left, right, found.resource, 0.16)
    axes.add_collection(PolyCollection(corners, gid="setups", zorder=2, **_SETUP), autolim=False)


def _labels(
    axes: Axes, schedule: Schedule, chart: Bars, unit: Unit, inches_per_time: float, span: int,
    high: float,
) -> None:  # fmt: skip
    """Jobs or micro-batches in the bars that are wide enough, all in one size of type."""
    jobs, ours = schedule.job[chart.operation].tolist(), schedule.microbatch[chart.operation]
    number = ours.tolist() if _one_job(schedule) else [_short(schedule, j) for j in jobs]
    left, right = np.clip(chart.start, 0, span), np.clip(chart.end, 0, span)
    points = (right - left) / unit.ticks * inches_per_time * 72 * 0.86
    length = np.array([len(str(j)) for j in number])
    best = np.minimum(points / np.maximum(length, 1) / 0.64, high * 72 * 0.5)
    size = float(np.clip(np.quantile(best, 0.25), 5.5, 9)) if len(best) else 9.0
    fits = np.flatnonzero((best >= size) & (chart.resource >= 0))
    if len(fits) > _MOST_LABELS:
        return
    hollow = left_out(schedule, chart)
    for k, rgb in zip(fits.tolist(), _colours(schedule, chart.operation[fits]), strict=True):
        on_bar = "white" if is_dark(rgb) else INK
        axes.text(
            (left[k] + right[k]) / 2 / unit.ticks, chart.resource[k], str(number[k]),
            ha="center", va="center_baseline", fontsize=size, zorder=5,
            color=MUTED if hollow[k] else on_bar,
        )  # fmt: skip


def _short(schedule: Schedule, job: int) -> str:
    """The name of a job, cut to the length of a label."""
    return one_line(schedule.job_name(job), 12)


def _one_job(schedule: Schedule) -> bool:
    """Whether the bars are micro-batches of a single job."""
    return bool(schedule.microbatch.any()) and len(np.unique(schedule.job)) == 1


_MOST_LABELS = 4000  # each costs a millisecond


def _title(figure: Figure, summary: Report, wide: float, tall: float, left: float) -> None:
    parts = worth(summary)
    peak = max((r.peak_memory for r in summary.resources), default=0)
    if peak:
        parts.append(f"peak memory {bytes_text(peak)}")
    place: dict[str, Any] = {"x": left / wide, "ha": "left", "va": "baseline"}
    name = one_line(summary.name) or "schedule"
    figure.text(y=1 - 0.38 / tall, s=name, fontsize=13, fontweight="bold", color=INK, **place)
    figure.text(y=1 - 0.62 / tall, s="  ·  ".join(parts), fontsize=9, color=MUTED, **place)


def _job_key(figure: Figure, schedule: Schedule, wide: float, tall: float, taken: float) -> None:
    """Draw the jobs in their colors, right of the title if they fit.

    None beyond 30 jobs, where colors repeat; ``taken`` is where the title ends, in inches.
    """
    from matplotlib.patches import Rectangle

    jobs = np.unique(schedule.job).tolist()
    names = [_short(schedule, job) for job in jobs]
    side = max(0.2, 0.06 + 0.065 * max(map(len, names), default=0))
    first = wide - 0.75 - side * len(jobs)
    if not 1 < len(jobs) <= 30 or first < taken + 0.9:
        return
    look = shade("")
    place: dict[str, Any] = {"y": 1 - 0.32 / tall, "va": "center_baseline"}
    figure.text(x=(first - 0.08) / wide, s="job", ha="right", fontsize=7.5, color=MUTED, **place)
    for k, (job, name) in enumerate(zip(jobs, names, strict=True)):
        corner = (first + k * side) / wide, 1 - 0.41 / tall
        rgb = colour(job, look)
        size = (side - 0.02) / wide, 0.18 / tall
        figure.add_artist(Rectangle(corner, *size, facecolor=rgb, transform=figure.transFigure))
        middle = corner[0] + size[0] / 2
        ink = "white" if is_dark(rgb) else INK
        figure.text(x=middle, s=name, ha="center", fontsize=7, color=ink, **place)


def _legend(
    figure: Figure, schedule: Schedule, hollow: bool, wide: float, tall: float, left: float
) -> None:
    """Shades of the kinds, the setup hatch and hollow bars, in one row at the foot."""
    from matplotlib.patches import Patch

    entries = [
        Patch(
            facecolor=colour(0, look),
            edgecolor="white",
            hatch=look.hatch or None,
            label=_WORDS.get(kind, one_line(kind)),
        )
        for kind, look in shades(schedule).items()
    ]
    if schedule.has_setups:
        entries.append(Patch(label="setup", **_SETUP))
    if hollow:
        fill: dict[str, Any] = {"facecolor": _BACKGROUND, "edgecolor": colour(0, shade("F"))}
        entries.append(Patch(label="not run by a cold start", **fill))
    figure.legend(
        handles=entries, loc="lower left", bbox_to_anchor=(left / wide, 0.1 / tall), ncols=12,
        frameon=False, fontsize=8, labelcolor=MUTED, borderpad=0, borderaxespad=0,
        handlelength=1.6, handleheight=0.9, columnspacing=1.6,
    )  # fmt: skip


_WORDS = {
    "F": "F forward", "B": "B backward", "R": "R recompute", "I": "I input gradient",
    "W": "W weight gradient", "U": "U update", "": "operation", "end": "end mark",
}  # fmt: skip


def _colours(schedule: Schedule, operations: np.typing.NDArray[np.int64]) -> list[str]:
    look, jobs = shades(schedule), schedule.job[operations].tolist()
    kinds = schedule.kind[operations].tolist()
    return [colour(job, look[kind]) for job, kind in zip(jobs, kinds, strict=True)]
