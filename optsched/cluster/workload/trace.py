"""Job traces as CSV: ``job_id, submit_time_s, num_gpus, duration_s, priority, type``."""

from __future__ import annotations

import re
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import msgspec
import numpy as np

from optsched.cluster.workload.columns import COLUMNS
from optsched.cluster.workload.job import CONTROL, MOST_WORK, PER_SECOND, ascending
from optsched.cluster.workload.speedup import MOST_GPUS, Linear
from optsched.cluster.workload.workload import Workload, numbered, sized
from optsched.errors import InputError
from optsched.io.csv_rows import check_header, csv_rows, csv_text
from optsched.io.files import read_text, write_atomic
from optsched.io.strict_json import MAX_INTEGER, format_json, without_collector
from optsched.io.values import MAX_NAME, file_label, format_value, integer, one_of
from optsched.model.schedule import TIME_UNITS

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence

    from optsched.cluster.workload.nodes import Nodes
    from optsched.cluster.workload.speedup import Speedup
    from optsched.model.schedule import IntArray

SPEED: Final = "speed:"
"""Begins the name of a column of speeds on a type of GPU."""

REQUIRED: Final = ("job_id", "submit_time_s", "num_gpus", "duration_s")
ORDER: Final = (*REQUIRED, "priority", "type", "sizes", "weight", "group", "preemptible", "passes",
                "cpus_per_gpu", "memory_per_gpu_gb", "template")  # fmt: skip
"""All columns, in the order in which they are written; the first six always are."""

_VALUES: Final = ("priority", "weight", "preemptible", "passes", "cpus_per_gpu",
                  "memory_per_gpu_gb")  # fmt: skip
