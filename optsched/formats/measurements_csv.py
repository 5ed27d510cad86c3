"""Measurements as CSV: ``op,payload_bytes,hosts,pattern,gpus,busbw_GBps``."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from optsched.bandwidth.gpu_words import parse_gpus, written_gpus
from optsched.bandwidth.measurements import Measurement, MeasurementTable, MixedMeasurements
from optsched.bandwidth.model import OPERATIONS
from optsched.bandwidth.patterns import parse_pattern, written_pattern
from optsched.bandwidth.rates import KILOBYTES, kilobytes
from optsched.errors import InputError
from optsched.io.files import read_text

if TYPE_CHECKING:
    import os

COLUMNS: Final = ("op", "payload_bytes", "hosts", "pattern", "gpus", "busbw_GBps")
_OPTIONAL: Final = ("hosts", "gpus", "censored", "mixed")
_NUMBER = re.compile(r"\d{1,12}(\.\d{1,20})?([eE][+-]?\d{1,3})?")
_BYTES = re.compile(r"[1-9]\d{0,15}")


@dataclass
class _Line:
    line: int
    op: str
    payload: int | None
    measurement: Measurement
    mixed: bool


def read(
    path: str | os.PathLike[str], op: str | None = None, payload: int | None = None
) -> MeasurementTable:
    """Read measurements; the order of the lines is kept.

    Parameters
    ----------
    path
        CSV with a header. `hosts` (how many, checked against the pattern), `gpus`
        (``n01:0-3 n02:4,5``), `censored` (1 where other traffic ran) and `mixed` (1 where values
        are not all of the payload given) may be missing; an empty `payload_bytes` is unknown.
    op, payload
        Take these lines only; by default all, which must then agree.

    Raises
    ------
    InputError
        With ``file:line``. `MixedMeasurements`: two collectives or payloads, and none chosen.
    """
    return from_text(read_text(path), str(path), op, payload)


def from_text(
    text: str, name: str, op: str | None = None, payload: int | None = None
) -> MeasurementTable:
    """Read measurements from the text of a CSV; see `read`."""
    lines = _lines(text, name)
    if not lines:
        raise InputError(f"{name}: there are no measurements in it")
    chosen = [
        line
        for line in lines
        if op in (None, line.op) and (payload is None or line.payload == payload)
    ]
    if not chosen:
        there = sorted({f"{line.op} of {_bytes(line.payload)}" for line in lines})
        raise InputError(
            f"{name}: no {op or 'measurement'} of {_bytes(payload) if payload else 'any size'}; "
            f"there are {', '.join(there[:6])}"
        )
    first = chosen[0]
    for line in chosen:
        if (line.op, line.payload) != (first.op, first.payload):
            raise MixedMeasurements(
                f"{name}:{line.line}: {line.op} of {_bytes(line.payload)}, but line {first.line} "
                f"is {first.op} of {_bytes(first.payload)}: choose op and payload"
            )
    rows = tuple(line.measurement for line in chosen)
    return MeasurementTable(rows, first.op, first.payload, any(line.mixed for line in chosen))


def to_csv(table: MeasurementTable) -> str:
    """The CSV of a table, readable by `read`; a column that says nothing is left out.

    Raises
    ------
    InputError
        A host name with spaces, commas or colons.
    """
    censored = any(row.censored for row in table)
    columns = [*COLUMNS, *["censored"] * censored, *["mixed"] * table.mixed]
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    for i, row in enumerate(table):
        whole, rest = divmod(row.value, KILOBYTES)
        cells: list[object] = [
            table.op,
            "" if table.payload is None else table.payload,
            len(row.pattern),
            written_pattern(row.pattern),
            written_gpus(row.gpus, f"rows[{i}].gpus"),
            f"{whole}.{rest:06d}".rstrip("0").rstrip("."),
        ]
        cells += [int(row.censored)] * censored + [1] * table.mixed
        writer.writerow(cells)
    return out.getvalue()


def _bytes(payload: int | None) -> str:
    return "unknown size" if payload is None else f"{payload} bytes"


def _lines(text: str, name: str) -> list[_Line]:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    columns: list[str] | None = None
    found: list[_Line] = []
    while True:
        try:
            cells = [cell.strip() for cell in next(reader)]
        except StopIteration:
            break
        except csv.Error as error:
            raise InputError(f"{name}:{reader.line_num}: not valid CSV ({error})") from None
        place = f"{name}:{reader.line_num}"
        if not any(cells):
            continue
        if columns is None:
            columns = _columns(cells, place)
        elif len(cells) != len(columns):
            raise InputError(f"{place}: expected {len(columns)} columns, got {len(cells)}")
        else:
            found.append(_line(dict(zip(columns, cells, strict=True)), place, reader.line_num))
    if columns is None:
        raise InputError(f"{name}: the file is empty, expected the header {','.join(COLUMNS)}")
    return found


def _columns(cells: list[str], place: str) -> list[str]:
    for cell in cells:
        if cell not in COLUMNS and cell not in _OPTIONAL:
            raise InputError(f"{place}: unknown column {cell!r:.60}; known: {','.join(COLUMNS)}")
        if cells.count(cell) > 1:
            raise InputError(f"{place}: column {cell!r:.60} is there twice")
    missing = [c for c in COLUMNS if c not in cells and c not in _OPTIONAL]
    if missing:
        raise InputError(f"{place}: the column {missing[0]!r} is missing")
    return cells


def _line(cells: dict[str, str], place: str, number: int) -> _Line:
    if cells["op"] not in OPERATIONS:
        raise InputError(
            f"{place}: op: expected one of {', '.join(OPERATIONS)}, got {cells['op']!r:.60}"
        )
    size = cells["payload_bytes"]
    if size and (not _BYTES.fullmatch(size) or int(size) > 2**53):
        raise InputError(
            f"{place}: payload_bytes: expected bytes >= 1 or nothing, got {size!r:.60}"
        )
    pattern = parse_pattern(cells["pattern"], f"{place}: pattern")
    hosts = cells.get("hosts", "")
    if hosts and hosts != str(len(pattern)):
        raise InputError(
            f"{place}: hosts: expected {len(pattern)} as in the pattern "
            f"{cells['pattern']}, got {hosts!r:.60}"
        )
    rate = cells["busbw_GBps"]
    if not _NUMBER.fullmatch(rate):
        raise InputError(f"{place}: busbw_GBps: expected GB/s >= 0, got {rate!r:.60}")
    value = kilobytes(f"{place}: busbw_GBps", float(rate))
    gpus = parse_gpus(cells.get("gpus", ""), f"{place}: gpus")
    censored, mixed = (_flag(cells, key, place) for key in ("censored", "mixed"))
    try:
        measurement = Measurement(pattern, value, gpus, censored)
    except InputError as error:
        raise InputError(f"{place}: {error}") from None
    return _Line(number, cells["op"], int(size) if size else None, measurement, mixed)


def _flag(cells: dict[str, str], key: str, place: str) -> bool:
    cell = cells.get(key, "")
    if cell not in ("", "0", "1"):
        raise InputError(f"{place}: {key}: expected 0 or 1, got {cell!r:.60}")
    return cell == "1"
