"""The document ``optsched.metrics/1``: what simulations of one workload were worth."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec

from optsched.errors import InputError
from optsched.io.files import read_text, write_atomic
from optsched.io.strict_json import check_format, decode, lines, parse
from optsched.io.values import plain
from optsched.version import __version__

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from optsched.cluster.run import Run

FORMAT = "optsched.metrics/1"

SETTINGS = ("restart_cost", "resize", "checkpoint", "timing", "round", "seed")
"""Settings that a document holds, beside `changes` and the name of the contention model."""

COLUMNS = ("jct", "queueing", "gpu_time", "restarts", "preemptions", "rho")
"""Values per job, in the order of `names`; null for a job that did not end."""


class RunRecord(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One policy: its options, its single numbers by name, and its columns by name."""

    policy: str
    options: dict[str, Any]
    settings: dict[str, Any]
    metrics: dict[str, float | None]
    jobs: dict[str, list[float | None]] = {}


class MetricsDocument(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """All runs of a document; times in `time_unit`.

    `version` is that of the program, `inputs` what the runs were made from as far as the caller
    said so (``optsched simulate``: trace, estimate error, packing tables).
    """

    format: str
    version: str = ""
    inputs: dict[str, Any] = {}
    workload: str
    time_unit: str
    nodes: list[int]
    names: list[str] = []
    submit: list[int] = []
    runs: dict[str, RunRecord]


def to_json(
    runs: Mapping[str, Run], *, per_job: bool = True, inputs: Mapping[str, Any] | None = None
) -> bytes:
    """The document of runs of one workload on the same nodes, by label.

    Parameters
    ----------
    runs
        Runs by label (a policy's name, as a rule).
    per_job
        Whether the columns per job are in it.
    inputs
        What else the runs were made from, as JSON has it.

    Raises
    ------
    InputError
        No run, or runs of different workloads or nodes.
    """
    if not runs:
        raise InputError("runs: expected at least one")
    some = next(iter(runs.values()))
    for label, run in runs.items():
        if run.workload.names != some.workload.names or run.nodes.gpus != some.nodes.gpus:
            raise InputError(f"runs: {label!r:.60} is of another workload or of other nodes")
    members: dict[str, Any] = {
        "format": FORMAT,
        "version": __version__,
        "inputs": plain("inputs", dict(inputs or {})),
        "workload": some.workload.name,
        "time_unit": some.workload.time_unit,
        "nodes": list(some.nodes.gpus),
    }
    if per_job:
        members["names"] = some.workload.names
        members["submit"] = some.workload.submit.tolist()
    members["runs"] = lines({label: lines(_record(r, per_job), 2) for label, r in runs.items()}, 1)
    return lines(members)


def write(
    runs: Mapping[str, Run],
    path: str | os.PathLike[str],
    *,
    per_job: bool = True,
    inputs: Mapping[str, Any] | None = None,
) -> None:
    """Write the document; see `to_json`."""
    write_atomic(path, to_json(runs, per_job=per_job, inputs=inputs))


def read(path: str | os.PathLike[str]) -> MetricsDocument:
    """Read a document strictly; `InputError` with the path in it, the rule and the value."""
    name = str(path)
    tree = parse(read_text(path), name)
    check_format(tree, FORMAT, name)
    found = decode(tree, MetricsDocument, name)
    if len(found.submit) != len(found.names):
        raise InputError(
            f"{name}: submit: expected {len(found.names)} values, one per name, "
            f"got {len(found.submit)}"
        )
    for label, run in found.runs.items():
        for key, column in run.jobs.items():
            place = f"{name}: runs.{label}.jobs.{key}"
            if key not in COLUMNS:
                raise InputError(f"{place}: unknown (there are {', '.join(COLUMNS)})")
            if len(column) != len(found.names):
                raise InputError(
                    f"{place}: expected {len(found.names)} values, one per name, got {len(column)}"
                )
    return found


def _record(run: Run, per_job: bool) -> dict[str, Any]:
    found = run.metrics
    record: dict[str, Any] = {
        "policy": run.policy,
        "options": {key: _plain(value) for key, value in run.options.items()},
        "settings": _settings(run),
        "metrics": {key: _finite(value) for key, value in found.summary().items()},
    }
    if per_job:
        columns = {
            "jct": found.jct, "queueing": found.queueing, "gpu_time": found.gpu_time,
            "restarts": found.restarts_by_job, "preemptions": found.preemptions_by_job,
            "rho": found.rho,
        }  # fmt: skip
        ended = found.ended.tolist()
        record["jobs"] = lines(
            {
                key: [v if e else None for v, e in zip(column.tolist(), ended, strict=True)]
                for key, column in columns.items()
            },
            3,
        )
    return record


def _settings(run: Run) -> dict[str, Any]:
    model = run.settings.contention
    changes = [{"time": c.time, "node": c.node, "kind": c.kind} for c in run.settings.changes]
    return {key: getattr(run.settings, key) for key in SETTINGS} | {
        "changes": changes,
        "contention": None if model is None else type(model).__name__,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _plain(value: Any) -> Any:
    """An option as JSON has it, or how it reads."""
    try:
        return plain("options", value)
    except InputError:
        return f"{value!r:.200}"


__all__ = ["FORMAT", "MetricsDocument", "RunRecord", "read", "to_json", "write"]
