"""Job arrays and job shops from tables: CSV files, data frames, lists of rows.

A data frame is anything with `columns` and ``frame[name]`` (pandas, polars); none is imported.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

from optsched.errors import InputError
from optsched.formats.registry import Reader, Source
from optsched.io.csv_rows import csv_records
from optsched.io.files import read_text
from optsched.io.strict_json import MAX_INTEGER
from optsched.io.text import NANOSECONDS
from optsched.io.values import as_python, did_you_mean, file_label, format_value, listed, one_of
from optsched.problems.jobarray.checks import TIMES
from optsched.problems.jobarray.fields import FIELDS, fields_of
from optsched.problems.jobarray.problem import JobArray
from optsched.problems.jobshop.problem import JobShop

_HEADER: Final = re.compile(r"(.+?)(?:_?([0-9]{1,6}))?(?:_(ns|us|ms|s))?")
_NUMBER: Final = re.compile(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]{1,3})?")
_KINDS: Final = {
    "F": "forward", "B": "backward", "I": "backward", "W": "weight", "R": "recompute",
    "U": "update",
}  # fmt: skip
_TIMES: Final = (*TIMES, "duration", "release", "deadline", "due")
_BYTES: Final = {
    "forward": "activation", "recompute": "recompute_workspace", "weight": "weight_memory",
}  # fmt: skip
_SHOP: Final = ("job", "machine", "duration")
_LONG: Final = ("job", "stage", "kind", "duration")
_WIDE: Final = ("forward", "backward")


class _Column(NamedTuple):
    """A column: the field and stage that its header names, its unit if it holds times."""

    header: str
    field: str
    stage: int | None
    unit: str
    cells: Sequence[Any]


class _Table:
    """Columns of a table; converts cells to names, integers and ticks."""

    def __init__(self, table: Any, time_unit: str, tick: str) -> None:
        for key, unit in (("time_unit", time_unit), ("tick", tick)):
            if unit:
                one_of(key, unit, tuple(NANOSECONDS))
        file, self.places, cells = _read_table(table)
        self.file, self.label = file or "table", file_label(Path(file).stem)
        if not self.places:
            raise InputError(f"{self.file}: expected a header and at least one row")
        self.columns = [_column(header, column, time_unit) for header, column in cells.items()]
        self.first = {(one.field, one.stage): one for one in reversed(self.columns)}
        self.plain = {one.field: one for one in self.columns if one.stage is None}
        self.fields = {one.field for one in self.columns}
        units = {one.unit for one in self.columns if one.unit}
        if tick and not units:
            hint = "give `time_unit`, or headers such as duration_ms"
            raise InputError(f"tick: no column of {self.file} has a unit: {hint}")
        if time_unit and units and time_unit not in units:
            known = ", ".join(sorted(units))
            raise InputError(
                f"time_unit: headers of {self.file} have units ({known}), leave it out"
            )
        self.tick = tick or ("ns" if "ns" in units else "us") if units else ""

    def check(self, needed: Sequence[str], known: Sequence[str]) -> None:
        """Refuse missing and unknown columns."""
        for field in needed:
            if field not in self.fields:
                raise InputError(
                    f"{self.file}: column {field} is missing; expected job,machine,"
                    "duration (job shop), job,stage,kind,duration, or forward_0,...,backward_0,..."
                )
        for column in self.columns:
            if column.field not in known:
                hint = did_you_mean(column.field, known) or f"; known: {', '.join(known)}"
                raise InputError(
                    f"{self.file}: unknown column {format_value(column.header)}{hint}; "
                    "leave out what is not part of the problem"
                )
            staged = column.field in FIELDS and FIELDS[column.field].kind in ("stage", "cut")
            if column.stage is not None and not staged:
                raise InputError(
                    f"{self.file}: column {column.header}: {column.field} has no stages"
                )
            first = self.first[column.field, column.stage]
            if first is not column:
                raise InputError(
                    f"{self.file}: columns {first.header} and {column.header} both hold "
                    f"{column.field}, keep one"
                )

    def refuse(self, r: int, column: _Column, rule: str) -> NoReturn:
        """Raise for a cell, by its row and column."""
        value = format_value(as_python(column.cells[r]))
        raise InputError(f"{self.places[r]}, column {column.header}: {rule}, got {value}")

    def name(self, r: int, column: _Column) -> str:
        """A name, or an integer as text."""
        value = as_python(column.cells[r])
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        if not isinstance(value, str) or not value.strip():
            self.refuse(r, column, "expected a name")
        return value.strip()

    def number(self, r: int, column: _Column, least: int = 0) -> int | None:
        """An integer, or ticks rounded to the nearest; None for an empty cell."""
        value = as_python(column.cells[r])
        if value is None or (isinstance(value, str) and not value.strip()):
            return None
        exact = _exact(value)
        if exact is None:
            self.refuse(r, column, "expected a finite number")
        if column.unit:
            exact *= Fraction(NANOSECONDS[column.unit], NANOSECONDS[self.tick])
        elif self.tick and column.field in _TIMES:
            self.refuse(r, column, "the unit is missing, as other columns have one")
        elif exact.denominator != 1:
            self.refuse(r, column, "expected an integer" + self._unit_hint(column))
        found = round(exact)
        if exact and not found:
            self.refuse(r, column, f"less than half a tick of 1 {self.tick}, give a finer `tick`")
        if abs(found) > MAX_INTEGER:
            self.refuse(r, column, f"more than 2^53{f' ticks of 1 {self.tick}' * bool(self.tick)}")
        if found < least:
            self.refuse(r, column, f"expected a number >= {least}")
        return found

    def required(self, r: int, column: _Column, least: int = 0) -> int:
        """`number`, without empty cells."""
        found = self.number(r, column, least)
        if found is None:
            self.refuse(r, column, "expected a number")
        return found

    def jobs(self) -> dict[str, list[int]]:
        """Rows of every job, in order of appearance; without names each row is one."""
        found: dict[str, list[int]] = {}
        for r in range(len(self.places)):
            name = self.name(r, self.plain["job"]) if "job" in self.plain else f"job{r}"
            found.setdefault(name, []).append(r)
        return found

    def per_job(
        self, field: str, jobs: Mapping[str, Sequence[int]], default: Any, least: int = 0
    ) -> list[Any]:
        """A column that repeats the value of a job in its rows; `default` if all are empty."""
        column, found = self.plain[field], []
        for rows in jobs.values():
            values: dict[int, int] = {}
            for r in rows:
                value = self.number(r, column, least)
                if value is not None and values.setdefault(value, r) == r and len(values) > 1:
                    self.refuse(r, column, f"expected {next(iter(values))} as before for this job")
            found.append(next(iter(values), default))
        return found

    def joined(self, fields: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of the table, its unit, and the arguments of the caller."""
        for key in given:
            if key in fields:
                raise InputError(f"{key}: given as an argument, but it follows from the table")
        unit = {"time_unit": self.tick} if self.tick else {}
        return {"name": self.label, **fields, **given, **unit}

    def _unit_hint(self, column: _Column) -> str:
        hint = f" (or a unit: `time_unit`, or the header {column.header}_ms)"
        return hint * (column.field in _TIMES)


