"""First difference between the graphs of two schedules, for messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from optsched.io.strict_json import format_json
from optsched.model.objectives import objective_name, per_job
from optsched.model.schedule import COLUMNS, NO_DEADLINE, Schedule

if TYPE_CHECKING:
    from collections.abc import Iterator


def difference(found: Schedule, expected: Schedule) -> str:
    """The first field in which two graphs differ; ``""`` if only orders, starts or offsets do."""
    for place, value, other in _pairs(found, expected):
        if value != other:
            return f"{place} {_text(value)}, expected {_text(other)}"
    return ""


def _pairs(found: Schedule, expected: Schedule) -> Iterator[tuple[str, object, object]]:
    if (found.period is None) != (expected.period is None):
        yield "has the period", found.period, expected.period
    yield "has the time unit", found.time_unit, expected.time_unit
    yield "has the objective", objective_name(found), objective_name(expected)
    if found.goal is not None and expected.goal is not None:
        for j, pair in enumerate(zip(per_job(found), per_job(expected), strict=False)):
            yield f"weight or due date of job {j}:", *pair
    for what in ("resources", "operations"):
        yield f"number of {what}:", getattr(found, f"n_{what}"), getattr(expected, f"n_{what}")
    for r, (ours, theirs) in enumerate(zip(found.resources, expected.resources, strict=True)):
        yield f"resources[{r}].name:", ours.name, theirs.name
        yield f"resources[{r}].memory:", ours.memory, theirs.memory
    for key in COLUMNS:
        if key == "offset":
            continue
        a, b = getattr(found, key), getattr(expected, key)
        for i in np.flatnonzero(a != b)[:1].tolist():
            yield f"operations[{i}].{key}:", a[i].item(), b[i].item()
    rows, others = found.op_resources.to_lists(), expected.op_resources.to_lists()
    for i, (row, other) in enumerate(zip(rows, others, strict=True)):
        yield f"operations[{i}].resources:", row, other
    yield "number of arcs:", len(found.arcs.tail), len(expected.arcs.tail)
    table, needed = np.array(found.arcs), np.array(expected.arcs)
    for a in np.flatnonzero((table != needed).any(axis=0))[:1].tolist():
        yield f"arcs[{a}]:", table[:, a].tolist(), needed[:, a].tolist()


def _text(value: object) -> str:
    if isinstance(value, list):
        return str(value) if len(value) <= 8 else f"a list of {len(value)}"
    return "none" if value is None or value == NO_DEADLINE else format_json(value)
