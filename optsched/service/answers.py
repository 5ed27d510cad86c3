"""Bodies in, status and JSON out; refusals have one form. No HTTP library is imported here."""

from __future__ import annotations

import re
import traceback
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import msgspec

from optsched.errors import (
    CyclicOrder,
    Infeasible,
    InputError,
    MissingExtra,
    UnsupportedProblem,
)
from optsched.io.files import decode_text
from optsched.io.strict_json import decode, parse, without_collector
from optsched.service.requests import QUERIES

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

MAX_DEPTH: Final = 64
"""Levels of objects and lists in a body."""

_TOKENS = re.compile(rb'"(?:[^"\\]|\\.)*"|([\[{])|([\]}])', re.DOTALL)
_PLACE = re.compile(r"((?:[\w*-]+|\[[^\]]*\])(?:\.[\w*-]+|\[[^\]]*\])*(?:, \w+)*): ")
_STEP = re.compile(r"\[(\d+)\]|([^.\[\]]+)")
_GOT = re.compile(r"\bgot (.*?)(?: \(|; |$)|(?:unknown field|field) (\"[^\"]*\"|'[^']*')")


class Fault(msgspec.Struct, kw_only=True):
    """Why a request is refused."""

    field: str
    """Path in the body, such as ``jobs[0].gpus``; or a header, or ``body``."""
    value: Any = None
    message: str
    """One sentence with the rule and what to do."""


class Refusal(msgspec.Struct):
    """The form of every error."""

    error: Fault


class Reply(NamedTuple):
    """Status code and body of a response."""

    status: int
    content: bytes
    trace: str = ""
    """For the log: the traceback of a bug."""


def refusal(status: int, field: str, value: Any, message: str) -> Reply:
    """Return a refusal."""
    fault = Fault(field=field, value=value, message=message)
    return Reply(status, msgspec.json.encode(Refusal(fault)))


def read_body(data: bytes, kind: type[T]) -> T:
    """Decode a body as a struct; `InputError` names path, rule and value."""
    return decode(read_tree(data), kind, "body")


def read_tree(data: bytes) -> Any:
    """Parse a body; refuse what nests too deeply."""
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH:
        depth = 0
        for token in _TOKENS.finditer(data):
            depth += (token[1] is not None) - (token[2] is not None)
            if depth > MAX_DEPTH:
                raise InputError(f"body: nested too deeply, expected at most {MAX_DEPTH} levels")
    return parse(decode_text(data, "body"), "body")


def answer(name: str, data: bytes, limit: float) -> Reply:
    """Answer a query of `QUERIES` by the bytes of its body.

    Parameters
    ----------
    name
        Of the query.
    data
        JSON.
    limit
        Most seconds that a body may ask for, and those of a body without a number.
    """
    query = QUERIES[name]

    def call(tree: Any) -> Any:
        if isinstance(tree, dict) and "time_limit" in query.body.__struct_fields__:
            given = tree.setdefault("time_limit", min(10.0, limit))
            if type(given) in (int, float) and given > limit:
                raise InputError(f"time_limit: expected seconds <= {limit:g}, got {given!r:.60}")
        return query.answer(tree, "body")

    return replied(call, data, name)


def replied(call: Callable[[Any], Any], data: bytes, name: str) -> Reply:
    """Return what a function answers to a parsed body, or the refusal of its exception.

    Parameters
    ----------
    call
        Its answer is encoded as JSON.
    data
        The body.
    name
        Schema of the body, for messages.
    """
    tree: Any = None
    try:
        with without_collector():
            tree = read_tree(data)
            return Reply(200, msgspec.json.encode(call(tree)))
    except Exception as error:
        return refused(error, tree, data, name)


def refused(error: Exception, tree: Any, data: bytes, name: str) -> Reply:
    """Return the refusal of an exception that the parsed body of a query raised."""
    if isinstance(error, Infeasible):
        return _explained(409, error, tree, data, name)
    if isinstance(error, (CyclicOrder, InputError, UnsupportedProblem, MissingExtra,
                          RecursionError)):  # fmt: skip
        return _explained(400, error, tree, data, name)
    if isinstance(error, MemoryError):
        return refusal(413, "body", None, "this request needs more memory; send a smaller one")
    message = f"a bug in optsched: {type(error).__name__}; please report it"
    trace = "".join(traceback.format_exception(error))
    return refusal(500, "", None, message)._replace(trace=trace)


def _explained(status: int, error: Exception, tree: Any, data: bytes, name: str) -> Reply:
    """Find field and value in the sentence of an exception."""
    message = str(error) or "nested too deeply"
    if isinstance(error, (UnsupportedProblem, MissingExtra)):
        message = f"solver: {message}"
    message, rest, places = re.sub(r"^body: ", "", message), "", []
    rest = re.sub(r"^body:\d+(:\d+)?: ", "", message)
    while match := _PLACE.match(rest):
        places.append(match[1].split(", ")[0])
        rest = rest[match.end() :]
    field = re.sub(r"\.\[", "[", ".".join(places)) or "body"
    if "expected" not in message and status == 400:
        message += f"; see /v1/schemas/{name}"
    return refusal(status, field, _value(message, field, tree, data), message)


def _value(message: str, field: str, tree: Any, data: bytes) -> Any:
    """Return the refused value: by the sentence, else by its place, else how the body begins."""
    if match := _GOT.search(message):
        text = match[1] or match[2]
        if text == "nothing":
            return None
        with suppress(ValueError):
            return msgspec.json.decode(text)
        return text
    if tree is None:
        return data[:60].decode(errors="replace")
    node = tree
    for index, key in _STEP.findall(field):
        try:
            node = node[int(index)] if index else node[key]
        except (KeyError, IndexError, TypeError):
            return None
    return node if isinstance(node, (str, int, float)) and len(str(node)) <= 60 else None
