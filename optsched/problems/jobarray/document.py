"""The document ``optsched.jobarray/1``."""

from __future__ import annotations

from types import GenericAlias
from typing import Annotated, Any

import msgspec
import numpy as np

from optsched.errors import InputError
from optsched.io.strict_json import MAX_INTEGER, check_format, decode, parse, placed
from optsched.model.document import Count, Signed
from optsched.problems.jobarray.fields import FIELDS, fields_of
from optsched.problems.jobarray.problem import JobArray

FORMAT = "optsched.jobarray/1"

_TABLES = [key for key in fields_of("stage", "cut") if key not in ("forward", "backward")]
_NUMBERS, _OPTIONS = fields_of("job"), fields_of("option")


def _struct(name: str, *fields: Any) -> Any:
    """A strict object of a document; fields are pairs (name, type), or triples with a default."""
    return msgspec.defstruct(
        name, fields, forbid_unknown_fields=True, omit_defaults=True, kw_only=True
    )


def _option(key: str) -> tuple[str, Any, Any]:
    default = FIELDS[key].default
    kind = str | list[bool] if key == "recompute_mode" else type(default)
    return key, kind, default


def _number(key: str) -> tuple[str, Any, Any]:
    field = FIELDS[key]
    return key, Annotated[int, msgspec.Meta(ge=field.least, le=MAX_INTEGER)], field.default


def _table(key: str) -> tuple[str, Any, Any]:
    return key, (list[Signed] if FIELDS[key].kind == "cut" else list[Count]) | None, None


def _document(place: Any) -> Any:
    return _struct(
        "_Document",
        ("format", str),
        ("name", str, ""),
        ("time_unit", str, "us"),
        ("devices", GenericAlias(list, _Device)),
        ("place", place | None, None),
        ("jobs", Annotated[GenericAlias(list, _Job), msgspec.Meta(min_length=1)]),
        ("options", _Options, msgspec.field(default_factory=_Options)),
    )


_Device = _struct("_Device", ("name", str), ("memory", Count, 0), ("server", str, ""))
_Job = _struct(
    "_Job",
    ("name", str | None, None),
    *map(_number, _NUMBERS),
    ("forward", list[Count]),
    ("backward", list[Count]),
    *map(_table, _TABLES),
)
_Options = _struct("_Options", *map(_option, _OPTIONS))
# a union of two list types is ambiguous to the decoder, so the nesting picks the type
_Flat, _Nested = _document(list[Count]), _document(list[list[list[Count]]])


def read(text: str, name: str = "jobarray") -> JobArray:
    """Read a job array from JSON text; `InputError` names place, rule and value."""
    return from_tree(parse(text, name), name)


def from_tree(tree: Any, name: str) -> JobArray:
    """Read a job array from parsed JSON."""
    check_format(tree, FORMAT, name)
    options = tree.get("options")
    if isinstance(options, dict) and "switch_on" in options:
        raise InputError(
            f"{name}: options.switch_on: no longer supported, `switch` is the time after a job; "
            'leave it out (for "in" write the graph as optsched.schedule/1 with setup_in)'
        )
    nested = tree.get("place")
    is_nested = isinstance(nested, list) and nested and isinstance(nested[0], list)
    document = decode(tree, _Nested if is_nested else _Flat, name)
    with placed(f"{name}: "):
        return _job_array(document)


def write(array: JobArray) -> bytes:
    """Canonical JSON: one job a line, fields at their default left out."""
    encode = msgspec.json.Encoder().encode
    tables = {key: getattr(array, key) for key in ("forward", "backward", *_TABLES)}
    jobs = []
    for j in range(array.n_jobs):
        fields = {key: table[j].tolist() for key, table in tables.items() if table is not None}
        always = ("forward", "backward", "weight")
        fields = {key: row for key, row in fields.items() if any(row) or key in always}
        numbers = {key: int(getattr(array, key)[j]) for key in _NUMBERS}
        jobs.append(_Job(name=array.names[j], **numbers, **fields))
    devices = [
        _Device(name=name, memory=memory, server=server)
        for name, memory, server in zip(
            array.devices, array.memory.tolist(), array.servers, strict=True
        )
    ]
    # compared by value: the encoder's own omission of defaults compares strings by identity
    options = {
        key: getattr(array, key) for key in _OPTIONS if getattr(array, key) != FIELDS[key].default
    }
    lines = [
        b'"format": "%s"' % FORMAT.encode(),
        b'"name": ' + encode(array.name),
        b'"time_unit": ' + encode(array.time_unit),
        b'"devices": [\n    ' + b",\n    ".join(map(encode, devices)) + b"\n  ]",
    ]
    if array.place != tuple(range(array.n_stages)):
        lines.append(b'"place": ' + encode(array.place))
    lines.append(b'"jobs": [\n    ' + b",\n    ".join(map(encode, jobs)) + b"\n  ]")
    if options:
        lines.append(b'"options": ' + encode(options))
    return b"{\n  " + b",\n  ".join(lines) + b"\n}\n"


def _job_array(document: Any) -> JobArray:
    jobs, devices = document.jobs, document.devices
    width = len(jobs[0].forward)
    if not width:
        raise InputError("jobs[0].forward: a job needs at least one stage")
    fields: dict[str, Any] = {key: [getattr(job, key) for job in jobs] for key in _NUMBERS}
    fields |= {key: getattr(document.options, key) for key in _OPTIONS}
    for key in ("forward", "backward", *_TABLES):
        expected = width - (FIELDS[key].kind == "cut")
        rows = [getattr(job, key) for job in jobs]
        if all(row is None for row in rows):
            continue
        for j, row in enumerate(rows):
            if row is None and key == "weight":
                raise InputError(f"jobs[{j}].weight: missing, but jobs[0] or another job has it")
            if row is not None and len(row) != expected:
                raise InputError(
                    f"jobs[{j}].{key}: expected {expected} values, got {len(row)}; "
                    f"jobs[0].forward has {width}"
                )
        table = np.array([[0] * expected if row is None else row for row in rows], np.int64)
        fields[key] = table.reshape(len(jobs), expected)
    return JobArray(
        **fields,
        names=[f"job{j}" if job.name is None else job.name for j, job in enumerate(jobs)],
        place=document.place,
        memory=[device.memory for device in devices],
        devices=[device.name for device in devices],
        servers=[device.server for device in devices],
        name=document.name,
        time_unit=document.time_unit,
    )
