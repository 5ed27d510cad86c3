"""A `Report` as tables for the terminal."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from optsched.plots.look import bytes_text, plain, share_text, time_text, worth

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from optsched.report import CriticalStep, Report, ResourceReport

_MOST_RUNS = 24  # lines of critical path: more than a screen helps nobody


def render(report: Report) -> Group:
    """What ``optsched show`` prints: the headline, the resources and the critical path.

    Strings of the document appear as they are, never as markup.
    """
    from rich.console import Group

    return Group(_headline(report), "", _resources(report), "", *_path(report))


def _headline(report: Report) -> Text:
    from rich.text import Text

    text = Text(plain(report.name) or "schedule", style="bold")
    parts = [*worth(report), *([] if report.status == "optimal" else [report.status])]
    style = "green" if report.status == "optimal" else "default"
    text.append("\n" + ", ".join(parts), style)
    size = f"\n{report.operations} operations of {report.jobs} jobs"
    text.append(f"{size} on {len(report.resources)} resources", "dim")
    return text


def _resources(report: Report) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    memory = any(row.peak_memory or row.memory for row in report.resources)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("resource")
    setups = any(row.setup for row in report.resources)
    heads = ["operations", "busy", "busy %", *(["setup", "setup %"] if setups else []), "bubble %"]
    for head in [*heads, "peak memory", "capacity"] if memory else heads:
        table.add_column(head, justify="right")
    unit = report.time_unit
    for row in report.resources:
        cells: list[str | Text] = [str(row.operations), time_text(row.busy, unit)]
        cells.append(share_text(row.busy_share))
        if setups:
            cells += [time_text(row.setup, unit), share_text(row.setup_share)]
        cells.append(share_text(row.bubble_share))
        table.add_row(Text(plain(row.name, 40)), *cells, *(_memory(row) if memory else ()))
    return table


def _memory(row: ResourceReport) -> tuple[Text, str]:
    from rich.text import Text

    over = 0 < row.memory < row.peak_memory
    peak = Text(bytes_text(row.peak_memory), style="bold red" if over else "")
    return peak, bytes_text(row.memory) if row.memory else "unlimited"


def _path(report: Report) -> list[Text]:
    from rich.text import Text

    steps = report.critical_path
    if not steps:
        return [Text("no critical path: nothing runs, or no cycle of operations is tight")]
    what = "critical path" if report.period is None else "critical cycle"
    lines = [Text(f"{what}, {len(steps)} operations:", style="bold")]
    runs = _runs(steps)
    for run in runs[:_MOST_RUNS]:
        lines.append(_run_line(run, report.time_unit))
    if len(runs) > _MOST_RUNS:
        rest = sum(len(run) for run in runs[_MOST_RUNS:])
        lines.append(Text(f"  … and {rest} operations more", style="dim"))
    if not report.path_is_complete:
        lines.append(Text("  it does not reach time 0: see its first line", style="yellow"))
    return lines


def _runs(steps: tuple[CriticalStep, ...]) -> list[list[CriticalStep]]:
    """Steps that follow each other on the same resources: one line each."""
    return [list(group) for _, group in itertools.groupby(steps, key=lambda step: step.resources)]


def _run_line(run: list[CriticalStep], time_unit: str) -> Text:
    from rich.text import Text

    first, last = run[0], run[-1]
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(f"  {time_text(first.start, time_unit):>14}  ", "dim")
    line.append(plain(" + ".join(first.resources), 40) + "  ", "cyan")
    line.append(plain(first.words), "default")
    if len(run) > 1:
        between = " … " if len(run) > 2 else ", "
        line.append(between + plain(last.words), "default")
        line.append(f" ({len(run)} operations)", "dim")
    line.append(f"  {plain(first.reason, 120)}", "dim")
    return line
