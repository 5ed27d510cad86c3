"""One picture or page of all policies that were simulated on a workload."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

from optsched.errors import InputError
from optsched.io.files import write_atomic
from optsched.io.text import one_line, readable_unit
from optsched.plots.picture import PICTURES, new_figure, picture, picture_style, rendered
from optsched.plots.policies import draw_cdf, draw_decomposition, draw_utilisation, times_of

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from matplotlib.figure import Figure

    from optsched.cluster.results.run import Run

SUFFIXES = (*PICTURES, ".html")
"""Legal suffixes of a report."""


def simulation_report(
    runs: Mapping[str, Run], path: str | os.PathLike[str], *, title: str = ""
) -> None:
    """All completion times, what they are made of, and the use of the cluster, in one file.

    Of a single `optsched.elastic.LiveRun`: its workers over time, and what was learned by pass.

    Parameters
    ----------
    runs
        Runs of one workload by policy.
    path
        ``.png``, ``.svg``, ``.pdf``, or ``.html`` for a page that also has the table; nothing is
        loaded by it.
    title
        Of the report; by default the workload's name.

    Raises
    ------
    InputError
        No run, or a file that cannot be written.
    MissingExtra
        matplotlib is not installed.
    """
    if not runs:
        raise InputError("runs: expected at least one")
    some = next(iter(runs.values()))
    kind = "elastic training" if hasattr(some, "live") else "simulation"
    name = one_line(title or some.workload.name or kind)
    if str(path).lower().endswith(".html"):
        with picture_style():
            drawing = rendered(_draw(runs, ""), ".svg").decode()
        write_atomic(path, _page(name, drawing[drawing.index("<svg") :], runs))
    else:
        picture(lambda: _draw(runs, name), path)


def check_suffix(path: str | os.PathLike[str]) -> None:
    """Refuse a name that `simulation_report` could not write to."""
    if not str(path).lower().endswith(SUFFIXES):
        raise InputError(f"{path}: expected a file ending in {', '.join(SUFFIXES)}")


def table(runs: Mapping[str, Run]) -> tuple[list[str], list[list[str]]]:
    """Header and rows as people read them; times in a readable unit."""
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


def _draw(runs: Mapping[str, Run], name: str) -> Figure:
    if len(runs) == 1 and hasattr(run := next(iter(runs.values())), "live"):  # real training
        from optsched.plots.elastic import draw_elastic

        return draw_elastic(run, name)
    figure = new_figure(9, 8.4 + 0.3 * len(runs), name)
    heights = [4.0, 1.2 + 0.3 * len(runs), 2.8]
    above, middle, below = figure.subplots(3, 1, height_ratios=heights)
    unit = next(iter(runs.values())).workload.time_unit
    draw_cdf(above, times_of({label: run.jct for label, run in runs.items()}), unit)
    draw_decomposition(middle, {label: run.metrics for label, run in runs.items()})
    draw_utilisation(below, runs)
    return figure


_STYLE = """
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
    words = (
        f"{len(some.workload)} jobs on {some.nodes.total} GPUs in {len(some.nodes.gpus)} nodes, "
        f"restart cost {s.restart_cost} {some.workload.time_unit}, resize {s.resize}, seed {s.seed}"
    )
    cells = "".join(_row((policy, job, why.text), "td") for policy, run in runs.items()
                    for job, why in run.reported_waiting().items())  # fmt: skip
    if cells:
        drawing += f"<table>{_row(('policy', 'waiting job', 'reason'), 'th')}{cells}</table>"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'\">\n"
        f"<title>{html.escape(name)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"<h1>{html.escape(name)}</h1>\n<p>{html.escape(words)}</p>\n<table>\n"
        f"{_row(header, 'th')}{''.join(_row(row, 'td') for row in rows)}</table>\n"
        f"{drawing}\n</main>\n</body>\n</html>\n"
    )


def _row(cells: Sequence[Any], tag: str) -> str:
    inside = "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in cells)
    return f"<tr>{inside}</tr>\n"
