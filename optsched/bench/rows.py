"""The results file of a benchmark: a CSV row per finished solve, appended in one write."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args, get_type_hints

from optsched.errors import InputError
from optsched.io.csv_rows import csv_rows, csv_text
from optsched.io.files import check_writable, decode_text, read_bytes, write_atomic

if TYPE_CHECKING:
    import pandas


class Row(NamedTuple):
    """One solve. Empty fields are None; times are in seconds."""

    instance: str
    family: str
    size: str
    operations: int
    sha256: str
    solver: str
    options: str
    """JSON object, keys sorted."""
    seed: int
    workers: int
    time_limit: float | None
    iterations: int | None
    version: str
    status: str
    """As in `Result.status`, or ``error``."""
    objective: int | None
    lower_bound: int | None
    time_to_best: float | None
    time_to_proof: float | None
    seconds: float | None
    """Of `optsched.solve`."""
    wall_seconds: float
    """Of the process: start, imports, reading, solving, writing."""
    cpu_seconds: float | None
    """Of the process, all threads."""
    history: str
    """JSON list of [seconds, objective, lower bound]."""
    error: str
    machine: str
    versions: str
    finished: str
    """UTC."""

    @property
    def key(self) -> tuple[str, ...]:
        """Identity of the experiment: instance, solver, options, seed, limits, version."""
        numbers = (self.seed, self.workers, self.time_limit, self.iterations)
        texts = tuple("" if n is None else repr(float(n)) for n in numbers)
        return (self.sha256, self.solver, self.options, *texts, self.version)

    @property
    def steps(self) -> list[tuple[float, int | None, int | None]]:
        """The history: seconds, objective, lower bound."""
        return [(at, value, bound) for at, value, bound in json.loads(self.history or "[]")]


COLUMNS = Row._fields
_KINDS = {name: get_args(hint) or (hint,) for name, hint in get_type_hints(Row).items()}
"""Types of the columns; ``NoneType`` for columns that may be empty."""
STATUSES = ("optimal", "feasible", "infeasible", "unknown", "error")


class Results:
    """A results file that can be appended to.

    Files with other columns or an invalid row are refused; an incomplete last line (power loss) is
    dropped by the next `append`.

    Examples
    --------
    >>> from optsched.bench.rows import Results
    >>> Results("results.csv").rows  # of a file that does not exist yet
    []
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.rows: list[Row] = []
        self._torn = False
        check_writable(path)
        if self.path.exists():
            self.rows = self._read()

    @property
    def done(self) -> set[tuple[str, ...]]:
        """Keys of the rows without an error."""
        return {row.key for row in self.rows if not row.error}

    def to_pandas(self) -> pandas.DataFrame:
        """Make a data frame with one row per solve; columns as in `Row`."""
        from optsched.plots.notebook import frame

        return frame({key: [getattr(row, key) for row in self.rows] for key in COLUMNS})

    def append(self, row: Row) -> None:
        """Append a row to the file in one write."""
        if self._torn:
            content = read_bytes(self.path)
            write_atomic(self.path, content[: content.rfind(b"\n") + 1])
            self._torn = False
        if not self.path.exists() or not self.path.stat().st_size:
            write_atomic(self.path, _line(COLUMNS))
        try:
            handle = os.open(self.path, os.O_WRONLY | os.O_APPEND)
            try:
                os.write(handle, _line(row).encode())  # one call: other writers cannot cut in
                os.fsync(handle)
            finally:
                os.close(handle)
        except OSError as error:
            raise InputError(f"{self.path}: cannot be written ({error.strerror})") from None
        self.rows.append(row)

    def _read(self) -> list[Row]:
        content = read_bytes(self.path)
        self._torn = bool(content) and not content.endswith(b"\n")
        whole = content[: content.rfind(b"\n") + 1]
        csv.field_size_limit(2**30)  # a history may be long
        lines = csv_rows(decode_text(whole, str(self.path)), str(self.path), strip=False)
        _, header = next(lines, ("", None))
        if header is None and not content:
            return []
        if header != list(COLUMNS):
            raise InputError(
                f"{self.path}: is no results file of this version (other columns): "
                "choose another name"
            )
        rows: list[Row] = []
        for place, cells in lines:
            try:
                rows.append(_row(cells))
            except ValueError as error:
                raise InputError(f"{place}: {error}") from None
        return rows


def _row(cells: list[str]) -> Row:
    if len(cells) != len(COLUMNS):
        raise ValueError(f"expected {len(COLUMNS)} columns, got {len(cells)}")
    values: dict[str, Any] = dict(zip(COLUMNS, cells, strict=True))
    for name, kinds in _KINDS.items():
        text = values[name]
        try:
            values[name] = kinds[0](text) if text or len(kinds) == 1 else None
        except ValueError:
            got = repr(text[:40]) if text else "nothing"
            raise ValueError(f"{name}: expected a number, got {got}") from None
    row = Row(**values)
    if row.status not in STATUSES:
        raise ValueError(f"status: expected one of {', '.join(STATUSES)}, got {row.status!r:.40}")
    try:
        right = isinstance(json.loads(row.options), dict)
        row.steps  # noqa: B018 (reads the history)
    except (ValueError, TypeError, RecursionError):
        right = False
    if not right:
        raise ValueError("options: expected a JSON object; history: a JSON list of lists")
    return row


def _line(cells: tuple[Any, ...]) -> str:
    """Format a row without line breaks, so that only the last line can be incomplete."""
    texts = ["" if cell is None else " ".join(str(cell).splitlines()) for cell in cells]
    return csv_text(texts, ())
