"""Checks of single values and arrays; each refusal names the place, the rule and the value."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np

from optsched.errors import InputError
from optsched.io.strict_json import HALF_PAIR, MAX_CHARACTERS, MAX_INTEGER, format_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

A = TypeVar("A", bound="npt.NDArray[Any]")

MAX_NAME: Final = 200
"""Characters of a name."""

_MAX_DEPTH: Final = 50


def format_value(value: Any) -> str:
    """One short line with a value, for a message."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, str) or (isinstance(value, int) and abs(value) >= 10**MAX_CHARACTERS):
        return format_json(value)
    text = " ".join(repr(value).split())
    return text if len(text) <= MAX_CHARACTERS else f"{text[: MAX_CHARACTERS - 3]}..."


def as_python(value: Any) -> Any:
    """Convert a NumPy scalar, or an array or tensor without dimensions, to a Python value."""
    if getattr(value, "ndim", None) != 0 or not callable(getattr(value, "item", None)):
        return value
    found = value.item()
    # of extended precision it is still NumPy's
    numbers = ((np.floating, float), (np.complexfloating, complex))
    return next((kind(found) for numpy, kind in numbers if isinstance(found, numpy)), found)


def integer(place: str, value: Any, least: int = 0, most: int | None = MAX_INTEGER) -> int:
    """Check an integer in ``least..most`` (None: no upper limit), of Python or NumPy, no boolean.

    `place` is the field in the message.
    """
    value = as_python(value)
    try:
        found = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        found = None
    if found is None or found < least or (most is not None and found > most):
        ends = f">= {least}" if most is None else f"in {_power(least)}..{_power(most)}"
        raise InputError(f"{place}: expected an integer {ends}, got {format_value(value)}")
    return found


