"""``optsched show``: a `Report` as tables for the terminal."""

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

if TYPE_CHECKING:
    from rich.console import Group, RenderableType

    from optsched.analysis.iterations import JobReport
    from optsched.analysis.report import CriticalStep, Report, ResourceReport

_MOST_RUNS = 24  # lines of critical path: more than a screen helps nobody
_MOST_JOBS = 64  # rows of jobs, likewise


def show(file: ScheduleFile) -> None:
    """Objective, bound, gap; load and peak bytes per device; latency per job; critical path."""
    from optsched.analysis.report import report

    display(render(report(scheduled(file))))


def render(report: Report) -> Group:
    """What ``optsched show`` prints: the headline, the resources, jobs and the critical path.

    Strings of the document appear as they are, never as markup.
    """
    from rich.console import Group

    parts: list[RenderableType] = [_headline(report), "", _resources(report), ""]
    if report.iterations:
        parts += [_jobs(report), *_left_over(report), ""]
    return Group(*parts, *_path(report))


def _headline(report: Report) -> Text:
    from optsched.plots.look import worth

    text = Text(one_line(report.name) or "schedule", style="bold")
    parts = [*worth(report), *([] if report.status == "optimal" else [report.status])]
    style = "green" if report.status == "optimal" else "default"
    if report.solver:
        parts.append(f"by {one_line(report.solver, 40)}")
    text.append("\n" + ", ".join(parts), style)
    size = f"\n{report.operations} operations of {report.jobs} jobs"
    text.append(f"{size} on {len(report.resources)} resources", "dim")
    if report.throughput is not None:
        text.append(f"\n{_rate(report)}")
    return text


def _rate(report: Report) -> str:
    """How much training gets done: iterations of all jobs, per span and per second."""
    count = sum(job.iterations for job in report.iterations)
    when = "" if report.period is None else " a cycle"
    return f"{count} iteration{'s' * (count != 1)}{when}, {report.throughput:.4g} a second"


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
        rows.append([*cells, *(_memory(row) if memory else ())])
    return table(heads, rows)


def _memory(row: ResourceReport) -> tuple[Text, str]:
    over = 0 < row.memory < row.peak_memory
    peak = Text(bytes_text(row.peak_memory), style="bold red" if over else "")
    return peak, bytes_text(row.memory) if row.memory else "unlimited"


def _jobs(report: Report) -> Table:
    """A row for every job; one for neighbours that are alike but for their number."""
    rolls, tells = report.period is not None, report.iterations[0].recompute is not None
    heads = ["job", "iterations", "latency", *(["cycles"] if rolls else []), "wait", "wait %"]
    rows: list[list[str | Text]] = []
    unit = readable_unit(report.time_unit, report.span)
    for first, last in _alike(report.iterations)[:_MOST_JOBS]:
        ends = [one_line(row.name, 40) or str(row.job) for row in (first, last)]
        name = " … ".join(ends[: 1 + (first is not last)])
        cells: list[str | Text] = [name, str(first.iterations), time_in(unit, first.latency)]
        if first.cycles is not None:
            cells.append(f"{first.cycles:.2f}")
        cells.append(time_in(unit, first.wait))
        cells.append(share_text(first.wait / first.latency if first.latency else 0.0))
        if tells:
            cells.append({True: "yes", False: "no", None: ""}[first.recompute])
        rows.append(cells)
    return table([*heads, *(["recompute"] if tells else [])], rows)


def _alike(jobs: tuple[JobReport, ...]) -> list[tuple[JobReport, JobReport]]:
    """First and last of every run of neighbours that differ in their number only."""
    alike = itertools.groupby(jobs, key=lambda job: replace(job, job=0, name=""))
    runs = [list(run) for _, run in alike]
    return [(run[0], run[-1]) for run in runs]


def _left_over(report: Report) -> list[Text]:
    rows = _alike(report.iterations)
    if len(rows) <= _MOST_JOBS:
        return []
    return [Text(f"… and the jobs after {rows[_MOST_JOBS - 1][1].job}", style="dim")]


def _path(report: Report) -> list[RenderableType]:
    steps = report.critical_path
    if not steps:
        return [Text("no critical path: nothing runs, or no cycle of operations is tight")]
    what = "critical path" if report.period is None else "critical cycle"
    head = Text(f"{what}, {len(steps)} operations{_faster(report)}:", style="bold")
    runs = _runs(steps)
    grid = Table.grid(padding=(0, 0, 0, 2), pad_edge=True)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(overflow="ellipsis")
    grid.add_column(overflow="fold")
    grid.add_column(overflow="fold")
    for run in runs[:_MOST_RUNS]:
        grid.add_row(*_run_cells(run, report.time_unit))
    lines: list[RenderableType] = [head, grid]
    if len(runs) > _MOST_RUNS:
        rest = sum(len(run) for run in runs[_MOST_RUNS:])
        lines.append(Text(f"  … and {rest} operations more", style="dim"))
    if not report.path_is_complete:
        lines.append(Text("  it does not reach time 0: see its first line", style="yellow"))
    return lines


def _faster(report: Report) -> str:
    """What to say where the period is not the least one of its orders."""
    least = report.least_period
    if least is None or least >= report.span:
        return ""
    return f"; in these orders a period of {time_text(least, report.time_unit)} would do"


def _runs(steps: tuple[CriticalStep, ...]) -> list[list[CriticalStep]]:
    """Steps that follow each other on the same resources: one line each."""
    return [list(group) for _, group in itertools.groupby(steps, key=lambda step: step.resources)]


def _run_cells(run: list[CriticalStep], time_unit: str) -> list[Text]:
    """When, where, what and why, each in its column."""
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
