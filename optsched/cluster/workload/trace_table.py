"""Columns of a trace, each with its cells; a file as columns that name the place of every cell."""

from __future__ import annotations

import re
from decimal import Decimal
from itertools import pairwise
from sys import float_info
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

import numpy as np

from optsched.cluster.workload.foreign import looks_like
from optsched.cluster.workload.job import PER_SECOND
from optsched.cluster.workload.job_checks import CONTROL, MOST_AMOUNT, MOST_GPUS, MOST_SPEED
from optsched.errors import InputError
from optsched.io.csv_rows import check_header, csv_rows
from optsched.io.files import read_text
from optsched.io.strict_json import MAX_INTEGER, format_json, without_collector
from optsched.model.schedule import TIME_UNITS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from optsched.model.schedule import IntArray

SEPARATOR: Final = "|"
"""Between the numbers of a cell of ``sizes``."""

_NUMBER: Final = re.compile(r"[+-]?[0-9]{1,40}(?:\.[0-9]{0,40})?(?:[eE][+-]?[0-9]{1,3})?")
_TRUTH: Final = {"true": True, "1": True, "false": False, "0": False}
MOST_TEXT: Final = 200


def seconds(times: IntArray, time_unit: str) -> list[str]:
    """Times of a unit as seconds, exactly."""
    if time_unit == "s":
        return list(map(str, times.tolist()))
    scale = PER_SECOND[time_unit]
    digits = len(str(scale)) - 1
    found = []
    for value in times.tolist():
        whole, part = divmod(value, scale)
        found.append(f"{whole}.{part:0{digits}d}".rstrip("0").rstrip("."))
    return found


def _decimal(text: str) -> Decimal | None:
    return Decimal(text) if _NUMBER.fullmatch(text) else None


def _number(
    least: float, most: float, kind: type = float, above: bool = False
) -> Callable[[str], Any]:
    """Reads a number in ``least..most``, `above` the least; None if it is none, or not whole."""

    def read(text: str) -> Any:
        value = _decimal(text)
        if value is None or (kind is int and value != value.to_integral_value()):
            return None
        found = kind(value)
        return found if least <= found <= most and not (above and found == least) else None

    return read


def _sizes(text: str) -> Sequence[int] | None:
    ends = [_number(0, MOST_GPUS, int)(part) for part in re.split(r"[|-]", text)]
    found = [number for number in ends if number is not None]
    rising = all(a < b for a, b in pairwise(found)) and len(found) == len(ends)
    if not rising or (0 in found and len(found) > 1) or ("-" in text and len(found) != 2):
        return None
    return range(found[0], found[1] + 1) if "-" in text else found


class Column(NamedTuple):
    """What the cells of a column are."""

    what: str = ""
    """For messages."""
    read: Callable[[str], Any] | None = None
    """The value of a cell, None if it is wrong; names and times have their own."""
    default: Any = None
    """The value of an empty cell."""


COLUMNS: Final = {
    "job_id": Column(),
    "submit_time_s": Column(),
    "num_gpus": Column(
        "whole GPUs in 0..2^24 (jobs that share a GPU: see optsched workload)",
        _number(0, MOST_GPUS, int),
    ),
    "duration_s": Column(),
    "priority": Column(
        "a whole number in 1..99 (shares are a column weight)", _number(1, 99, int), 50
    ),
    "type": Column(),
    "sizes": Column("ascending sizes in 1..2^24 such as 1|2|4 or 2-8, or 0 alone", _sizes),
    "weight": Column("a finite weight > 0", _number(0, float_info.max, above=True), 1.0),
    "group": Column(),
    "preemptible": Column("true, false, 1 or 0", _TRUTH.get, True),
    "passes": Column("a whole number of passes in 1..2^53", _number(1, MAX_INTEGER, int), 1),
    "cpus_per_gpu": Column("CPUs by GPU in 0..2^20", _number(0, MOST_AMOUNT), 0.0),
    "memory_per_gpu_gb": Column("GB by GPU in 0..2^20", _number(0, MOST_AMOUNT), 0.0),
    "template": Column(),
}

SPEED: Final = "speed:"
"""Begins the name of a column of speeds on a type of GPU."""

_SPEED: Final = Column(
    "a speed in 0..1000, 0: the job does not run on that type", _number(0, MOST_SPEED), 1.0
)

USUAL: Final = tuple(COLUMNS)[:6]
"""Columns that every trace has when it is written; the first four must be there to be read."""


def _is_speed(key: str) -> bool:
    return key.startswith(SPEED) and key != SPEED


