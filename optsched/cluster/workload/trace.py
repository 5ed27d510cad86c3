"""Job traces as CSV: ``job_id, submit_time_s, num_gpus, duration_s, priority, type``."""

from __future__ import annotations

import re
from decimal import Decimal
from pathlib import Path
from sys import float_info
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import msgspec
import numpy as np

from optsched.cluster.workload.columns import COLUMNS
from optsched.cluster.workload.job import (
    MOST_AMOUNT,
    MOST_SPEED,
    MOST_WORK,
    PER_SECOND,
    ascending,
)
from optsched.cluster.workload.speedup import MOST_GPUS, Linear
from optsched.cluster.workload.workload import Workload, grouped, sized
from optsched.errors import InputError
from optsched.io.csv_rows import check_header, csv_rows, csv_text
from optsched.io.files import read_text, write_atomic
from optsched.io.strict_json import MAX_INTEGER, format_json, without_collector
from optsched.io.values import file_label, integer, one_of
from optsched.model.schedule import TIME_UNITS

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from optsched.cluster.workload.nodes import Nodes
    from optsched.cluster.workload.speedup import Speedup
    from optsched.model.schedule import IntArray

SPEED: Final = "speed:"
"""Begins the name of a column of speeds on a type of GPU."""

REQUIRED: Final = ("job_id", "submit_time_s", "num_gpus", "duration_s")
VALUES: Final[dict[str, tuple[Any, str]]] = {
    "num_gpus": (Annotated[int, msgspec.Meta(ge=0, le=MOST_GPUS)],
                 "whole GPUs in 0..2^24 (jobs that share a GPU: see optsched workload)"),
    "priority": (Annotated[int, msgspec.Meta(ge=1, le=99)],
                 "a whole number in 1..99 (shares are a column weight)"),
    "weight": (Annotated[float, msgspec.Meta(gt=0, le=float_info.max)], "a finite weight > 0"),
    "preemptible": (bool, "true, false, 1 or 0"),
    "passes": (Annotated[int, msgspec.Meta(ge=1, le=MAX_INTEGER)],
               "a whole number of passes in 1..2^53"),
    "cpus_per_gpu": (Annotated[float, msgspec.Meta(ge=0, le=MOST_AMOUNT)],
                     "CPUs by GPU in 0..2^20"),
    "memory_per_gpu_gb": (Annotated[float, msgspec.Meta(ge=0, le=MOST_AMOUNT)],
                          "GB by GPU in 0..2^20"),
    SPEED: (Annotated[float, msgspec.Meta(ge=0, le=MOST_SPEED)],
            "a speed in 0..1000, 0: the job does not run on that type"),
}  # fmt: skip
"""Type of the cells of a column, and what a message expects there."""

ORDER: Final = (*REQUIRED, "priority", "type", "sizes", "weight", "group", "preemptible", "passes",
                "cpus_per_gpu", "memory_per_gpu_gb", "template")  # fmt: skip
"""All columns, in the order in which they are written; the first six always are."""

