"""The document ``optsched.jobarray/1``."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import numpy as np

from optsched.errors import InputError
from optsched.io.strict_json import MAX_INTEGER, check_format, decode, parse
from optsched.model.document import Count, Signed  # noqa: TC001 (msgspec reads the annotations)
from optsched.problems.jobarray.fields import CHOICES, FLAGS, PER_CUT, PER_JOB, PER_STAGE
from optsched.problems.jobarray.problem import JobArray

FORMAT = "optsched.jobarray/1"

Positive = Annotated[int, msgspec.Meta(ge=1, le=MAX_INTEGER)]


class _Device(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    name: str
    memory: Count = 0
    server: str = ""


class _Job(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    name: str | None = None
    micro_batches: Positive = 1
    multiplicity: Positive = 1
    release: Count = 0
    batch_size: Count = 0
    forward: list[Count]
    backward: list[Count]
    weight: list[Count] | None = None
    recompute: list[Count] | None = None
    update: list[Count] | None = None
    switch: list[Count] | None = None
    lag_forward: list[Signed] | None = None
    lag_backward: list[Signed] | None = None
    activation: list[Count] | None = None
    checkpoint: list[Count] | None = None
    recompute_workspace: list[Count] | None = None
    weight_memory: list[Count] | None = None
    state: list[Count] | None = None


class _Options(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    objective: str = "makespan"
    recompute_mode: str | list[bool] = "never"
    recompute_as_block: bool = False
    update_mode: str = "fused"
    update_blocks_gradient: bool = False
    microbatch_order: str = "fixed"
    switch_on: str = "out"
    trailing_switch: bool = False


class _Document(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    format: str
    name: str = ""
    time_unit: str = "us"
    devices: list[_Device]
    place: list[Count] | list[list[list[Count]]] | None = None
    jobs: Annotated[list[_Job], msgspec.Meta(min_length=1)]
    options: _Options = msgspec.field(default_factory=_Options)


_TABLES = tuple(key for key in (*PER_STAGE, *PER_CUT) if key not in ("forward", "backward"))
_SETTINGS = _Options.__struct_fields__


def read(text: str, name: str = "jobarray") -> JobArray:
    """Read a job array from JSON text; `InputError` names place, rule and value."""
    return from_tree(parse(text, name), name)


def from_tree(tree: Any, name: str) -> JobArray:
    """Read a job array from parsed JSON."""
    check_format(tree, FORMAT, name)
    nested = tree.get("place")
    is_nested = isinstance(nested, list) and nested and isinstance(nested[0], list)
    shape = _Nested if is_nested else _Flat
    document = decode(tree, shape, name)
    try:
        return _job_array(document)
    except InputError as error:
        error.args = (f"{name}: {error.args[0]}",)
        raise


# a union of two list types is ambiguous to the decoder, so the nesting picks the type
class _Flat(_Document, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    place: list[Count] | None = None


class _Nested(_Document, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    place: list[list[list[Count]]] | None = None


def write(array: JobArray) -> bytes:
    """Canonical JSON: one job a line, fields at their default left out."""
    encode = msgspec.json.Encoder().encode
    jobs = []
    for j in range(array.n_jobs):
        tables = {key: getattr(array, key) for key in _TABLES}
        fields = {key: table[j].tolist() for key, table in tables.items() if table is not None}
        kept: dict[str, Any] = {
            key: row for key, row in fields.items() if any(row) or (key == "weight" and row)
        }
        numbers: dict[str, Any] = {key: int(getattr(array, key)[j]) for key in PER_JOB}
        jobs.append(
            _Job(
                name=array.names[j],
                forward=array.forward[j].tolist(),
                backward=array.backward[j].tolist(),
                **numbers,
                **kept,
            )
        )
    devices = [
        _Device(name, int(memory), server)
        for name, memory, server in zip(array.devices, array.memory, array.servers, strict=True)
    ]
    mode = array.recompute_mode
    settings = {key: getattr(array, key) for key in _SETTINGS}
    settings["recompute_mode"] = mode if isinstance(mode, str) else list(mode)
    # compared by value: the encoder's own omission of defaults compares strings by identity
    options = {k: value for k, value in settings.items() if value != getattr(_Options(), k)}
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


def _job_array(document: _Document) -> JobArray:
    jobs = document.jobs
    width = len(jobs[0].forward)
    if not width:
        raise InputError("jobs[0].forward: a job needs at least one stage")
    tables: dict[str, Any] = {}
    for key in ("forward", "backward", *_TABLES):
        expected = width - 1 if key in PER_CUT else width
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
        tables[key] = np.array([[0] * expected if row is None else row for row in rows], np.int64)
        tables[key] = tables[key].reshape(len(jobs), expected)
    options = document.options
    mode = options.recompute_mode
    choices = {key: getattr(options, key) for key in _SETTINGS if key != "recompute_mode"}
    tables |= {key: np.array([getattr(job, key) for job in jobs], np.int64) for key in PER_JOB}
    return JobArray(
        **tables,
        names=tuple(f"job{j}" if job.name is None else job.name for j, job in enumerate(jobs)),
        place=document.place,
        memory=np.array([device.memory for device in document.devices], np.int64),
        devices=tuple(device.name for device in document.devices),
        servers=tuple(device.server for device in document.devices),
        recompute_mode=mode if isinstance(mode, str) else tuple(mode),
        name=document.name,
        time_unit=document.time_unit,
        **choices,
    )


assert set(_SETTINGS) >= {*FLAGS} and set(_SETTINGS) >= set(CHOICES) - {"time_unit"}