def _read_table(table: Any) -> tuple[str, list[str], Mapping[str, Sequence[Any]]]:
    """File, places of the rows, and columns of a path, a text, a frame, or a list of mappings."""
    if isinstance(table, Source):
        rows = list(csv_records(table.text, table.file, (), ()))
        found = {key: [cells[key] for _, cells in rows] for key in (rows[0][1] if rows else ())}
        return table.file, [place for place, _ in rows], found
    if isinstance(table, (str, os.PathLike)):
        return _read_table(Source(str(table), read_text(table)))
    names = getattr(table, "columns", table if isinstance(table, Mapping) else None)
    if names is not None:
        if len(set(map(str, names))) < len(names):
            raise InputError("table: two columns have the same name")
        found = {str(key): listed(f"column {key}", table[key], "a column") for key in names}
    else:
        records = listed("table", table, "a path, a data frame, or a list of mappings")
        for r, row in enumerate(records):
            if not isinstance(row, Mapping) or row.keys() != records[0].keys():
                raise InputError(
                    f"row {r}: expected a mapping with the keys of row 0, got {format_value(row)}"
                )
        found = {str(key): [row[key] for row in records] for key in (*records, {})[0]}
    sizes = set(map(len, found.values()))
    if len(sizes) > 1:
        raise InputError(f"table: the columns differ in length: {sorted(sizes)}")
    return "", [f"row {r}" for r in range(max(sizes, default=0))], found


