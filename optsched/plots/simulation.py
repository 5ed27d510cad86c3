"""One picture or page of simulated policies, or of a real elastic run, and their table."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.analysis.occupancy import bars
from optsched.errors import InputError
from optsched.io.files import write_atomic
from optsched.io.text import one_line, readable_unit
from optsched.plots.look import colour, shade
from optsched.plots.picture import (
    INK,
    MUTED,
    PICTURES,
    check_suffix,
    dress,
    look_of,
    new_figure,
    picture,
    picture_style,
    rendered,
)

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from optsched.cluster.results.run import Run

_MOST_STEPS: Final = 2000
"""Points of a line; more are not visible and make large files."""

_BINS: Final = 240
"""Intervals in which the utilization is averaged."""


def simulation_report(
    runs: Mapping[str, Run], path: str | os.PathLike[str] | None = None, *, title: str = ""
) -> Figure:
    """Draw completion times, their parts, and the GPUs in use, one line per policy.

    A single `optsched.elastic.LiveRun` is drawn as its workers over time and the metric by pass.

    Parameters
    ----------
    runs
        Runs of one workload by policy.
    path
        ``.png``, ``.svg``, ``.pdf``, or ``.html`` for a self-contained page with the table; None:
        only the figure is returned.
    title
        By default the workload's name.

    Raises
    ------
    InputError
        No run, a run in which no job ended, or a file that cannot be written.
    MissingExtra
        matplotlib is not installed.

    Examples
    --------
    >>> from optsched import cluster
    >>> job = cluster.Job(name="a", sizes=(8,), work=8 * 10**8)
    >>> jobs = cluster.Workload.of([job], time_unit="s")
    >>> run = cluster.simulate(jobs, "fifo", cluster.Nodes(1, gpus=8))
    >>> optsched.plots.simulation_report({"fifo": run}, title="one job").get_suptitle()
    'one job'
    """
    if path is not None:
        check_suffix(path, (*PICTURES, ".html"))
    if not runs:
        raise InputError("runs: expected at least one")
    some = next(iter(runs.values()))
    live = len(runs) == 1 and hasattr(some, "live")
    for name, run in runs.items():
        if not live and not run.metrics.ended.any():
            raise InputError(f"runs[{name!r:.60}]: no job ended")
    name = one_line(title or some.workload.name or ("elastic training" if live else "simulation"))
    draw = _live_figure if live else _figure
    if path is None or not str(path).lower().endswith(".html"):
        return picture(lambda: draw(runs, name), path)
    with picture_style():
        figure = draw(runs, "")
        drawing = rendered(figure, ".svg").decode()
    write_atomic(path, _page(name, drawing[drawing.index("<svg") :], runs))
    return figure


def table(runs: Mapping[str, Run]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of the comparison of policies; times in a readable unit."""
    found = {name: run.metrics for name, run in runs.items()}
    longest = max(int(max(m.jct_mean for m in found.values())), 1)
    unit = readable_unit(next(iter(found.values())).time_unit, longest)

    def time(value: float) -> str:
        return f"{value / unit.ticks:,.2f}"

    header = [
        "policy", f"JCT mean ({unit.name})", "queueing", "service", "p50", "p95", "p99",
        "makespan", "in use", "effective", "GPU-h", "restarts", "preempted", "rho max",
    ]  # fmt: skip
    fails = any(m.interruptions for m in found.values())
    header += ["interrupted", "GPU-h lost"] * fails
    rows = []
    for name, m in found.items():
        lost = m.gpu_hours * m.lost_time / max(int(m.gpu_time.sum()), 1)
        part = f" ({m.jobs - m.unfinished:,} of {m.jobs:,} ended)" if m.unfinished else ""
        rows.append([
            one_line(name, 40) + part, *map(time, (m.jct_mean, m.queueing_mean, m.service_mean)),
            *(time(m.percentile(p)) if m.ended.any() else "-" for p in (50, 95, 99)),
            time(m.makespan), f"{100 * m.utilisation:.1f} %",
            f"{100 * m.effective_utilisation:.1f} %", f"{m.gpu_hours:,.1f}",
            f"{m.restarts:,}", f"{m.preemptions:,}", f"{m.rho_max:.2f}",
            *([f"{m.interruptions:,}", f"{lost:,.1f}"] * fails),
        ])  # fmt: skip
    return header, rows


