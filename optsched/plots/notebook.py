"""Views and data frames for notebooks: the code behind `_repr_html_` and `to_pandas`."""

from __future__ import annotations

import base64
import html
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.analysis.report import report
from optsched.errors import MissingExtra, OptschedError
from optsched.io.text import one_line, share_text
from optsched.model.graph import describe
from optsched.plots.cluster_map import gpu_map
from optsched.plots.gantt_chart import gantt
from optsched.plots.look import worth
from optsched.plots.picture import picture_style, rendered
from optsched.plots.simulation import html_row, simulation_report, table
from optsched.serving.tables import NS_PER_MS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import pandas
    from matplotlib.figure import Figure

    from optsched.arraypipe.trainer import RunResult
    from optsched.bandwidth.topology.state import ClusterState
    from optsched.cluster.results.run import Run
    from optsched.model.schedule import Schedule
    from optsched.serving.log import Log
    from optsched.solving.result import Result

_MOST: Final = 20_000
_MOST_RESOURCES: Final = 512
_MOST_GPUS: Final = 2_048
"""Largest sizes of pictures; more, which would take seconds, is shown as a table."""


def _view(
    caption: str, draw: Callable[[], Figure] | None, header: Sequence[str], rows: Sequence[Any]
) -> str:
    """Make HTML of a picture, or of a caption and a table if there is none.

    It loads nothing; texts are escaped; without matplotlib the caption has the way to install it.
    """
    try:
        if draw is not None:
            with picture_style():
                data = base64.b64encode(rendered(draw(), ".png")).decode()
            source = f"data:image/png;base64,{data}"
            return f'<img style="max-width:100%" alt="{html.escape(caption)}" src="{source}">'
    except OptschedError as error:
        caption += f" (no picture: {error})"
    lines = [html_row(header, "th"), *(html_row(row, "td") for row in rows[:32])]
    lines += [html_row([f"... of {len(rows)}"], "td")] * (len(rows) > 32)
    return f"<p>{html.escape(caption)}</p><table>{''.join(lines)}</table>"


def schedule_view(schedule: Schedule) -> str:
    """Gantt chart of a schedule, or the use of its resources."""
    if not schedule.is_scheduled:
        return f"<p>{html.escape(repr(schedule))}</p>"
    small = schedule.n_operations <= _MOST and schedule.n_resources <= _MOST_RESOURCES
    draw = (lambda: gantt(schedule, width=11)) if small else None
    found = report(schedule)
    rows = [
        (one_line(r.name, 40), r.operations, *map(share_text, (r.busy_share, r.setup_share)))
        for r in found.resources
    ]
    caption = ", ".join([one_line(schedule.name) or "schedule", *worth(found)])
    return _view(caption, draw, ("resource", "operations", "busy", "setup"), rows)


def result_view(result: Result) -> str:
    """Status, objective and bound of a result, and its schedule."""
    schedule = "" if result.schedule is None else schedule_view(result.schedule)
    return f"<p>{html.escape(repr(result))}</p>{schedule}"


def training_view(result: RunResult) -> str:
    """Report of a run of the executor, and its blocks as they ran."""
    return result.report._repr_html_() + schedule_view(result.trace)


def simulation_view(run: Run) -> str:
    """Completion times and use of the GPUs in a simulation or an elastic run."""
    runs = {run.policy: run}
    rows = table(runs) if run.metrics.ended.any() else ((), ())
    return _view(repr(run), lambda: simulation_report(runs), *rows)


def state_view(state: ClusterState) -> str:
    """Map of the GPUs of a cluster, or its jobs."""
    rows = [(one_line(job.name, 40), len(job.gpus)) for job in state.jobs]
    draw = (lambda: gpu_map(state)) if state.cluster.n_gpus <= _MOST_GPUS else None
    return _view(repr(state), draw, ("job", "GPUs"), rows)


def serving_view(log: Log) -> str:
    """Totals of a run of serving."""
    totals = [(key, getattr(log.summary, key)) for key in log.summary.__struct_fields__]
    rows = [(key, f"{value:,.6g}") for key, value in totals if value is not None]
    return _view(repr(log), None, ("total", "value"), rows)


def frame(columns: Mapping[str, Any]) -> pandas.DataFrame:
    """Make a data frame of columns of equal length; lists with None become nullable."""
    try:
        import pandas
    except ImportError:
        raise MissingExtra("to_pandas", "pandas") from None
    return pandas.DataFrame({
        name: pandas.Series(values, dtype=object).convert_dtypes()
        if isinstance(values, list) and None in values else values
        for name, values in columns.items()
    })  # fmt: skip


def operations(schedule: Schedule) -> pandas.DataFrame:
    """Make a data frame with one row per operation; see `Schedule.to_pandas`."""
    names, count = [resource.name for resource in schedule.resources], range(schedule.n_operations)
    times = {} if schedule.start is None else {"start": schedule.start, "end": schedule.end}
    return frame({
        "job": [schedule.job_name(job) for job in schedule.job.tolist()],
        "name": [describe(schedule, i) for i in count],
        **{key: getattr(schedule, key) for key in ("kind", "stage", "microbatch", "iteration")},
        "resource": ["+".join(names[r] for r in row) for row in schedule.op_resources.to_lists()],
        "duration": schedule.duration, **times,
        **({} if schedule.period is None else {"offset": schedule.offset}),
        "unit": [schedule.time_unit for _ in count],
    })  # fmt: skip


def requests(log: Log) -> pandas.DataFrame:
    """Make a data frame with one row per request of a batch; see `Log.to_pandas` of serving."""
    batch = np.repeat(log.batches, log.batches["images"])
    return frame({
        "request": [log.scenario.ids[r] for r in log.entries["request"].tolist()],
        "server": [log.scenario.servers[s].id for s in batch["server"].tolist()],
        **{key: batch[key].copy() for key in ("instance", "segment", "width", "images")},
        "queued_ms": log.entries["queued"] / NS_PER_MS,
        "start_ms": batch["start"] / NS_PER_MS, "end_ms": batch["end"] / NS_PER_MS,
    })  # fmt: skip
