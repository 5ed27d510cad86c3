"""Lists of hosts with brackets, as Slurm writes them: ``n[01-04,07],login``."""

from __future__ import annotations

import re
from typing import Final

from optsched.errors import InputError

MOST: Final = 100_000

_ITEM = re.compile(r"[^\[\],]*(?:\[[\d,\-]+\][^\[\],]*){0,8}")
_SPACES = re.compile(r"\s*,\s*|\s+")
_NUMBER = re.compile(r"[0-9]{1,9}")
_BRACKET = re.compile(r"\[([\d,\-]+)\]")


def expand(text: str, place: str = "hosts") -> list[str]:
    """All names of a list, in order; zeros in front are kept: ``n[08-10]`` has ``n08``.

    Parameters
    ----------
    text
        Names separated by commas or spaces; brackets hold numbers and ranges.
    place
        Field for messages.

    Raises
    ------
    InputError
        Brackets that do not match, a range that falls, or more than 100,000 names.
    """
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
        low, dash, high = span.partition("-")
        if not _NUMBER.fullmatch(low) or (dash and not _NUMBER.fullmatch(high)):
            raise InputError(f"{place}: expected a range such as 01-04, got {span!r:.60}")
        if int(high or low) < int(low):
            raise InputError(f"{place}: expected a range such as 01-04, got {span!r:.60}")
        if int(high or low) - int(low) >= most - len(numbers):
            raise InputError(f"{place}: {item!r:.60} names more than {MOST} hosts")
        numbers += [f"{i:0{len(low)}d}" for i in range(int(low), int(high or low) + 1)]
    head, rest = item[: bracket.start()], item[bracket.end() :]
    tails = _expanded(rest, place, most // max(1, len(numbers)))
    return [f"{head}{number}{tail}" for number in numbers for tail in tails]
