"""Routers by two measures: every point with its interval, and the Pareto front."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from optsched.errors import InputError
from optsched.io.files import write_atomic
from optsched.io.text import one_line
from optsched.io.values import one_of
from optsched.plots.look import oklch
from optsched.plots.picture import GRID, INK, MUTED, picture_style, rendered, suffix_of
from optsched.serving.simulator import MEASURES, front_of

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from matplotlib.figure import Figure

    from optsched.serving.simulator import Point

_TITLES = {
    "accuracy": "accuracy, %", "mean_ms": "mean latency, ms", "p99_ms": "P99 latency, ms",
    "joules_per_image": "energy, J per image", "cost_ms": "cost, ms per request",
    "throughput_per_s": "images per second", "attainment": "answered in time, %",
}  # fmt: skip
_PAGE = (
    "<!doctype html><meta charset=utf-8><title>Routers</title><style>svg{max-width:100%%}</style>%s"
)


def pareto(
    points: Sequence[Point],
    path: str | os.PathLike[str],
    *,
    x: str = "accuracy",
    y: str = "p99_ms",
) -> None:
    """Draw routers by two measures, a panel a load.

    Every router has a colour, static tuples are joined by a line, intervals (95 %) are bars,
    saturated points are hollow; a grey line is the Pareto front.

    Parameters
    ----------
    points
        Of `optsched.serving.compare`.
    path
        File to write: ``.png``, ``.svg``, ``.pdf`` or ``.html``.
    x, y
        Two of `optsched.serving.simulator.MEASURES`.

    Raises
    ------
    InputError
        Nothing to draw, an unknown measure, or a file of another kind.
    MissingExtra
        matplotlib is not installed.

    Examples
    --------
    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> from optsched import serving
    >>> scenario = serving.reference(rate=500, burst=2, seconds=0.1)
    >>> points = serving.compare(scenario, {"cost": serving.MarginalCost()}, seeds=[1, 2])
    >>> with TemporaryDirectory() as folder:
    ...     optsched.plots.pareto(points, Path(folder, "routers.svg"))
    ...     [path.name for path in Path(folder).iterdir()]
    ['routers.svg']
    """
    for name in (x, y):
        one_of("pareto", name, MEASURES)
    if not points:
        raise InputError("points: there is nothing to draw")
    page = Path(path).suffix.lower() == ".html"
    suffix = ".svg" if page else suffix_of(path)
    with picture_style():
        picture = rendered(_draw(points, x, y), suffix)
    if page:
        svg = picture[picture.index(b"<svg") :].decode()
        picture = (_PAGE % svg).encode()
    write_atomic(path, picture)


def _draw(points: Sequence[Point], x: str, y: str) -> Figure:
    from matplotlib.figure import Figure

    loads = list(dict.fromkeys(point.load for point in points))
    names = list(dict.fromkeys(point.router for point in points))
    colour = {name: oklch(0.6, 0.15, 360 * i / len(names)) for i, name in enumerate(names)}
    figure = Figure(figsize=(5.2 * len(loads), 4.2), layout="constrained")
    for axes, load in zip(figure.subplots(1, len(loads), squeeze=False)[0], loads, strict=True):
        some = [point for point in points if point.load == load]
        front = sorted((p.mean[x], p.mean[y]) for p in front_of(some, x, y))
        fixed = [p for p in some if p.router.startswith("static") and not p.saturated]
        static = sorted((p.mean[x], p.mean[y]) for p in fixed)
        axes.plot(*zip(*static, strict=True), color=MUTED, lw=0.7, ls=":") if static else None
        axes.plot(*zip(*front, strict=True), color=GRID, lw=3, zorder=0) if front else None
        for point in some:
            axes.errorbar(
                point.mean[x], point.mean[y], xerr=point.interval[x], yerr=point.interval[y],
                marker="o", ms=5, lw=0.8, color=colour[point.router], label=one_line(point.router),
                markerfacecolor="none" if point.saturated else colour[point.router],
            )  # fmt: skip
        axes.set(xlabel=_TITLES[x], ylabel=_TITLES[y])
        if y.endswith("_ms"):
            axes.set_yscale("log")
            low, high = axes.get_ylim()
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter("{x:g}" if high < 10 * low else "")
        axes.set_title(one_line(load), color=INK, fontsize=10)
        axes.grid(color=GRID, lw=0.5)
        axes.legend(fontsize=6, frameon=False)
    return figure