class TraceTable:
    """Rows of the file by column, with what is needed to name a place in it."""

    def __init__(self, path: Any, ignore_columns: bool) -> None:
        self.path = path
        text = read_text(path)
        if (nul := text.find("\0")) >= 0:
            raise InputError(f"{path}:{text.count(chr(10), 0, nul) + 1}: a NUL byte")
        if text.lstrip()[:1] in ("[", "{"):
            raise InputError(f"{path}: expected a CSV file, got JSON{looks_like(text)}")
        with without_collector():
            rows = [row for row in csv_rows(text, path, strip=False) if any(row[1])]
        if not rows:
            raise InputError(f"{path}: the file is empty; expected a header {','.join(USUAL)}")
        place, header = rows.pop(0)
        if "job_id" not in header:
            way = "(optsched workload makes a trace of a scheduler's log)"
            raise InputError(f'{place}: column "job_id" is missing {way}{looks_like(text)}')
        known = () if ignore_columns else (*COLUMNS, *filter(_is_speed, header))
        skip = " (ignore_columns=True skips it; optsched workload leaves such columns out)"
        try:
            check_header(header, known, USUAL[:4], place, skip)
        except InputError as error:
            other = not {*USUAL[:4]} <= {*header}
            raise InputError(f"{error}{looks_like(text) * other}") from None
        if not rows:
            raise InputError(f"{path}: no jobs: there are no rows")
        for place, cells in rows:
            if len(cells) != len(header):
                what = f"has {len(cells)} fields, the header has {len(header)}"
                raise InputError(f"{place}: {what}")
        places, cells_of = zip(*rows, strict=True)
        self.places: Sequence[str] = places
        self.columns: dict[str, Sequence[str]] = dict(
            zip(header, zip(*cells_of, strict=True), strict=True)
        )

        self.types = tuple(key.removeprefix(SPEED) for key in header if _is_speed(key))

    def refuse(self, i: int, key: str, what: str) -> NoReturn:
        """Refuse a cell of the i-th job."""
        name = format_json(self.columns["job_id"][i])
        raise InputError(f"{self.places[i]} (job {name}): {key}: {what}")

    def take(self, chosen: Sequence[int]) -> None:
        """These rows, in this order."""
        self.places = [self.places[i] for i in chosen]
        self.columns = {key: [v[i] for i in chosen] for key, v in self.columns.items()}

    def texts(self, key: str) -> Sequence[str]:
        """A column of names: short, without control characters; empty ones if it is not there."""
        column = self.columns.get(key)
        if column is None:
            return ("",) * len(self.places)
        long = max(column, key=len)
        if len(long) > MOST_TEXT:
            self.refuse(column.index(long), key, f"longer than {MOST_TEXT} characters")
        if CONTROL.search("".join(column)):
            i = next(i for i, text in enumerate(column) if CONTROL.search(text))
            self.refuse(i, key, f"control characters (a line break) in {format_json(column[i])}")
        return column

    def check_names(self) -> None:
        """Refuse ids that are empty or twice."""
        seen: dict[str, int] = {}
        for i, name in enumerate(self.texts("job_id")):
            if not name:
                self.refuse(i, "job_id", "empty")
            if (first := seen.setdefault(name, i)) != i:
                self.refuse(i, "job_id", f"is also that of {self.places[first]}")

    def values(self, key: str, default: Any = None) -> list[Any]:
        """Values of a column by its rule; of empty cells, or no column, `default` or the rule's."""
        rule = COLUMNS.get(key, _SPEED)
        assert rule.read is not None  # nobody asks for values of names and times
        empty = rule.default if default is None else default
        known: dict[str, Any] = {} if key in USUAL[:3] else {"": empty}
        column = self.columns.get(key)
        if column is None:
            return [empty] * len(self.places)
        for text in dict.fromkeys(column):
            if text not in known:
                known[text] = rule.read(text)
                if known[text] is None:
                    self._wrong(column.index(text), key, rule.what)
        return [known[text] for text in column]

    def _wrong(self, i: int, key: str, what: str) -> NoReturn:
        text = self.columns[key][i]
        got = format_json(text) if text else "nothing"
        self.refuse(i, key, f"expected {what}, got {got}")

    def times(self, key: str, time_unit: str, least: int) -> IntArray:
        """Whole times >= least in a unit, of a column in seconds."""
        column, scale = self.columns[key], PER_SECOND[time_unit]
        text = "".join(column)
        plain = text.isascii() and text.isdigit() and "" not in column
        if plain and len(max(column, key=len)) < 40:
            numbers = [int(cell) * scale for cell in column]
        else:
            numbers = [self._time(i, key, cell, time_unit) for i, cell in enumerate(column)]
        if min(numbers) < least or max(numbers) > MAX_INTEGER:
            i = next(i for i, value in enumerate(numbers) if not least <= value <= MAX_INTEGER)
            rule = f"expected a time {'>= 0' if least == 0 else '> 0'}, got {column[i]:.40}"
            beyond = f"{column[i]:.40} s is beyond 2^53 {time_unit}"
            self.refuse(i, key, rule if numbers[i] < least else beyond)
        return np.array(numbers, np.int64)

    def _time(self, i: int, key: str, text: str, time_unit: str) -> int:
        number = _decimal(text)
        if number is None:
            self._wrong(i, key, "seconds")
        value = number * PER_SECOND[time_unit]
        if value != value.to_integral_value():
            finer = TIME_UNITS[max(TIME_UNITS.index(time_unit) - 1, 0)]
            self.refuse(
                i, key,
                f"{text} s is not a whole number of {time_unit} (time_unit={finer!r}; optsched "
                "workload rounds)",
            )  # fmt: skip
        return int(value)


def first(bad: npt.NDArray[np.bool_]) -> int | None:
    """Where the first True is, or None."""
    return int(np.argmax(bad)) if bad.any() else None
