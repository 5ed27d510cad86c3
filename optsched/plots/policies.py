"""Policies side by side: completion times, what they are made of, how busy the cluster was."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from optsched.errors import InputError
from optsched.io.text import one_line, readable_unit
from optsched.io.values import format_value
from optsched.plots.picture import INK, MUTED, dress, look_of, new_figure, picture

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    import numpy.typing as npt
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from optsched.cluster.results.metrics import Metrics
    from optsched.cluster.results.run import Run


_MOST_STEPS = 2000  # more cannot be seen, and make large files
_BINS = 240


def jct_cdf(
    jct: Mapping[str, npt.ArrayLike],
    path: str | os.PathLike[str] | None = None,
    *,
    time_unit: str = "s",
    log: bool = True,
    title: str = "completion times",
) -> Figure:
    """Share of jobs that took at most so long, one step line per policy.

    Parameters
    ----------
    jct
        Completion times of the jobs by policy, such as ``{"fifo": run.jct}``; negative ones (jobs
        that did not end) are left out.
    path
        File to write, ``.png``, ``.svg`` or ``.pdf``; None: only the figure is returned.
    time_unit
        Of the times.
    log
        Logarithmic time axis.
    title
        Above the picture.

    Raises
    ------
    InputError
        No times, something that is no number, or a file that cannot be written.
    MissingExtra
        matplotlib is not installed.
    """
    found = times_of(jct)

    def draw() -> Figure:
        figure = new_figure(8, 4.6)
        draw_cdf(figure.subplots(), found, time_unit, log=log, title=title)
        return figure

    return picture(draw, path)


def by_policy(field: str, given: Any) -> dict[str, Any]:
    """Something by name, as a dict."""
    if not hasattr(given, "items"):
        raise InputError(
            f"{field}: expected a mapping from policies, such as {{'fifo': ...}}, got "
            f"{format_value(given)}"
        )
    return dict(given)


def times_of(jct: Mapping[str, npt.ArrayLike]) -> dict[str, npt.NDArray[np.float64]]:
    """Times by policy, ascending, without those of jobs that did not end."""
    found = {}
    for name, given in by_policy("jct", jct).items():
        try:
            values = np.asarray(given, np.float64)
        except (TypeError, ValueError):
            raise InputError(f"jct[{name!r:.60}]: expected a flat array of times") from None
        if values.ndim != 1 or np.isnan(values).any():
            raise InputError(f"jct[{name!r:.60}]: expected a flat array of times without NaN")
        found[name] = np.sort(values[values >= 0])
        if not len(found[name]):
            raise InputError(f"jct[{name!r:.60}]: no job ended")
    if not found:
        raise InputError("jct: expected the times of at least one policy")
    return found


def draw_cdf(
    axes: Axes,
    jct: Mapping[str, npt.NDArray[np.float64]],
    time_unit: str,
    *,
    log: bool = True,
    title: str = "completion times",
) -> None:
    """Draw sorted times into axes."""
    longest = max(float(values[-1]) for values in jct.values())
    unit = readable_unit(time_unit, max(int(longest), 1))
    for k, (name, values) in enumerate(jct.items()):
        few = np.unique(np.linspace(0, len(values) - 1, min(len(values), _MOST_STEPS)).astype(int))
        share, shown = (few + 1) / len(values), values[few]
        axes.step(
            np.concatenate((shown[:1], shown)) / unit.ticks, np.concatenate(([0.0], share)),
            where="post", lw=1.6, label=one_line(name, 60), gid=f"cdf-{k}", **look_of(k),
        )  # fmt: skip
    positive = [float(v[v > 0].min()) for v in jct.values() if (v > 0).any()]
    if log and positive:
        axes.set_xscale("log")
        axes.set_xlim(left=min(positive) / unit.ticks * 0.9)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    dress(axes, title)
    axes.set_ylim(0, 1.01)
    axes.set_xlabel(f"completion time in {unit.name}", fontsize=9)
    axes.set_ylabel("share of jobs", fontsize=9)
    axes.legend(frameon=False, fontsize=9, loc="best")


def jct_decomposition(
    runs: Mapping[str, Run | Metrics],
    path: str | os.PathLike[str] | None = None,
) -> Figure:
    """Mean completion time of every policy as queueing (to the first start) and service.

    Parameters
    ----------
    runs
        Runs or their metrics by policy.
    path
        File to write, ``.png``, ``.svg`` or ``.pdf``; None: only the figure is returned.

    Raises
    ------
    InputError
        No run, different units of time, or a file that cannot be written.
    MissingExtra
        matplotlib is not installed.
    """
    given = by_policy("runs", runs).items()
    found = runs_of({name: getattr(run, "metrics", run) for name, run in given}, "queueing_mean")

    def draw() -> Figure:
        figure = new_figure(8, 1.3 + 0.38 * len(found))
        draw_decomposition(figure.subplots(), found)
        return figure

    return picture(draw, path)


def runs_of(runs: Mapping[str, Any], needed: str) -> dict[str, Any]:
    """Runs or metrics by policy that have an attribute, all in one unit of time."""
    found = by_policy("runs", runs)
    if not found:
        raise InputError("runs: expected at least one")
    for name, value in found.items():
        if not hasattr(value, needed):
            raise InputError(f"runs[{name!r:.60}]: expected a Run, got {format_value(value)}")
    if len({getattr(value, "workload", value).time_unit for value in found.values()}) > 1:
        raise InputError("runs: their units of time differ")
    return found


def draw_decomposition(axes: Axes, found: Mapping[str, Metrics]) -> None:
    """Draw stacked bars into axes."""
    values = list(found.values())
    longest = max(m.jct_mean for m in values)
    unit = readable_unit(values[0].time_unit, max(int(longest), 1))
    rows = np.arange(len(values))
    queueing = np.array([m.queueing_mean for m in values]) / unit.ticks
    service = np.array([m.service_mean for m in values]) / unit.ticks
    waits: dict[str, Any] = {"color": "#d1d5db", "label": "queueing", "gid": "queueing"}
    runs: dict[str, Any] = {"color": look_of(0)["color"], "label": "service", "gid": "service"}
    axes.barh(rows, queueing, height=0.62, **waits)
    axes.barh(rows, service, left=queueing, height=0.62, **runs)
    for row, total in zip(rows.tolist(), (queueing + service).tolist(), strict=True):
        axes.text(total, row, f"  {total:,.3g}", va="center", fontsize=8.5, color=MUTED)
    axes.set_yticks(rows, [one_line(name, 40) for name in found], fontsize=9, color=INK)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    dress(axes, "mean completion time")
    axes.grid(False, axis="y")
    axes.set_xlabel(unit.name, fontsize=9)
    axes.legend(frameon=False, fontsize=9, ncols=2, loc="lower right", bbox_to_anchor=(1, 1))


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
    given = runs_of(runs, "log")

    def draw() -> Figure:
        figure = new_figure(8, 3.4)
        draw_utilisation(figure.subplots(), given)
        return figure

    return picture(draw, path)


def busy_share(run: Run, edges: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Mean share of all GPUs that is held between neighbouring edges (times, ascending)."""
    from optsched.cluster.results.held import held

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
            lw=1.3, label=one_line(name, 60), gid=f"busy-{k}", **look_of(k),
        )  # fmt: skip
    dress(axes, "GPUs in use")
    axes.set_ylim(0, 1.03)
    axes.set_xlim(0, (end - begin) / unit.ticks)
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    axes.set_xlabel(f"time in {unit.name}", fontsize=9)
    axes.legend(frameon=False, fontsize=9, loc="lower right", ncols=4, bbox_to_anchor=(1, 1))
