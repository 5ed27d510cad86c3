"""A finished elastic run: who had which workers when, what was learned by pass, who waited."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from optsched.analysis.occupancy import bars
from optsched.io.text import one_line, readable_unit
from optsched.plots.look import colour, shade
from optsched.plots.picture import INK, dress, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from optsched.elastic import LiveRun


def draw_elastic(run: Any, title: str) -> Figure:
    """Of a `LiveRun`: workers, metric and uncertainty by pass, queueing and service by job."""
    jobs, slots = len(run.live), run.nodes.total
    heights = [0.8 + 0.35 * min(slots, 24), 2.6, 0.8 + 0.25 * min(jobs, 40)]
    figure = new_figure(9, sum(heights) + 0.8, title)
    grid = figure.add_gridspec(3, 2, height_ratios=heights)
    _workers(figure.add_subplot(grid[0, :]), run)
    metric, certain = figure.add_subplot(grid[1, 0]), figure.add_subplot(grid[1, 1])
    for job in run.live:
        passes = np.arange(1, job.passes + 1)
        look: dict[str, Any] = {"color": _colour(job.number), "lw": 1.4, "marker": ".", "ms": 4}
        metric.plot(passes, [record["metric"] for record in job.log], **look)
        certain.plot(passes, [record["uncertainty"] for record in job.log], **look)
        if job.spec.target is not None:
            metric.axhline(job.spec.target, color=_colour(job.number), lw=0.8, ls=(0, (4, 3)))
    dress(metric, "validation metric by pass (dashed: target)")
    dress(certain, "uncertainty U by pass")
    _times(figure.add_subplot(grid[2, :]), run)
    return figure


def _colour(job: int, kind: str = "run") -> str:
    return colour(job, shade(kind))


def _workers(axes: Axes, run: LiveRun) -> None:
    """A bar per stay, the restart in it dark; the job's name where it fits."""
    history = run.history
    unit = readable_unit("ms", max(int(run.log.end.max(initial=1)), 1))
    chart = bars(history)
    span = max(float(chart.end.max(initial=1)), 1.0)
    rows = zip(chart.operation, chart.resource, chart.start, chart.end, strict=True)
    for operation, worker, start, end in rows:
        job, kind = int(history.job[operation]), str(history.kind[operation])
        wide = (end - start) / unit.ticks
        axes.barh(worker, wide, left=start / unit.ticks, height=0.84, color=_colour(job, kind))
        name = one_line(run.live[job].spec.name, 24)
        if kind == "run" and (end - start) / span * 110 > len(name):
            middle = (start + end) / 2 / unit.ticks
            axes.text(middle, worker, name, ha="center", va="center", fontsize=8, color=INK)
    dress(axes, "workers (dark: starting)")
    axes.set_yticks(range(run.nodes.total), [f"worker {k}" for k in range(run.nodes.total)])
    axes.set_ylim(run.nodes.total - 0.5, -0.5)
    axes.set_xlim(0, span / unit.ticks)
    axes.set_xlabel(f"time in {unit.name}", fontsize=9)


def _times(axes: Axes, run: LiveRun) -> None:
    """Queueing pale, service full; jobs that did not end have no bar."""
    m = run.metrics
    unit = readable_unit("ms", max(int(m.jct.max(initial=1)), 1))
    for job in run.live:
        k = job.number
        if m.ended[k]:
            wait, serve = m.queueing[k] / unit.ticks, m.service[k] / unit.ticks
            axes.barh(k, wait, height=0.7, color=_colour(k), alpha=0.35)
            axes.barh(k, serve, left=wait, height=0.7, color=_colour(k))
        else:
            axes.text(0, k, f" {job.phase}", va="center", fontsize=8, color=INK)
    dress(axes, f"completion time in {unit.name} (pale: before the first start)")
    axes.set_yticks(range(len(run.live)), [one_line(job.spec.name, 24) for job in run.live])
    axes.set_ylim(len(run.live) - 0.5, -0.5)