_NUMBER: Final = re.compile(r"[+-]?[0-9]{1,40}(?:\.[0-9]{0,40})?(?:[eE][+-]?[0-9]{1,3})?")
_MOST_SIZES: Final = 2**22  # of all rows
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
    """Read a trace strictly; a job ends after exactly its duration at its ``num_gpus``.

    `docs/traces.md` lists the columns; an empty cell is the default. Jobs are in the order of
    their submission, those of one time in that of the file.

    Parameters
    ----------
    path
        The file: UTF-8, a header, one job a row.
    nodes
        The cluster; a job with more GPUs is an error.
    ignore_columns
        Skip unknown columns instead of refusing them.
    time_unit
        Unit of the workload; the file's times are seconds, whole numbers in this unit.
    speedup
        Of every job; linear by default.
    sizes
        Allowed sizes of every job, beside its ``num_gpus``; rigid by default. The column ``sizes``
        has precedence.
    passes
        Data passes of every job: elastic jobs change size between them (``resize="pass"``). The
        column has precedence.
    largest
        Leave out jobs of more GPUs.

    Raises
    ------
    InputError
        With ``file:line`` and the field.
    """
    one_of("time_unit", time_unit, TIME_UNITS)
    table = _Table(path, ignore_columns)
    gpus, submit = table.numbers("num_gpus"), table.times("submit_time_s", time_unit, 0)
    table.check_names()
    kept = np.arange(len(gpus))
    if largest is not None:
        kept = np.flatnonzero(gpus <= integer("largest", largest, 1))
        if not len(kept):
            raise InputError(f"{path}: no job has at most {largest} GPUs")
    kept = kept[np.argsort(submit[kept], kind="stable")]
    table.take(kept)
    gpus, submit = gpus[kept], submit[kept]
    if nodes is not None:
        table.refuse_first(
            gpus > nodes.total, "num_gpus",
            lambda i: f"needs {gpus[i]} GPUs, but the cluster has {nodes.total} "
            f"(largest={nodes.total} leaves such jobs out)",
        )  # fmt: skip
    columns: dict[str, Any] = _sizes(table, gpus, speedup or Linear(), sizes)
    rate = columns["rate"][columns["size"] == np.repeat(gpus, np.diff(columns["size_ptr"]))]
    duration = table.times("duration_s", time_unit, 1)
    table.refuse_first(
        duration > MOST_WORK // rate, "duration_s",
        lambda i: f"{duration[i]} {time_unit} on its GPUs: more work than 2^62",
    )  # fmt: skip
    columns["passes"] = table.numbers("passes", integer("passes", passes, 1))
    for key in ("priority", "weight", "preemptible", "cpus_per_gpu", "memory_per_gpu_gb"):
        columns[key] = table.numbers(key, COLUMNS[key].default)
    group, template = table.texts("group"), table.texts("template")
    groups, templates = grouped(group, ()), sorted({*template} - {""})
    types = [key.removeprefix(SPEED) for key in table.columns if _is_speed(key)]
    speeds = [table.numbers(SPEED + kind, 1.0) for kind in types]
    try:
        return Workload(
            name=file_label(Path(path).name), time_unit=time_unit, submit=submit,
            work=duration * rate, names=tuple(table.columns["job_id"]),
            source=np.array(table.texts("type"), np.str_), groups=groups,
            group=_places(group, [one.name for one in groups]), templates=tuple(templates),
            template=_places(template, templates), types=tuple(types),
            speeds=np.array(speeds, np.float64).T, **columns,
        )  # fmt: skip
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _sizes(
    table: _Table, gpus: IntArray, speedup: Speedup, sizes: Sequence[int] | None
) -> dict[str, Any]:
    """Speed-ups, and sizes with their rates in CSR form: columns of a workload."""
    others = () if sizes is None else ascending("sizes", sizes)
    known: dict[str, Sequence[int]] = {"": ()}
    rows: list[Sequence[int]] = []
    total = 0
    for i, (cell, g) in enumerate(zip(table.texts("sizes"), gpus.tolist(), strict=True)):
        if cell not in known:
            known[cell] = _listed_sizes(table, i, cell)
        listed = known[cell]
        if cell and g not in listed:
            table.refuse(i, "num_gpus", f"{g} is not among the sizes {format_json(cell)}")
        total += len(listed or (g,))
        if total > _MOST_SIZES:
            table.refuse(i, "sizes", f"more than {_MOST_SIZES:,} sizes in all rows up to here")
        rows.append(listed or ((g,) if not others or g == 0 else sorted({*others, g} - {0})))
    return sized(table.columns["job_id"], rows, [speedup] * len(rows))


def _listed_sizes(table: _Table, i: int, cell: str) -> Sequence[int]:
    """Sizes of a cell such as ``1|2|4`` or ``2-8``."""
    dense = re.fullmatch(r"([1-9][0-9]{0,7})-([1-9][0-9]{0,7})", cell)
    if dense and int(dense[1]) <= int(dense[2]) <= MOST_GPUS:
        return range(int(dense[1]), int(dense[2]) + 1)
    try:
        parts = msgspec.convert(cell.split("|"), list[int], strict=False)
        return ascending("", parts)
    except (msgspec.ValidationError, InputError):
        table.expected(i, "sizes", "ascending sizes in 1..2^24 such as 1|2|4 or 2-8, or 0 alone")


def _places(names: Sequence[str], known: Sequence[str]) -> IntArray:
    place = {name: k for k, name in enumerate(known)}
    return np.array([place.get(name, -1) for name in names], np.int64)


def _is_speed(key: str) -> bool:
    return key.startswith(SPEED) and key != SPEED