def _column(header: str, cells: Sequence[Any], time_unit: str) -> _Column:
    """Parse a header such as ``forward_0_ms``."""
    match = _HEADER.fullmatch(header.strip())
    if match is None or (match[3] and match[1] not in _TIMES):
        return _Column(header, header, None, "", cells)
    unit = match[3] or (time_unit if match[1] in _TIMES else "")
    return _Column(header, match[1], None if match[2] is None else int(match[2]), unit, cells)


def job_array(given: Any, time_unit: str = "", tick: str = "", **options: Any) -> JobArray:
    """See `JobArray.from_table`."""
    table = _Table(given, time_unit, tick)
    is_long, per_job = bool(table.fields & {"kind", "stage"}), fields_of("job")
    if is_long:
        table.check(_LONG, [*_LONG, "bytes", *per_job])
    else:
        table.check(_WIDE, ["job", *fields_of("job", "stage", "cut")])
    if not table.tick:
        raise InputError(
            f"{table.file}: the unit of the times is missing: give `time_unit`, or "
            f"headers such as {'duration_ms' if is_long else 'forward_0_ms'}"
        )
    jobs = table.jobs()
    if not is_long and len(jobs) < len(table.places):
        name, rows = next(one for one in jobs.items() if len(one[1]) > 1)
        raise InputError(f"{table.places[rows[1]]}: job {format_value(name)} has several rows")
    cells: dict[str, dict[tuple[int, int], int]] = {"forward": {}, "backward": {}}
    for j, rows in enumerate(jobs.values()):
        for r in rows:
            for field, v, value in _blocks(table, r) if is_long else _row(table, r):
                if (j, v) in cells.setdefault(field, {}):
                    raise InputError(f"{table.places[r]}: a second value of {field}, stage {v}")
                cells[field][j, v] = value
    places = [f"{table.places[rows[0]]}: job {format_value(name)}" for name, rows in jobs.items()]
    fields = _filled(cells, places, "" if is_long else table.file)
    fields["names"] = list(jobs)
    for key in (key for key in per_job if key in table.plain):
        fields[key] = table.per_job(key, jobs, FIELDS[key].default, FIELDS[key].least)
    return JobArray(**table.joined(fields, options))


def _blocks(table: _Table, r: int) -> list[tuple[str, int, int]]:
    """Field, stage and value of a row (job, stage, kind, duration[, bytes])."""
    columns = table.plain
    kind, stage = table.name(r, columns["kind"]), table.required(r, columns["stage"])
    field = _KINDS.get(kind, kind)
    if field not in TIMES:
        table.refuse(r, columns["kind"], f"expected one of {', '.join([*_KINDS, *TIMES])}")
    found = [(field, stage, table.required(r, columns["duration"], FIELDS[field].least))]
    if "bytes" in columns and (size := table.number(r, columns["bytes"])):
        if field not in _BYTES:
            table.refuse(r, columns["bytes"], f"expected none for kind {kind}, only for F, R and W")
        found.append((_BYTES[field], stage, size))
    return found


