"""JSON that is either exactly right or refused with the place of the first fault."""

from __future__ import annotations

import gc
import json
import math
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

import msgspec

from optsched.errors import InputError
from optsched.io.files import read_text
from optsched.io.text import one_line

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

T = TypeVar("T")
_encode = msgspec.json.encode

MAX_INTEGER: Final = 2**53
"""Largest integer in a document: every JSON reader represents it exactly."""

_ADVICE: Final = {
    "optsched.profile": "a profile holds measured times, it is no instance and no schedule: "
    "`optsched arraypipe problem` writes the instance of its jobs (in Python "
    "Profile.read(path).problem()), and `optsched arraypipe run` measures and solves by itself",
}
"""Where to use documents that are easily confused with others."""

_PATH = re.compile(r"\.([^.\[\]]+)|\[(\d+|\.\.\.)\]")
_HALF_ESCAPED = re.compile(r"\\u[dD][89a-fA-F]")  # or a whole pair
HALF_PAIR: Final = re.compile("[\ud800-\udfff]")
_UNKNOWN: Final = object()
_MOST_KNOWN: Final = 16
"""Fields that a message lists."""

MAX_CHARACTERS: Final = 60
"""Characters of a value that a message repeats."""


@contextmanager
def without_collector() -> Iterator[None]:
    """Pause the garbage collector: it would scan the growing tree repeatedly (3x the time)."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Fault(Exception):
    """A value that is refused: the literal in the text, or "", and the reason."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        seen: set[str] = set()
        key = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
        keys = shortened([format_json(k) for k in members])
        raise _Fault("", f"key {format_json(key)} appears twice in an object of {keys}")
    return members


def _constant(literal: str) -> NoReturn:
    raise _Fault(literal, f"{literal} is not a JSON number")


def _finite(literal: str) -> float:
    if math.isinf(value := float(literal)):
        start = f"{literal[:20]}{'...' * (len(literal) > 20)}"
        raise _Fault(literal, f"{start} is too large a number")
    return value


_DECODER: Final = json.JSONDecoder(
    object_pairs_hook=_unique, parse_constant=_constant, parse_float=_finite
)


def parse(text: str, name: str) -> Any:
    """Parse JSON text; refuse duplicate keys, NaN, Infinity and half surrogate pairs.

    Errors of syntax begin with ``name:line:column``; `name` is the file.
    """
    try:
        tree = _DECODER.decode(text)
        if (not text.isascii() and HALF_PAIR.search(text)) or _HALF_ESCAPED.search(text):
            json.dumps(tree, ensure_ascii=False).encode()
    except _Fault as fault:
        literal, reason = fault.args
        raise InputError(f"{name}{_line_of(literal, text) if literal else ''}: {reason}") from None
    except json.JSONDecodeError as error:
        reason = f"{error.msg[0].lower()}{error.msg[1:]}"
        if error.pos >= len(text.rstrip()):
            reason = "the text ends too early (truncated?)" if text.strip() else "the file is empty"
        place = f"{name}:{error.lineno}:{error.colno}"
        raise InputError(f"{place}: not valid JSON: {reason}") from None
    except UnicodeEncodeError as error:
        code = ord(error.object[error.start])
        raise InputError(f"{name}: half a surrogate pair, U+{code:04X}, is no character") from None
    except RecursionError:
        raise InputError(f"{name}: nested too deeply") from None
    except ValueError:
        raise InputError(f"{name}: a number has more digits than any 64-bit integer") from None
    return tree


