"""How busy the cluster was over time, under every policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from optsched.errors import InputError
from optsched.io.values import format_value
from optsched.plots.jct import by_policy
from optsched.plots.lines import dress, look_of, picture
from optsched.plots.look import plain, readable_unit

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    import numpy.typing as npt
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from optsched.cluster.run import Run

_BINS = 240


def utilisation_over_time(
    runs: Mapping[str, Run], path: str | os.PathLike[str] | None = None
) -> Figure:
    """Share of GPUs held over time, one line per policy (means over equal pieces of the time).

    Parameters
    ----------
    runs
        Runs by policy.
    path
        File to write, ``.png``, ``.svg`` or ``.pdf``; None: only the figure is returned.

    Raises
    ------
    InputError
        No run, different units of time, or a file that cannot be written.
    MissingExtra
        matplotlib is not installed.
    """
    given = by_policy("runs", runs)
    if not given:
        raise InputError("runs: expected at least one")
    for name, run in given.items():
        if not hasattr(run, "log") or not hasattr(run, "workload"):
            raise InputError(f"runs[{name!r:.60}]: expected a Run, got {format_value(run)}")
    if len({run.workload.time_unit for run in runs.values()}) > 1:
        raise InputError("runs: their units of time differ")

    def draw() -> Figure:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 3.4), facecolor="white", layout="constrained")
        draw_utilisation(figure.subplots(), runs)
        return figure

    return picture(draw, path)


def busy_share(run: Run, edges: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Mean share of all GPUs that is held between neighbouring edges (times, ascending)."""
    from optsched.cluster.held import held

    taken = held(run.log)
    time = np.concatenate((taken.start, taken.end))
    change = np.concatenate((taken.count, -taken.count))
    order = np.argsort(time, kind="stable")
    time, level = time[order], np.cumsum(change[order])
    if not len(time):
        return np.zeros(len(edges) - 1)
    area = np.concatenate(([0.0], np.cumsum(level[:-1] * np.diff(time).astype(np.float64))))
    k = np.clip(np.searchsorted(time, edges, side="right") - 1, 0, None)
    up_to = np.where(edges < time[0], 0.0, area[k] + level[k] * (edges - time[k]))
    width = np.maximum(np.diff(edges), 1e-300)
    share: npt.NDArray[np.float64] = np.diff(up_to) / width / run.nodes.total
    return np.clip(share, 0.0, 1.0)


def draw_utilisation(axes: Axes, runs: Mapping[str, Run]) -> None:
    """Draw into axes."""
    begin = min(int(run.workload.submit[0]) for run in runs.values())
    end = max(int(run.log.end.max(initial=begin + 1)) for run in runs.values())
    unit = readable_unit(next(iter(runs.values())).workload.time_unit, max(end - begin, 1))
    edges = np.linspace(begin, end, _BINS + 1)
    for k, (name, run) in enumerate(runs.items()):
        axes.stairs(
            busy_share(run, edges), (edges - begin) / unit.ticks, baseline=None,
            lw=1.3, label=plain(name, 60), gid=f"busy-{k}", **look_of(k),
        )  # fmt: skip
    dress(axes, "GPUs in use")
    axes.set_ylim(0, 1.03)
    axes.set_xlim(0, (end - begin) / unit.ticks)
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    axes.set_xlabel(f"time in {unit.name}", fontsize=9)
    axes.legend(frameon=False, fontsize=9, loc="lower right", ncols=4, bbox_to_anchor=(1, 1))
