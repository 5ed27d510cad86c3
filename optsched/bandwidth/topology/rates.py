"""Bandwidths are integers in kB/s, so that every solver agrees to the last digit."""

from __future__ import annotations

from typing import Any, Final

from optsched.errors import InputError
from optsched.io.values import number

KILOBYTES: Final = 1_000_000
"""kB/s in one GB/s."""

MOST: Final = 3_037_000_499
"""Bandwidths are below: products of two fit in 64 bits."""

NO_LIMIT: Final = 2**62
"""What does not limit, such as the links within a host that holds a single GPU."""

UNMEASURED: Final = -1


def kilobytes(place: str, given: Any) -> int:
    """GB/s, a number >= 0, as kB/s, rounded to the nearest."""
    value = number(place, given, infinite=True, what="GB/s")
    if value * KILOBYTES >= MOST:
        raise InputError(f"{place}: expected GB/s below 3037, got {given!r:.60} (is it in MB/s?)")
    return round(value * KILOBYTES)


def rate_text(value: int) -> str:
    """As people read it: ``337.17 GB/s``."""
    return f"{value / KILOBYTES:.2f} GB/s"
