"""Links as one types them: ``activation=25GB/s,5us``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from optsched.errors import InputError
from optsched.io.strict_json import format_json

if TYPE_CHECKING:
    from collections.abc import Sequence

_NAMES: Final = ("activation", "host")
_SIZES: Final = {
    "": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip
_TIMES: Final = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9}
_LINK = re.compile(
    r"(?P<name>[a-z]+)=(?P<bandwidth>\d{1,12}(?:\.\d{1,6})?) ?(?P<size>[A-Za-z]*)(?:/s)?"
    r"(?:, ?(?P<latency>\d{1,12}(?:\.\d{1,6})?) ?(?P<time>[a-z]+))?",
    re.ASCII,
)


def links(given: Sequence[str]) -> dict[str, dict[str, float]]:
    """What `advise` takes as ``link``; GB is 10^9 bytes here, as in the data sheets of links.

    Raises
    ------
    InputError
        An option cannot be read, or names a link twice.
    """
    found: dict[str, dict[str, float]] = {}
    for text in given:
        match = _LINK.fullmatch(text)
        if match is None or match["name"] not in _NAMES or match["size"] not in _SIZES:
            raise InputError(
                f"link: expected activation=BANDWIDTH[,LATENCY] or host=..., such as "
                f"activation=25GB/s,5us, got {format_json(text)}"
            )
        name = match["name"]
        if name in found:
            raise InputError(f"link: {name} is given twice")
        found[name] = {"bandwidth": float(match["bandwidth"]) * _SIZES[match["size"]]}
        if match["latency"] is not None:
            if match["time"] not in _TIMES:
                raise InputError(f"link: expected a latency such as 5us, got {format_json(text)}")
            found[name]["latency_ns"] = float(match["latency"]) * _TIMES[match["time"]]
    return found
