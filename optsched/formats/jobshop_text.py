"""Lines and numbers of the job-shop text formats, and which of the two formats a text is in."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal, NamedTuple, NoReturn

from optsched.errors import InputError
from optsched.io.strict_json import MAX_INTEGER
from optsched.io.values import format_value

if TYPE_CHECKING:
    from collections.abc import Sequence

_PLAIN_ROW = re.compile(r"-?[0-9]{1,15}(?:[ \t]+-?[0-9]{1,15})*")
_INTEGER = re.compile(r"-?[0-9]+")  # int() alone would also take 1_000, +5 and Arabic digits


class Line(NamedTuple):
    """A line that says something: its number in the file (from 1) and its text."""

    number: int
    text: str


def lines_of(text: str, name: str, most: int | None = None) -> list[Line]:
    """Lines that are neither blank nor comments (first non-blank character ``#``).

    Parameters
    ----------
    text
        The text.
    name
        File name for messages.
    most
        How many are wanted; all by default.
    """
    lines: list[Line] = []
    for number, raw in enumerate(text.split("\n") if text.strip() else (), start=1):
        line = raw.removesuffix("\r").strip(" \t")
        if line and not line.startswith("#"):
            lines.append(Line(number, line))
            if len(lines) == most:
                break
    if not lines:
        what = "only comments" if text.strip() else "the file is empty"
        raise InputError(f"{name}:1: expected a job shop, got nothing ({what})")
    return lines


def layout(lines: Sequence[Line], name: str) -> Literal["standard", "taillard"]:
    """Decide by a title line or by the width of the first row: 2m is standard, m Taillard's."""
    if lines[0].text[0].isalpha():
        if lines[0].text.count(",") < 2:
            what = "two numbers (jobs machines), a title line of Taillard's, or JSON"
            fail(name, lines[0], f"expected {what}, got {format_value(lines[0].text)}")
        return "taillard"
    _, m = sizes(lines[0], name)
    if len(lines) == 1:
        fail(name, lines[0], "expected rows after the line with the sizes, got none")
    width = len(lines[1].text.split())
    if width not in (m, 2 * m):
        _first_numbers(lines[1], name)
        fail(
            name,
            lines[1],
            f"expected {2 * m} numbers (standard: {m} pairs machine duration) "
            f"or {m} (Taillard), got {width}",
        )
    return "standard" if width == 2 * m else "taillard"


def sizes(line: Line, name: str) -> tuple[int, int]:
    """The line ``n m``: number of jobs and of machines."""
    values = _first_numbers(line, name)
    if len(values) != 2:
        count = len(line.text.split())
        fail(name, line, f"expected 2 numbers (jobs machines), got {count}")
    for what, value in zip(("job", "machine"), values, strict=True):
        if value < 1:
            fail(name, line, f"expected at least 1 {what}, got {value}")
    return values[0], values[1]


def numbers(line: Line, name: str) -> list[int]:
    """All numbers of a line; ASCII digits with an optional minus, not above 2^53."""
    if _PLAIN_ROW.fullmatch(line.text):
        return list(map(int, line.text.split()))
    return [_number(token, line, name) for token in re.split(r"[ \t]+", line.text)]


def _first_numbers(line: Line, name: str) -> list[int]:
    """The first hundred numbers of a line that is refused anyway if it has more."""
    return numbers(
        Line(line.number, " ".join(re.split(r"[ \t]+", line.text, maxsplit=100)[:100])), name
    )


def check_durations(values: Sequence[int], line: Line, name: str) -> None:
    """Refuse a negative duration."""
    if min(values) < 0:
        fail(name, line, f"expected a duration in 0..2^53, got {min(values)}")


def check_machines(
    values: Sequence[int], line: Line, name: str, *, base: int, m: int, once: bool
) -> None:
    """Refuse machines out of range and, if each may come only once, repeated ones.

    Parameters
    ----------
    values
        The machines of a job as the file numbers them, from `base` on.
    base, m
        The number of the first machine, 0 or 1, and how many there are.
    once
        Whether a machine may come only once.
    """
    odd = values and not base <= min(values) <= max(values) < base + m
    for value in values if odd else ():
        if not base <= value < base + m:
            hint = f" (machines are {base}-based here)" if value in (0, m) else ""
            fail(name, line, f"expected a machine in {base}..{base + m - 1}, got {value}{hint}")
    if once and len(set(values)) < len(values):
        second = next(i for i, value in enumerate(values) if value in values[:i])
        columns = [1 + i * (2 - base) for i in (values.index(values[second]), second)]
        # the standard text has machine and duration side by side, Taillard's rows only machines
        remedy = "; if that is meant, read it with reentrant=True" if base == 0 else ""
        fail(
            name,
            line,
            f"expected every machine once, got machine {values[second]} in columns "
            f"{columns[0]} and {columns[1]}{remedy}",
        )


def fail(name: str, line: Line, message: str) -> NoReturn:
    """Raise `InputError` with ``file:line``."""
    raise InputError(f"{name}:{line.number}: {message}")


def _number(token: str, line: Line, name: str) -> int:
    if not _INTEGER.fullmatch(token):
        fail(name, line, f"expected an integer (digits 0-9), got {format_value(token)}")
    digits = token.lstrip("-").lstrip("0")
    if len(digits) > 16 or int(digits or "0") > MAX_INTEGER:
        shown = token if len(token) <= 30 else f"a number of {len(digits)} digits"
        fail(name, line, f"expected an integer in 0..2^53, got {shown}")
    return -int(digits or "0") if token.startswith("-") else int(digits or "0")