"""Columns of a workload by the same name."""
_WHOLE: Final = "whole GPUs in 0..2^24 (jobs that share a GPU: see optsched cluster workload)"
_CELLS: Final[dict[type, tuple[Any, str]]] = {
    int: (list[Annotated[int, msgspec.Meta(ge=-(2**62), le=2**62)]], "a whole number"),
    float: (list[float], "a number"),
    bool: (list[bool], "true, false, 1 or 0"),
}
"""Types of columns, and what a message expects."""
_NUMBER: Final = re.compile(r"[+-]?[0-9]{1,40}(?:\.[0-9]{0,40})?(?:[eE][+-]?[0-9]{1,3})?")
_MOST_SIZES: Final = 2**22  # of all rows


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
    r"""Read a trace strictly; a job ends after exactly its duration at its ``num_gpus``.

    `docs/clusters/traces.md` lists the columns; an empty cell is the default. Jobs are in the order
    of their submission, those of one time in that of the file.

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

    Examples
    --------
    >>> import pathlib, tempfile
    >>> from optsched.cluster import read_trace
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "jobs.csv")
    ...     _ = path.write_text("job_id,submit_time_s,num_gpus,duration_s\na,0,2,60\n")
    ...     read_trace(path)
    <Workload 'jobs.csv': 1 jobs, submitted 0..0 s>
    """
    one_of("time_unit", time_unit, TIME_UNITS)
    table = _Table(path, ignore_columns)
    gpus, submit = table.numbers("num_gpus", int), table.times("submit_time_s", time_unit, 0)
    for i in np.flatnonzero((gpus < 0) | (gpus > MOST_GPUS))[:1].tolist():
        table.expected(i, "num_gpus", _WHOLE)
    kept = np.arange(len(gpus))
    if largest is not None:
        kept = np.flatnonzero(gpus <= integer("largest", largest, 1))
        if not len(kept):
            raise InputError(f"{path}: no job has at most {largest} GPUs")
    kept = kept[np.argsort(submit[kept], kind="stable")]
    table.take(kept)
    gpus, submit = gpus[kept], submit[kept]
    if nodes is not None and gpus.max() > nodes.total:
        i = int(np.argmax(gpus > nodes.total))
        what = f"the cluster has {nodes.total} (in Python largest={nodes.total} leaves it out)"
        table.refuse(i, "num_gpus", f"needs {gpus[i]} GPUs, but {what}")
    names = table.texts("job_id")
    rows = _sizes(table, gpus.tolist(), () if sizes is None else ascending("sizes", sizes))
    columns = sized(names, rows, [speedup or Linear()] * len(rows))
    rate = columns["rate"][columns["size"] == np.repeat(gpus, np.diff(columns["size_ptr"]))]
    duration = table.times("duration_s", time_unit, 1)
    for i in np.flatnonzero(duration > MOST_WORK // rate)[:1].tolist():
        what = f"{duration[i]} {time_unit} on its GPUs: more work than 2^62"
        table.refuse(i, "duration_s", what)
    for key in _VALUES:
        default = integer("passes", passes, 1) if key == "passes" else COLUMNS[key].default
        columns[key] = table.numbers(key, COLUMNS[key].type, default)
    types = [key.removeprefix(SPEED) for key in table.columns if _is_speed(key)]
    speeds = [table.numbers(SPEED + kind, float, 1.0) for kind in types]
    with table.located():
        return Workload(
            name=file_label(Path(path).name), time_unit=time_unit, submit=submit,
            work=duration * rate, names=tuple(names), types=tuple(types),
            source=np.array(table.texts("type"), np.str_),
            speeds=np.array(speeds, np.float64).T, **columns,
            **numbered(table.texts("group"), table.texts("template")),
        )  # fmt: skip


def _sizes(table: _Table, gpus: list[int], others: Sequence[int]) -> list[Sequence[int]]:
    """Allowed sizes of every job."""
    known: dict[str, Sequence[int]] = {"": ()}
    rows: list[Sequence[int]] = []
    total = 0
    for i, (cell, g) in enumerate(zip(table.texts("sizes"), gpus, strict=True)):
        if cell not in known:
            known[cell] = _listed_sizes(table, i, cell)
        listed = known[cell]
        if cell and g not in listed:
            table.refuse(i, "num_gpus", f"{g} is not among the sizes {format_json(cell)}")
        total += len(listed or (g,))
        if total > _MOST_SIZES:
            table.refuse(i, "sizes", f"more than {_MOST_SIZES:,} sizes in all rows up to here")
        rows.append(listed or ((g,) if not others or g == 0 else sorted({*others, g} - {0})))
    return rows


def _listed_sizes(table: _Table, i: int, cell: str) -> Sequence[int]:
    """Sizes of a cell such as ``1|2|4`` or ``2-8``."""
    dense = re.fullmatch(r"([1-9][0-9]{0,7})-([1-9][0-9]{0,7})", cell)
    if dense and int(dense[1]) <= int(dense[2]) <= MOST_GPUS:
        return range(int(dense[1]), int(dense[2]) + 1)
    try:
        return ascending("", msgspec.convert(cell.split("|"), list[int], strict=False))
    except (msgspec.ValidationError, InputError):
        table.expected(i, "sizes", "ascending sizes in 1..2^24 such as 1|2|4 or 2-8, or 0 alone")


def _is_speed(key: str) -> bool:
    return key.startswith(SPEED) and key != SPEED


class _Table:
    """Rows of the file by column, with what is needed to name a place in it."""

    def __init__(self, path: Any, ignore_columns: bool) -> None:
        text, self.path = read_text(path), path
        if (nul := text.find("\0")) >= 0:
            raise InputError(f"{path}:{text.count(chr(10), 0, nul) + 1}: a NUL byte")
        if text.lstrip()[:1] in ("[", "{"):
            raise InputError(f"{path}: expected a CSV file, got JSON{looks_like(text)}")
        with without_collector():
            rows = [row for row in csv_rows(text, path, strip=False) if any(row[1])]
        if not rows:
            raise InputError(f"{path}: the file is empty; expected a header {','.join(ORDER[:6])}")
        place, header = rows.pop(0)
        known = () if ignore_columns else (*ORDER, *filter(_is_speed, header))
        skip = " (ignore_columns=True skips it; optsched cluster workload makes a trace of a log)"
        try:
            check_header(header, known if "job_id" in header else (), REQUIRED, place, skip)
        except InputError as error:
            if len(header) == 1 and {*REQUIRED} <= {*re.split("[;\t]", header[0])}:
                raise InputError(f"{place}: columns: expected commas, got {header[0]!r}") from None
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
        for key in ("job_id", "type", "group", "template"):
            for i, cell in enumerate(self.texts(key)):
                if len(cell) > MAX_NAME or CONTROL.search(cell):
                    self.expected(i, key, f"up to {MAX_NAME} characters without control characters")
        first: dict[str, int] = {}
        for i, name in enumerate(self.columns["job_id"]):
            if (known_at := first.setdefault(name, i)) != i or not name:
                what = f"is also that of {self.places[known_at]}" if name else "empty"
                self.refuse(i, "job_id", what)

    def refuse(self, i: int, key: str, what: str) -> NoReturn:
        """Refuse a cell of the i-th job."""
        name = format_json(self.columns["job_id"][i])
        raise InputError(f"{self.places[i]} (job {name}): {key}: {what}")

    def expected(self, i: int, key: str, what: str) -> NoReturn:
        """Refuse a cell that does not hold what is expected."""
        text = self.columns[key][i]
        self.refuse(i, key, f"expected {what}, got {format_json(text) if text else 'nothing'}")

    @contextmanager
    def located(self) -> Iterator[None]:
        """Add the line of a job that is refused by its name."""
        try:
            yield
        except InputError as error:
            text, place = str(error), self.path
            for at, name in zip(self.places, self.columns["job_id"], strict=True):
                if text.startswith(f"job {format_value(name)}: "):
                    place = at
            raise InputError(f"{place}: {text}") from None

    def take(self, chosen: IntArray) -> None:
        """Keep these rows, in this order."""
        places = chosen.tolist()
        self.places = [self.places[i] for i in places]
        self.columns = {key: [cells[i] for i in places] for key, cells in self.columns.items()}

    def texts(self, key: str) -> Sequence[str]:
        """A column of texts; empty texts if it is missing."""
        return self.columns.get(key, ("",) * len(self.places))

    def numbers(self, key: str, kind: type, default: Any = None) -> Any:
        """Values of a column; `default` for empty cells or without the column."""
        column = self.columns.get(key)
        if column is None:
            return np.full(len(self.places), default)
        cells = column if default is None else [cell or default for cell in column]
        cells_type, what = _CELLS[kind]
        try:
            return np.array(msgspec.convert(cells, cells_type, strict=False))
        except msgspec.ValidationError as error:
            at = re.search(r"\$\[(\d+)\]", str(error))
            assert at is not None
            self.expected(int(at[1]), key, _WHOLE if key == "num_gpus" else what)

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
                hint = f"(time_unit={finer!r}; optsched cluster workload rounds)"
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
        A file that cannot be written.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> from optsched.cluster import Job, Workload, write_trace
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "jobs.csv")
    ...     write_trace(Workload.of([Job(name="a", sizes=(2,), work=120 * 10**6)]), path)
    ...     print(path.read_text().splitlines()[1])
    a,0,2,60,50,
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
        **_cells_of_sizes(w),
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


