"""Bodies in, status and JSON out; refusals have one form. No HTTP library is imported here."""

from __future__ import annotations

import logging
import re
import traceback
from contextlib import nullcontext, suppress
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from optsched.bandwidth import Policy
from optsched.errors import (
    Infeasible,
    InputError,
    InternalError,
    MissingExtra,
    OptschedError,
    UnsupportedProblem,
)
from optsched.io.files import decode_text
from optsched.io.strict_json import parse, without_collector
from optsched.service.queries import QUERIES, ask

if TYPE_CHECKING:
    from collections.abc import Callable

LOGGER: Final = logging.getLogger("optsched.service")

_LARGE: Final = 1 << 16
"""Bytes of a body from which the garbage collector pauses."""

MAX_DEPTH: Final = 64
"""Levels of objects and lists in a body."""

_SHOWN: Final = 60
"""Characters of a refused value."""

_TOKENS = re.compile(rb'"(?:[^"\\]|\\.)*+"?|([\[{])|([\]}])', re.DOTALL)  # linear: no second try
_PLACE = re.compile(r"((?:[\w*-]+|\[[^\]]*\])(?:\.[\w*-]+|\[[^\]]*\])*(?:, \w+)*): ")
_STEP = re.compile(r"\[(\d+)\]|([^.\[\]]+)")
_GOT = re.compile(
    r"(?<! GPUs, )\bgot (.*?)(?: \(|; |$)|(?:unknown field|field) (\"[^\"]*\"|'[^']*')"
)

_IN_BODY: Final = (
    {"gang": "jobs", "gang.gpus": "jobs"}
    | {
        f"{verb}{one.name}": f"policy.{one.name}"
        for one in fields(Policy)
        for verb in ("", "gang.")
    }
    | {f"{one}.level": f"policy.{one}" for one in ("required", "preferred")}
)
"""Where a body has the arguments of a dispatcher."""


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


class Refused(OptschedError):
    """A refusal with a status of its own; its sentence begins with the field."""

    def __init__(self, status: int, message: str, value: Any = None) -> None:
        super().__init__(message)
        self.status, self.value = status, value


class Reply(NamedTuple):
    """Status code and body of a response."""

    status: int
    content: bytes
    kind: str = "application/json"
    trace: str = ""
    """For the log: the traceback of a bug."""


def refusal(status: int, field: str, value: Any, message: str) -> Reply:
    """Return a refusal."""
    fault = Fault(field=field, value=value, message=message)
    return Reply(status, msgspec.json.encode(Refusal(fault)))


def read_tree(data: bytes) -> Any:
    """Parse a body; refuse what nests too deeply."""
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH:
        depth = 0
        for token in _TOKENS.finditer(data):
            depth += (token[1] is not None) - (token[2] is not None)
            if depth > MAX_DEPTH:
                raise InputError(f"body: nested too deeply, expected at most {MAX_DEPTH} levels")
    with without_collector() if len(data) > _LARGE else nullcontext():
        return parse(decode_text(data, "body"), "body")


def answer(name: str, data: bytes, limit: float) -> Reply:
    """Answer a query of `QUERIES` by the bytes of its body.

    `limit` is the most seconds that a body may request, and those of a body without a number.
    """
    known = getattr(QUERIES[name].body, "__struct_fields__", ())

    def call(tree: Any) -> Any:
        for field, default in (("time_limit", 10.0), ("deadline", 1.0)):
            if field in known and isinstance(tree, dict):
                given = tree.setdefault(field, min(default, limit))
                if type(given) in (int, float) and given > limit:
                    raise InputError(f"{field}: expected seconds <= {limit:g}, got {given!r:.60}")
        return ask(name, tree)

    return replied(call, data, name)


def replied(call: Callable[[Any], Any], data: bytes, name: str | None) -> Reply:
    """Return what a function answers to a parsed body, or the refusal of its exception.

    `name` is the schema of the body, for messages; None for a line of a stream.
    """
    try:
        return Reply(200, msgspec.json.encode(call(read_tree(data))))
    except Exception as error:
        return refused(error, data, name)


def refused(error: Exception, data: bytes = b"", name: str | None = "") -> Reply:
    """Return the refusal of an exception: field and value are those of its sentence.

    `Infeasible` is a conflict, and what is not raised on purpose a bug. Sentences without an
    expectation refer to the schema `name` of the body.
    """
    if isinstance(error, MemoryError):
        return refusal(413, "body", None, "expected less: this request needs too much memory")
    if isinstance(error, InternalError) or not isinstance(error, (OptschedError, RecursionError)):
        text = f"a bug in optsched: {type(error).__name__}; please report it"
        trace = "".join(traceback.format_exception(error))
        return refusal(500, "service", None, text)._replace(trace=trace)
    message, places = str(error), []
    if isinstance(error, Refused):
        return refusal(error.status, message.partition(":")[0], error.value, message)
    if isinstance(error, RecursionError):
        message = f"nested too deeply, expected at most {MAX_DEPTH} levels"
    if isinstance(error, (UnsupportedProblem, MissingExtra)):
        message = f"solver: {message}"
    message = message.removeprefix("body: ")
    left = re.sub(r"^body:\d+(:\d+)?: ", "", message)
    while match := _PLACE.match(left):
        places.append(match[1].split(", ")[0])
        left = left[match.end() :]
    field = ".".join(places).replace(".[", "[") or "body"
    field = _IN_BODY.get(field, field)
    status = 409 if isinstance(error, Infeasible) else 400
    if not message.isprintable():  # names in a body may hold anything
        message = "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in message)
    if name is not None and "expected" not in message and status == 400:
        message += f"; see /v1/schemas/{name}" if name else "; see /docs"
    return refusal(status, field, _value(message, field, data), message)


def _value(message: str, field: str, data: bytes) -> Any:
    """Return the refused value: by the sentence, else the start of the JSON at its place."""
    if re.search('the field "[^"]*" is missing', message):
        return None
    match = _GOT.search(message)
    if match and match[1] != '"none"':  # as a dispatcher names an empty object
        text = (match[1] or match[2]).strip("'")
        if text == "nothing":
            return None
        with suppress(ValueError):
            return msgspec.json.decode(text)
        return text
    try:
        node = read_tree(data)
    except OptschedError:
        return data[:_SHOWN].decode(errors="replace")
    steps = 0
    with suppress(LookupError, TypeError, StopIteration):
        for index, key in () if field == "body" else _STEP.findall(field):
            if not index and isinstance(node, list):  # such as jobs['a']
                node = next(one for one in node if one["name"] == key.strip("'"))
            else:
                node = node[int(index)] if index else node[key]
            steps += 1
    if not steps and field != "body":
        return None  # a header, or a member that is missing
    if node is None or isinstance(node, (bool, int, float)):
        return node
    text = node if isinstance(node, str) else msgspec.json.encode(node).decode()
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