class _Table:
    """Rows of the file by column, with what is needed to name a place in it."""

    def __init__(self, path: Any, ignore_columns: bool) -> None:
        text = read_text(path)
        if (nul := text.find("\0")) >= 0:
            raise InputError(f"{path}:{text.count(chr(10), 0, nul) + 1}: a NUL byte")
        if text.lstrip()[:1] in ("[", "{"):
            raise InputError(f"{path}: expected a CSV file, got JSON{looks_like(text)}")
        with without_collector():
            rows = [row for row in csv_rows(text, path, strip=False) if any(row[1])]
        if not rows:
            raise InputError(f"{path}: the file is empty; expected a header {','.join(ORDER[:6])}")
        place, header = rows.pop(0)
        if "job_id" not in header:
            hint = "(optsched workload makes a trace of a scheduler's log)"
            raise InputError(f'{place}: column "job_id" is missing {hint}{looks_like(text)}')
        known = () if ignore_columns else (*ORDER, *filter(_is_speed, header))
        skip = " (ignore_columns=True skips it; optsched workload leaves such columns out)"
        try:
            check_header(header, known, REQUIRED, place, skip)
        except InputError as error:
            other = not {*REQUIRED} <= {*header}
            raise InputError(f"{error}{looks_like(text) * other}") from None
        if not rows:
            raise InputError(f"{path}: no jobs: there are no rows")
        for place, cells in rows:
            if len(cells) != len(header):
                what = f"has {len(cells)} fields, the header has {len(header)}"
                raise InputError(f"{place}: {what}")
        self.places: Sequence[str] = [place for place, _ in rows]
        self.columns: dict[str, Sequence[str]] = dict(
            zip(header, zip(*(cells for _, cells in rows), strict=True), strict=True)
        )

    def refuse(self, i: int, key: str, what: str) -> NoReturn:
        """Refuse a cell of the i-th job."""
        name = format_json(self.columns["job_id"][i])
        raise InputError(f"{self.places[i]} (job {name}): {key}: {what}")

    def refuse_first(self, bad: Any, key: str, what: Any) -> None:
        """Refuse the first cell with its flag set."""
        if bad.any():
            i = int(np.argmax(bad))
            self.refuse(i, key, what(i))

    def expected(self, i: int, key: str, what: str) -> NoReturn:
        """Refuse a cell that does not hold what is expected."""
        text = self.columns[key][i]
        self.refuse(i, key, f"expected {what}, got {format_json(text) if text else 'nothing'}")

    def take(self, chosen: IntArray) -> None:
        """Keep these rows, in this order."""
        places = chosen.tolist()
        self.places = [self.places[i] for i in places]
        self.columns = {key: [cells[i] for i in places] for key, cells in self.columns.items()}

    def texts(self, key: str) -> Sequence[str]:
        """A column of texts; empty ones if it is missing."""
        return self.columns.get(key, ("",) * len(self.places))

    def check_names(self) -> None:
        """Refuse ids that are empty or there twice."""
        seen: dict[str, int] = {}
        for i, name in enumerate(self.columns["job_id"]):
            if not name:
                self.refuse(i, "job_id", "empty")
            if (first := seen.setdefault(name, i)) != i:
                self.refuse(i, "job_id", f"is also that of {self.places[first]}")

    def numbers(self, key: str, default: Any = None) -> Any:
        """Values of a column; `default` for empty cells or without the column."""
        kind, what = VALUES[SPEED if _is_speed(key) else key]
        cells_type: Any = list[kind]  # type: ignore[valid-type]
        column = self.columns.get(key)
        if column is None:
            return np.full(len(self.places), default)
        cells = column if default is None else [cell or default for cell in column]
        try:
            return np.array(msgspec.convert(cells, cells_type, strict=False))
        except msgspec.ValidationError as error:
            at = re.search(r"\$\[(\d+)\]", str(error))
            assert at is not None
            self.expected(int(at[1]), key, what)

    def times(self, key: str, time_unit: str, least: int) -> IntArray:
        """Whole times >= least in a unit, of a column in seconds."""
        column, scale = self.columns[key], PER_SECOND[time_unit]
        found = []
        for i, cell in enumerate(column):
            if not _NUMBER.fullmatch(cell):
                self.expected(i, key, "seconds")
            value = int(cell) * scale if cell.isdigit() else Decimal(cell) * scale
            if not least <= value <= MAX_INTEGER:
                rule = f"expected a time {'>= 0' if least == 0 else '> 0'}, got {cell:.40}"
                beyond = f"{cell:.40} s is beyond 2^53 {time_unit}"
                self.refuse(i, key, rule if value < least else beyond)
            if value != int(value):
                finer = TIME_UNITS[max(TIME_UNITS.index(time_unit) - 1, 0)]
                hint = f"(time_unit={finer!r}; optsched workload rounds)"
                self.refuse(i, key, f"{cell} s is not a whole number of {time_unit} {hint}")
            found.append(int(value))
        return np.array(found, np.int64)


# writing


