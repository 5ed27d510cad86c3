"""Job shops as text in the standard layout (JSPLIB): ``jobs machines``, then pairs."""

from __future__ import annotations

import re
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from optsched.errors import InputError
from optsched.formats.registry import Reader, Source, looks_like
from optsched.io.strict_json import MAX_INTEGER, placed
from optsched.io.values import file_label, format_value
from optsched.model.schedule import Goal
from optsched.problems.jobshop.checks import MAX_MACHINES
from optsched.problems.jobshop.document import shop_of, standard_text
from optsched.problems.jobshop.problem import JobShop

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

ORDINARY: Final = "# job shop"
"""First line of a text that is an ordinary shop although it could be read as a flexible one."""

_COUNT: Final = re.compile(r"[0-9]{1,9}")
_INTEGER: Final = re.compile(r"-?[0-9]+")  # int() alone would also take 1_000, +5, Arabic digits


class ShopText:
    """Cursor over the lines of a text, without blank lines and comments (``#``)."""

    def __init__(self, text: str, file: str, most: int | None = None) -> None:
        self.file, self.at = file, 0
        self._found: list[tuple[int, str]] = []
        for number, raw in enumerate(text.split("\n"), 1):
            line = raw.removesuffix("\r").strip(" \t")
            if line and not line.startswith("#"):
                self._found.append((number, line))
                if len(self._found) == most:
                    break
        if not self._found:
            what = "only comments" if text.strip() else "the file is empty"
            raise InputError(f"{file}:1: expected a job shop, got nothing ({what})")

    @property
    def line(self) -> str:
        """The current line; empty after the last."""
        return self._found[self.at][1] if self.at < len(self._found) else ""

    def fail(self, message: str) -> NoReturn:
        """Raise an error at the current line."""
        number, _ = self._found[min(self.at, len(self._found) - 1)]
        raise InputError(f"{self.file}:{number}: {message}")

    def numbers(self) -> list[int]:
        """Parse the numbers of the current line; ASCII digits, optional minus, at most 2^53."""
        return [self._number(token) for token in re.split(r"[ \t]+", self.line)]

    def sizes(self) -> tuple[int, int]:
        """Parse the line ``n m``: number of jobs and of machines."""
        if re.fullmatch(r"[0-9]+\s+[0-9]+\s+[0-9.]+", self.line):
            self.fail(
                "expected 2 numbers (jobs machines), got 3, as in files of flexible job shops, "
                "which are not supported"
            )
        values = self.numbers()
        if len(values) != 2:
            self.fail(f"expected 2 numbers (jobs machines), got {len(values)}")
        for what, value in zip(("job", "machine"), values, strict=True):
            if value < 1:
                self.fail(f"expected at least 1 {what}, got {value}")
        self.at += 1
        return values[0], values[1]

    def rows(self, n: int, what: str, row: Callable[[list[int]], list[Any]]) -> list[list[Any]]:
        """Parse the next n lines of numbers, one a job."""
        found = []
        for k in range(n):
            if not self.line or self.line[0].isalpha():
                self.fail(f"expected {n} rows of {what}, one a job, got {k}")
            found.append(row(self.numbers()))
            self.at += 1
        return found

    def shop(
        self, jobs: list[list[tuple[int, int]]], m: int, facts: Mapping[str, int] | None = None
    ) -> JobShop:
        """Make the shop of these rows; refuse further lines."""
        if self.line:
            self.fail(f"expected the end of the file, one instance, got {format_value(self.line)}")
        if m > MAX_MACHINES:
            raise InputError(f"{self.file}: machines: expected at most {MAX_MACHINES}, got {m}")
        name, machines = file_label(Path(self.file).stem), [f"m{k}" for k in range(m)]
        with placed(f"{self.file}: "):
            return JobShop(jobs, machines, name=name, metadata=facts)

    def check_durations(self, values: Sequence[int]) -> None:
        """Refuse a negative duration."""
        if min(values, default=0) < 0:
            self.fail(f"expected a duration in 0..2^53, got {min(values)}")

    def check_machines(self, values: Sequence[int], base: int, m: int, once: bool) -> None:
        """Refuse machines outside base..base+m-1, and repeated machines if `once`."""
        if not base <= min(values, default=base) <= max(values, default=base) < base + m:
            value = next(value for value in values if not base <= value < base + m)
            hint = f" (machines are {base}-based here)" if value in (0, m) else ""
            self.fail(f"expected a machine in {base}..{base + m - 1}, got {value}{hint}")
        if once and len(set(values)) < len(values):
            twice = next(value for i, value in enumerate(values) if value in values[:i])
            remedy = "; if that is meant, read it with reentrant=True" if base == 0 else ""
            self.fail(f"expected every machine once, got machine {twice} twice{remedy}")

    def _number(self, token: str) -> int:
        if not _INTEGER.fullmatch(token):
            self.fail(f"expected an integer (digits 0-9), got {format_value(token)}")
        digits = token.lstrip("-").lstrip("0") or "0"
        if len(digits) > 16 or int(digits) > MAX_INTEGER:
            got = token if len(token) <= 30 else f"a number of {len(digits)} digits"
            self.fail(f"expected an integer in 0..2^53, got {got}")
        return -int(digits) if token.startswith("-") else int(digits)


