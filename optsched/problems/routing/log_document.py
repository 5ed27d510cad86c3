"""The document ``optsched.serving-log/1``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from optsched.errors import InputError
from optsched.io.files import read_text
from optsched.io.strict_json import MAX_INTEGER, check_format, decode, parse, without_collector
from optsched.io.values import integer
from optsched.problems.routing.checks import milliseconds
from optsched.problems.routing.document import lines
from optsched.problems.routing.log import BATCH, ENTRY, INSTANCE, Log, Summary
from optsched.problems.routing.problem import NS_PER_MS

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
            f"the log is of another scenario: {said!s:.12}, this one is {problem.sha256:.12}"
        )


def log_of(problem: Routing, document: Document) -> Log:
    """The history that a document tells.

    Raises
    ------
    InputError
        It is of another scenario, names what is not there, or a time is out of range.
    """
    check_scenario(problem, document)
    server = {one.id: s for s, one in enumerate(problem.servers)}
    request = {name: r for r, name in enumerate(problem.ids)}

    def known(place: str, names: dict[Any, int], name: Any) -> int:
        if name not in names:
            raise InputError(f"{place}: there is no {name!r:.60}")
        return names[name]

    segment = {k: k for k in range(problem.n_segments)}
    width = {w: w for w in range(problem.n_widths)}

    def head(place: str, row: _Instance | _Batch, number: int) -> tuple[int, ...]:
        s = known(f"{place}.server", server, row.server)
        k = known(f"{place}.segment", segment, row.segment)
        return s, number, k, known(f"{place}.width", width, row.width)

    instances: list[tuple[int, ...]] = []
    hosts: dict[Any, dict[Any, int]] = {}
    for i, there in enumerate(document.instances):
        place = f"instances[{i}]"
        gone = -1 if there.unload_ms is None else _ns(f"{place}.unload_ms", there.unload_ms)
        instances.append(
            (*head(place, there, integer(f"{place}.id", there.id, 0, MAX_INTEGER)),
             _ns(f"{place}.load_ms", there.load_ms), _ns(f"{place}.ready_ms", there.ready_ms), gone)
        )  # fmt: skip
        if hosts.setdefault(there.server, {}).setdefault(there.id, i) != i:
            raise InputError(f"{place}.id: server {there.server!r:.60} has an instance {there.id}")
    batches: list[tuple[int, ...]] = []
    entries: list[tuple[int, int]] = []
    for b, row in enumerate(document.batches):
        place = f"batches[{b}]"
        first = head(place, row, row.instance)
        if row.instance not in hosts.get(row.server, {}):
            raise InputError(f"{place}: server {row.server!r:.60} has no instance {row.instance}")
        batches.append(
            (*first, _ns(f"{place}.start_ms", row.start_ms), _ns(f"{place}.end_ms", row.end_ms),
             len(row.requests), len(entries))
        )  # fmt: skip
        entries += [
            (known(f"{place}.requests[{i}].id", request, one.id),
             _ns(f"{place}.requests[{i}].queued_ms", one.queued_ms))
            for i, one in enumerate(row.requests)
        ]  # fmt: skip
    horizon = document.horizon_ms
    return Log(
        problem, np.array(batches, BATCH), np.array(entries, ENTRY), np.array(instances, INSTANCE),
        document.summary.decisions, None if horizon is None else _ns("horizon_ms", horizon),
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
        ("instances", lines(instances)), ("batches", lines(batches)),
    ]  # fmt: skip
    body = b",\n".join(b'  "%s": %s' % (key.encode(), value) for key, value in members)
    return b"{\n" + body + b"\n}\n"


def _ns(place: str, given: float) -> int:
    return round(milliseconds(place, given) * NS_PER_MS)
