"""Reading CSV with line numbers and a checked header, and writing it."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING, Any

from optsched.errors import InputError
from optsched.io.strict_json import format_json
from optsched.io.values import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


def csv_rows(
    text: str, name: str, delimiter: str = ",", strip: bool = True
) -> Iterator[tuple[str, list[str]]]:
    """Every row with its place ``file:line``, blank lines included; quotes only with commas."""
    quoting: Any = csv.QUOTE_MINIMAL if delimiter == "," else csv.QUOTE_NONE
    lines = io.StringIO(text, newline="")
    reader = csv.reader(lines, strict=True, delimiter=delimiter, quoting=quoting)
    try:
        for cells in reader:
            place = f"{name}:{reader.line_num}"
            yield place, [cell.strip() for cell in cells] if strip else cells
    except csv.Error as error:
        raise InputError(f"{name}:{reader.line_num}: not valid CSV ({error})") from None


def csv_records(
    text: str,
    name: str,
    known: Sequence[str],
    needed: Sequence[str],
    delimiter: str = ",",
    header: Sequence[str] = (),
) -> Iterator[tuple[str, dict[str, str]]]:
    """Every row below the header as cells by column, with its place; see `check_header`.

    With a `header` argument the text has none.
    """
    columns = list(header)
    for place, cells in csv_rows(text, name, delimiter):
        if not any(cells):
            continue
        if not columns:
            check_header(cells, known, needed, place)
            columns = cells
        elif len(cells) != len(columns):
            hint = " (a | in a JobName? leave that column out)" * (delimiter == "|")
            raise InputError(f"{place}: expected {len(columns)} columns, got {len(cells)}{hint}")
        else:
            yield place, dict(zip(columns, cells, strict=True))
    if not columns:
        expected = f"the header {','.join(known or needed)}" if known or needed else "a header"
        raise InputError(f"{name}: the file is empty, expected {expected}")


def csv_text(header: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    """The text of a CSV."""
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return out.getvalue()


def check_header(
    cells: Sequence[str], known: Sequence[str], needed: Sequence[str], place: str, skip: str = ""
) -> None:
    """Refuse a header with unknown columns (`known` empty: any are), doubled or missing columns.

    `skip` is the end of the message for unknown columns: how to ignore them.
    """
    for cell in cells:
        if cells.count(cell) > 1:
            raise InputError(f"{place}: column {format_json(cell)} appears twice")
        if known and cell not in known:
            hint = did_you_mean(cell, known) + skip if skip else f"; known: {','.join(known)}"
            raise InputError(f"{place}: unknown column {format_json(cell)}{hint}")
    for key in needed:
        if key not in cells:
            raise InputError(
                f"{place}: column {format_json(key)} is missing; needed: {','.join(needed)}"
            )
