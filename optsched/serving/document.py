"""Documents of scenarios (``optsched.routing/1``) and logs (``optsched.serving-log/1``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from optsched.errors import InputError
from optsched.io.strict_json import MAX_INTEGER, decode_document, lines, placed, read_json, rows
from optsched.io.values import integer
from optsched.serving.accuracy import accuracy_table
from optsched.serving.fields import NS_PER_MS, milliseconds
from optsched.serving.log import BATCH, ENTRY, INSTANCE, Log, Summary
from optsched.serving.scenario import Link, Scenario, Server

if TYPE_CHECKING:
    import os

FORMAT: Final = "optsched.routing/1"
LOG_FORMAT: Final = "optsched.serving-log/1"


class _Struct(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A part of a document."""


class _Request(_Struct):
    id: int | str
    arrival_ms: float


class _Scenario(_Struct, kw_only=True):
    format: str
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
    """Fields of the document of a log, with names instead of indices."""

    format: str
    wall_clock: bool = False
    horizon_ms: float | None = None
    instances: list[_Instance]
    batches: list[_Batch]
    summary: Summary
    provenance: dict[str, Any] = {}


# scenarios


def from_tree(tree: Any, name: str) -> Scenario:
    """Read a scenario from parsed JSON; its fields are those of `Scenario` and its parts.

    Raises
    ------
    InputError
        With the path in the document, the rule and the value.
    """
    found = msgspec.structs.asdict(decode_document(tree, _Scenario, FORMAT, name))
    del found["format"]
    requests: list[_Request] = found.pop("requests")
    prior = found.pop("accuracy_prior")
    with placed(f"{name}: "):
        if prior is not None:
            segments = len(found["mmac"])
            table = accuracy_table(found["accuracy"], found["widths"], segments, prior)
            found["accuracy"] = table
        return Scenario(
            ids=[one.id for one in requests],
            arrival_ms=[one.arrival_ms for one in requests],
            **found,
        )


def to_json(scenario: Scenario) -> bytes:
    """Return the document ``optsched.routing/1``, one line per server and request."""
    members: dict[str, Any] = {"format": FORMAT}
    if scenario.name:
        members["name"] = scenario.name
    members |= _fields(scenario)
    members["servers"] = rows(scenario.servers)
    members["requests"] = rows(map(_Request, scenario.ids, scenario.arrival_ms.tolist()))
    return lines(members)


def content(scenario: Scenario) -> bytes:
    """Return all fields but the name, for the hash."""
    whole = [_fields(scenario), scenario.arrival.tolist(), scenario.ids]
    return msgspec.json.encode(whole, order="deterministic")


def _fields(scenario: Scenario) -> dict[str, Any]:
    """Fields of the document without name and requests; those that are None are omitted."""
    keys = [",".join(map(str, row)) for row in scenario.tuples.tolist()]
    mmac = scenario.mmac.tolist()
    found = {
        "widths": scenario.widths,
        "mmac": [mmac[0][:1], *mmac[1:]],
        "vram_mb": scenario.vram_mb.tolist(),
        "max_batch": scenario.max_batch,
        "accuracy": dict(zip(keys, scenario.accuracy.tolist(), strict=True)),
        "router_ms": scenario.router_ms,
        "link": scenario.link,
        "ms_per_point": scenario.ms_per_point,
        "ms_per_joule": scenario.ms_per_joule,
        "servers": scenario.servers,
    }
    return {key: value for key, value in found.items() if value is not None}


# logs


def log_document(given: Log | Mapping[str, Any] | str | os.PathLike[str]) -> LogDocument:
    """Decode a log, its parsed JSON or its file, without resolving names; see `log_of`.

    Raises
    ------
    InputError
        With the path in the document, the rule and the value.
    """
    tree: Any = msgspec.json.decode(given.to_json()) if isinstance(given, Log) else given

    def read(tree: Any, name: str) -> LogDocument:
        return decode_document(tree, LogDocument, LOG_FORMAT, name)

    return read(tree, "log") if isinstance(tree, Mapping) else read_json(tree, read)


def check_scenario(scenario: Scenario, document: LogDocument) -> None:
    """Refuse the log of a different scenario, with both hashes."""
    given = document.provenance.get("instance_sha256")
    if given is not None and given != scenario.sha256:
        raise InputError(
            f"the log is of another scenario: {given!s:.12}, this one is {scenario.sha256:.12}"
        )


def log_of(scenario: Scenario, document: LogDocument) -> Log:
    """Convert a document to a log: indices instead of names, ns instead of ms.

    Raises
    ------
    InputError
        It is of a different scenario, a name is unknown, or a time is out of range.
    """
    check_scenario(scenario, document)
    names: dict[str, Any] = {
        "server": {one.id: s for s, one in enumerate(scenario.servers)},
        "segment": range(scenario.n_segments),
        "width": range(scenario.n_widths),
    }
    requests = {name: r for r, name in enumerate(scenario.ids)}

    def row(place: str, one: _Instance | _Batch) -> tuple[int, ...]:
        keys = [key for key in one.__struct_fields__ if key != "requests"]
        return tuple(_number(f"{place}.{key}", getattr(one, key), names.get(key)) for key in keys)

    instances: dict[tuple[int, int], tuple[int, ...]] = {}
    for i, one in enumerate(document.instances):
        found = row(f"instances[{i}]", one)
        if found[:2] in instances:
            raise InputError(
                f"instances[{i}].id: server {one.server!r:.60} has an instance {found[1]}"
            )
        instances[found[0], found[1]] = found
    batches: list[tuple[int, ...]] = []
    entries: list[tuple[int, ...]] = []
    for b, batch in enumerate(document.batches):
        found = row(f"batches[{b}]", batch)
        if found[:2] not in instances:
            raise InputError(
                f"batches[{b}]: server {batch.server!r:.60} has no instance {found[1]}"
            )
        batches.append((*found, len(batch.requests), len(entries)))
        for i, entry in enumerate(batch.requests):
            place = f"batches[{b}].requests[{i}]"
            queued = _number(f"{place}.queued_ms", entry.queued_ms)
            entries.append((_number(f"{place}.id", entry.id, requests), queued))
    horizon = document.horizon_ms
    return Log(
        scenario, np.array(batches, BATCH), np.array(entries, ENTRY),
        np.array([*instances.values()], INSTANCE), document.summary,
        None if horizon is None else _number("horizon_ms", horizon),
        document.provenance, document.wall_clock,
    )  # fmt: skip


def _number(place: str, given: Any, names: Any = None) -> int:
    """Index of a name, a time in ns (-1 for None), or an integer."""
    if names is not None:
        if given not in names:
            raise InputError(f"{place}: there is no {given!r:.60}")
        return int(names[given])
    if place.endswith("_ms"):
        return -1 if given is None else round(milliseconds(place, given) * NS_PER_MS)
    return integer(place, given, 0, MAX_INTEGER)


def log_to_json(log: Log) -> bytes:
    """Return the document ``optsched.serving-log/1``, one line per instance and batch."""
    from optsched.version import __version__

    names, ids = [one.id for one in log.scenario.servers], log.scenario.ids
    entries = [_Entry(ids[r], queued / NS_PER_MS) for r, queued in log.entries.tolist()]
    members: dict[str, Any] = {"format": LOG_FORMAT}
    if log.wall_clock:
        members["wall_clock"] = True
    if log.horizon is not None:
        members["horizon_ms"] = log.horizon / NS_PER_MS
    members["provenance"] = {
        "optsched": __version__, "instance_sha256": log.scenario.sha256, **log.provenance
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
