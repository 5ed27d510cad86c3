"""Rows of a CSV with the number of their line, and checks of its header: for all that read CSV."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING

from optsched.errors import InputError
from optsched.io.strict_json import format_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def csv_rows(text: str, name: str) -> Iterator[tuple[str, list[str]]]:
    """Every row, its cells stripped, with its place ``file:line``; blank lines too.

    Raises
    ------
    InputError
        With ``file:line``: quotes that are not closed, or whatever else is no CSV.
    """
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        for cells in reader:
            yield f"{name}:{reader.line_num}", [cell.strip() for cell in cells]
    except csv.Error as error:
        raise InputError(f"{name}:{reader.line_num}: not valid CSV ({error})") from None


def check_header(
    cells: Sequence[str], known: Sequence[str], needed: Sequence[str], place: str, skip: str = ""
) -> None:
    """Refuse a header with unknown columns, a column twice, or one that is missing.

    Parameters
    ----------
    cells
        The header.
    known, needed
        Columns that may be there (empty: any), and those that must.
    place
        Where it stands.
    skip
        How a user has unknown columns passed over, for the message.
    """
    for cell in cells:
        if cells.count(cell) > 1:
            raise InputError(f"{place}: column {format_json(cell)} is there twice")
        if known and cell not in known:
            way = skip or f"; known: {','.join(known)}"
            raise InputError(f"{place}: unknown column {format_json(cell)}{way}")
    for key in needed:
        if key not in cells:
            raise InputError(f"{place}: column {format_json(key)} is missing")
