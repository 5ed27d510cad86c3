"""Job traces as CSV: ``job_id, submit_time_s, num_gpus, duration_s, priority, type``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.cluster.workload.columns import grouped, sized
from optsched.cluster.workload.job import rates
from optsched.cluster.workload.job_checks import MOST_WORK, ascending
from optsched.cluster.workload.speedup import Linear
from optsched.cluster.workload.trace_table import (
    COLUMNS,
    SEPARATOR,
    SPEED,
    USUAL,
    TraceTable,
    first,
    seconds,
)
from optsched.cluster.workload.workload import Workload
from optsched.errors import InputError
from optsched.io.csv_rows import csv_text
from optsched.io.files import write_atomic
from optsched.io.strict_json import MAX_INTEGER, format_json
from optsched.io.values import file_label, format_value, integer, one_of
from optsched.model.schedule import TIME_UNITS

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from optsched.cluster.workload.nodes import Nodes
    from optsched.cluster.workload.speedup import Speedup
    from optsched.model.schedule import IntArray

_MOST_SIZES: Final = 2**22  # of all rows
_USUALLY: Final = ("weight", "cpus_per_gpu", "memory_per_gpu_gb")
"""Columns of numbers that are written where they are not as usual."""

_MOST_CELL: Final = 131_000  # characters: what readers of CSV take


def read_trace(
    path: str | os.PathLike[str],
    nodes: Nodes | None = None,
    ignore_columns: bool = False,
    *,
    time_unit: str = "s",
    speedup: Speedup | None = None,
    sizes: Sequence[int] | None = None,
    passes: int = 1,
    largest: int | None = None,
) -> Workload:
    """Read a trace strictly; a job ends after exactly its duration at its own size.

    Beside the six columns a file may have any of ``sizes`` (numbers of GPUs such as ``1|2|4``, or
    ``2-8``), ``weight``, ``group``, ``preemptible`` (true or false, 1 or 0), ``passes``,
    ``template``, ``cpus_per_gpu``, ``memory_per_gpu_gb`` and ``speed:TYPE`` (a factor on the speed
    on GPUs of a type, 0: not there); an empty cell is the default. Jobs are in the order of their
    submission, those of one time in that of the file.

    Parameters
    ----------
    path
        The file: UTF-8, a header, one job a row.
    nodes
        The cluster; a job with more GPUs is an error.
    ignore_columns
        Skip columns that are not known instead of refusing them.
    time_unit
        Unit of the workload; the file's times are seconds, and whole ones in this unit.
    speedup
        Of every job; linear by default.
    sizes
        Every job may take its own size or any of these; rigid by default. Sizes in the file go
        first.
    passes
        Data passes of every job: elastic jobs change size between them (``resize="pass"``). The
        column goes first.
    largest
        Leave out jobs of more GPUs.

    Raises
    ------
    InputError
        With ``file:line`` and the field.
    """
    table = TraceTable(path, ignore_columns)
    one_of("time_unit", time_unit, TIME_UNITS)
    integer("passes", passes, 1)
    gpus = np.array(table.values("num_gpus"), np.int64)
    if largest is not None:
        kept = np.flatnonzero(gpus <= integer("largest", largest, 1))
        if not len(kept):
            raise InputError(f"{path}: no job has at most {largest} GPUs")
        table.take(kept.tolist())
        gpus = gpus[kept]
    if nodes is not None and (i := first(gpus > nodes.total)) is not None:
        table.refuse(
            i, "num_gpus",
            f"asks for {gpus[i]} GPUs, but the cluster has {nodes.total} (largest={nodes.total} "
            "leaves such jobs out)",
        )  # fmt: skip
    submit = table.times("submit_time_s", time_unit, 0)
    table.check_names()
    if (np.diff(submit) < 0).any():
        order = np.argsort(submit, kind="stable")
        table.take(order.tolist())
        gpus, submit = gpus[order], submit[order]
    columns = _labels(table, passes)
    columns |= _sizes(table, gpus, speedup or Linear(), sizes)
    per_job = np.repeat(gpus, np.diff(columns["size_ptr"]))
    rate = columns["rate"][columns["size"] == per_job]
    duration = table.times("duration_s", time_unit, 1)
    if (i := first(duration > MOST_WORK // rate)) is not None:
        table.refuse(i, "duration_s", f"{duration[i]} {time_unit} on its GPUs: more work than 2^62")
    work, passes_of = duration * rate, columns["passes"]
    if (i := first(-(-work // rate) > MAX_INTEGER - submit)) is not None:
        table.refuse(i, "duration_s", f"ends beyond 2^53 {time_unit}")
    if (i := first(passes_of > work)) is not None:
        table.refuse(i, "passes", f"{passes_of[i]} passes of less than one unit of work")
    n = len(work)
    return Workload(
        name=file_label(Path(path).name), time_unit=time_unit,
        names=tuple(table.columns["job_id"]), submit=submit,
        work=work, estimate=work, pass_work=-(-work // passes_of),
        restart_cost=np.full(n, -1),
        observed_ptr=np.zeros(n + 1, np.int64), observed=np.zeros(0),
        target=np.full(n, np.nan), initial=np.full(n, np.nan),
        **columns,
    )  # fmt: skip


def _sizes(
    table: TraceTable, gpus: IntArray, speedup: Speedup, sizes: Sequence[int] | None
) -> dict[str, Any]:
    """Speed-ups, and sizes with their rates in CSR form: columns of a workload."""
    wanted = None if sizes is None else ascending("sizes", sizes)
    own, n = table.values("sizes"), len(gpus)
    found: tuple[Any, ...]
    if wanted is None and not any(own):
        distinct, which = np.unique(gpus, return_inverse=True)
        rate = np.array([rates(speedup, (g,))[0] for g in distinct.tolist()], np.int64)
        found = (speedup,), np.zeros(n, np.int64), np.arange(n + 1), gpus, rate[which]
    else:
        rows: list[tuple[int, ...]] = []
        total = 0
        for i, (named, g) in enumerate(zip(own, gpus.tolist(), strict=True)):
            if named and g not in named:
                cell = format_value(table.columns["sizes"][i])
                table.refuse(i, "num_gpus", f"{g} is not among the sizes {cell}")
            total += len(named or (g,))
            if total > _MOST_SIZES:
                table.refuse(i, "sizes", f"more than {_MOST_SIZES:,} sizes in all rows up to here")
            usual = (g,) if wanted is None or g == 0 else sorted({*wanted, g} - {0})
            rows.append(tuple(named or usual))
        found = sized(table.columns["job_id"], rows, [speedup] * n)
    return dict(zip(("speedups", "speedup", "size_ptr", "size", "rate"), found, strict=True))


def _labels(table: TraceTable, passes: int) -> dict[str, Any]:
    """Columns of a workload that rows say one by one."""
    group, template = table.texts("group"), table.texts("template")
    groups, templates = list(dict.fromkeys(group)), sorted(set(template) - {""})
    return {
        **{key: np.array(table.values(key)) for key in ("priority", "preemptible", *_USUALLY)},
        "passes": np.array(table.values("passes", default=passes)),
        "types": table.types,
        "speeds": np.array([table.values(SPEED + kind) for kind in table.types]).T,
        "source": np.array(table.texts("type"), np.str_),
        "group": _numbers(group, groups), "groups": grouped(groups, ()),
        "template": _numbers(template, templates), "templates": tuple(templates),
    }  # fmt: skip


def _numbers(words: Sequence[str], found: list[str]) -> IntArray:
    place = {word: k for k, word in enumerate(found)}
    return np.array([place.get(word, -1) for word in words], np.int64)


# writing


def write_trace(workload: Workload, path: str | os.PathLike[str]) -> None:
    """Write jobs as a trace that `read_trace` reads back.

    Kept are name, submit time, priority, weight, group, template, passes, whether preemptible,
    `source` as type, sizes, and the work as the duration on ``num_gpus``: the smallest size at
    which it is a whole number of units of time (if there is none, the smallest, rounded up).
    Columns that no job needs are left out. There is no column for speed-ups (give them to
    `read_trace` again), limits and weights of groups, curves, targets, restart costs and
    estimates.

    Raises
    ------
    InputError
        A list of sizes that is too long for a cell, or a file that cannot be written.
    """
    w = workload
    found: dict[str, Sequence[Any]] = {
        "job_id": w.names, "submit_time_s": seconds(w.submit, w.time_unit),
        "priority": w.priority.tolist(), "type": w.source.tolist(),
        "group": [w.groups[g].name for g in w.group.tolist()],
        "preemptible": ["" if x else "false" for x in w.preemptible.tolist()],
        "template": ["" if t < 0 else w.templates[t] for t in w.template.tolist()],
        **{key: _given(getattr(w, key), COLUMNS[key].default) for key in ("passes", *_USUALLY)},
        **_cells_of_sizes(w, path),
    }  # fmt: skip
    columns = {key: found[key] for key in COLUMNS if key in USUAL or any(found[key])}
    columns |= {SPEED + kind: _given(s, 1) for kind, s in zip(w.types, w.speeds.T, strict=True)}
    write_atomic(path, csv_text(columns, zip(*columns.values(), strict=True)))


def _given(values: IntArray, usual: float) -> list[Any]:
    """Cells of a column, empty where it is as usual."""
    return ["" if x == usual else x for x in values.tolist()]


def _cells_of_sizes(w: Workload, path: Any) -> dict[str, Sequence[Any]]:
    """The own size and its duration; ranges of sizes without gaps, lists of others."""
    begin, ends = w.size_ptr[:-1], w.size_ptr.tolist()
    exact = np.repeat(w.work, np.diff(w.size_ptr)) % w.rate == 0
    place = np.minimum.reduceat(np.where(exact, np.arange(len(exact)), len(exact)), begin)
    at = np.where(place < len(exact), place, begin)
    low, high = w.size[begin].tolist(), w.size[w.size_ptr[1:] - 1].tolist()
    listed = [""] * len(w)
    for i in np.flatnonzero(np.diff(w.size_ptr) > 1).tolist():
        count = ends[i + 1] - ends[i]
        dense = high[i] - low[i] + 1 == count
        sizes = (low[i], high[i]) if dense else w.sizes_of(i).tolist()
        listed[i] = ("-" if dense else SEPARATOR).join(map(str, sizes))
        if len(listed[i]) > _MOST_CELL:
            raise InputError(f"{path}: job {format_json(w.names[i])}: {count:,} sizes are too many")
    duration = seconds(-(-w.work // w.rate[at]), w.time_unit)
    return {"num_gpus": w.size[at].tolist(), "duration_s": duration, "sizes": listed}
