"""Documents: scenarios (``optsched.routing/1``, ``slim-scenario/1``) and logs of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from optsched.errors import InputError
from optsched.io.strict_json import (
    MAX_INTEGER,
    check_format,
    decode,
    decode_document,
    lines,
    placed,
    read_json,
    rows,
)
from optsched.io.values import integer
from optsched.problems.routing.checks import milliseconds
from optsched.problems.routing.log import BATCH, ENTRY, INSTANCE, Log, Summary
from optsched.problems.routing.problem import NS_PER_MS, POINTS, Link, Routing, Server

if TYPE_CHECKING:
    import os

FORMAT: Final = "optsched.routing/1"
INTERCHANGE: Final = "slim-scenario/1"
LOG_FORMAT: Final = "optsched.serving-log/1"


class _Struct(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A part of a document."""


class _Request(_Struct):
    id: int | str
    arrival_ms: float


class _Scenario(_Struct, kw_only=True):
    format: str | None = None
    schema: str | None = None
    seed: int | None = None
    name: str = ""
    widths: list[float]
    mmac: list[list[list[float]]]
    vram_mb: list[list[float]]
    max_batch: int
    accuracy: dict[str, float]
    accuracy_prior: str | None = None
    router_ms: float | None = None
    link: Link | None = None
    ms_per_point: float = 4.0
    ms_per_joule: float = 0.0
    servers: list[Server]
    requests: list[_Request]


class _Instance(_Struct):
    server: int | str
    id: int
    segment: int
    width: int
    load_ms: float
    ready_ms: float
    unload_ms: float | None


class _Entry(_Struct):
    id: int | str
    queued_ms: float


class _Batch(_Struct):
    server: int | str
    instance: int
    segment: int
    width: int
    start_ms: float
    end_ms: float
    requests: list[_Entry]


class LogDocument(_Struct, kw_only=True):
    """Fields of a log's document as they stand there."""

    format: str
    wall_clock: bool = False
    horizon_ms: float | None = None
    instances: list[_Instance]
    batches: list[_Batch]
    summary: Summary
    provenance: dict[str, Any] = {}


# scenarios


def read(path: str | os.PathLike[str]) -> Routing:
    """Read a scenario from a file; see `from_tree`."""
    return read_json(path, from_tree)


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
    found = msgspec.structs.asdict(decode(tree, _Scenario, name))
    for key in ("format", "schema", "seed"):
        del found[key]
    requests: list[_Request] = found.pop("requests")
    found["arrival_ms"] = [one.arrival_ms for one in requests]
    with placed(f"{name}: "):
        return Routing(ids=[one.id for one in requests], **found)


def to_json(problem: Routing) -> bytes:
    """The document ``optsched.routing/1``, a server and a request a line."""
    members: dict[str, Any] = {"format": FORMAT}
    if problem.name:
        members["name"] = problem.name
    members |= _fields(problem)
    members["servers"] = rows(problem.servers)
    arrival = (problem.arrival / NS_PER_MS).tolist()
    members["requests"] = rows(map(_Request, problem.ids, arrival))
    return lines(members)


def content(problem: Routing) -> bytes:
    """All but the name, for the hash."""
    whole = [_fields(problem), problem.arrival.tolist(), problem.ids]
    return msgspec.json.encode(whole, order="deterministic")


def _fields(problem: Routing) -> dict[str, Any]:
    """Fields of the document without name and requests; what is not there is left out."""
    keys = [",".join(map(str, row)) for row in problem.tuples.tolist()]
    mmac = problem.mmac.tolist()
    found = {
        "widths": problem.widths,
        "mmac": [mmac[0][:1], *mmac[1:]],
        "vram_mb": (problem.vram / 1000).tolist(),
        "max_batch": problem.max_batch,
        "accuracy": dict(zip(keys, (problem.accuracy / POINTS).tolist(), strict=True)),
        "router_ms": problem.router_ms,
        "link": problem.link,
        "ms_per_point": problem.ms_per_point,
        "ms_per_joule": problem.ms_per_joule,
        "servers": problem.servers,
    }
    return {key: value for key, value in found.items() if value is not None}


# logs


def log_document(given: Log | Mapping[str, Any] | str | os.PathLike[str]) -> LogDocument:
    """What a log, its parsed JSON or its file says, as it stands there; see `log_of`.

    Raises
    ------
    InputError
        With the path in the document, the rule and the value.
    """
    said: Any = msgspec.json.decode(given.to_json()) if isinstance(given, Log) else given

    def read(tree: Any, name: str) -> LogDocument:
        return decode_document(tree, LogDocument, LOG_FORMAT, name)

    return read(said, "log") if isinstance(said, Mapping) else read_json(said, read)


