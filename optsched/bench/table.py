"""A summary as tables for people, and as one JSON object for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from optsched.io.text import one_line

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from optsched.bench.summary import Mean, Summary

NARROW = 125
"""Columns of a terminal below which only the most important means are shown."""

MOST_INSTANCES = 200
"""Above, the table of instances is left out: the results file has them."""


def render(summary: Summary, console: Console) -> None:
    """Gaps per instance (medians over seeds), then means per family and configuration."""
    from rich.table import Table

    if len(summary.references) <= MOST_INSTANCES:
        table = Table(title="gap to the best known schedule, median over seeds")
        table.add_column("instance")
        table.add_column("size", justify="right")
        table.add_column("best bound", justify="right")
        table.add_column("best known", justify="right")
        for name in summary.configurations:
            table.add_column(_text(name), justify="right")
        cells = {(cell.instance, cell.configuration): cell for cell in summary.cells}
        for name, reference in summary.references.items():
            row = [cells.get((name, configuration)) for configuration in summary.configurations]
            table.add_row(
                _text(name), reference.size, _number(reference.lower), _number(reference.upper),
                *("-" if c is None else _percent(c.gap) + "*" * (c.proved == c.runs) for c in row),
            )  # fmt: skip
        console.print(table)
        console.print("* proved optimal in every run", highlight=False)
    console.print(_means(summary, narrow=console.width < NARROW))
    for sentence in (*summary.contradictions, *summary.errors):
        console.print(_text(sentence), style="bold red", highlight=False)


def as_json(summary: Summary) -> dict[str, Any]:
    """Every number of the summary, by name."""
    return {
        "configurations": summary.configurations,
        "instances": [
            {"instance": name, **reference._asdict()}
            for name, reference in summary.references.items()
        ],
        "cells": [cell._asdict() for cell in summary.cells],
        "means": [mean._asdict() for mean in summary.means],
        "contradictions": summary.contradictions,
        "errors": summary.errors,
    }


def _means(summary: Summary, narrow: bool) -> Any:
    from rich.table import Table

    table = Table(title="means over instances")
    columns: dict[str, Callable[[Mean], str]] = {
        "solved": lambda m: f"{m.solved}/{m.instances}",
        "proved": lambda m: f"{m.proved}/{m.runs}",
        "gap": lambda m: _percent(m.gap),
        "worst": lambda m: _percent(m.worst_gap),
        "bound gap": lambda m: _percent(m.bound_gap),
        "primal integral": lambda m: _fraction(m.primal_integral),
        "to best": lambda m: _seconds(m.time_to_best),
        "to proof": lambda m: _seconds(m.time_to_proof),
        "wall": lambda m: _seconds(m.wall_seconds),
        "CPU": lambda m: _seconds(m.cpu_seconds),
    }
    if narrow:
        columns = {head: columns[head] for head in ("solved", "proved", "gap", "worst", "wall")}
    table.add_column("family")
    table.add_column("solver")
    for head in columns:
        table.add_column(head, justify="right")
    last = None
    for mean in summary.means:
        if last not in (None, mean.family):
            table.add_section()
        family = _text(mean.family) if mean.family != last else ""
        table.add_row(family, _text(mean.configuration), *(show(mean) for show in columns.values()))
        last = mean.family
    return table


def _text(name: str) -> Any:
    from rich.text import Text

    return Text(one_line(name, 200))  # names are data, never markup


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}"


def _fraction(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"
