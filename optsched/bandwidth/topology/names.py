"""Lists of hosts as in Slurm (``n[01-04,07],login``), and of GPUs (``n01:0-3 n02:4,6``)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable

MOST: Final = 100_000
"""Hosts of a list."""

_ITEM = re.compile(r"[^\[\],]*(?:\[[\d,\-]+\][^\[\],]*){0,8}")
_SPACES = re.compile(r"\s*,\s*|\s+")
_NUMBER = re.compile(r"[0-9]{1,9}")
_BRACKET = re.compile(r"\[([\d,\-]+)\]")
_PART = re.compile(r"([^\s:,/]+):([\d,-]+)")
_IDS = re.compile(r"\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*")


def expand(text: str, place: str = "hosts") -> list[str]:
    """Expand a list of hosts; leading zeros are kept: ``n[08-10]`` has ``n08``."""
    found: list[str] = []
    at = 0
    text = _SPACES.sub(",", text.strip())
    while at <= len(text):
        match = _ITEM.match(text, at)
        assert match is not None  # it may be empty
        end = match.end()
        if match[0] == "" or (end < len(text) and text[end] != ","):
            raise InputError(
                f"{place}: expected a list of hosts such as n[01-04], got {text!r:.60}"
            )
        found += _expanded(match[0], place, MOST - len(found))
        at = end + 1
    return found


def _expanded(item: str, place: str, most: int) -> list[str]:
    bracket = _BRACKET.search(item)
    if bracket is None:
        return [item]
    numbers: list[str] = []
    for span in bracket[1].split(","):
        low, _, high = span.partition("-")
        last = high or low * ("-" not in span)
        if not _NUMBER.fullmatch(low) or not _NUMBER.fullmatch(last) or int(last) < int(low):
            raise InputError(f"{place}: expected a range such as 01-04, got {span!r:.60}")
        if int(last) - int(low) >= most - len(numbers):
            raise InputError(f"{place}: {item!r:.60} names more than {MOST} hosts")
        numbers += [f"{i:0{len(low)}d}" for i in range(int(low), int(last) + 1)]
    head, after = item[: bracket.start()], item[bracket.end() :]
    tails = _expanded(after, place, most // max(1, len(numbers)))
    return [f"{head}{number}{tail}" for number in numbers for tail in tails]


def parse_gpus(text: str, place: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Read GPUs without a cluster: host names with local ids, in the order of the text."""
    found: dict[str, tuple[int, ...]] = {}
    for part in text.split():
        match = _PART.fullmatch(part)
        if match is None:
            raise InputError(f"{place}: expected HOST:IDS such as n01:0-3,6, got {part!r:.60}")
        ids = local_ids(match[2], 10_000, part, place)
        if len(set(ids)) < len(ids) or match[1] in found:
            raise InputError(f"{place}: a host or an id is given twice in {text!r:.60}")
        found[match[1]] = tuple(ids)
    return tuple(found.items())


def written_gpus(gpus: Iterable[tuple[str, tuple[int, ...]]], place: str) -> str:
    """Write GPUs as `parse_gpus` reads them; `InputError` if it would read others."""
    text = " ".join(f"{host}:{id_ranges([*ids])}" for host, ids in gpus)
    if parse_gpus(text, place) != tuple((host, tuple(ids)) for host, ids in gpus):
        raise InputError(f"{place}: cannot be written as HOST:IDS, got {text!r:.60}")
    return text


def local_ids(text: str, size: int, part: str, place: str) -> list[int]:
    """Read ids below `size` such as ``0-3,6``; messages name `part`."""
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
    """Write ascending ids as `local_ids` reads them."""
    parts: list[str] = []
    start = 0
    for i in range(1, len(ids) + 1):
        if i == len(ids) or ids[i] != ids[i - 1] + 1:
            a, b = ids[start], ids[i - 1]
            parts.append(str(a) if a == b else f"{a}-{b}" if b > a + 1 else f"{a},{b}")
            start = i
    return ",".join(parts)
