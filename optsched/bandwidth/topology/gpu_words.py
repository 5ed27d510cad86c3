"""GPUs in words where no cluster is at hand: ``n01:0-3 n02:4,6``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable

_PART = re.compile(r"([^\s:,/]+):(\d{1,4}(?:-\d{1,4})?(?:,\d{1,4}(?:-\d{1,4})?)*)")


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
        ids: list[int] = []
        for span in match[2].split(","):
            low, _, high = span.partition("-")
            if int(high or low) < int(low):
                raise InputError(f"{place}: expected a range such as 0-3, got {span!r:.60}")
            ids += range(int(low), int(high or low) + 1)
        if len(set(ids)) < len(ids) or match[1] in found:
            raise InputError(f"{place}: a host or an id is given twice in {text!r:.60}")
        found[match[1]] = tuple(ids)
    return tuple(found.items())


def written_gpus(gpus: Iterable[tuple[str, tuple[int, ...]]], place: str) -> str:
    """The inverse of `parse_gpus`; `InputError` for hosts or ids that have no such words."""
    words = []
    for host, ids in gpus:
        spans: list[tuple[int, int]] = []
        for i in ids:
            if spans and spans[-1][1] + 1 == i:
                spans[-1] = (spans[-1][0], i)
            else:
                spans.append((i, i))
        listed = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
        words.append(f"{host}:{listed}")
    text = " ".join(words)
    if parse_gpus(text, place) != tuple((host, tuple(ids)) for host, ids in gpus):
        raise InputError(f"{place}: cannot be written in words, got {text!r:.60}")
    return text
