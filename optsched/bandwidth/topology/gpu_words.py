"""GPUs in words where no cluster is at hand: ``n01:0-3 n02:4,6``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable

_PART = re.compile(r"([^\s:,/]+):([\d,-]+)")
_IDS = re.compile(r"\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*")
_MOST = 10_000  # ids of four digits


def parse_gpus(text: str, place: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Host names with local ids, in the order of the text.

    Parameters
    ----------
    text
        Parts ``host:ids`` separated by white space.
    place
        Field for the message.

    Raises
    ------
    InputError
        Another form, a range that falls, or a host or id twice.
    """
    found: dict[str, tuple[int, ...]] = {}
    for part in text.split():
        match = _PART.fullmatch(part)
        if match is None:
            raise InputError(f"{place}: expected HOST:IDS such as n01:0-3,6, got {part!r:.60}")
        ids = local_ids(match[2], _MOST, part, place)
        if len(set(ids)) < len(ids) or match[1] in found:
            raise InputError(f"{place}: a host or an id is given twice in {text!r:.60}")
        found[match[1]] = tuple(ids)
    return tuple(found.items())


def written_gpus(gpus: Iterable[tuple[str, tuple[int, ...]]], place: str) -> str:
    """The inverse of `parse_gpus`; `InputError` for hosts or ids that have no such words."""
    text = " ".join(f"{host}:{id_ranges([*ids])}" for host, ids in gpus)
    if parse_gpus(text, place) != tuple((host, tuple(ids)) for host, ids in gpus):
        raise InputError(f"{place}: cannot be written in words, got {text!r:.60}")
    return text


def local_ids(text: str, size: int, part: str, place: str) -> list[int]:
    """The ids below `size` that ``0-3,6`` means; `part` is told in messages."""
    if not _IDS.fullmatch(text):
        raise InputError(f"{place}: expected ids such as 0-3,6 after the colon, got {part!r:.60}")
    found: list[int] = []
    for span in text.split(","):
        low, _, high = span.partition("-")
        last = int(high or low)
        if last >= size or int(low) > last:
            raise InputError(f"{place}: {part!r:.60}: expected ids in 0..{size - 1}, got {span}")
        found += range(int(low), last + 1)
    return found


def id_ranges(ids: list[int]) -> str:
    """The inverse of `local_ids`, for ascending ids."""
    parts: list[str] = []
    start = 0
    for i in range(1, len(ids) + 1):
        if i == len(ids) or ids[i] != ids[i - 1] + 1:
            a, b = ids[start], ids[i - 1]
            parts.append(str(a) if a == b else f"{a}-{b}" if b > a + 1 else f"{a},{b}")
            start = i
    return ",".join(parts)
