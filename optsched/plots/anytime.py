"""Anytime curves: the mean gap of several solvers over time, as a PNG, SVG or PDF file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from optsched.errors import InputError
from optsched.io.text import plain
from optsched.plots.picture import dress, look_of, picture, suffix_of

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    Steps = Sequence[tuple[float, float]]
    Curves = Mapping[str, tuple[Sequence[Steps], Sequence[Steps]]]

_POINTS = 400
_LEAST = 1e-4  # gaps below are drawn linearly down to 0


def anytime(curves: Curves, path: str | os.PathLike[str], *, horizon: float) -> None:
    """Draw mean gaps over time: of the schedules above, of the bounds below.

    Parameters
    ----------
    curves
        By name of a solver its runs' steps ``(seconds, gap)`` in order, for schedules and for
        bounds; gaps from 0 to 1, and 1 before the first step.
    path
        File to write, ``.png``, ``.svg`` or ``.pdf``.
    horizon
        Seconds up to which is drawn; the last step of a run counts until then.

    Raises
    ------
    InputError
        There is nothing to draw, the suffix is none of the three, or the file cannot be written.
    MissingExtra
        matplotlib is not installed.
    """
    suffix_of(path)
    runs = [primal for primal, _ in curves.values() if primal]
    if not runs or not horizon > 0:
        raise InputError("curves: expected at least one run, and a horizon above 0 seconds")
    picture(lambda: _draw(curves, horizon), path)


def mean_steps(runs: Sequence[Steps], times: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Mean over runs of their gaps at some times; 1 where a run has not begun."""
    total = np.zeros(len(times))
    for steps in runs:
        at = np.array([0.0, *(t for t, _ in steps)])
        gap = np.array([1.0, *(g for _, g in steps)])
        total += gap[np.searchsorted(at, times, side="right") - 1]
    return total / max(len(runs), 1)


def _draw(curves: Curves, horizon: float) -> Figure:
    from matplotlib.figure import Figure

    first = min((t for runs in curves.values() for part in runs for steps in part
                 for t, _ in steps if t > 0), default=horizon / 100)  # fmt: skip
    begin = min(max(first * 0.8, horizon * 1e-4), horizon / 10)
    times = np.geomspace(begin, horizon, _POINTS)
    figure = Figure(figsize=(8, 7), facecolor="white", layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    titles = ("mean gap of the schedules (z - z*) / z", "mean gap of the bounds (z* - bound) / z*")
    for part, (axes, title) in enumerate(zip((above, below), titles, strict=True)):
        for k, (name, runs) in enumerate(curves.items()):
            if runs[part]:
                values = mean_steps(runs[part], times)
                axes.plot(times, values, **look_of(k), lw=1.8, label=plain(name, 60))
        dress(axes, title)
        _scale(axes)
    below.set_xlabel("seconds")
    below.set_xlim(begin, horizon)
    above.legend(frameon=False, fontsize=9)
    return figure


def _scale(axes: Axes) -> None:
    axes.set_xscale("log")
    axes.set_yscale("symlog", linthresh=_LEAST, linscale=0.4)
    axes.set_ylim(0, 1.2)
    ticks = [0, 1e-4, 1e-3, 1e-2, 0.1, 1]
    axes.set_yticks(ticks, [f"{100 * tick:g} %" for tick in ticks])
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
