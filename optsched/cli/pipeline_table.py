"""What ``optsched pipeline`` prints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fractions import Fraction

    from rich.console import Console
    from rich.table import Table

    from optsched.model.schedule import Schedule
    from optsched.model.violation import Violation


@dataclass(frozen=True)
class Row:
    """One pipeline: its schedule, or the sentence why there is none."""

    name: str
    schedule: Schedule | None = None
    violations: tuple[Violation, ...] = ()
    published: str = ""
    chunks: int = 0  # activations are counted in chunks; 0: bytes
    reason: str = ""


def comparison(rows: list[Row]) -> Table:
    """All pipelines side by side."""
    from rich import box
    from rich.table import Table

    from optsched.plots.look import plain, time_text

    periodic = any(row.schedule is not None and row.schedule.period for row in rows)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("pipeline", no_wrap=True)
    for head in ("period" if periodic else "makespan", "bubble"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("published", overflow="fold")
    for head in ("peak", "memory"):
        table.add_column(head, justify="right")
    for row in rows:
        if row.schedule is None:
            table.add_row(row.name, "-", "-", plain(row.reason, 300), "-", "-")
            continue
        schedule = row.schedule
        span = schedule.makespan if schedule.period is None else schedule.period
        table.add_row(
            row.name, time_text(span, schedule.time_unit), _percent(_idle(schedule)),
            row.published, _held(max(_peaks(schedule), default=0), row.chunks),
            "too small" if row.violations else "fits",
        )  # fmt: skip
    return table


def details(row: Row, console: Console) -> None:
    """What there is to know about one pipeline."""
    from rich import box
    from rich.table import Table

    from optsched.analysis.report import report
    from optsched.plots.look import bytes_text, plain, time_text

    schedule = row.schedule
    assert schedule is not None  # or there was an error
    kind = "makespan" if schedule.period is None else "period"
    span = schedule.makespan if schedule.period is None else schedule.period
    console.print(f"{'pipeline':12}{plain(schedule.name or row.name, 1000)}")
    console.print(f"{kind:12}{time_text(span, schedule.time_unit)}")
    console.print(f"{'bubble':12}{_percent(_idle(schedule))}")
    if row.published:
        console.print(f"{'published':12}{row.published}")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("device", no_wrap=True)
    what = "peak activations" if row.chunks else "peak memory"
    for head in ("operations", "busy", "bubble", what, *(() if row.chunks else ("capacity",))):
        table.add_column(head, justify="right")
    for line in report(schedule).resources:
        capacity = bytes_text(line.memory) if line.memory else "unlimited"
        table.add_row(
            plain(line.name, 40), str(line.operations), f"{100 * line.busy_share:.1f} %",
            f"{100 * line.bubble_share:.1f} %", _held(line.peak_memory, row.chunks),
            *(() if row.chunks else (capacity,)),
        )  # fmt: skip
    console.print(table)
    for violation in row.violations:
        console.print(f"does not fit: {plain(violation.message, 1000)}")


def _idle(schedule: Schedule) -> Fraction:
    from optsched.pipelines import idle_share

    return idle_share(schedule)


def _peaks(schedule: Schedule) -> list[int]:
    from optsched.analysis.occupancy import peak_memory

    return [peak_memory(schedule, r) for r in range(schedule.n_resources)]


def _held(count: int, chunks: int) -> str:
    """Activations of whole devices, or bytes."""
    from optsched.plots.look import bytes_text

    return f"{count / chunks:g}" if chunks else bytes_text(count)


def _percent(share: Fraction) -> str:
    return f"{100 * float(share):.2f} %"
