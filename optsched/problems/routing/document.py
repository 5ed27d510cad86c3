"""The document ``optsched.routing/1``, and the plain interchange form ``slim-scenario/1``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from optsched.errors import InputError
from optsched.io.files import read_text
from optsched.io.strict_json import check_format, decode, parse, without_collector
from optsched.problems.routing.problem import NS_PER_MS, POINTS, Contention, Link, Routing, Server

if TYPE_CHECKING:
    import os

FORMAT: Final = "optsched.routing/1"
INTERCHANGE: Final = "slim-scenario/1"

_Rows = list[list[float]]


class _Contention(msgspec.Struct, forbid_unknown_fields=True):
    knee: float
    below: float
    above: float


class _Link(msgspec.Struct, forbid_unknown_fields=True):
    latency_ms: float
    ms_per_mb: float
    activation_mb: _Rows


class _Server(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    id: int | str
    vram_mb: float
    launch_ms: float
    ms_per_mmac: float
    idle_w: float
    peak_w: float
    load_ms: float | None = None
    sat_mmac: float | None = None
    contention: _Contention | None = None
    cost_ms: list[_Rows] | None = None


class _Request(msgspec.Struct, forbid_unknown_fields=True):
    id: int | str
    arrival_ms: float


class _Document(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    format: str | None = None
    schema: str | None = None
    seed: int | None = None
    name: str = ""
    widths: list[float]
    mmac: list[_Rows]
    vram_mb: _Rows
    max_batch: int
    accuracy: dict[str, float]
    accuracy_prior: str | None = None
    router_ms: float | None = None
    link: _Link | None = None
    ms_per_point: float = 4.0
    ms_per_joule: float = 0.0
    servers: list[_Server]
    requests: list[_Request]


def read(path: str | os.PathLike[str]) -> Routing:
    """Read a scenario from a file; see `from_tree`."""
    text = read_text(path)
    with without_collector():
        return from_tree(parse(text, str(path)), str(path))


def from_tree(tree: Any, name: str) -> Routing:
    """Read a scenario from parsed JSON.

    Parameters
    ----------
    tree
        ``optsched.routing/1``, whose fields are those of `Routing`, `Server`, `Contention` and
        `Link`, or the same with ``"schema": "slim-scenario/1"`` instead of the format.
    name
        File name for messages.

    Raises
    ------
    InputError
        With the path in the document, the rule and the value.
    """
    if not isinstance(tree, dict) or tree.get("schema") != INTERCHANGE or "format" in tree:
        check_format(tree, FORMAT, name)
        for key in ("schema", "seed"):
            if key in tree:
                raise InputError(f"{name}: top level: unknown field {key!r}")
    found = decode(tree, _Document, name)
    try:
        return Routing(
            found.widths, found.mmac, found.vram_mb, found.accuracy,
            [_server(one) for one in found.servers],
            [one.arrival_ms for one in found.requests], ids=[one.id for one in found.requests],
            max_batch=found.max_batch, accuracy_prior=found.accuracy_prior,
            router_ms=found.router_ms,
            link=None if found.link is None else Link(*msgspec.structs.astuple(found.link)),
            ms_per_point=found.ms_per_point, ms_per_joule=found.ms_per_joule, name=found.name,
        )  # fmt: skip
    except InputError as error:
        error.args = (f"{name}: {error.args[0]}",)
        raise


def to_json(problem: Routing) -> bytes:
    """The document ``optsched.routing/1``, a server and a request a line."""
    encode = msgspec.json.encode
    rows = _fields(problem)
    requests = [
        _Request(name, ns / NS_PER_MS)
        for name, ns in zip(problem.ids, problem.arrival.tolist(), strict=True)
    ]
    members = [("format", encode(FORMAT))]
    members += [("name", encode(problem.name))] * bool(problem.name)
    members += [(key, encode(value)) for key, value in rows.items() if key != "servers"]
    members += [("servers", lines(rows["servers"])), ("requests", lines(requests))]
    body = b",\n".join(b'  "%s": %s' % (key.encode(), value) for key, value in members)
    return b"{\n" + body + b"\n}\n"


def content(problem: Routing) -> bytes:
    """All but the name, for the hash."""
    whole = [_fields(problem), problem.arrival.tolist(), problem.ids]
    return msgspec.json.encode(whole, order="deterministic")


def _fields(problem: Routing) -> dict[str, Any]:
    """Fields of the document without name and requests; what is not there is left out."""
    keys = [",".join(map(str, row)) for row in problem.tuples.tolist()]
    mmac = problem.mmac.tolist()
    link = problem.link
    found = {
        "widths": list(problem.widths),
        "mmac": [mmac[0][:1], *mmac[1:]],
        "vram_mb": (problem.vram / 1000).tolist(),
        "max_batch": problem.max_batch,
        "accuracy": dict(zip(keys, (problem.accuracy / POINTS).tolist(), strict=True)),
        "router_ms": problem.router_ms,
        "link": None if link is None else _Link(*link[:2], _plain(link.activation_mb)),
        "ms_per_point": problem.ms_per_point,
        "ms_per_joule": problem.ms_per_joule,
        "servers": [_written(one) for one in problem.servers],
    }
    return {key: value for key, value in found.items() if value is not None}


def _server(given: _Server) -> Server:
    values = msgspec.structs.asdict(given)
    if given.contention is not None:
        values["contention"] = Contention(*msgspec.structs.astuple(given.contention))
    return Server(**values)


def _written(server: Server) -> _Server:
    values = dict(vars(server))
    if server.contention is not None:
        values["contention"] = _Contention(*server.contention)
    if server.cost_ms is not None:
        values["cost_ms"] = [_plain(part) for part in server.cost_ms]
    return _Server(**values)


def _plain(rows: Any) -> _Rows:
    return [[float(value) for value in row] for row in rows]


def lines(rows: list[Any]) -> bytes:
    """An array of a document, an entry a line."""
    if not rows:
        return b"[]"
    return b"[\n    " + b",\n    ".join(msgspec.json.encode(row) for row in rows) + b"\n  ]"
