"""Names and free-form values that a document can hold: what is written is what is read."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from optsched.errors import InputError
from optsched.io.strict_json import MAX_INTEGER, shown

MAX_NAME: Final = 200
"""Characters of a name."""

_MAX_DEPTH: Final = 50
_HALF_PAIR: Final = re.compile("[\ud800-\udfff]")


def label(place: str, given: Any, longest: int = MAX_NAME) -> str:
    """A name: a short text that a UTF-8 file can hold.

    Parameters
    ----------
    place
        Field for the message.
    given
        The name.
    longest
        Most characters.

    Raises
    ------
    InputError
        Not a string, too long, or with half a surrogate pair (which is no character).
    """
    if not isinstance(given, str):
        raise InputError(f"{place}: expected a string, got {_told(given)}")
    if len(given) > longest:
        raise InputError(f"{place}: longer than {longest} characters")
    return _encodable(place, given)


def file_label(text: str) -> str:
    """A label made of a file name: cut, and bytes that are no UTF-8 become ``?``."""
    return _HALF_PAIR.sub("?", text[:MAX_NAME])


def plain(place: str, given: Any, depth: int = _MAX_DEPTH) -> Any:
    """A copy in plain JSON types that reads back the same.

    Parameters
    ----------
    place
        Field for the message.
    given
        Mappings with string keys, lists, tuples, strings, numbers, booleans, None; NumPy scalars.
    depth
        Most levels of nesting.

    Raises
    ------
    InputError
        Another type, nested too deeply, a number that is not finite or an integer beyond 2^53.
    """
    if given is None or isinstance(given, (bool, np.bool_)):
        return None if given is None else bool(given)
    if isinstance(given, (int, np.integer)):
        if not -MAX_INTEGER <= given <= MAX_INTEGER:
            raise InputError(f"{place}: expected an integer in -2^53..2^53, got {_told(given)}")
        return int(given)
    if isinstance(given, (float, np.floating)):
        if not math.isfinite(given):
            raise InputError(f"{place}: expected a finite number, got {given}")
        return float(given)
    if isinstance(given, str):
        return _encodable(place, given)
    if isinstance(given, (Mapping, list, tuple)) and not depth:
        raise InputError(f"{place}: nested too deeply")
    if isinstance(given, Mapping):
        return {
            _key(place, key): plain(f"{place}.{_key(place, key)[:60]}", value, depth - 1)
            for key, value in given.items()
        }
    if isinstance(given, (list, tuple)):
        return [plain(f"{place}[{i}]", value, depth - 1) for i, value in enumerate(given)]
    raise InputError(f"{place}: expected plain JSON values, got {_told(given)}")


def _key(place: str, key: Any) -> str:
    if not isinstance(key, str):
        raise InputError(f"{place}: expected keys that are strings, got {_told(key)}")
    return _encodable(place, key)


def _encodable(place: str, text: str) -> str:
    if not text.isascii() and (half := _HALF_PAIR.search(text)):
        raise InputError(f"{place}: half a surrogate pair, U+{ord(half[0]):04X}, is no character")
    return str(text)


def _told(value: Any) -> str:
    if isinstance(value, (np.generic, np.ndarray)):
        value = value.tolist()
    try:
        return shown(value)
    except TypeError:
        return f"a {type(value).__name__}"
