"""A summary as tables for the terminal, as a LaTeX table, and as one JSON object."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from optsched.io.text import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from rich.console import Console

    from optsched.bench.summary import Cell, Mean, Summary

NARROW: Final = 125
"""Width of a terminal below which only the most important means are printed."""

MOST_INSTANCES: Final = 200
"""Above, the table of instances is left out: the results file has them."""

_LATEX: Final = str.maketrans(
    {c: rf"\{c}" for c in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
       "<": r"\textless{}", ">": r"\textgreater{}"}
)  # fmt: skip


def render(summary: Summary, console: Console) -> None:
    """Print gaps per instance (medians over seeds), then means per family and configuration."""
    from rich.table import Table

    if len(summary.references) <= MOST_INSTANCES:
        table = Table(title="gap to the best known schedule, median over seeds")
        table.add_column("instance")
        for head in ("size", "best bound", "best known", *map(_text, summary.configurations)):
            table.add_column(head, justify="right")
        rows = _instances(summary)
        for row in rows:
            table.add_row(_text(row[0]), *row[1:])
        console.print(table)
        if any(cell.endswith("*") for row in rows for cell in row[4:]):
            console.print("* proved optimal in every run", highlight=False)
    if unknown := [name for name, reference in summary.references.items() if not reference.known]:
        text = f"no known bounds, gaps to the best of these runs: {', '.join(unknown)}"
        console.print(_text(text), highlight=False)
    console.print(_means(summary, narrow=console.width < NARROW))
    if better := sorted({cell.instance for cell in summary.cells if (cell.gap or 0) < 0}):
        console.print(_text(f"better than best known: {', '.join(better)}"), highlight=False)
    for sentence in (*summary.contradictions, *summary.errors):
        console.print(_text(sentence), style="bold red", highlight=False)


def as_json(summary: Summary) -> dict[str, Any]:
    """Return every number of the summary, by name."""
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


def latex(summary: Summary) -> str:
    r"""Return the table of gaps as LaTeX (package ``booktabs``), a last row with the means.

    The least gap of every row is bold; ``*`` marks instances proved optimal in every run.
    """
    heads = ["instance", "size", "best bound", "best known", *summary.configurations]
    lines = [rf"\begin{{tabular}}{{l{'r' * (len(heads) - 1)}}}", r"\toprule"]
    lines += [_latex_row(heads), r"\midrule"]
    lines += [_latex_row(row, bold=_least(row)) for row in _instances(summary)]
    means = {m.configuration: m for m in summary.means[-len(summary.configurations) :]}
    row = ["mean", "", "", "", *(_percent(means[name].gap) for name in summary.configurations)]
    lines += [r"\midrule", _latex_row(row, bold=_least(row)), r"\bottomrule", r"\end{tabular}"]
    return "\n".join(lines) + "\n"


def _instances(summary: Summary) -> list[list[str]]:
    """Return instance, size, bound, objective and the gap of every configuration as texts."""
    cells = {(cell.instance, cell.configuration): cell for cell in summary.cells}

    def gap(cell: Cell | None) -> str:
        return "-" if cell is None else _percent(cell.gap) + "*" * (cell.proved == cell.runs)

    return [
        [
            name, reference.size,
            *("-" if n is None else str(n) for n in (reference.lower, reference.upper)),
            *(gap(cells.get((name, configuration))) for configuration in summary.configurations),
        ]
        for name, reference in summary.references.items()
    ]  # fmt: skip


def _least(row: Sequence[str]) -> set[int]:
    """Return the columns of the least gap of a row."""
    gaps = {k: float(cell.rstrip("*%")) for k, cell in enumerate(row[4:], 4) if cell != "-"}
    return {k for k, gap in gaps.items() if gap == min(gaps.values())}


def _latex_row(cells: Sequence[str], bold: Collection[int] = ()) -> str:
    texts = [one_line(cell, 200).translate(_LATEX) for cell in cells]
    return " & ".join(rf"\textbf{{{t}}}" if k in bold else t for k, t in enumerate(texts)) + r" \\"


def _means(summary: Summary, narrow: bool) -> Any:
    from rich.table import Table

    columns: dict[str, Callable[[Mean], str]] = {
        "solved": lambda m: f"{m.solved}/{m.instances}",
        "proved": lambda m: f"{m.proved}/{m.runs}",
        "gap": lambda m: _percent(m.gap),
        "worst": lambda m: _percent(m.worst_gap),
        "wall": lambda m: _seconds(m.wall_seconds),
        "bound gap": lambda m: _percent(m.bound_gap),
        "primal integral": lambda m: (
            "-" if m.primal_integral is None else f"{m.primal_integral:.4f}"
        ),
        "to best": lambda m: _seconds(m.time_to_best),
        "to proof": lambda m: _seconds(m.time_to_proof),
        "CPU": lambda m: _seconds(m.cpu_seconds),
    }
    columns = dict(list(columns.items())[: 5 if narrow else None])
    table = Table(title="means over instances")
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


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"
