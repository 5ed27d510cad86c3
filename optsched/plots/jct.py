"""Completion times of policies: their distributions, and what they are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from optsched.errors import InputError
from optsched.io.values import format_value
from optsched.plots.lines import dress, look_of, picture
from optsched.plots.look import plain, readable_unit
from optsched.plots.picture import INK, MUTED

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    import numpy.typing as npt
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from optsched.cluster.metrics import Metrics
    from optsched.cluster.run import Run


_MOST_STEPS = 2000  # more cannot be seen, and make large files


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
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 4.6), facecolor="white", layout="constrained")
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
            where="post", lw=1.6, label=plain(name, 60), gid=f"cdf-{k}", **look_of(k),
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
    found = metrics_of(runs)

    def draw() -> Figure:
        from matplotlib.figure import Figure

        tall = 1.3 + 0.38 * len(found)
        figure = Figure(figsize=(8, tall), facecolor="white", layout="constrained")
        draw_decomposition(figure.subplots(), found)
        return figure

    return picture(draw, path)


def metrics_of(runs: Mapping[str, Run | Metrics]) -> dict[str, Metrics]:
    """Metrics by policy, all in one unit of time."""
    given = by_policy("runs", runs)
    found: dict[str, Metrics] = {n: getattr(run, "metrics", run) for n, run in given.items()}
    if not found:
        raise InputError("runs: expected at least one")
    for name, value in found.items():
        if not hasattr(value, "queueing_mean"):
            raise InputError(
                f"runs[{name!r:.60}]: expected a Run or its metrics, got {value!r:.60}"
            )
    if len({value.time_unit for value in found.values()}) > 1:
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
    axes.set_yticks(rows, [plain(name, 40) for name in found], fontsize=9, color=INK)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    dress(axes, "mean completion time")
    axes.grid(False, axis="y")
    axes.set_xlabel(unit.name, fontsize=9)
    axes.legend(frameon=False, fontsize=9, ncols=2, loc="lower right", bbox_to_anchor=(1, 1))
