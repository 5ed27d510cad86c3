"""The document ``optsched.serving-log/1``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from optsched.errors import InputError
from optsched.files import read_text
from optsched.problems.routing.log import BATCH, ENTRY, INSTANCE, Log, Summary
from optsched.problems.routing.problem import NS_PER_MS
from optsched.strict_json import check_format, decode, parse, without_collector

if TYPE_CHECKING:
    import os

    from optsched.problems.routing.problem import Routing

FORMAT: Final = "optsched.serving-log/1"


class _Instance(msgspec.Struct, forbid_unknown_fields=True):
    server: int | str
    id: int
    segment: int
    width: int
    load_ms: float
    ready_ms: float
    unload_ms: float | None


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    id: int | str
    queued_ms: float


class _Batch(msgspec.Struct, forbid_unknown_fields=True):
    server: int | str
    instance: int
    segment: int
    width: int
    start_ms: float
    end_ms: float
    requests: list[_Entry]


class Document(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Fields of the document as they stand there."""

    format: str
    wall_clock: bool = False
    horizon_ms: float | None = None
    instances: list[_Instance]
    batches: list[_Batch]
    summary: Summary
    provenance: dict[str, Any] = {}


def read(path: str | os.PathLike[str]) -> Document:
    """Read a log from a file, as it stands there; `log_of` makes a `Log` of it."""
    text = read_text(path)
    with without_collector():
        return from_tree(parse(text, str(path)), str(path))


def from_tree(tree: Any, name: str) -> Document:
    """Read a log from parsed JSON.

    Raises
    ------
    InputError
        With the path in the document, the rule and the value.
    """
    check_format(tree, FORMAT, name)
    return decode(tree, Document, name)


def check_scenario(problem: Routing, document: Document) -> None:
    """Refuse the log of another scenario.

    Raises
    ------
    InputError
        With both hashes.
    """
    said = document.provenance.get("instance_sha256")
    if said is not None and said != problem.sha256:
        raise InputError(
            f"the log is of another scenario: {said:.12}, this one is {problem.sha256:.12}"
        )


def log_of(problem: Routing, document: Document) -> Log:
    """The history that a document tells.

    Raises
    ------
    InputError
        It is of another scenario, or names a server or request that is not there.
    """
    check_scenario(problem, document)
    server = {one.id: s for s, one in enumerate(problem.servers)}
    request = {name: r for r, name in enumerate(problem.ids)}

    def known(place: str, names: dict[Any, int], name: Any) -> int:
        if name not in names:
            raise InputError(f"{place}: there is no {name!r:.60}")
        return names[name]

    instances = [
        (known(f"instances[{i}].server", server, row.server), row.id, row.segment, row.width,
         _ns(row.load_ms), _ns(row.ready_ms), -1 if row.unload_ms is None else _ns(row.unload_ms))
        for i, row in enumerate(document.instances)
    ]  # fmt: skip
    batches: list[tuple[int, ...]] = []
    entries: list[tuple[int, int]] = []
    for b, row in enumerate(document.batches):
        place = f"batches[{b}]"
        batches.append(
            (known(f"{place}.server", server, row.server), row.instance, row.segment, row.width,
             _ns(row.start_ms), _ns(row.end_ms), len(row.requests), len(entries))
        )  # fmt: skip
        entries += [
            (known(f"{place}.requests[{i}].id", request, one.id), _ns(one.queued_ms))
            for i, one in enumerate(row.requests)
        ]
    horizon = document.horizon_ms
    return Log(
        problem, np.array(batches, BATCH), np.array(entries, ENTRY), np.array(instances, INSTANCE),
        document.summary.decisions, None if horizon is None else _ns(horizon),
        document.provenance, document.wall_clock,
        document.summary.energy_j if document.wall_clock else None,
    )  # fmt: skip


def to_json(log: Log) -> bytes:
    """A log as a document, an instance and a batch a line."""
    from optsched.version import __version__

    encode = msgspec.json.encode
    names = [one.id for one in log.problem.servers]
    ids = log.problem.ids
    entries = [_Entry(ids[r], queued / NS_PER_MS) for r, queued in log.entries.tolist()]
    instances = [
        _Instance(names[s], i, k, w, load / NS_PER_MS, ready / NS_PER_MS,
                  None if unload < 0 else unload / NS_PER_MS)
        for s, i, k, w, load, ready, unload in log.instances.tolist()
    ]  # fmt: skip
    batches = [
        _Batch(names[s], i, k, w, start / NS_PER_MS, end / NS_PER_MS, entries[first : first + n])
        for s, i, k, w, start, end, n, first in log.batches.tolist()
    ]
    provenance = {
        "optsched": __version__, "instance_sha256": log.problem.sha256, **log.provenance
    }  # fmt: skip
    members = [("format", encode(FORMAT))]
    members += [("wall_clock", b"true")] * log.wall_clock
    if log.horizon is not None:
        members.append(("horizon_ms", encode(log.horizon / NS_PER_MS)))
    members += [
        ("provenance", encode(provenance)), ("summary", encode(log.summary)),
        ("instances", _lines(instances)), ("batches", _lines(batches)),
    ]  # fmt: skip
    body = b",\n".join(b'  "%s": %s' % (key.encode(), value) for key, value in members)
    return b"{\n" + body + b"\n}\n"


def _ns(milliseconds: float) -> int:
    return round(milliseconds * NS_PER_MS)


def _lines(rows: list[Any]) -> bytes:
    if not rows:
        return b"[]"
    return b"[\n    " + b",\n    ".join(msgspec.json.encode(row) for row in rows) + b"\n  ]"