def _figure(runs: Mapping[str, Run], title: str) -> Figure:
    figure = new_figure(9, 8.4 + 0.3 * len(runs), title)
    heights = [4.0, 1.2 + 0.3 * len(runs), 2.8]
    above, middle, below = figure.subplots(3, 1, height_ratios=heights)
    _completion_times(above, runs)
    _queueing_and_service(middle, runs)
    _gpus_in_use(below, runs)
    return figure


def _completion_times(axes: Axes, runs: Mapping[str, Run]) -> None:
    """Draw the share of jobs that took at most so long."""
    times = {name: np.sort(run.jct[run.jct >= 0]) for name, run in runs.items()}
    longest = max(int(values[-1]) for values in times.values())
    unit = readable_unit(next(iter(runs.values())).workload.time_unit, max(longest, 1))
    for k, (name, values) in enumerate(times.items()):
        few = np.unique(np.linspace(0, len(values) - 1, min(len(values), _MOST_STEPS)).astype(int))
        axes.step(
            np.concatenate((values[:1], values[few])) / unit.ticks,
            np.concatenate(([0.0], (few + 1) / len(values))),
            where="post", lw=1.6, label=one_line(name, 60), gid=f"cdf-{k}", **look_of(k),
        )  # fmt: skip
    positive = [float(v[v > 0].min()) for v in times.values() if (v > 0).any()]
    if positive:
        axes.set_xscale("log")
        axes.set_xlim(left=min(positive) / unit.ticks * 0.9)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    dress(axes, "completion times")
    axes.set_ylim(0, 1.01)
    axes.set_xlabel(f"completion time in {unit.name}", fontsize=9)
    axes.set_ylabel("share of jobs", fontsize=9)
    axes.legend(frameon=False, fontsize=9, loc="best")


def _queueing_and_service(axes: Axes, runs: Mapping[str, Run]) -> None:
    """Draw the mean completion time of every policy as a stacked bar."""
    found = [run.metrics for run in runs.values()]
    unit = readable_unit(found[0].time_unit, max(int(max(m.jct_mean for m in found)), 1))
    rows, left = np.arange(len(found)), np.zeros(len(found))
    for part, fill in (("queueing", "#d1d5db"), ("service", look_of(0)["color"])):
        wide = np.array([getattr(m, f"{part}_mean") for m in found]) / unit.ticks
        axes.barh(rows, wide, left=left, height=0.62, color=fill, label=part, gid=part)
        left = left + wide
    for row, total in enumerate(left.tolist()):
        axes.text(total, row, f"  {total:,.3g}", va="center", fontsize=8.5, color=MUTED)
    axes.set_yticks(rows, [one_line(name, 40) for name in runs], fontsize=9, color=INK)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    dress(axes, "mean completion time")
    axes.grid(False, axis="y")
    axes.set_xlabel(unit.name, fontsize=9)
    axes.legend(frameon=False, fontsize=9, ncols=2, loc="lower right", bbox_to_anchor=(1, 1))


