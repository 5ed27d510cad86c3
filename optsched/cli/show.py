"""``optsched show``: objective, resources, jobs and critical path of a schedule."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from optsched.cli.options import ScheduleFile  # noqa: TC001 (typer reads the annotations)
from optsched.cli.schedules import scheduled
from optsched.cli.tables import display, table
from optsched.io.text import bytes_text, one_line, readable_unit, share_text, time_in, time_text
from optsched.model.objectives import LATENESS

if TYPE_CHECKING:
    from rich.console import Group, RenderableType

    from optsched.analysis.iterations import JobReport
    from optsched.analysis.report import CriticalStep, Report

_MOST_LINES = 24  # of the critical path
_MOST_JOBS = 64


def show(file: ScheduleFile) -> None:
    """Print objective, bound and gap; load and memory of devices; jobs; the critical path.

    Example: optsched show plan.schedule.json
    """
    from optsched.analysis.report import report

    display(render(report(scheduled(file))))


def render(report: Report) -> Group:
    """Return the headline, the resources, the jobs and the critical path; names are data."""
    from rich.console import Group

    parts: list[RenderableType] = [_headline(report), "", _resources(report), ""]
    if report.iterations:
        rows = _alike(report.iterations)
        parts.append(_jobs(report, rows[:_MOST_JOBS]))
        if len(rows) > _MOST_JOBS:
            last = rows[_MOST_JOBS - 1][1].job
            parts.append(Text(f"… and the jobs after {last}", style="dim"))
        parts.append("")
    if report.completions:
        parts += [_completions(report), ""]
    return Group(*parts, *_path(report))


def _completions(report: Report) -> Table:
    """Return the ends of jobs, those first that count most."""
    unit = readable_unit(report.time_unit, report.span)
    late = report.objective_name == LATENESS
    heads = ["job", "end", *(["due", "lateness"] if late else ["weight", "weight x end"])]
    rows: list[list[str | Text]] = []
    counts = [
        job.end - job.counted if late else job.end * job.counted for job in report.completions
    ]
    for count, job in sorted(zip(counts, report.completions, strict=True), reverse=True):
        counted = time_in(unit, job.counted) if late else str(job.counted)
        name = Text(one_line(job.name, 40))
        rows.append([name, time_in(unit, job.end), counted, time_in(unit, count)])
    return table(heads, rows[:_MOST_JOBS])


def _headline(report: Report) -> Text:
    from optsched.plots.look import worth

    text = Text(one_line(report.name) or "schedule", style="bold")
    parts = [*worth(report), *([] if report.status == "optimal" else [report.status])]
    if report.solver:
        parts.append(f"by {one_line(report.solver, 40)}")
    text.append("\n" + ", ".join(parts), "green" if report.status == "optimal" else "default")
    size = f"\n{report.operations} operations of {report.jobs} jobs"
    text.append(f"{size} on {len(report.resources)} resources", "dim")
    if report.throughput is not None:
        number = sum(job.iterations for job in report.iterations)
        when = "" if report.period is None else " a cycle"
        rate = f"{report.throughput:.4g} a second"
        text.append(f"\n{number} iteration{'s' * (number != 1)}{when}, {rate}")
    return text


def _resources(report: Report) -> Table:
    memory = any(row.peak_memory or row.memory for row in report.resources)
    setups = any(row.setup for row in report.resources)
    heads = ["busy", "busy %", *(["setup", "setup %"] if setups else []), "bubble %"]
    heads = ["resource", *heads, *(["peak bytes", "capacity"] if memory else [])]
    rows: list[list[str | Text]] = []
    unit = readable_unit(report.time_unit, report.span)
    for row in report.resources:
        name = Text(one_line(row.name, 40))
        cells: list[str | Text] = [name, time_in(unit, row.busy), share_text(row.busy_share)]
        if setups:
            cells += [time_in(unit, row.setup), share_text(row.setup_share)]
        cells.append(share_text(row.bubble_share))
        if memory:
            over = 0 < row.memory < row.peak_memory
            cells.append(Text(bytes_text(row.peak_memory), style="bold red" if over else ""))
            cells.append(bytes_text(row.memory) if row.memory else "unlimited")
        rows.append(cells)
    return table(heads, rows)


def _alike(jobs: tuple[JobReport, ...]) -> list[tuple[JobReport, JobReport]]:
    """Return the first and last of every run of neighbors that differ only in their number."""
    alike = itertools.groupby(jobs, key=lambda job: replace(job, job=0, name=""))
    runs = [list(run) for _, run in alike]
    return [(run[0], run[-1]) for run in runs]


def _jobs(report: Report, rows: list[tuple[JobReport, JobReport]]) -> Table:
    rolls = report.period is not None
    recompute = report.iterations[0].recompute is not None
    heads = ["job", "iterations", "latency", *(["cycles"] if rolls else []), "wait", "wait %"]
    unit = readable_unit(report.time_unit, report.span)
    found: list[list[str | Text]] = []
    for first, last in rows:
        ends = [one_line(row.name, 40) or str(row.job) for row in (first, last)]
        name = " … ".join(ends[: 1 + (first is not last)])
        cells: list[str | Text] = [name, str(first.iterations), time_in(unit, first.latency)]
        if first.cycles is not None:
            cells.append(f"{first.cycles:.2f}")
        share = first.wait / first.latency if first.latency else 0.0
        cells += [time_in(unit, first.wait), share_text(share)]
        if recompute:
            cells.append({True: "yes", False: "no", None: ""}[first.recompute])
        found.append(cells)
    return table([*heads, *(["recompute"] if recompute else [])], found)


def _path(report: Report) -> list[RenderableType]:
    steps = report.critical_path
    if not steps:
        return [Text("no critical path: nothing runs, or no cycle of operations is tight")]
    what = "critical path" if report.period is None else "critical cycle"
    title = f"{what}, {len(steps)} operations"
    if report.least_period is not None and report.least_period < report.span:
        least = time_text(report.least_period, report.time_unit)
        title += f"; these orders allow a period of {least}"
    grid = Table.grid(padding=(0, 0, 0, 2), pad_edge=True)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(overflow="ellipsis")
    grid.add_column(overflow="fold")
    grid.add_column(overflow="fold")
    runs = [list(run) for _, run in itertools.groupby(steps, key=lambda step: step.resources)]
    for run in runs[:_MOST_LINES]:
        grid.add_row(*_run_cells(run, report.time_unit))
    lines: list[RenderableType] = [Text(f"{title}:", style="bold"), grid]
    if len(runs) > _MOST_LINES:
        more = sum(len(run) for run in runs[_MOST_LINES:])
        lines.append(Text(f"  … and {more} operations more", style="dim"))
    if not report.path_is_complete:
        lines.append(Text("  it does not reach time 0: see its first line", style="yellow"))
    return lines


def _run_cells(run: list[CriticalStep], time_unit: str) -> list[Text]:
    """Return time, resource, operations and reason of steps on the same resources."""
    first, last = run[0], run[-1]
    what = Text(one_line(first.name))
    if len(run) > 1:
        what.append((" … " if len(run) > 2 else ", ") + one_line(last.name))
        what.append(f" ({len(run)} operations)", "dim")
    return [
        Text(time_text(first.start, time_unit), "dim"),
        Text(one_line(" + ".join(first.resources), 40), "cyan"),
        what,
        Text(one_line(first.reason, 120), "dim"),
    ]