def write_trace(workload: Workload, path: str | os.PathLike[str]) -> None:
    """Write jobs as a trace that `read_trace` reads back.

    ``num_gpus`` is the smallest size at which the work is a whole number of units of time (if there
    is none, the smallest, rounded up). Columns that no job needs are left out. There is no column
    for speed-ups (give them to `read_trace` again), limits and weights of groups, curves, targets,
    restart costs and estimates.

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
        **{key: _given(getattr(w, key), COLUMNS[key].default)
           for key in ("passes", "weight", "cpus_per_gpu", "memory_per_gpu_gb")},
        **_cells_of_sizes(w, path),
    }  # fmt: skip
    columns = {key: found[key] for key in ORDER if key in ORDER[:6] or any(found[key])}
    columns |= {SPEED + kind: _given(s, 1) for kind, s in zip(w.types, w.speeds.T, strict=True)}
    write_atomic(path, csv_text(columns, zip(*columns.values(), strict=True)))


def seconds(times: IntArray, time_unit: str) -> list[str]:
    """Times of a unit as seconds, exactly."""
    if time_unit == "s":
        return list(map(str, times.tolist()))
    scale = PER_SECOND[time_unit]
    digits = len(str(scale)) - 1
    pairs = (divmod(value, scale) for value in times.tolist())
    return [f"{whole}.{part:0{digits}d}".rstrip("0").rstrip(".") for whole, part in pairs]


def _given(values: IntArray, default: float) -> list[Any]:
    """Cells of a column, empty where it has the default value."""
    return ["" if x == default else x for x in values.tolist()]


def _cells_of_sizes(w: Workload, path: Any) -> dict[str, Sequence[Any]]:
    """One size and the duration there; ranges of sizes without gaps, lists of others."""
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
        listed[i] = ("-" if dense else "|").join(map(str, sizes))
        if len(listed[i]) > _MOST_CELL:
            raise InputError(f"{path}: job {format_json(w.names[i])}: {count:,} sizes are too many")
    duration = seconds(-(-w.work // w.rate[at]), w.time_unit)
    return {"num_gpus": w.size[at].tolist(), "duration_s": duration, "sizes": listed}


# tables of others


_TABLES: Final = {
    "submit_time_s duration_s num_gpus": "a trace of optsched: `optsched simulate` takes it",
    "num_gpu submit_time iterations duration": "a Tiresias trace: `optsched workload` reads it",
    "job_id submit_time start_time gpu_num": "a Helios log: `optsched workload` reads it",
    "job_name inst_num start_time plan_gpu": "Alibaba's tasks (2020): `optsched workload` reads it",
    "name num_gpu gpu_milli creation_time": "Alibaba's pods of 2023: `optsched workload` reads it",
    "jobid submit start end": "a log of sacct: `optsched workload` reads that of sacct -P",
    "job_name inst_id status start_time": "Alibaba's table of jobs or instances, without GPUs: "
    "`optsched workload` reads pai_task_table.csv",
    "job_name worker_name gpu_wrk_util": "Alibaba's table of sensors of 2020, not of jobs",
    "sn cpu_milli memory_mib gpu": "a list of nodes, not of jobs",
    "time name application num_replicas": "a Pollux or Sia workload, without durations",
    "machineid gpu0_util": "Philly's utilisation of GPUs: its jobs are in cluster_job_log",
    "time_submit time_start time_end gres_used": "a Slurm log of MIT Supercloud: name its "
    "columns as sacct -P does",
    "vmid vmcreated vmdeleted": "an Azure trace of virtual machines, without GPUs",
    "timestamp contexttokens generatedtokens": "a trace of inference requests, not of jobs",
    "timestamp request_tokens response_tokens": "a trace of inference requests, not of jobs",
}
"""What a table is that has these columns, in small letters."""

_TEXTS: Final = {
    r"\s*jobid +\S+.*\n[ -]*-{3}": "sacct without -P: its columns are cut, use sacct -P",
    r"\s*\{\s*\"(?:meta|jobs)\"": "sacct --json: use sacct -P",
    r"\s*jobid +partition +name +user": "squeue, which has no ends of jobs: use sacct -P",
    r"\s*\[\s*\{[^\[]*\"(?:attempts|jobid)\"": "Philly's log: `optsched workload` reads it",
    r"; *(?:version|computer):|\s*([-.\d]+[ \t]+){17}[-\d]+\s*$": "SWF: use `optsched workload`",
    r"[^\t\n]+\t[^\t\n]*(?:\t[^\t\n]*){7,9}(?:\n|$)": "a Gavel trace, with steps and no "
    "durations: its throughput tables decide",
}
"""What a text is that begins like this, in small letters."""


def looks_like(text: str) -> str:
    """``"; this looks like ..."`` for the first lines of a known table of others, else ``""``."""
    text = text.lstrip("\ufeff")[:4000].lower()
    head = {
        cell.strip(' "').replace(" ", "_") for cell in re.split(r"[,|;\t]", text.split("\n")[0])
    }
    found = [what for columns, what in _TABLES.items() if head.issuperset(columns.split())]
    found += [what for begin, what in _TEXTS.items() if re.match(begin, text, re.M)]
    return f"; this looks like {found[0]}" if found else ""
