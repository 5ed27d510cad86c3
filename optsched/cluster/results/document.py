"""The document ``optsched.metrics/1``: what simulations of one workload were worth."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from optsched.errors import InputError
from optsched.io.files import write_atomic
from optsched.io.strict_json import lines
from optsched.io.values import json_value
from optsched.version import __version__

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from optsched.cluster.results.run import Run
    from optsched.model.schedule import IntArray

FORMAT = "optsched.metrics/1"

SETTINGS = ("restart_cost", "resize", "checkpoint", "round", "seed")
"""Settings that a document holds, beside `changes`."""


def to_json(
    runs: Mapping[str, Run], *, per_job: bool = True, inputs: Mapping[str, Any] | None = None
) -> bytes:
    """The document of runs of the same jobs on the same nodes, by label (a policy's name, mostly).

    Every run has, in ``jobs`` if `per_job`, columns in the order of ``names`` (null: not ended),
    ``submit`` among them if it is not that of the first run; ``waiting`` says why jobs wait after a
    Ctrl-C, or at the start of a simulation from now. `inputs`: what else the runs were made from.
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
        "inputs": json_value("inputs", dict(inputs or {})),
        "workload": some.workload.name,
        "time_unit": some.workload.time_unit,
        "nodes": list(some.nodes.gpus),
    }
    if per_job:
        members["names"] = some.workload.names
        members["submit"] = some.workload.submit.tolist()
    first = some.workload.submit
    rows = {label: lines(_record(run, per_job, first), 2) for label, run in runs.items()}
    members["runs"] = lines(rows, 1)
    return lines(members)


def write(runs: Mapping[str, Run], path: str | os.PathLike[str], **options: Any) -> None:
    """Write the document; options are those of `to_json`."""
    write_atomic(path, to_json(runs, **options))


def described(run: Run) -> dict[str, Any]:
    """Policy, options and settings of a run."""
    return {
        "policy": run.policy,
        "options": {key: _as_json(value) for key, value in run.options.items()},
        "settings": {key: getattr(run.settings, key) for key in SETTINGS},
    }


def _record(run: Run, per_job: bool, first: IntArray) -> dict[str, Any]:
    found, record = run.metrics, described(run)
    record["settings"]["changes"] = [
        {"time": c.time, "node": c.node, "kind": c.kind} for c in run.settings.changes
    ]
    record["metrics"] = {k: v if math.isfinite(v) else None for k, v in found.summary().items()}
    if run.notes:
        record["notes"] = list(run.notes)
    if not per_job:
        return record
    if waiting := run.reported_waiting():
        record["waiting"] = {
            name: {"why": why, "text": text} for name, (why, text) in waiting.items()
        }
    columns = {}
    if not np.array_equal(run.workload.submit, first):
        columns["submit"] = run.workload.submit.tolist()
    for key in (
        "jct", "queueing", "waiting", "waiting_for_room", "gpu_time", "restarts_by_job",
        "preemptions_by_job", "rho",
    ):  # fmt: skip
        values = zip(getattr(found, key).tolist(), found.ended.tolist(), strict=True)
        columns[key.removesuffix("_by_job")] = [v if ended else None for v, ended in values]
    record["jobs"] = lines(columns, 3)
    return record


def _as_json(value: Any) -> Any:
    """Return an option as JSON has it, or its representation."""
    try:
        return json_value("options", value)
    except InputError:
        return f"{value!r:.200}"