def _row(table: _Table, r: int) -> list[tuple[str, int, int]]:
    """Field, stage and value of the cells of a job's only row."""
    found = []
    for column in table.columns:
        if column.field != "job" and FIELDS[column.field].kind != "job":
            if column.stage is None:
                raise InputError(
                    f"{table.file}: column {column.header}: expected one per stage, "
                    f"{column.field}_0, ..."
                )
            if (value := table.number(r, column, FIELDS[column.field].least)) is not None:
                found.append((column.field, column.stage, value))
    return found


def _filled(
    cells: Mapping[str, Mapping[tuple[int, int], int]], places: Sequence[str], wide: str
) -> dict[str, Any]:
    """Tables of an array; a missing value is 0, refused for blocks that every job has.

    In a table with a row per job, the file `wide`, a missing column of a stage is refused too.
    """
    stages = 1 + max((v for _, v in cells["forward"]), default=0)
    fields: dict[str, Any] = {}
    for field, found in cells.items():
        width = stages - (FIELDS[field].kind == "cut")
        for j, v in found:
            if v >= width:
                raise InputError(
                    f"{places[j]}: {field} of stage {v}, expected 0..{width - 1} by the stages of "
                    "forward"
                )
        every = ((j, v) for j in range(len(places)) for v in range(width))
        if field in ("forward", "backward", "weight"):
            for j, v in (at for at in every if at not in found):
                raise InputError(f"{places[j]}: {field} of stage {v} is missing")
        if empty := {*range(width)} - {v for _, v in found} if wide else ():
            at = f"{wide}: column {field}_{min(empty)}"
            raise InputError(f"{at} is missing: other stages have theirs")
        fields[field] = [[found.get((j, v), 0) for v in range(width)] for j in range(len(places))]
    return fields


def job_shop(given: Any, time_unit: str = "", tick: str = "", **options: Any) -> JobShop:
    """See `JobShop.from_table`."""
    table = _Table(given, time_unit, tick)
    per_job = {"release": 0, "deadline": None, "due": 0, "job_weight": 1}
    table.check(_SHOP, [*_SHOP, "step", *per_job])
    jobs, columns = table.jobs(), table.plain
    labels = [table.name(r, columns["machine"]) for r in range(len(table.places))]
    numbered = all(name.isdecimal() and name == str(int(name)) for name in labels)
    number = {name: int(name) if numbered else k for k, name in enumerate(dict.fromkeys(labels))}
    chains = []
    for name, rows in jobs.items():
        if "step" in columns:
            steps = {table.required(r, columns["step"]): r for r in rows}
            if len(steps) < len(rows):
                place = table.places[min({*rows} - {*steps.values()})]
                raise InputError(f"{place}: job {format_value(name)}: two rows have the same step")
            rows = [steps[step] for step in sorted(steps)]
        chains.append([(number[labels[r]], table.required(r, columns["duration"])) for r in rows])
    fields: dict[str, Any] = {
        key: table.per_job(key, jobs, default) for key, default in per_job.items() if key in columns
    }
    if not numbered:
        fields["machines"] = list(number)
    return JobShop(chains, **table.joined({"names": list(jobs), **fields}, options))


def _exact(value: Any) -> Fraction | None:
    """The exact value of a number or a decimal text; None for a boolean, NaN or infinity."""
    text = isinstance(value, str)
    if isinstance(value, bool) or (text and not _NUMBER.fullmatch(value.strip())):
        return None
    try:
        return Fraction(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _fields(source: Source) -> set[str]:
    """Fields in the header of a text."""
    first = next(filter(None, map(str.strip, source.text.split("\n", 20))), "")
    return {_column(name.strip('" '), (), "").field for name in first.split(",") if name.strip()}


def _recognises(source: Source) -> bool:
    """Whether a header has the columns of a job shop, or of an array in either form."""
    found = _fields(source) if source.tree is None else set()
    return any(found.issuperset(needed) for needed in (_SHOP, _LONG, _WIDE))


def _read(source: Source) -> JobArray | JobShop:
    return job_shop(source) if "machine" in _fields(source) else job_array(source)


READER = Reader("table", recognises=_recognises, read=_read)
