"""Schedule documents: strict reading of every version, canonical writing of the newest."""

from __future__ import annotations

from sys import intern
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import numpy as np

from optsched.io.strict_json import (
    MAX_INTEGER,
    check_format,
    decode,
    lines,
    parse,
    placed,
    rows,
    without_collector,
)
from optsched.model.schedule import NO_DEADLINE, Arcs, Csr, Goal, Objective, Resource, Schedule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FORMAT = "optsched.schedule/1"
"""The version that is written; a newer version of a document is refused with the way out."""

Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_INTEGER)]
Signed = Annotated[int, msgspec.Meta(ge=-MAX_INTEGER, le=MAX_INTEGER)]


class _Resource(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    name: str
    memory: Count = 0


class _Operation(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    duration: Count
    job: Count = 0
    kind: str = ""
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


class _Goal(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    objective: str
    job_weight: tuple[Count, ...] = ()
    due: tuple[Count, ...] = ()


class _Document(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    format: str
    name: str = ""
    time_unit: str = "us"
    resources: list[_Resource]
    operations: list[_Operation]
    arcs: list[list[Signed]] = []
    period: Count | None = None
    goal: _Goal | None = None
    sequences: list[list[Count]] | None = None
    starts: list[Count] | None = None
    objective: _Objective | None = None
    provenance: dict[str, Any] = {}


_NUMBERS = tuple(
    f for f in _Operation.__struct_fields__ if f not in ("kind", "resources", "deadline")
)


def read(text: str, name: str = "schedule") -> Schedule:
    """Read a schedule (or, without sequences and starts, an instance) from the text of a file."""
    with without_collector():
        return from_tree(parse(text, name), name)


def from_tree(tree: Any, name: str) -> Schedule:
    """Read a schedule from parsed JSON; see `read`."""
    version = check_format(tree, tuple(_READERS), name)
    return _READERS[version](tree, name)


def write(schedule: Schedule) -> bytes:
    """Canonical JSON: one operation a line, fields at their default left out."""
    claim = schedule.objective
    members = {
        "format": FORMAT,
        "name": schedule.name,
        "time_unit": schedule.time_unit,
        "resources": rows(_Resource(r.name, r.memory) for r in schedule.resources),
        "operations": rows(_operations(schedule)),
        "arcs": rows(_arcs(schedule)),
        "period": schedule.period,
        "goal": None if schedule.goal is None else _Goal(*schedule.goal),
        "sequences": None if schedule.sequences is None else rows(schedule.sequences.to_lists()),
        "starts": None if schedule.start is None else schedule.start.tolist(),
        "objective": None if claim is None else _Objective(*claim[:3], intern(claim.status)),
        "provenance": dict(schedule.provenance),
    }
    defaults = {"name": "", "time_unit": "us", "arcs": b"[]", "provenance": {}}
    return lines({
        key: value for key, value in members.items()
        if value is not None and (key not in defaults or value != defaults[key])
    })  # fmt: skip


def _read_1(tree: Any, name: str) -> Schedule:
    document = decode(tree, _Document, name)
    operations = document.operations
    n = len(operations)
    columns: dict[str, Any] = {
        key: np.fromiter((getattr(op, key) for op in operations), np.int64, n) for key in _NUMBERS
    }
    columns["kind"] = [op.kind for op in operations]
    columns["deadline"] = np.fromiter(
        (NO_DEADLINE if op.deadline is None else op.deadline for op in operations), np.int64, n
    )
    claim, goal = document.objective, document.goal
    with placed(f"{name}: "):
        return Schedule(
            name=document.name,
            time_unit=document.time_unit,
            resources=tuple(Resource(r.name, r.memory) for r in document.resources),
            op_resources=Csr.of([op.resources for op in operations]),
            arcs=Arcs.of(document.arcs),
            period=document.period,
            goal=None if goal is None else Goal(goal.objective, goal.job_weight, goal.due),
            sequences=None if document.sequences is None else Csr.of(document.sequences),
            start=None if document.starts is None else np.array(document.starts, np.int64),
            objective=None if claim is None else Objective(*msgspec.structs.astuple(claim)),
            provenance=document.provenance,
            **columns,
        )


def _operations(schedule: Schedule) -> Iterator[_Operation]:
    columns = {key: getattr(schedule, key).tolist() for key in _NUMBERS}
    columns["deadline"] = [None if d == NO_DEADLINE else d for d in schedule.deadline.tolist()]
    columns["kind"] = schedule.kind.tolist()
    columns["resources"] = schedule.op_resources.to_lists()
    keys = list(columns)
    for row in zip(*columns.values(), strict=True):
        yield _Operation(**dict(zip(keys, row, strict=True)))


def _arcs(schedule: Schedule) -> Iterator[list[int]]:
    for arc in zip(*(column.tolist() for column in schedule.arcs), strict=True):
        yield list(arc) if arc[3] else list(arc[:3]) if arc[2] else list(arc[:2])


_READERS: Final[dict[str, Callable[[Any, str], Schedule]]] = {FORMAT: _read_1}
"""Reader of every version, the newest last. A new version adds its struct and an entry here; the
reader of version 1 stays, so that old files can be read for ever."""
