"""The standard job-shop text (JSPLIB): a line ``jobs machines``, then a row of pairs a job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from optsched.errors import InputError
from optsched.formats.jobshop_text import (
    Line,
    check_durations,
    check_machines,
    fail,
    layout,
    lines_of,
    numbers,
    sizes,
)
from optsched.formats.registry import Reader, Source
from optsched.io.files import read_text
from optsched.io.strict_json import placed
from optsched.io.values import file_label
from optsched.problems.jobshop.checks import MAX_MACHINES
from optsched.problems.jobshop.document import shop_of, standard_text
from optsched.problems.jobshop.problem import JobShop

if TYPE_CHECKING:
    import os


def read(path: str | os.PathLike[str], reentrant: bool = False) -> JobShop:
    """Read a file in the standard format; see `from_text`."""
    return from_text(read_text(path), str(path), reentrant)


def from_text(text: str, name: str, reentrant: bool = False) -> JobShop:
    """Read the standard text: ``n m``, then n rows of m pairs ``machine duration``.

    Parameters
    ----------
    text
        The text; machines are numbered from 0, ``#`` starts a comment line.
    name
        File name for messages; without folder and suffix it names the instance.
    reentrant
        Rows may have any number of pairs; machines may repeat or be skipped.

    Raises
    ------
    InputError
        With ``file:line`` and the expected and found count, value or range.
    """
    n, m = sizes(lines_of(text, name, 1)[0], name)
    lines = lines_of(text, name, n + 2)
    if reentrant and m > MAX_MACHINES:
        fail(name, lines[0], f"expected 1..{MAX_MACHINES} machines, got {m}")
    rows = lines[1:]
    if len(rows) != n:
        at = rows[n] if len(rows) > n else lines[-1]
        got = "more" if len(rows) > n else len(rows)
        fail(name, at, f"expected {n} rows, one a job, got {got}")
    jobs = [_row(line, name, m, reentrant) for line in rows]
    return named_shop(jobs, m, name, instance_name(name))


def to_text(shop: JobShop) -> str:
    """The canonical standard text; names and the time unit are not part of it.

    Raises
    ------
    InputError
        The shop has releases or deadlines, which the format cannot express.
    """
    refuse_windows(shop, "standard")
    return standard_text(shop)


def instance_name(name: str) -> str:
    """Name of the instance in a file: the file's, without folder and suffix."""
    return file_label(Path(name).stem)


def named_shop(
    jobs: list[list[tuple[int, int]]],
    m: int,
    file: str,
    name: str,
    metadata: dict[str, int] | None = None,
) -> JobShop:
    """The shop of checked rows; sums that overflow are reported with the file."""
    with placed(f"{file}: "):
        return JobShop(jobs, [f"m{k}" for k in range(m)], name=name, metadata=metadata)


def refuse_windows(shop: JobShop, format: str) -> None:
    """Releases and deadlines must not be lost silently."""
    if shop.has_windows:
        raise InputError(f"the {format} format has no releases and deadlines: write it as json")


def _row(line: Line, name: str, m: int, reentrant: bool) -> list[tuple[int, int]]:
    values = numbers(line, name)
    machines, durations = values[0::2], values[1::2]
    if len(values) % 2 or (not reentrant and len(machines) != m):
        expected = "pairs" if reentrant else f"{m} pairs"
        odd = " and a single number" if len(values) % 2 else ""
        fail(name, line, f"expected {expected} (machine duration), got {len(durations)}{odd}")
    check_machines(machines, line, name, base=0, m=m, once=not reentrant)
    check_durations(durations, line, name)
    return list(zip(machines, durations, strict=True))


def is_layout(source: Source, wanted: str) -> bool:
    """Whether a text is in this one of the two layouts; `InputError` if it is in neither."""
    file = source.file
    return source.tree is None and layout(lines_of(source.text, file, 2), file) == wanted


READER = Reader(
    "standard",
    recognises=lambda source: is_layout(source, "standard"),
    read=lambda source: from_text(source.text, source.file, source.reentrant),
    write=lambda problem: to_text(shop_of(problem)),
    endings=(".txt",),
)
