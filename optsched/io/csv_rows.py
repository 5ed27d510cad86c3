"""Rows of a CSV with the number of their line, checks of its header, and the text of one."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING, Any

from optsched.errors import InputError
from optsched.io.strict_json import format_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


def csv_rows(
    text: str, name: str, delimiter: str = ",", strip: bool = True
) -> Iterator[tuple[str, list[str]]]:
    """Every row, its cells stripped, with its place ``file:line``; blank lines too.

    Only cells that are separated by commas may have quotes.

    Raises
    ------
    InputError
        With ``file:line``: quotes that are not closed, or whatever else is no CSV.
    """
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
    """Every row below the header as cells by column, with its place; `check_header` tells how.

    A `header` that is given is not in the text.

    Raises
    ------
    InputError
        With ``file:line``: no header, or a row of another length.
    """
    columns = list(header)
    for place, cells in csv_rows(text, name, delimiter):
        if not any(cells):
            continue
        if not columns:
            check_header(cells, known, needed, place)
            columns = cells
        elif len(cells) != len(columns):
            way = " (a | in a JobName? leave that column out)" * (delimiter == "|")
            raise InputError(f"{place}: expected {len(columns)} columns, got {len(cells)}{way}")
        else:
            yield place, dict(zip(columns, cells, strict=True))
    if not columns:
        raise InputError(
            f"{name}: the file is empty, expected the header {','.join(known or needed)}"
        )


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
    """Refuse a header with columns that are not `known` (empty: any), twice, or missing.

    `skip` says in messages how a user has unknown columns passed over.
    """
    for cell in cells:
        if cells.count(cell) > 1:
            raise InputError(f"{place}: column {format_json(cell)} is there twice")
        if known and cell not in known:
            way = skip or f"; known: {','.join(known)}"
            raise InputError(f"{place}: unknown column {format_json(cell)}{way}")
    for key in needed:
        if key not in cells:
            raise InputError(
                f"{place}: column {format_json(key)} is missing; needed: {','.join(needed)}"
            )