def used_share(run: Run, edges: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the mean share of all GPUs that jobs hold between neighboring ascending times."""
    from optsched.cluster.results.metrics import held

    taken = held(run.log)
    time = np.concatenate((taken.start, taken.end))
    change = np.concatenate((taken.count, -taken.count))
    order = np.argsort(time, kind="stable")
    time, level = time[order], np.cumsum(change[order])
    if not len(time):
        return np.zeros(len(edges) - 1)
    area = np.concatenate(([0.0], np.cumsum(level[:-1] * np.diff(time).astype(np.float64))))
    total: npt.NDArray[np.float64] = np.diff(np.interp(edges, time, area))
    return np.clip(total / np.maximum(np.diff(edges), 1e-300) / run.nodes.total, 0.0, 1.0)


def _gpus_in_use(axes: Axes, runs: Mapping[str, Run]) -> None:
    begin = min(int(run.workload.submit[0]) for run in runs.values())
    end = max(int(run.log.end.max(initial=begin + 1)) for run in runs.values())
    unit = readable_unit(next(iter(runs.values())).workload.time_unit, max(end - begin, 1))
    edges = np.linspace(begin, end, _BINS + 1)
    for k, (name, run) in enumerate(runs.items()):
        axes.stairs(
            used_share(run, edges), (edges - begin) / unit.ticks, baseline=None, lw=1.3,
            label=one_line(name, 60), gid=f"used-{k}", **look_of(k),
        )  # fmt: skip
    dress(axes, "GPUs in use")
    axes.set_ylim(0, 1.03)
    axes.set_xlim(0, (end - begin) / unit.ticks)
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    axes.set_xlabel(f"time in {unit.name}", fontsize=9)
    axes.legend(frameon=False, fontsize=9, loc="lower right", ncols=4, bbox_to_anchor=(1, 1))


def _live_figure(runs: Mapping[str, Any], title: str) -> Figure:
    """Draw a `LiveRun`: workers over time; metric and uncertainty by pass."""
    run = next(iter(runs.values()))
    high = 1.2 + 0.35 * min(run.nodes.total, 24)
    figure = new_figure(9, high + 3.4, title)
    grid = figure.add_gridspec(2, 2, height_ratios=[high, 2.6])
    _workers(figure.add_subplot(grid[0, :]), run)
    for k, (key, text) in enumerate(
        {"metric": "validation metric (dashed: target)", "uncertainty": "uncertainty U"}.items()
    ):
        axes = figure.add_subplot(grid[1, k])
        for job in run.live:
            look: dict[str, Any] = {"color": colour(job.number, shade("run"))}
            values = [record[key] for record in job.log]
            axes.plot(np.arange(1, job.passes + 1), values, lw=1.4, marker=".", ms=4, **look)
            if key == "metric" and job.spec.target is not None:
                axes.axhline(job.spec.target, lw=0.8, ls=(0, (4, 3)), **look)
        dress(axes, f"{text} by pass")
    return figure


def _workers(axes: Axes, run: Any) -> None:
    """Draw a bar per stay of a job on a worker; its restart is dark."""
    history, chart = run.history, bars(run.history)
    unit = readable_unit("ms", max(int(run.log.end.max(initial=1)), 1))
    named = set[int]()
    for operation, worker, start, end in zip(
        chart.operation, chart.resource, chart.start, chart.end, strict=True
    ):
        job, kind = int(history.job[operation]), str(history.kind[operation])
        fresh = kind == "run" and job not in named
        named |= {job} if fresh else set()
        axes.barh(
            worker, (end - start) / unit.ticks, left=start / unit.ticks, height=0.84,
            color=colour(job, shade(kind)),
            label=one_line(run.live[job].spec.name, 24) if fresh else None,
        )  # fmt: skip
    dress(axes, "workers (dark: starting)")
    axes.set_yticks(range(run.nodes.total), [f"worker {k}" for k in range(run.nodes.total)])
    axes.set_ylim(run.nodes.total - 0.5, -0.5)
    axes.set_xlabel(f"time in {unit.name}", fontsize=9)
    if 0 < len(named) <= 24:
        axes.legend(frameon=False, fontsize=8, ncols=6, loc="lower right", bbox_to_anchor=(1, 1))


_STYLE: Final = """
body { margin: 0; font: 14px/1.45 system-ui, "DejaVu Sans", sans-serif; color: #1f2430; }
main { max-width: 1100px; margin: 0 auto; padding: 20px 24px 40px; }
h1 { font-size: 20px; overflow-wrap: anywhere; }
p { color: #6b7280; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; }
th, td { padding: 4px 9px; text-align: right; border-bottom: 1px solid #e5e7eb; }
th:first-child, td:first-child { text-align: left; }
svg { max-width: 100%; height: auto; }
"""


def _page(name: str, drawing: str, runs: Mapping[str, Run]) -> str:
    header, rows = table(runs)
    s = (some := next(iter(runs.values()))).settings
    about = (
        f"{len(some.workload)} jobs on {some.nodes.total} GPUs in {len(some.nodes.gpus)} nodes, "
        f"restart cost {s.restart_cost} {some.workload.time_unit}, resize {s.resize}, seed {s.seed}"
    )
    waiting = "".join(html_row((policy, job, why.text), "td") for policy, run in runs.items()
                      for job, why in run.reported_waiting().items())  # fmt: skip
    if waiting:
        drawing += f"<table>{html_row(('policy', 'waiting job', 'reason'), 'th')}{waiting}</table>"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'\">\n"
        f"<title>{html.escape(name)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"<h1>{html.escape(name)}</h1>\n<p>{html.escape(about)}</p>\n<table>\n"
        f"{html_row(header, 'th')}{''.join(html_row(row, 'td') for row in rows)}</table>\n"
        f"{drawing}\n</main>\n</body>\n</html>\n"
    )


def html_row(cells: Sequence[object], tag: str) -> str:
    """Make an HTML table row; texts are escaped."""
    inside = "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in cells)
    return f"<tr>{inside}</tr>\n"
