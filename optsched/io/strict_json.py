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

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

T = TypeVar("T")
_encode = msgspec.json.encode

MAX_INTEGER: Final = 2**53
"""Largest integer in a document: every JSON reader represents it exactly."""

_WAYS_OUT: Final = {
    "optsched.profile": "a profile is measured times, no instance and no schedule: `optsched "
    "arraypipe problem` writes the instance of its jobs (in Python Profile.read(path).problem() "
    "makes it), and `optsched arraypipe run` measures and solves by itself",
}
"""What to do with documents that people take for others."""

_PATH = re.compile(r"\.([^.\[\]]+)|\[(\d+|\.\.\.)\]")
_HALF_ESCAPED = re.compile(r"\\u[dD][89a-fA-F]")  # or a whole pair
_HALF_IN_TEXT = re.compile("\\\\u[dD][89a-fA-F]|[\ud800-\udfff]")
HALF_PAIR: Final = re.compile("[\ud800-\udfff]")
_UNKNOWN: Final = object()
MAX_SHOWN: Final = 60
"""Characters of an offending value that a message repeats."""


class _Duplicate:
    """Stands in the parsed tree where an object had one key twice."""

    def __init__(self, key: str) -> None:
        self.key = key


@contextmanager
def without_collector() -> Iterator[None]:
    """Pause the garbage collector: it would walk the growing tree again and again (3x the time)."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def parse(text: str, name: str) -> Any:
    """Parse JSON text: no duplicate keys, no NaN, Infinity or half surrogate pairs, no rest.

    Parameters
    ----------
    text
        The JSON text.
    name
        File name for messages.

    Raises
    ------
    InputError
        With ``name:line:column`` for syntax, or the path of a duplicate key.
    """
    duplicates: list[_Duplicate] = []

    def unique(pairs: list[tuple[str, Any]]) -> Any:
        members = dict(pairs)
        if len(members) == len(pairs):
            return members
        seen: set[str] = set()
        key = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
        duplicates.append(_Duplicate(key))
        return duplicates[-1]

    def constant(literal: str) -> NoReturn:
        raise InputError(f"{name}{_line_of(literal, text)}: {literal} is not a JSON number")

    def finite(literal: str) -> float:
        if math.isinf(value := float(literal)):
            what = f"{literal[:20]}{'...' * (len(literal) > 20)}"
            raise InputError(f"{name}{_line_of(literal, text)}: {what} is too large a number")
        return value

    try:
        tree = json.loads(
            text, object_pairs_hook=unique, parse_constant=constant, parse_float=finite
        )
    except json.JSONDecodeError as error:
        what = f"{error.msg[0].lower()}{error.msg[1:]}"
        if error.pos >= len(text.rstrip()):
            what = "the text ends too early (truncated?)" if text.strip() else "the file is empty"
        raise InputError(f"{name}:{error.lineno}:{error.colno}: not valid JSON: {what}") from None
    except RecursionError:
        raise InputError(f"{name}: nested too deeply") from None
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{name}: a number has more digits than any 64-bit integer") from None
    if duplicates:
        path, found = _find(tree, lambda node: isinstance(node, _Duplicate))
        raise InputError(f"{name}: {path}: key {format_json(found.key)} appears twice")
    if _HALF_ESCAPED.search(text) if text.isascii() else _HALF_IN_TEXT.search(text):
        path, found = _find(tree, _is_half)
        if path:
            raise InputError(
                f"{name}: {path}: half a surrogate pair, "
                f"U+{ord(HALF_PAIR.findall(found)[0]):04X}, is no character"
            )
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
    """`decode` a whole document, which must be of the ``family/version`` expected."""
    check_format(tree, expected, name)
    return decode(tree, kind, name)


def read_json(path: str | os.PathLike[str], read: Callable[..., T], *rest: Any) -> T:
    """What ``read(tree, name, *rest)`` makes of the JSON in a file."""
    name = str(path)
    with without_collector():
        return read(parse(read_text(path), name), name, *rest)


@contextmanager
def placed(place: str) -> Iterator[None]:
    """Put the name of a file, or a path in it, in front of what is refused within."""
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


def nested(document: bytes) -> bytes:
    """A document as the value of a member of another one: indented."""
    return document.rstrip().replace(b"\n", b"\n  ")


def check_format(tree: Any, expected: str, name: str) -> None:
    """Refuse a document that is not of the ``family/version`` expected, saying what it is."""
    if not isinstance(tree, dict):
        raise InputError(f"{name}: expected a JSON object, got {format_json(tree)}")
    found = tree.get("format")
    if found == expected:
        return
    if not isinstance(found, str):
        got = "nothing" if found is None else format_json(found)
        raise InputError(f'{name}: format: expected "{expected}", got {got}')
    family, _, version = found.partition("/")
    wanted_family, _, wanted_version = expected.partition("/")
    if family == wanted_family and re.fullmatch(r"[0-9]{1,9}", version):
        if int(version) > int(wanted_version):
            raise InputError(
                f"{name}: format: {format_json(found)} is newer than this optsched reads "
                f'("{expected}"): install a newer optsched'
            )
        raise InputError(
            f'{name}: format: {format_json(found)} is unknown, this optsched reads "{expected}"'
        )
    check_kin(tree, name)
    raise InputError(f'{name}: format: expected "{expected}", got {format_json(found)}')


def check_kin(tree: dict[str, Any], name: str) -> None:
    """Refuse a document that is good for something else, saying for what."""
    family = str(tree.get("format", "")).partition("/")[0]
    if family in _WAYS_OUT:
        raise InputError(f"{name}: {_WAYS_OUT[family]}")


def format_json(value: Any) -> str:
    """A value as a message repeats it: JSON, cut to one short line."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**MAX_SHOWN:
        return "a number of more than 60 digits"
    if isinstance(value, str):
        value = value[: MAX_SHOWN + 1]
    text = json.dumps(value, ensure_ascii=False)
    if not text.isprintable():  # nothing invisible or turned round on somebody's terminal
        text = "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