def _cells_of_sizes(w: Workload) -> dict[str, Sequence[Any]]:
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
    duration = seconds(-(-w.work // w.rate[at]), w.time_unit)
    return {"num_gpus": w.size[at].tolist(), "duration_s": duration, "sizes": listed}


# tables of others


_READ: Final = ": `optsched cluster workload` reads it"

_TABLES: Final = {
    "submit_time_s duration_s num_gpus": "a trace: `optsched cluster simulate` takes it",
    "num_gpu submit_time iterations duration": f"a Tiresias trace{_READ}",
    "job_id submit_time start_time gpu_num": f"a Helios log{_READ}",
    "job_name inst_num start_time plan_gpu": f"Alibaba's tasks (2020){_READ}",
    "name num_gpu gpu_milli creation_time": f"Alibaba's pods of 2023{_READ}",
    "jobid submit start end": f"a log of sacct (-P){_READ}",
}
"""What a table is that has these columns, in small letters."""

_TEXTS: Final = {
    r"\s*jobid +\S+.*\n[ -]*-{3}": "sacct without -P: its columns are cut, use sacct -P",
    r"\s*\{\s*\"(?:meta|jobs)\"": "sacct --json: use sacct -P",
    r"\s*jobid +partition +name +user": "squeue, which has no ends of jobs: use sacct -P",
    r"\s*\[\s*\{[^\[]*\"(?:attempts|jobid)\"": f"Philly's log{_READ}",
    r"; *(?:version|computer):|\s*([-.\d]+[ \t]+){17}[-\d]+\s*$": f"SWF{_READ}",
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
