"""A picture of a benchmark: performance profile, and gaps to the best known per instance."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from optsched.bench.summary import ALL
from optsched.errors import InputError
from optsched.io.text import one_line
from optsched.plots.picture import INK, dress, look_of, new_figure, picture

if TYPE_CHECKING:
    import os

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from optsched.bench.summary import Summary

_MOST_INSTANCES: Final = 60
"""Rows of the picture; above, families take the place of instances."""


def bench_report(summary: Summary, path: str | os.PathLike[str] | None = None) -> Figure:
    """Draw a performance profile (Dolan & Moré 2002) and the gaps of all solvers.

    The profile is the share of instances whose gap to the best known objective is at most x;
    instances without a schedule never count. Gaps are medians over seeds.

    Parameters
    ----------
    summary
        Of `optsched.bench.summary.summarise`.
    path
        ``.png``, ``.svg`` or ``.pdf``; None: only the figure is returned.

    Raises
    ------
    InputError
        No instance with a gap, or a file that cannot be written.
    MissingExtra
        matplotlib is not installed.

    Examples
    --------
    >>> from optsched.bench.rows import Results
    >>> from optsched.bench.summary import summarise
    >>> summary = summarise(Results("results.csv").rows)  # doctest: +SKIP
    >>> optsched.plots.bench_report(summary, "gaps.svg")  # doctest: +SKIP
    """
    if not any(cell.gap is not None for cell in summary.cells):
        raise InputError("plot: no solver has a schedule, there is nothing to draw")
    rows = _rows(summary)

    def draw() -> Figure:
        figure = new_figure(11, max(4.2, 1.6 + 0.2 * len(rows)))
        profile, gaps = figure.subplots(1, 2)
        _profile(profile, summary)
        _gaps(gaps, summary, rows)
        return figure

    return picture(draw, path)


def _profile(axes: Axes, summary: Summary) -> None:
    total = len(summary.references)
    found = {}
    for name in summary.configurations:
        cells = [cell for cell in summary.cells if cell.configuration == name]
        found[name] = np.sort([cell.gap for cell in cells if cell.gap is not None])
    most = 100 * max(float(gaps[-1]) for gaps in found.values() if len(gaps))
    for k, (name, gaps) in enumerate(found.items()):
        share = np.arange(len(gaps) + 1) / total
        x = np.concatenate(([0.0], 100 * gaps, [1.05 * most + 0.01]))
        axes.step(
            x, np.append(share, share[-1]), where="post", lw=1.6, label=one_line(name, 60),
            gid=f"profile-{k}", **look_of(k),
        )  # fmt: skip
    dress(axes, f"performance profile of {total} instances")
    axes.set_xlim(left=0)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("gap to the best known objective in %", fontsize=9)
    axes.set_ylabel("share of instances within the gap", fontsize=9)
    axes.legend(frameon=False, fontsize=9, loc="lower right")


def _rows(summary: Summary) -> dict[str, dict[str, float]]:
    """Return the gaps in percent of every instance, or family, by configuration."""
    if len(summary.references) <= _MOST_INSTANCES:
        found = [(c.instance, c.configuration, c.gap) for c in summary.cells]
    else:
        families = len({reference.family for reference in summary.references.values()})
        found = [(m.family, m.configuration, m.gap) for m in summary.means
                 if families == 1 or m.family != ALL]  # fmt: skip
    rows: dict[str, dict[str, float]] = {}
    for row, configuration, gap in found:
        rows.setdefault(row, {})
        if gap is not None:
            rows[row][configuration] = 100 * gap
    return rows


def _gaps(axes: Axes, summary: Summary, rows: dict[str, dict[str, float]]) -> None:
    names = list(rows)
    for k, configuration in enumerate(summary.configurations):
        at = [y for y, name in enumerate(names) if configuration in rows[name]]
        values = [rows[names[y]][configuration] for y in at]
        fill = look_of(k)["color"]
        axes.plot(values, at, "o", ms=5, color=fill, alpha=0.85, gid=f"gaps-{k}", clip_on=False)
    dress(axes, "gap to the best known objective in % (median over seeds)")
    axes.set_yticks(range(len(names)), [one_line(n, 24) for n in names], fontsize=8, color=INK)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(left=min([0.0, *(gap for row in rows.values() for gap in row.values())]))
