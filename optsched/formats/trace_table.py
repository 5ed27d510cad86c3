"""Traces as tables: rows by column with strict numbers and the name of every place; writing."""

from __future__ import annotations

import csv
import io
import re
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final, NoReturn

import numpy as np

from optsched.cluster.job_checks import CONTROL, MOST_GPUS
from optsched.errors import InputError
from optsched.io.files import read_text, write_atomic
from optsched.io.strict_json import MAX_INTEGER, format_json, without_collector
from optsched.io.values import format_value, integer
from optsched.model.schedule import TIME_UNITS

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    import numpy.typing as npt

    from optsched.cluster.workload import Workload
    from optsched.model.schedule import IntArray

COLUMNS: Final = ("job_id", "submit_time_s", "num_gpus", "duration_s", "priority", "type")
EXTRAS: Final = (
    "workload", "batch_size", "min_gpus", "max_gpus", "sizes", "weight", "group", "preemptible",
    "passes", "template",
)  # fmt: skip
"""Optional columns; of ``workload`` and ``batch_size`` nothing is kept."""

SEPARATOR: Final = "|"
"""Between the numbers of a cell of ``sizes``."""

PER_SECOND: Final = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_KNOWN: Final = (*COLUMNS, *EXTRAS)
_REQUIRED: Final = COLUMNS[:3]
_NUMBER: Final = re.compile(r"[+-]?[0-9]{1,40}(?:\.[0-9]{0,40})?(?:[eE][+-]?[0-9]{1,3})?")
_MAX_TEXT: Final = 200
_MOST_CELL: Final = 131_000  # characters: what readers of CSV take


