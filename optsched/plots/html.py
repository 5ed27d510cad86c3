"""A self-contained interactive page of a schedule: one HTML file, no network, no server."""

from __future__ import annotations

import html
import json
import re
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np

from optsched.analysis.occupancy import bars, holds_memory, horizon, memory_steps, setups
from optsched.analysis.report import Report, report
from optsched.analysis.unroll import copies
from optsched.io.files import write_atomic
from optsched.io.text import one_line, readable_unit
from optsched.model.schedule import NO_DEADLINE
from optsched.plots.look import colour, shades, worth

if TYPE_CHECKING:
    import os

    from optsched.analysis.iterations import JobReport
    from optsched.model.schedule import Schedule


def write(schedule: Schedule, path: str | os.PathLike[str], *, cycles: int = 3) -> None:
    """Write the interactive page of a schedule; see `page`."""
    write_atomic(path, page(schedule, cycles=cycles))


def page(schedule: Schedule, *, cycles: int = 3) -> str:
    """Make the interactive page: zoom, pan, tooltips, one job or the critical path at a time.

    A periodic schedule is drawn in its steady state; hollow bars belong to iterations before the
    first, which a cold start leaves out.

    Everything is inside the text, nothing is loaded. Strings of the schedule are data: they are
    shown, never interpreted.

    Parameters
    ----------
    schedule
        A scheduled graph; it is not verified.
    cycles
        Periods to draw of a periodic schedule.

    Raises
    ------
    InputError
        The graph is not scheduled.

    Examples
    --------
    >>> shop = optsched.JobShop([[(0, 3), (1, 2)], [(1, 4), (0, 1)]])
    >>> from optsched.plots import html
    >>> html.page(optsched.solve(shop).schedule)[:15]
    '<!doctype html>'
    """
    summary = report(schedule)
    template = resources.files("optsched.plots").joinpath("page.html").read_text("utf-8")
    top, middle, foot = re.split(f"{re.escape(_TITLE)}|{re.escape(_DATA)}", template)
    title = html.escape(one_line(schedule.name) or "schedule")
    return top + title + middle + _safe_json(payload(schedule, summary, cycles)) + foot


def payload(schedule: Schedule, summary: Report, cycles: int = 3) -> dict[str, Any]:
    """Return the data of the page: integers in the schedule's units, columns of equal length."""
    span = max(horizon(schedule, cycles), 1)
    unit = readable_unit(schedule.time_unit, span)
    chart, waits = bars(schedule, cycles), setups(schedule, cycles)
    look = shades(schedule)
    kinds = list(look)
    size = f"{summary.operations} operations of {summary.jobs} jobs"
    return {
        "name": one_line(schedule.name) or "schedule",
        "headline": " · ".join([*worth(summary), size]),
        "unit": {"own": schedule.time_unit.replace("us", "µs"), **unit._asdict()},
        "span": span,
        "share_span": summary.span,
        "period": schedule.period,
        "resources": [_resource(summary, r) for r in range(schedule.n_resources)],
        "jobs": [_job(row) for row in summary.iterations],
        "job_names": [one_line(name, 60) for name in schedule.job_names],
        "kinds": [{"name": one_line(kind), "hatch": bool(look[kind].hatch)} for kind in kinds],
        "operations": _operations(schedule, kinds),
        "arcs": _arcs(schedule),
        "bars": _columns(chart, ("operation", "resource", "start", "end", "cycle")),
        "setups": _columns(waits, ("resource", "operation", "start", "end")),
        "memory": [
            [column.tolist() for column in memory_steps(schedule, r, cycles)]
            for r in range(schedule.n_resources)
        ]
        if holds_memory(schedule)
        else [],
        "critical": [[s.operation, one_line(s.reason, 200)] for s in summary.critical_path],
        "critical_complete": summary.path_is_complete,
    }


_TITLE = "<!--TITLE-->"
_DATA = "/*DATA*/"

_FIELDS = (
    "job", "stage", "microbatch", "iteration", "offset", "family", "duration", "release",
    "setup_in", "setup_out", "acquire", "free", "workspace",
)  # fmt: skip


def _safe_json(tree: Any) -> str:
    """JSON in ASCII that cannot end the script element it stands in."""
    text = json.dumps(tree, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _columns(table: Any, keys: tuple[str, ...]) -> dict[str, list[int]]:
    return {key: getattr(table, key).tolist() for key in keys}


def _resource(summary: Report, r: int) -> dict[str, Any]:
    row = summary.resources[r]
    keys = ("operations", "busy", "setup", "bubble", "memory")
    found = {key: getattr(row, key) for key in keys}
    return {"name": one_line(row.name, 60), "peak": row.peak_memory, **found}


def _job(row: JobReport) -> dict[str, Any]:
    keys = ("job", "iterations", "latency", "wait", "recompute")
    return {key: getattr(row, key) for key in keys}


def _operations(schedule: Schedule, kinds: list[str]) -> dict[str, Any]:
    """Columns of fields; those that are zero throughout are left out."""
    look = shades(schedule)
    columns: dict[str, Any] = {
        key: getattr(schedule, key).tolist()
        for key in _FIELDS
        if key in ("job", "duration") or getattr(schedule, key).any()
    }
    place = {kind: k for k, kind in enumerate(kinds)}
    columns["kind"] = [place[kind] for kind in schedule.kind.tolist()]
    columns["resources"] = schedule.op_resources.to_lists()
    if schedule.iteration.any():
        columns["copies"] = copies(schedule).tolist()
    if (schedule.deadline != NO_DEADLINE).any():
        columns["deadline"] = [None if d == NO_DEADLINE else d for d in schedule.deadline.tolist()]
    palette: dict[str, int] = {}
    columns["colour"] = [
        palette.setdefault(colour(job, look[kind]), len(palette))
        for job, kind in zip(schedule.job.tolist(), schedule.kind.tolist(), strict=True)
    ]
    columns["palette"] = list(palette)
    return columns


def _arcs(schedule: Schedule) -> dict[str, list[int]]:
    """Arcs with their tokens: how many cycles later the head runs than the tail."""
    tail, head, lag, distance = schedule.arcs
    tokens = distance + schedule.offset[head] - schedule.offset[tail]
    near = np.abs(tokens) <= 100  # the drawing shows no more cycles
    columns = {"tail": tail, "head": head, "lag": lag, "tokens": tokens}
    return {key: column[near].tolist() for key, column in columns.items()}