def decode(tree: Any, kind: type[T], name: str) -> T:
    """Turn a parsed tree into a typed struct; `InputError` names the path, the rule and the value.

    Integers are exact: ``3.0``, ``true`` and ``1e2`` are not integers.
    """
    try:
        return msgspec.convert(tree, type=kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise InputError(f"{name}: {_explain(str(error), tree, kind)}") from None


def decode_document(tree: Any, kind: type[T], expected: str, name: str) -> T:
    """`decode` a document of one known version ``family/version``."""
    check_format(tree, expected, name)
    return decode(tree, kind, name)


def read_json(path: str | os.PathLike[str], read: Callable[..., T], *arguments: Any) -> T:
    """Return ``read(tree, name, *arguments)`` for the JSON in a file."""
    name = str(path)
    with without_collector():
        return read(parse(read_text(path), name), name, *arguments)


@contextmanager
def placed(place: str) -> Iterator[None]:
    """Prefix refusals raised inside with the name of a file, or a path in it."""
    try:
        yield
    except InputError as error:
        error.args = (f"{place}{error.args[0]}",)
        raise


def lines(members: Mapping[str, Any], depth: int = 0) -> bytes:
    """A JSON object, one member a line; values that are bytes are JSON already."""
    begin = b"\n" + b"  " * (depth + 1)
    rows = (
        begin + _encode(key) + b": " + (v if isinstance(v, bytes) else _encode(v))
        for key, v in members.items()
    )
    end = b"\n" + b"  " * depth + b"}"
    return b"{" + b",".join(rows) + end + b"\n" * (not depth)


def rows(values: Iterable[Any], depth: int = 1) -> bytes:
    """A JSON list, one element a line; elements that are bytes are JSON already."""
    begin = b"\n" + b"  " * (depth + 1)
    parts = [begin + (v if isinstance(v, bytes) else _encode(v)) for v in values]
    return b"[" + b",".join(parts) + b"\n" + b"  " * depth + b"]" if parts else b"[]"


def indented(value: object) -> bytes:
    """A value as JSON, one field a line."""
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"


def nested(document: bytes) -> bytes:
    """A document as the value of a member of another one: indented."""
    return document.rstrip().replace(b"\n", b"\n  ")


def check_format(tree: Any, known: str | Sequence[str], name: str) -> str:
    """Refuse a document that is not of a known ``family/version``; return which it is.

    `known` are versions of one family, the newest last.
    """
    if not isinstance(tree, dict):
        raise InputError(f"{name}: expected a JSON object, got {format_json(tree)}")
    found, known = tree.get("format"), (known,) if isinstance(known, str) else known
    if isinstance(found, str) and found in known:
        return found
    newest = known[-1]
    if not isinstance(found, str):
        got = "nothing" if found is None else format_json(found)
        raise InputError(f'{name}: format: expected "{newest}", got {got}')
    family, _, version = found.partition("/")
    if family == newest.partition("/")[0] and re.fullmatch(r"[0-9]{1,9}", version):
        if int(version) > int(newest.partition("/")[2]):
            raise InputError(
                f"{name}: format: {format_json(found)} is newer than this optsched reads "
                f'("{newest}"): install a newer optsched'
            )
        reads = " and ".join(f'"{one}"' for one in known)
        raise InputError(
            f"{name}: format: {format_json(found)} is unknown, this optsched reads {reads}"
        )
    check_kin(tree, name)
    raise InputError(f'{name}: format: expected "{newest}", got {format_json(found)}')


def check_kin(tree: dict[str, Any], name: str) -> None:
    """Refuse a document of a related kind, with the command that reads it."""
    family = str(tree.get("format", "")).partition("/")[0]
    if family in _ADVICE:
        raise InputError(f"{name}: {_ADVICE[family]}")


def format_json(value: Any) -> str:
    """JSON of a value for a message, cut to one short line."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**MAX_CHARACTERS:
        return "a number of more than 60 digits"
    if isinstance(value, str):
        value = value[: MAX_CHARACTERS + 1]
    text = json.dumps(value, ensure_ascii=False)
    if not text.isprintable():  # no control characters on a terminal
        text = "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text)
    return text if len(text) <= MAX_CHARACTERS else f"{text[: MAX_CHARACTERS - 3]}..."


def shortened(parts: Sequence[str], limit: int = 4) -> str:
    """Join the first parts of a list with commas on one line, and count the others."""
    others = f" and {len(parts) - limit} more" if len(parts) > limit else ""
    return ", ".join(one_line(part, 1000) for part in parts[:limit]) + others


def _line_of(literal: str, text: str) -> str:
    """``:line`` of a literal outside of names and quotes, or ``""``."""
    at = re.search(rf"(?<![\w\"]){re.escape(literal)}(?![\w\"])", text)
    return f":{text.count(chr(10), 0, at.start()) + 1}" if at else ""


def _explain(message: str, tree: Any, kind: Any) -> str:
    """Translate one msgspec message into ``path: expected ..., got ...``."""
    fault, _, where = message.rpartition(" - at `$")  # the name of a field may hold anything
    if where.count("`") != 1:
        fault, where = message, ""
    steps = _PATH.findall(where.rstrip("`"))
    node, path = tree, ""
    for key, index in steps:
        if index == "...":  # a value of a mapping: msgspec does not give its key
            path, node = f"{path}.*", _UNKNOWN
            continue
        path += f"[{index}]" if index else (f".{key}" if path else key)
        try:
            node = node[int(index)] if index else node[key]
        except (KeyError, IndexError, TypeError):
            node = node if node is _UNKNOWN else None
    place = path or "top level"
    if match := re.match(r"Object missing required field `(.*)`", fault, re.DOTALL):
        return f'{place}: the field "{match[1]}" is missing'
    if match := re.match(r"Object contains unknown field `(.*)`", fault, re.DOTALL):
        known = [f.encode_name for one in _types(kind, steps) for f in getattr(one, "fields", ())]
        rule = f"; expected one of {', '.join(known)}" if 0 < len(known) <= _MOST_KNOWN else ""
        return f"{place}: unknown field {format_json(match[1])}{rule}"
    rule = _rule(fault)
    values = [value for one in _types(kind, steps) for value in getattr(one, "values", ())]
    if values and fault.startswith("Invalid enum value"):
        rule = f"one of {', '.join(map(format_json, values))}"
    if node is not _UNKNOWN:
        return f"{place}: expected {rule}, got {format_json(node)}"
    got = re.search(r", got (.*)$", fault)
    return f"{place}: expected {rule}{f', got {_rule(got[1])}' if got else ''}"


def _types(kind: Any, steps: Sequence[tuple[str, str]]) -> list[Any]:
    """Types at a path of a struct, [] if it is not found."""
    types: list[Any] = [msgspec.inspect.type_info(kind)]
    for key, index in [*steps, ("", "")]:
        types = [part for one in types for part in getattr(one, "types", (one,))]  # of unions
        if not (key or index):
            break
        members = [f for one in types for f in getattr(one, "fields", ()) if f.encode_name == key]
        inner = "item_type" if index else "value_type"
        types = [f.type for f in members] + [getattr(t, inner) for t in types if hasattr(t, inner)]
    return types


def _rule(fault: str) -> str:
    """Rule of a msgspec message in English: ``Expected `int` >= 0`` is ``an integer >= 0``."""
    rule = re.sub(r", got .*$", "", re.sub(r"^Expected ", "", fault))
    names = {
        "int": "an integer", "str": "a string", "array": "a list", "object": "an object",
        "bool": "true or false", "float": "a number", "null": "null",
    }  # fmt: skip
    rule = re.sub(
        r"`([a-z |]+)`",
        lambda m: " or ".join(names.get(part.strip(), part) for part in m[1].split("|")),
        rule,
    )
    return rule.replace(f"<= {MAX_INTEGER}", "<= 2^53")
