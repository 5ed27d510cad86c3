"""The document ``optsched.jobarray/1``; values are checked by `JobArray`."""

from __future__ import annotations

from types import GenericAlias
from typing import Annotated, Any

import msgspec
import numpy as np

from optsched.errors import InputError
from optsched.io.strict_json import check_format, decode, parse, placed
from optsched.model.document import Count, Signed
from optsched.problems.jobarray.fields import FIELDS, fields_of
from optsched.problems.jobarray.problem import JobArray

FORMAT = "optsched.jobarray/1"

_TABLES = [key for key in fields_of("stage", "cut") if key not in ("forward", "backward")]
_NUMBERS, _OPTIONS = fields_of("job"), fields_of("option")
_WRITTEN = ("forward", "backward", "weight")  # even if all values are 0


def _struct(name: str, *fields: Any) -> Any:
    """Make a strict object of a document of fields (name, type) or (name, type, default)."""
    return msgspec.defstruct(
        name, fields, forbid_unknown_fields=True, omit_defaults=True, kw_only=True
    )


_Device = _struct("_Device", ("name", str), ("memory", Count, 0), ("server", str, ""))
_Job = _struct(
    "_Job",
    ("name", str | None, None),
    *((key, Signed, FIELDS[key].default) for key in _NUMBERS),
    ("forward", list[Signed]),
    ("backward", list[Signed]),
    *((key, list[Signed] | None, None) for key in _TABLES),
)
_Options = _struct(
    "_Options",
    *(
        (key, str | list[bool] if key == "recompute_mode" else type(default), default)
        for key, default in ((key, FIELDS[key].default) for key in _OPTIONS)
    ),
)
_Document = _struct(
    "_Document",
    ("format", str),
    ("name", str, ""),
    ("time_unit", str, "us"),
    ("devices", GenericAlias(list, _Device)),
    ("place", Any, None),
    ("jobs", Annotated[GenericAlias(list, _Job), msgspec.Meta(min_length=1)]),
    ("options", _Options, msgspec.field(default_factory=_Options)),
)


def read(text: str, name: str = "jobarray") -> JobArray:
    """Read a job array from JSON text; `InputError` names place, rule and value."""
    return from_tree(parse(text, name), name)


def from_tree(tree: Any, name: str) -> JobArray:
    """Read a job array from parsed JSON; `name` is the file in messages."""
    check_format(tree, FORMAT, name)
    options = tree.get("options")
    if isinstance(options, dict) and "switch_on" in options:
        raise InputError(
            f"{name}: options.switch_on: no longer supported, `switch` is the time after a job; "
            'leave it out (for "in" write the graph as optsched.schedule/1 with setup_in)'
        )
    found = decode(tree, _Document, name)
    with placed(f"{name}: "):
        return JobArray(
            **_tables(found.jobs),
            **{key: getattr(found.options, key) for key in _OPTIONS},
            names=[f"job{j}" if job.name is None else job.name for j, job in enumerate(found.jobs)],
            place=found.place,
            memory=[device.memory for device in found.devices],
            devices=[device.name for device in found.devices],
            servers=[device.server for device in found.devices],
            name=found.name,
            time_unit=found.time_unit,
        )


def _tables(jobs: Any) -> dict[str, Any]:
    """Tables of all jobs; a row that is left out is 0."""
    width = len(jobs[0].forward)
    fields: dict[str, Any] = {key: [getattr(job, key) for job in jobs] for key in _NUMBERS}
    for key in ("forward", "backward", *_TABLES):
        rows = [getattr(job, key) for job in jobs]
        if all(row is None for row in rows):
            continue
        expected = width - (FIELDS[key].kind == "cut")
        for j, row in enumerate(rows):
            if row is None and key == "weight":
                raise InputError(f"jobs[{j}].weight: missing, but jobs[0] or another job has it")
            if row is not None and len(row) != max(expected, key == "forward"):
                raise InputError(
                    f"jobs[{j}].{key}: expected {max(expected, 1)} values, got {len(row)}; "
                    f"jobs[0].forward has {width}"
                )
        table = np.array([[0] * expected if row is None else row for row in rows], np.int64)
        fields[key] = table.reshape(len(jobs), expected)
    return fields


def write(array: JobArray) -> bytes:
    """Write canonical JSON: one job a line, fields at their default left out."""
    encode = msgspec.json.Encoder().encode
    tables = {key: getattr(array, key) for key in ("forward", "backward", *_TABLES)}
    jobs = []
    for j in range(array.n_jobs):
        fields = {key: table[j].tolist() for key, table in tables.items() if table is not None}
        fields = {key: row for key, row in fields.items() if any(row) or key in _WRITTEN}
        numbers = {key: int(getattr(array, key)[j]) for key in _NUMBERS}
        jobs.append(_Job(name=array.names[j], **numbers, **fields))
    columns = zip(array.devices, array.memory.tolist(), array.servers, strict=True)
    devices = [_Device(name=name, memory=memory, server=server) for name, memory, server in columns]
    # compared by value: the encoder's omission of defaults compares strings by identity
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
