"""Writing a workload as a trace that reads back the same."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING, Any

import numpy as np

from optsched.errors import InputError
from optsched.formats.trace_extras import SEPARATOR
from optsched.formats.trace_table import COLUMNS, PER_SECOND
from optsched.io.files import write_atomic
from optsched.io.strict_json import format_json

if TYPE_CHECKING:
    import os

    from optsched.cluster.workload import Workload
    from optsched.model.schedule import IntArray

_MOST_CELL = 131_000  # characters: what readers of CSV take


def write_trace(workload: Workload, path: str | os.PathLike[str]) -> None:
    """Write jobs as a trace that `read_trace` reads back.

    Kept are name, submit time, priority, weight, group, template, passes, whether preemptible,
    `source` as type, sizes, and the work as the duration on ``num_gpus``: the smallest size at
    which it is a whole number of units of time (if there is none, the smallest, rounded up).
    Columns that no job needs are left out. There is no column for speed-ups (give them to
    `read_trace` again), limits and weights of groups, curves, targets, restart costs, estimates
    and micro factors.

    Raises
    ------
    InputError
        A list of sizes that is too long for a cell, or a file that cannot be written.
    """
    w, scale = workload, PER_SECOND[workload.time_unit]
    first = w.size_ptr[:-1]
    exact = np.repeat(w.work, np.diff(w.size_ptr)) % w.rate == 0
    place = np.minimum.reduceat(np.where(exact, np.arange(len(exact)), len(exact)), first)
    at = np.where(place < len(exact), place, first)
    columns: dict[str, Any] = dict(
        zip(
            COLUMNS,
            (
                w.names,
                _seconds(w.submit, scale),
                w.size[at].tolist(),
                _seconds(-(-w.work // w.rate[at]), scale),
                w.priority.tolist(),
                w.source.tolist(),
            ),
            strict=True,
        )
    )
    columns |= _sizes(w, path) | _others(w)
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    write_atomic(path, text.getvalue())


def _sizes(w: Workload, path: Any) -> dict[str, list[Any]]:
    """Bounds of jobs whose sizes have no gaps, lists of others, nothing for rigid ones."""
    if w.is_rigid:
        return {}
    ends = w.size_ptr.tolist()
    low, high = w.size[w.size_ptr[:-1]].tolist(), w.size[w.size_ptr[1:] - 1].tolist()
    found: dict[str, list[Any]] = {key: [""] * len(w) for key in ("min_gpus", "max_gpus", "sizes")}
    for i in np.flatnonzero(np.diff(w.size_ptr) > 1).tolist():
        count = ends[i + 1] - ends[i]
        if high[i] - low[i] + 1 == count:
            found["min_gpus"][i], found["max_gpus"][i] = low[i], high[i]
            continue
        cell = SEPARATOR.join(map(str, w.sizes_of(i).tolist()))
        if len(cell) > _MOST_CELL:
            raise InputError(f"{path}: job {format_json(w.names[i])}: {count:,} sizes are too many")
        found["sizes"][i] = cell
    return {key: column for key, column in found.items() if any(column)}


def _others(w: Workload) -> dict[str, list[Any]]:
    """Columns in which some job differs from what is taken for granted."""
    found: dict[str, list[Any]] = {
        "weight": ["" if x == 1 else repr(x) for x in w.weight.tolist()],
        "group": [w.groups[g].name for g in w.group.tolist()],
        "preemptible": ["" if x else "false" for x in w.preemptible.tolist()],
        "passes": ["" if x == 1 else x for x in w.passes.tolist()],
        "template": ["" if t < 0 else w.templates[t] for t in w.template.tolist()],
    }
    return {key: column for key, column in found.items() if any(column)}


def _seconds(times: IntArray, scale: int) -> list[str]:
    if scale == 1:
        return list(map(str, times.tolist()))
    digits = len(str(scale)) - 1
    found = []
    for value in times.tolist():
        whole, part = divmod(value, scale)
        found.append(f"{whole}.{part:0{digits}d}".rstrip("0").rstrip("."))
    return found
