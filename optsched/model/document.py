"""The document ``optsched.schedule/1``: strict reading, canonical writing."""

from __future__ import annotations

from sys import intern
from typing import Annotated, Any

import msgspec
import numpy as np

from optsched.io.strict_json import MAX_INTEGER, decode_document, parse, placed, without_collector
from optsched.model.schedule import MAX_KIND, NO_DEADLINE, Arcs, Csr, Objective, Resource, Schedule

FORMAT = "optsched.schedule/1"

Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_INTEGER)]
Signed = Annotated[int, msgspec.Meta(ge=-MAX_INTEGER, le=MAX_INTEGER)]


class _Resource(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    name: str
    memory: Count = 0


class _Operation(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    duration: Count
    job: Count = 0
    kind: Annotated[str, msgspec.Meta(max_length=MAX_KIND)] = ""
    stage: Count = 0
    microbatch: Count = 0
    iteration: Count = 0
    offset: Count = 0
    family: Count = 0
    resources: list[Count] = []
    release: Count = 0
    deadline: Count | None = None
    setup_in: Count = 0
    setup_out: Count = 0
    acquire: Count = 0
    free: Count = 0
    workspace: Count = 0


class _Objective(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    name: str
    value: Signed | None = None
    lower_bound: Signed | None = None
    status: str = "unknown"


class _Document(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    format: str
    name: str = ""
    time_unit: str = "us"
    resources: list[_Resource]
    operations: list[_Operation]
    arcs: list[Annotated[list[Signed], msgspec.Meta(min_length=2, max_length=4)]] = []
    period: Annotated[int, msgspec.Meta(ge=1, le=MAX_INTEGER)] | None = None
    sequences: list[list[Count]] | None = None
    starts: list[Count] | None = None
    objective: _Objective | None = None
    provenance: dict[str, Any] = {}


_NUMBERS = tuple(
    f for f in _Operation.__struct_fields__ if f not in ("kind", "resources", "deadline")
)


def read(text: str, name: str = "schedule") -> Schedule:
    """Read a schedule (or, without sequences and starts, an instance) from JSON text.

    Parameters
    ----------
    text
        The document.
    name
        File name for messages.

    Raises
    ------
    InputError
        With the place, the rule and the value: syntax, duplicate or unknown fields, types,
        ranges, arcs to nowhere, cycles, sums that overflow.
    """
    with without_collector():
        return from_tree(parse(text, name), name)


def from_tree(tree: Any, name: str) -> Schedule:
    """Read a schedule from parsed JSON; see `read`."""
    document = decode_document(tree, _Document, FORMAT, name)
    with placed(f"{name}: "):
        return _schedule(document)


def write(schedule: Schedule) -> bytes:
    """Canonical JSON: one operation a line, fields at their default left out."""
    document = _document(schedule)
    encode = msgspec.json.Encoder(order=None).encode
    head = encode(document)
    # long lists one element a line, so that documents can be compared and read
    members = []
    for key, value in msgspec.json.decode(head, type=dict[str, msgspec.Raw]).items():
        rows = getattr(document, key)
        if key in ("resources", "operations", "arcs", "sequences") and rows:
            body = b",\n    ".join(encode(row) for row in rows)
            members.append(b'  "%s": [\n    %s\n  ]' % (key.encode(), body))
        else:
            members.append(b'  "%s": %s' % (key.encode(), bytes(value)))
    return b"{\n" + b",\n".join(members) + b"\n}\n"


def _schedule(document: _Document) -> Schedule:
    operations = document.operations
    n = len(operations)
    columns = {
        key: np.fromiter((getattr(op, key) for op in operations), np.int64, n) for key in _NUMBERS
    }
    deadline = np.fromiter(
        (NO_DEADLINE if op.deadline is None else op.deadline for op in operations), np.int64, n
    )
    indptr = np.zeros(n + 1, np.int64)
    np.cumsum([len(op.resources) for op in operations], out=indptr[1:])
    ids = np.array([r for op in operations for r in op.resources], np.int64)
    given = document.objective
    return Schedule(
        name=document.name,
        time_unit=document.time_unit,
        resources=tuple(Resource(r.name, r.memory) for r in document.resources),
        op_resources=Csr(indptr, ids),
        kind=np.array([op.kind for op in operations], dtype=np.str_),
        deadline=deadline,
        arcs=Arcs.of(document.arcs),
        period=document.period,
        sequences=None if document.sequences is None else Csr.of(document.sequences),
        start=None if document.starts is None else np.array(document.starts, np.int64),
        objective=None
        if given is None
        else Objective(given.name, given.value, given.lower_bound, given.status),
        provenance=document.provenance,
        **columns,
    )


def _document(schedule: Schedule) -> _Document:
    columns = {key: getattr(schedule, key).tolist() for key in _NUMBERS}
    columns["deadline"] = [None if d == NO_DEADLINE else d for d in schedule.deadline.tolist()]
    columns["kind"] = schedule.kind.tolist()
    columns["resources"] = schedule.op_resources.to_lists()
    keys = list(columns)
    operations = [
        _Operation(**dict(zip(keys, row, strict=True)))
        for row in zip(*columns.values(), strict=True)
    ]
    arcs = []
    for tail, head, lag, distance in zip(*(c.tolist() for c in schedule.arcs), strict=True):
        full = [tail, head, lag, distance]
        while len(full) > 2 and full[-1] == 0:
            full.pop()
        arcs.append(full)
    objective = schedule.objective
    return _Document(
        format=FORMAT,
        name=schedule.name,
        time_unit=intern(schedule.time_unit),  # defaults are left out by identity
        resources=[_Resource(r.name, r.memory) for r in schedule.resources],
        operations=operations,
        arcs=arcs,
        period=schedule.period,
        sequences=None if schedule.sequences is None else schedule.sequences.to_lists(),
        starts=None if schedule.start is None else schedule.start.tolist(),
        objective=None
        if objective is None
        else _Objective(*objective[:3], intern(objective.status)),
        provenance=dict(schedule.provenance),
    )
