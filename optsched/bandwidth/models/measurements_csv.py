"""Measurements as CSV: ``op,payload_bytes,hosts,pattern,gpus,busbw_GBps``."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from optsched.bandwidth.models.measurements import Measurement, MeasurementTable, MixedMeasurements
from optsched.bandwidth.models.model import OPERATIONS
from optsched.bandwidth.models.patterns import parse_pattern, written_pattern
from optsched.bandwidth.topology.foreign import looks_like
from optsched.bandwidth.topology.names import parse_gpus, written_gpus
from optsched.bandwidth.topology.rates import KILOBYTES, kilobytes
from optsched.errors import InputError
from optsched.io.csv_rows import csv_records, csv_text
from optsched.io.strict_json import placed
from optsched.io.values import one_of

COLUMNS: Final = ("op", "payload_bytes", "hosts", "pattern", "gpus", "busbw_GBps")
_KNOWN: Final = (*COLUMNS, "censored", "mixed")
_NEEDED: Final = ("op", "payload_bytes", "pattern", "busbw_GBps")
_NUMBER = re.compile(r"\d{1,12}(\.\d{1,20})?([eE][+-]?\d{1,3})?")
_BYTES = re.compile(r"[1-9]\d{0,15}")


class _Line(NamedTuple):
    place: str
    op: str
    payload: int | None
    measurement: Measurement
    mixed: bool


def from_text(
    text: str, name: str, op: str | None = None, payload: int | None = None
) -> MeasurementTable:
    """Read measurements; the order of the lines is kept.

    Parameters
    ----------
    text
        CSV with a header. `hosts` (how many, checked against the pattern), `gpus`
        (``n01:0-3 n02:4,5``), `censored` (1 where other traffic ran) and `mixed` (1 where values
        are not all of the payload given) may be missing; an empty `payload_bytes` is unknown.
    name
        File name for messages.
    op, payload
        Take these lines only; by default all, which must then agree.

    Raises
    ------
    InputError
        With ``file:line``. `MixedMeasurements`: two collectives or payloads, and none chosen.
    """
    rows = csv_records(text, name, _KNOWN, _NEEDED)
    try:
        lines = [_line(cells, place) for place, cells in rows]
    except InputError as error:
        if "busbw_GBps" not in text.partition("\n")[0]:
            error.args = (f"{error}{looks_like(text)}",)
        raise
    if not lines:
        raise InputError(f"{name}: there are no measurements in it")
    wanted = (op, payload)
    chosen = [
        line for line in lines
        if all(a in (None, b) for a, b in zip(wanted, (line.op, line.payload), strict=True))
    ]  # fmt: skip
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
                f"{line.place}: {line.op} of {_bytes(line.payload)}, but {first.place} "
                f"is {first.op} of {_bytes(first.payload)}: choose op and payload, or a file each"
            )
    found = tuple(line.measurement for line in chosen)
    return MeasurementTable(found, first.op, first.payload, any(line.mixed for line in chosen))


def to_csv(table: MeasurementTable) -> str:
    """The CSV of a table, readable by `from_text`; a column that says nothing is left out.

    Raises
    ------
    InputError
        A host name with spaces, commas or colons.
    """
    censored = any(row.censored for row in table)
    columns = [*COLUMNS, *["censored"] * censored, *["mixed"] * table.mixed]
    rows = []
    for i, row in enumerate(table):
        whole, rest = divmod(row.value, KILOBYTES)
        cells: list[object] = [
            table.op, "" if table.payload is None else table.payload, len(row.pattern),
            written_pattern(row.pattern), written_gpus(row.gpus, f"rows[{i}].gpus"),
            f"{whole}.{rest:06d}".rstrip("0").rstrip("."),
        ]  # fmt: skip
        cells += [int(row.censored)] * censored + [1] * table.mixed
        rows.append(cells)
    return csv_text(columns, rows)


def _bytes(payload: int | None) -> str:
    return "unknown size" if payload is None else f"{payload} bytes"


def _line(cells: dict[str, str], place: str) -> _Line:
    one_of(f"{place}: op", cells["op"], OPERATIONS)
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
    with placed(f"{place}: "):
        measurement = Measurement(pattern, value, gpus, censored)
    return _Line(place, cells["op"], int(size) if size else None, measurement, mixed)


def _flag(cells: dict[str, str], key: str, place: str) -> bool:
    cell = cells.get(key, "")
    if cell not in ("", "0", "1"):
        raise InputError(f"{place}: {key}: expected 0 or 1, got {cell!r:.60}")
    return cell == "1"