def layout(source: Source) -> str:
    """Return ``standard`` or ``taillard``, by a title line or the width of the first row."""
    if source.tree is not None:
        return ""
    text = ShopText(source.text, source.file, 2)
    if not text.line[0].isdigit() and text.line[0] != "-":
        known = looks_like(source.text)
        if known or text.line.count(",") < 2:
            what = "two numbers (jobs machines), a title line of Taillard's, or JSON"
            text.fail(f"expected {what}, got {format_value(text.line)}{known}")
        return "taillard"
    refuse_flexible(source.text, source.file)
    _, m = text.sizes()
    if not text.line:
        text.fail("expected rows after the line with the sizes, got none")
    width = len(text.numbers())
    if width not in (m, 2 * m):
        text.fail(
            f"expected {2 * m} numbers (standard: {m} pairs machine duration) "
            f"or {m} (Taillard), got {width}"
        )
    return "standard" if width == 2 * m else "taillard"


def from_text(text: str, name: str, reentrant: bool = False) -> JobShop:
    """Read the standard text: ``n m``, then n rows of m pairs ``machine duration``.

    Machines are numbered from 0, ``#`` starts a comment line. `name`, without folder and suffix,
    names the instance. With `reentrant` rows may have any number of pairs, and machines may repeat.
    """
    lines = ShopText(text, name)
    n, m = lines.sizes()

    def row(values: list[int]) -> list[tuple[int, int]]:
        machines, durations = values[0::2], values[1::2]
        if len(values) % 2 or (not reentrant and len(machines) != m):
            expected = "pairs" if reentrant else f"{m} pairs"
            odd = " and a single number" if len(values) % 2 else ""
            lines.fail(f"expected {expected} (machine duration), got {len(durations)}{odd}")
        lines.check_machines(machines, 0, m, once=not reentrant)
        lines.check_durations(durations)
        return list(zip(machines, durations, strict=True))

    return lines.shop(lines.rows(n, "pairs", row), m)


def to_text(shop: JobShop) -> str:
    r"""Return the canonical standard text, without names and time unit; see `refuse_windows`.

    Examples
    --------
    >>> shop = optsched.JobShop([[(0, 3), (1, 2)], [(1, 4), (0, 1)]])
    >>> from optsched.formats import standard
    >>> standard.to_text(shop)
    '2 2\n0 3 1 2\n1 4 0 1\n'
    """
    refuse_windows(shop, "standard")
    return marked(standard_text(shop))


def refuse_windows(shop: JobShop, format: str) -> None:
    """Refuse what the text formats cannot hold: windows, weights, due dates."""
    if shop.goal != Goal():
        raise InputError(f"the {format} format has no objective, weights and due dates: write json")
    if shop.has_windows:
        raise InputError(f"the {format} format has no releases and deadlines: write it as json")


# flexible shops (FJSPLIB), whose texts can be valid ones of ordinary shops


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


READER = Reader(
    "standard",
    recognises=lambda source: layout(source) == "standard",
    read=lambda source: from_text(source.text, source.file, source.reentrant),
    write=lambda problem: to_text(shop_of(problem)),
    endings=(".txt",),
)