def check_scenario(problem: Routing, said: LogDocument) -> None:
    """Refuse the log of another scenario, with both hashes."""
    given = said.provenance.get("instance_sha256")
    if given is not None and given != problem.sha256:
        raise InputError(
            f"the log is of another scenario: {given!s:.12}, this one is {problem.sha256:.12}"
        )


def log_of(problem: Routing, said: LogDocument) -> Log:
    """The history that a document tells.

    Raises
    ------
    InputError
        It is of another scenario, names what is not there, or a time is out of range.
    """
    check_scenario(problem, said)
    names: dict[str, Any] = {
        "server": {one.id: s for s, one in enumerate(problem.servers)},
        "segment": range(problem.n_segments),
        "width": range(problem.n_widths),
    }
    requests = {name: r for r, name in enumerate(problem.ids)}

    def value(place: str, given: Any, known: Any = None) -> int:
        """A number of the log: of what a name stands for, in ns, or as it is given."""
        if known is not None:
            if given not in known:
                raise InputError(f"{place}: there is no {given!r:.60}")
            return int(known[given])
        if place.endswith("_ms"):
            return -1 if given is None else round(milliseconds(place, given) * NS_PER_MS)
        return integer(place, given, 0, MAX_INTEGER)

    def row(place: str, one: _Instance | _Batch) -> tuple[int, ...]:
        keys = [key for key in one.__struct_fields__ if key != "requests"]
        return tuple(value(f"{place}.{key}", getattr(one, key), names.get(key)) for key in keys)

    instances: dict[tuple[int, int], tuple[int, ...]] = {}
    for i, one in enumerate(said.instances):
        s, number, *rest = row(f"instances[{i}]", one)
        if (s, number) in instances:
            raise InputError(
                f"instances[{i}].id: server {one.server!r:.60} has an instance {number}"
            )
        instances[s, number] = (s, number, *rest)
    batches: list[tuple[int, ...]] = []
    entries: list[tuple[int, ...]] = []
    for b, ran in enumerate(said.batches):
        place = f"batches[{b}]"
        s, number, *rest = row(place, ran)
        if (s, number) not in instances:
            raise InputError(f"{place}: server {ran.server!r:.60} has no instance {number}")
        batches.append((s, number, *rest, len(ran.requests), len(entries)))
        for i, entry in enumerate(ran.requests):
            at = f"{place}.requests[{i}]"
            queued = value(f"{at}.queued_ms", entry.queued_ms)
            entries.append((value(f"{at}.id", entry.id, requests), queued))
    return Log(
        problem, np.array(batches, BATCH), np.array(entries, ENTRY),
        np.array(list(instances.values()), INSTANCE), said.summary.decisions,
        None if said.horizon_ms is None else value("horizon_ms", said.horizon_ms),
        said.provenance, said.wall_clock, said.summary.energy_j if said.wall_clock else None,
    )  # fmt: skip


def log_to_json(log: Log) -> bytes:
    """The document ``optsched.serving-log/1``, an instance and a batch a line."""
    from optsched.version import __version__

    names = [one.id for one in log.problem.servers]
    entries = [_Entry(log.problem.ids[r], queued / NS_PER_MS) for r, queued in log.entries.tolist()]
    members: dict[str, Any] = {"format": LOG_FORMAT}
    if log.wall_clock:
        members["wall_clock"] = True
    if log.horizon is not None:
        members["horizon_ms"] = log.horizon / NS_PER_MS
    members["provenance"] = {
        "optsched": __version__, "instance_sha256": log.problem.sha256, **log.provenance
    }  # fmt: skip
    members["summary"] = log.summary
    members["instances"] = rows(
        _Instance(names[s], i, k, w, load / NS_PER_MS, ready / NS_PER_MS,
                  None if unload < 0 else unload / NS_PER_MS)
        for s, i, k, w, load, ready, unload in log.instances.tolist()
    )  # fmt: skip
    members["batches"] = rows(
        _Batch(names[s], i, k, w, start / NS_PER_MS, end / NS_PER_MS, entries[first : first + n])
        for s, i, k, w, start, end, n, first in log.batches.tolist()
    )
    return lines(members)