def shortened(parts: Sequence[str], limit: int = 4) -> str:
    """A list in words that stays readable however long it is."""
    if len(parts) <= limit:
        return ", ".join(parts)
    return ", ".join(parts[:limit]) + f" and {len(parts) - limit} more"


def _is_half(node: Any) -> bool:
    return isinstance(node, str) and not node.isascii() and bool(HALF_PAIR.search(node))


def _line_of(literal: str, text: str) -> str:
    """``:line`` of a literal in a text, if it is there outside of words and quotes."""
    at = re.search(rf"(?<![\w\"]){re.escape(literal)}(?![\w\"])", text)
    return f":{text.count(chr(10), 0, at.start()) + 1}" if at else ""


def _find(tree: Any, wanted: Callable[[Any], bool]) -> tuple[str, Any]:
    """Path and value of a node or key that is wanted; an empty path if there is none."""
    stack: list[tuple[str, Any]] = [("", tree)]
    while stack:
        path, node = stack.pop()
        if wanted(node):
            return path or "top level", node
        if isinstance(node, dict):
            for key, child in node.items():
                if wanted(key):
                    return path or "top level", key
                step = key if key.isprintable() and len(key) < MAX_SHOWN else format_json(key)
                stack.append((f"{path}.{step}" if path else step, child))
        elif isinstance(node, list):
            stack.extend((f"{path}[{i}]", child) for i, child in enumerate(node))
    return "", None


def _explain(message: str, tree: Any, kind: Any) -> str:
    """Translate one msgspec message into ``path: expected ..., got ...``."""
    what, _, where = message.rpartition(" - at `$")  # a field's name may hold anything
    if where.count("`") != 1:
        what, where = message, ""
    steps = _PATH.findall(where.rstrip("`"))
    node, path = tree, ""
    for key, index in steps:
        if index == "...":  # msgspec does not name the key of a mapping, so the value is unknown
            path, node = f"{path}.*", _UNKNOWN
            continue
        path += f"[{index}]" if index else (f".{key}" if path else key)
        try:
            node = node[int(index)] if index else node[key]
        except (KeyError, IndexError, TypeError):
            node = node if node is _UNKNOWN else None
    place = path or "top level"
    if match := re.match(r"Object missing required field `(.*)`", what, re.DOTALL):
        return f'{place}: the field "{match[1]}" is missing'
    if match := re.match(r"Object contains unknown field `(.*)`", what, re.DOTALL):
        return f"{place}: unknown field {format_json(match[1])}"
    rule = _rule(what)
    if what.startswith("Invalid enum value") and (values := _allowed(kind, steps)):
        rule = f"one of {', '.join(map(format_json, values))}"
    if node is not _UNKNOWN:
        return f"{place}: expected {rule}, got {format_json(node)}"
    got = re.search(r", got (.*)$", what)
    return f"{place}: expected {rule}{f', got {_rule(got[1])}' if got else ''}"


def _allowed(kind: Any, steps: Sequence[tuple[str, str]]) -> list[Any]:
    """Values of the enumeration at a place of a struct, none if it is not found."""
    found = _alternatives([msgspec.inspect.type_info(kind)])
    for key, index in steps:
        inner: list[Any] = []
        for one in found:
            if isinstance(one, msgspec.inspect.StructType):
                inner += [field.type for field in one.fields if field.encode_name == key]
            elif hasattr(one, "item_type" if index else "value_type"):
                inner.append(getattr(one, "item_type" if index else "value_type"))
        found = _alternatives(inner)
    return [value for one in found for value in getattr(one, "values", ())]


def _alternatives(types: Sequence[Any]) -> list[Any]:
    """The types, unions taken apart."""
    return [part for one in types for part in getattr(one, "types", (one,))]


def _rule(what: str) -> str:
    """The rule of a msgspec message in words: ``Expected `int` >= 0`` is ``an integer >= 0``."""
    rule = re.sub(r"^Expected ", "", what)
    rule = re.sub(r", got .*$", "", rule)
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