class TraceTable:
    """Rows of the file by column, with what is needed to name a place in it."""

    def __init__(
        self, path: Any, ignore_columns: bool, where: dict[str, str], limit: int | None
    ) -> None:
        self.path = path
        text = read_text(path)
        if (nul := text.find("\0")) >= 0:
            raise InputError(f"{path}:{text.count(chr(10), 0, nul) + 1}: a NUL byte")
        reader = csv.reader(io.StringIO(text, newline=""), strict=True)
        try:
            with without_collector():
                rows = list(reader)
        except csv.Error as error:
            raise InputError(f"{path}: row {reader.line_num}: not valid CSV: {error}") from None
        self.row = np.arange(1, len(rows) + 1)
        if [] in rows:  # blank lines
            self.row = np.flatnonzero([bool(row) for row in rows]) + 1
            rows = [row for row in rows if row]
        if not rows:
            raise InputError(f"{path}: the file is empty; expected a header {','.join(COLUMNS)}")
        header, rows, self.row = rows[0], rows[1:], self.row[1:]
        self._check_header(header, ignore_columns, where)
        bad = first(np.array([len(row) for row in rows], np.int64) != len(header))
        if bad is not None:
            raise InputError(
                f"{path}: row {self.row[bad]}: has {len(rows[bad])} fields, the header has "
                f"{len(header)}"
            )
        for key, wanted in where.items():
            k = header.index(key)
            kept = np.array([row[k] == wanted for row in rows], np.bool_)
            self.row, rows = self.row[kept], [row for row in rows if row[k] == wanted]
        if limit is not None:
            rows = rows[: integer("limit", limit, 1)]
            self.row = self.row[: len(rows)]
        if not rows:
            raise InputError(f"{path}: no jobs: there are no rows{' left' if where else ''}")
        by_key = dict(zip(header, zip(*rows, strict=True), strict=True))
        self.columns: dict[str, Sequence[str]] = {k: v for k, v in by_key.items() if k in _KNOWN}

    def _check_header(self, header: list[str], ignore: bool, where: dict[str, str]) -> None:
        for key in header:
            if header.count(key) > 1:
                raise InputError(f"{self.path}: row 1: column {format_json(key)} is there twice")
            if key not in _KNOWN and key not in where and not ignore:
                raise InputError(
                    f"{self.path}: row 1: unknown column {format_json(key)} (ignore_columns=True, "
                    "--ignore-columns skips it)"
                )
        for key in (*_REQUIRED, *where):
            if key not in header:
                raise InputError(f"{self.path}: row 1: column {format_json(key)} is missing")

    def refuse(self, i: int, key: str, what: str) -> NoReturn:
        """Refuse the i-th job."""
        raise InputError(f"{self.place(i, key)}: {what}")

    def place(self, i: int, key: str) -> str:
        """Where the field of the i-th job stands."""
        name = format_json(self.columns["job_id"][i])
        return f"{self.path}: row {self.row[i]} (job {name}): {key}"

    def keep(self, kept: Any, otherwise: str) -> None:
        """Leave out the other rows."""
        if not kept.any():
            raise InputError(f"{self.path}: {otherwise}")
        if not kept.all():
            chosen = np.flatnonzero(kept).tolist()
            self.row = self.row[chosen]
            self.columns = {k: [v[i] for i in chosen] for k, v in self.columns.items()}

    def texts(self, key: str) -> Sequence[str]:
        """A column of names: short, without control characters."""
        column = self.columns[key]
        long = max(column, key=len)
        if len(long) > _MAX_TEXT:
            self.refuse(column.index(long), key, f"longer than {_MAX_TEXT} characters")
        if CONTROL.search("".join(column)):
            i = next(i for i, text in enumerate(column) if CONTROL.search(text))
            self.refuse(i, key, f"control characters (a line break) in {format_json(column[i])}")
        return column

    def names(self) -> list[str]:
        """Distinct ids."""
        names = list(self.columns["job_id"])
        if "" in names:
            self.refuse(names.index(""), "job_id", "empty")
        self.texts("job_id")
        if len(set(names)) < len(names):
            seen: dict[str, int] = {}
            i = next(i for i, name in enumerate(names) if seen.setdefault(name, i) != i)
            self.refuse(i, "job_id", f"is also that of row {self.row[seen[names[i]]]}")
        return names

    def gpus(self) -> IntArray:
        """GPUs of every job; 0 for a task without."""
        column = self.columns["num_gpus"]
        if (numbers := _digits(column)) is None:
            numbers = []
            for i, text in enumerate(column):
                value = self.number(i, "num_gpus", text, "a number of GPUs")
                if value != value.to_integral_value():
                    self.refuse(
                        i, "num_gpus",
                        f"expected whole GPUs, got {text}; jobs that share a GPU are not simulated",
                    )  # fmt: skip
                numbers.append(int(value))
        for i, count in enumerate(numbers):
            if not 0 <= count <= MOST_GPUS:
                self.refuse(i, "num_gpus", f"expected 0..2^24 GPUs, got {format_value(count)}")
        return np.array(numbers, np.int64)

    def times(self, key: str, time_unit: str, least: int) -> IntArray:
        """Whole times >= least in a unit, of a column in seconds."""
        column, scale = self.columns[key], PER_SECOND[time_unit]
        numbers = _digits(column)
        if numbers is None:
            numbers = [self._time(i, key, text, time_unit) for i, text in enumerate(column)]
        elif scale > 1:
            numbers = [value * scale for value in numbers]
        if min(numbers) < least or max(numbers) > MAX_INTEGER:
            i = next(i for i, value in enumerate(numbers) if not least <= value <= MAX_INTEGER)
            if numbers[i] < least:
                rule = ">= 0" if least == 0 else "> 0"
                self.refuse(i, key, f"expected a time {rule}, got {column[i]:.40}")
            self.refuse(i, key, f"{column[i]:.40} s is beyond 2^53 {time_unit}")
        return np.array(numbers, np.int64)

    def _time(self, i: int, key: str, text: str, time_unit: str) -> int:
        value = self.number(i, key, text, "seconds") * PER_SECOND[time_unit]
        if value != value.to_integral_value():
            finer = TIME_UNITS[max(TIME_UNITS.index(time_unit) - 1, 0)]
            self.refuse(
                i, key,
                f"{text} s is not a whole number of {time_unit} (time_unit={finer!r}, "
                f"--time-unit {finer})",
            )  # fmt: skip
        return int(value)

    def whole(self, i: int, key: str, text: str, least: int, most: int, what: str) -> int:
        """A whole number in ``least..most`` of the i-th row."""
        value = self.number(i, key, text, what)
        whole = int(value) if value == value.to_integral_value() else float(value)
        return integer(self.place(i, key), whole, least, most)

    def number(self, i: int, key: str, text: str, what: str) -> Decimal:
        """The i-th number of a column, exactly."""
        if not _NUMBER.fullmatch(text):
            got = format_json(text) if text else "nothing"
            self.refuse(i, key, f"expected {what}, got {got}")
        return Decimal(text)


def _digits(column: Sequence[str]) -> list[int] | None:
    """Plain integers, fast; None if any is not plain."""
    text = "".join(column)
    plain = text.isascii() and text.isdigit() and "" not in column
    return list(map(int, column)) if plain and len(max(column, key=len)) < 40 else None


def first(bad: npt.NDArray[np.bool_]) -> int | None:
    """Where the first True is, or None."""
    return int(np.argmax(bad)) if bad.any() else None


# writing


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