def is_integer(value: Any) -> bool:
    """Whether this is an integer of Python or NumPy, and no boolean."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def int_array(name: str, given: npt.ArrayLike, ndim: int | None = 1) -> npt.NDArray[np.int64]:
    """A read-only, contiguous int64 array (None: of any shape); copied unless `given` is one.

    Refuses floats, booleans, text, ragged rows and integers beyond 2^53 by the name of the field.
    """
    try:
        array = np.asarray(given)
    except (ValueError, OverflowError):
        rule = "expected a flat list of integers" if ndim == 1 else "the rows differ in length"
        raise InputError(f"{name}: {rule}") from None
    if array.size == 0 and array.dtype.kind == "f":
        array = array.astype(np.int64)
    if array.dtype.kind == "u" and array.size and int(array.max()) > MAX_INTEGER:
        raise InputError(f"{name}: expected integers <= 2^53, got {array.max()}")
    if array.dtype.kind == "b" or (not isinstance(given, np.ndarray) and _holds_bool(given)):
        raise InputError(f"{name}: expected integers, got true or false")  # NumPy takes True for 1
    if array.dtype.kind not in "iu":
        raise InputError(f"{name}: expected integers, got {array.dtype} values")
    if array.ndim != (array.ndim if ndim is None else ndim):
        what = "a flat array" if ndim == 1 else f"{ndim} dimensions"
        raise InputError(f"{name}: expected {what}, got shape {array.shape}")
    if not (array.dtype == np.int64 and array.flags.c_contiguous and not array.flags.writeable):
        array = frozen(np.array(array, dtype=np.int64, order="C"))
    return array


def frozen(array: A) -> A:
    """Make an array read-only and return it."""
    array.flags.writeable = False
    return array


def _holds_bool(given: Any) -> bool:
    if not isinstance(given, (list, tuple)):
        return isinstance(given, (bool, np.bool_))
    kinds = set(map(type, given))
    return not kinds <= {int} and any(map(_holds_bool, given))


def number(
    place: str,
    value: Any,
    least: float = 0.0,
    most: float = math.inf,
    *,
    above: bool = False,
    infinite: bool = False,
    what: str = "",
) -> float:
    """Check a number in ``least..most`` and return it as a float; no boolean, text or NaN.

    `above` excludes `least` itself; `what` is the unit in the message, such as ``seconds``.
    """
    value = as_python(value)
    try:
        bad = isinstance(value, (bool, str, bytes))
        found = math.nan if bad else float(value)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    good = infinite or math.isfinite(found)
    if not good or not least <= found <= most or (above and found == least):
        open_ended = math.isinf(most)
        what = what or ("a finite number" if open_ended and not infinite else "a number")
        ends = "" if math.isinf(least) else f" {'>' if above else '>='} {least:g}"
        ends += "" if open_ended else f" and <= {most:g}"
        raise InputError(f"{place}: expected {what}{ends}, got {format_value(value)}")
    return found


def bytes_of(memory: str | int) -> int:
    """Bytes of a device: an integer, also as text, or ``"80GB"`` (GB and GiB are 2^30 here)."""
    if not isinstance(memory, str):
        return integer("memory", memory, 1, MAX_INTEGER)
    match = re.fullmatch(r"([0-9]{1,20})(?: ?(GB|GiB|MB|MiB))?", memory, re.ASCII)
    if not match or int(match[1]) == 0:
        raise InputError(
            f'memory: expected bytes or a size such as "80GB" (GB, GiB, MB, MiB), '
            f"got {format_value(memory)}"
        )
    power = {None: 0, "M": 20, "G": 30}[match[2] and match[2][0]]
    return integer("memory", int(match[1]) << power, 1, MAX_INTEGER)


def boolean(place: str, value: Any) -> bool:
    """Check a boolean of Python or NumPy; 0 and 1 are none."""
    value = as_python(value)
    if type(value) is not bool:
        raise InputError(f"{place}: expected True or False, got {format_value(value)}")
    return value


def one_of(place: str, value: Any, choices: Sequence[str]) -> str:
    """Check a string against a list of choices."""
    if not isinstance(value, str) or value not in choices:
        listed = ", ".join(choices)
        raise InputError(f"{place}: expected one of {listed}, got {format_value(value)}")
    return value


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """`` (did you mean NAME?)`` with the nearest known name, or ``""``."""
    from difflib import get_close_matches  # only when needed

    return "".join(f" (did you mean {one}?)" for one in get_close_matches(str(name), [*known], 1))


def label(place: str, given: Any, longest: int = MAX_NAME) -> str:
    """Check a name: a string of at most so many characters that UTF-8 can encode."""
    if not isinstance(given, str):
        raise InputError(f"{place}: expected a string, got {format_value(given)}")
    if len(given) > longest:
        raise InputError(f"{place}: longer than {longest} characters")
    return _encodable(place, given)


def labels(place: str, given: Any, count: int | None = None, prefix: str = "") -> tuple[str, ...]:
    """Check distinct names, `count` of them if that is given; None: ``prefix0, prefix1, ...``."""
    if given is None and prefix and count is not None:
        return tuple(f"{prefix}{k}" for k in range(count))
    names = tuple(listed(place, given, "a list of names", count))
    seen: dict[str, int] = {}
    for k, name in enumerate(names):
        if (first := seen.setdefault(label(f"{place}[{k}]", name), k)) != k:
            raise InputError(
                f"{place}[{k}]: {format_value(name)} is also the name of {place}[{first}]"
            )
    return names


def listed(place: str, given: Any, what: str, count: int | None = None) -> list[Any]:
    """Check an iterable that is no text, mapping or set, and its length if `count` is given."""
    unordered = isinstance(given, (str, bytes, Mapping, AbstractSet))
    if unordered or not hasattr(given, "__iter__") or getattr(given, "ndim", 1) == 0:
        raise InputError(f"{place}: expected {what}, got {format_value(given)}")
    found = given.tolist() if isinstance(given, np.ndarray) else list(given)
    if count is not None and len(found) != count:
        raise InputError(f"{place}: expected {what} ({count} values), got {len(found)}")
    return found


def refuse_unknown(given: Iterable[str], known: Iterable[str], where: str) -> None:
    """Refuse names that are not among the known ones, with the nearest of them."""
    names = sorted(known)
    for key in given:
        if key not in names:
            hint = did_you_mean(key, names) or f"; there are {', '.join(names)}"
            raise InputError(f"{key}: {where} has no such field{hint}")


def file_label(text: str) -> str:
    """A label from a file name: cut, with ``?`` for bytes that are no UTF-8."""
    return HALF_PAIR.sub("?", text[:MAX_NAME])


def json_value(place: str, given: Any, depth: int = _MAX_DEPTH) -> Any:
    """A copy in plain JSON types that a document can hold exactly.

    Accepts mappings with string keys, lists, tuples, strings, booleans, None, finite numbers,
    integers up to 2^53 and NumPy scalars, nested at most `depth` levels.
    """
    if given is None or isinstance(given, (bool, np.bool_)):
        return None if given is None else bool(given)
    if isinstance(given, (int, np.integer)):
        return integer(place, given, -MAX_INTEGER)
    if isinstance(given, (float, np.floating)):
        return number(place, given, -math.inf)
    if isinstance(given, str):
        return _encodable(place, given)
    if isinstance(given, (Mapping, list, tuple)) and not depth:
        raise InputError(f"{place}: nested too deeply")
    if isinstance(given, Mapping):
        return {
            _key(place, key): json_value(f"{place}.{_key(place, key)[:60]}", value, depth - 1)
            for key, value in given.items()
        }
    if isinstance(given, (list, tuple)):
        return [json_value(f"{place}[{i}]", value, depth - 1) for i, value in enumerate(given)]
    raise InputError(f"{place}: expected plain JSON values, got a {type(given).__name__}")


def _key(place: str, key: Any) -> str:
    if not isinstance(key, str):
        raise InputError(f"{place}: expected keys that are strings, got {format_value(key)}")
    return _encodable(place, key)


def _encodable(place: str, text: str) -> str:
    if not text.isascii() and (half := HALF_PAIR.search(text)):
        raise InputError(f"{place}: half a surrogate pair, U+{ord(half[0]):04X}, is no character")
    return str(text)


def _power(limit: int) -> str:
    """A limit as a power of two, if it is a large one: ``2^53``."""
    large = abs(limit) >= 2**24 and abs(limit).bit_count() == 1
    return f"{'-' * (limit < 0)}2^{abs(limit).bit_length() - 1}" if large else str(limit)
