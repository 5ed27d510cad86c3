"""Numbers of jobs: what is refused, and how the message says so."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.errors import InputError
from optsched.io.strict_json import MAX_INTEGER, shown
from optsched.io.values import label

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST_WORK: Final = 2**62
"""Work of a job: one more unit of time at any speed still fits 64 bits."""

MOST_RATE: Final = 2**53
"""Work per unit of time: the speed of 9 * 10**9 GPUs."""

MOST_GPUS: Final = 2**24
"""GPUs of one job."""


def told(value: Any) -> str:
    """A value as a message repeats it: one short line."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**60:
        return "a number of more than 60 digits"
    if isinstance(value, np.generic):
        value = value.item()
    text = shown(value) if isinstance(value, str) else " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def integer(place: str, value: Any, least: int = 0, most: int = MAX_INTEGER) -> int:
    """A plain integer in ``least..most``, also of NumPy's; never a truth value."""
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, np.integer))
        or not least <= value <= most
    ):
        limit = {MAX_INTEGER: "2^53", MOST_WORK: "2^62", MOST_GPUS: "2^24"}.get(most, str(most))
        raise InputError(f"{place}: expected an integer in {least}..{limit}, got {told(value)}")
    return int(value)


def truth(place: str, value: Any) -> bool:
    """Python's True or False; nothing that only counts as one of them."""
    if type(value) is not bool:
        raise InputError(f"{place}: expected True or False, got {value!r:.60}")
    return value


def real(
    place: str, value: Any, least: float = 0.0, most: float = math.inf, *, above: bool = False
) -> float:
    """A finite float in ``least..most``, maybe not the least; never a truth value or a text."""
    try:
        bad = isinstance(value, (bool, np.bool_, str, bytes))
        found = math.nan if bad else float(value)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not math.isfinite(found) or not least <= found <= most or (above and found == least):
        sign = ">" if above else ">="
        if most < math.inf:
            raise InputError(
                f"{place}: expected a number {sign} {least:g} and <= {most:g}, got {told(value)}"
            )
        raise InputError(f"{place}: expected a finite number {sign} {least:g}, got {told(value)}")
    return found


_latest: list[tuple[int, ...]] = [(1,)]
"""What was found right last: the jobs of one workload often share their sizes."""


def ascending(place: str, sizes: Any) -> tuple[int, ...]:
    """Allowed numbers of GPUs: not empty, distinct, ascending; 0 only alone."""
    same: bool = sizes is _latest[0]
    if same:
        return _latest[0]
    if isinstance(sizes, (str, bytes)) or not hasattr(sizes, "__iter__"):
        raise InputError(f"{place}: expected numbers of GPUs such as (1, 2, 4), got {told(sizes)}")
    found = tuple(integer(place, size, 0, MOST_GPUS) for size in sizes)
    if not found:
        raise InputError(f"{place}: empty; give at least one number of GPUs ((0,) for none)")
    if any(b <= a for a, b in pairwise(found)):
        raise InputError(f"{place}: expected ascending numbers of GPUs, got {told(list(found))}")
    if found[0] == 0 and len(found) > 1:
        raise InputError(
            f"{place}: 0 stands alone, for a task without GPUs, got {told(list(found))}"
        )
    _latest[0] = found
    return found


def word(place: str, value: Any) -> str:
    """A name that a file can hold."""
    return label(place, value)


CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")
"""Characters that no name or free text of a job has: a line of a trace could not hold them."""


def line(place: str, value: Any, *, empty: bool = True) -> str:
    """A name without control characters; maybe not an empty one."""
    text = word(place, value)
    if not text and not empty:
        raise InputError(f"{place}: empty; give every job a name")
    if CONTROL.search(text):
        raise InputError(f"{place}: control characters (a line break, NUL) in {told(text)}")
    return text


def one_of(place: str, value: Any, words: Sequence[str]) -> str:
    """One of these words."""
    if not isinstance(value, str) or value not in words:
        raise InputError(f"{place}: expected one of {', '.join(words)}, got {told(value)}")
    return value
