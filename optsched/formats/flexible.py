"""Texts of flexible job shops (FJSPLIB), which can be valid ones of ordinary shops."""

from __future__ import annotations

import re
from itertools import islice
from typing import TYPE_CHECKING, Final

from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

ORDINARY: Final = "# job shop"
"""First line of a text that is an ordinary shop although it could be read as a flexible one."""

_COUNT: Final = re.compile(r"[0-9]{1,9}")


def refuse_flexible(text: str, file: str) -> None:
    """Refuse a text in the layout of flexible shops that does not begin with `ORDINARY`."""
    alternatives = _alternatives(text)
    if alternatives is not None:
        count = f"{alternatives or 'no'} operation{'s' * (alternatives > 1)}"
        raise InputError(
            f"{file}: this looks like a flexible job shop ({count} with alternatives), which is "
            "not supported; if its rows are pairs of a machine and a duration, begin the file with "
            f'the line "{ORDINARY}"'
        )


def marked(text: str) -> str:
    """The text of an ordinary shop, marked as one if it looks like that of a flexible shop."""
    return text if _alternatives(text) is None else f"{ORDINARY}\n{text}"


def _alternatives(text: str) -> int | None:
    """Operations with several machines; None for a text that is not in the layout of FJSPLIB.

    There a row is the number of operations, then of each the number of its machines and so many
    pairs ``machine duration``; machines are numbered from 0 or 1. The first line may have a third
    number. A shop in which nothing has alternatives is taken for an ordinary one if no job has
    two operations.
    """
    if text.lstrip().startswith(ORDINARY):
        return None
    rows = (line.split() for line in text.split("\n") if line.strip() and line.strip()[0] != "#")
    head = next(rows, [])
    if len(head) not in (2, 3) or not all(map(_COUNT.fullmatch, head[:2])):
        return None
    n, m = map(int, head[:2])
    operations = found = 0
    for row in islice(rows, n):
        counts = _machine_counts(row, m) if all(map(_COUNT.fullmatch, row)) else None
        if counts is None:
            return None
        operations = max(operations, len(counts))
        found += sum(count > 1 for count in counts)
    return found if found or operations > (len(head) == 2) else None


def _machine_counts(row: Sequence[str], m: int) -> list[int] | None:
    """Of every operation the number of its machines, if a row is in the layout of FJSPLIB."""
    values, at, found = list(map(int, row)), 1, list[int]()
    while at < len(values):
        count = values[at]
        machines = values[at + 1 : at + 1 + 2 * count : 2]
        at += 1 + 2 * count
        if not 0 < len(set(machines)) == count or max(machines) > m or at > len(values):
            return None
        found.append(count)
    return found if found and len(found) == values[0] else None
