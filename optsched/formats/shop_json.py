"""Job shops in the JSON of job_shop_lib."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import numpy as np

from optsched.errors import InputError
from optsched.formats.registry import Reader, Source
from optsched.io.strict_json import decode, format_json, placed
from optsched.model.document import Count
from optsched.model.schedule import NO_DEADLINE
from optsched.problems.jobshop.problem import JobShop

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.model.schedule import Problem

_Rows = list[list[Count | None]]
_Matrix = Annotated[
    list[Annotated[list[Count], msgspec.Meta(min_length=1)]], msgspec.Meta(min_length=1)
]
_Machines = Annotated[list[Count], msgspec.Meta(min_length=1)]
_WINDOWS: Final = ("release_dates_matrix", "deadlines_matrix", "due_dates_matrix")
_CHANGES: Final = re.compile(
    "agv|arriv|avail|batch|block|break|buffer|calendar|capacit|changeover|constrain|deadline|"
    "depend|down|due|eligib|energy|fail|flexib|maint|objective|operator|preced|preempt|priorit|"
    "ready|release|repair|required|robot|setup|shift|speed|stochast|tard|time.?lag|tool|transport|"
    "travel|uncertain|unavail|vehicle|wait|weight|window|worker"
)
"""Parts of names of metadata that may change the problem."""
_FACTS: Final = re.compile("author|best|bound|name|optim|reference|schedule|sequence|solution|tag")
"""Parts of names of lists and objects that do not."""


class _JobShopLib(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: str
    duration_matrix: _Matrix
    machines_matrix: list[list[Count | _Machines]]
    metadata: dict[str, Any] = {}
    release_dates_matrix: _Rows | None = None
    deadlines_matrix: _Rows | None = None
    due_dates_matrix: _Rows | None = None


def from_job_shop_lib(tree: Any, name: str) -> Problem:
    """Read ``duration_matrix``, ``machines_matrix``, release dates and deadlines, one row a job.

    The result is a graph if operations behind the first have release dates, or operations
    before the last deadlines. Several machines, due dates, and metadata that may change the
    problem are refused.
    """
    if isinstance(tree, dict) and isinstance(facts := tree.get("metadata"), dict):
        moved = {key: facts[key] for key in _WINDOWS if key in facts and key not in tree}
        others = {key: value for key, value in facts.items() if key not in moved}
        tree = {**tree, **moved, "metadata": others}  # versions before 1.7 keep windows there
    found = decode(tree, _JobShopLib, name)
    times, metadata = found.duration_matrix, found.metadata
    places = _one_each(found.machines_matrix, name)
    windows = {key: getattr(found, key) for key in _WINDOWS}
    for key, rows in {"machines_matrix": places, **windows}.items():
        _check_shape(times if rows is None else rows, times, f"{name}: {key}")
    if any(due is not None for row in found.due_dates_matrix or () for due in row):
        raise InputError(
            f"{name}: due_dates_matrix: due dates are not read, as files name no objective; leave "
            "them out, make deadlines of them, or give JobShop one `due` per job and the objective"
        )
    for key, value in metadata.items():
        is_data = isinstance(value, (list, dict)) and not _FACTS.search(key.lower())
        if value and (is_data or _CHANGES.search(key.lower())):
            raise InputError(
                f"{name}: metadata.{key}: may change the problem and is not supported; leave it "
                f"out if it is a mere fact, got {format_json(value)}"
            )
    jobs = [list(zip(row, p, strict=True)) for row, p in zip(places, times, strict=True)]
    with placed(f"{name}: "):
        return _with_windows(JobShop(jobs, None, name=found.name, metadata=metadata), windows)


def _one_each(rows: list[list[Any]], name: str) -> list[list[int]]:
    """Return the machine of every operation; refuse alternatives."""
    several = sum(isinstance(one, list) and len(one) > 1 for row in rows for one in row)
    if several:
        raise InputError(
            f"{name}: machines_matrix: this looks like a flexible job shop ({several} operation"
            f"{'s' * (several > 1)} with alternatives), which is not supported"
        )
    return [[one[0] if isinstance(one, list) else one for one in row] for row in rows]


def _check_shape(rows: Sequence[Sequence[Any]], times: Sequence[Any], place: str) -> None:
    """Refuse rows of another shape than the durations."""
    if len(rows) != len(times):
        what = f"expected {len(times)} rows as in duration_matrix, got {len(rows)}"
        raise InputError(f"{place}: {what}")
    for j, (row, p) in enumerate(zip(rows, times, strict=True)):
        if len(row) != len(p):
            what = f"expected {len(p)} values as there are durations, got {len(row)}"
            raise InputError(f"{place}[{j}]: {what}")


def _with_windows(shop: JobShop, windows: dict[str, Any]) -> Problem:
    """Add release dates and deadlines of operations; a graph if a shop cannot hold them."""
    release, deadline = (
        np.array([default if one is None else one for row in rows for one in row], np.int64)
        if rows is not None
        else np.full(shop.n_operations, default)
        for rows, default in zip(
            (windows[key] for key in _WINDOWS[:2]), (0, NO_DEADLINE), strict=True
        )
    )
    first, last = shop.first[:-1], shop.first[1:] - 1
    found = JobShop(
        shop.jobs, shop.machines, release=release[first], deadline=deadline[last],
        name=shop.name, time_unit=shop.time_unit, metadata=shop.metadata,
    )  # fmt: skip
    if np.delete(release, first).any() or (np.delete(deadline, last) != NO_DEADLINE).any():
        return replace(found.graph(), release=release, deadline=deadline)
    return found


def _recognises(source: Source) -> bool:
    keys = source.tree.keys() if isinstance(source.tree, dict) else set()
    return "format" not in keys and bool({"duration_matrix", "machines_matrix"} & keys)


READER = Reader(
    "job_shop_lib", _recognises, lambda source: from_job_shop_lib(source.tree, source.file)
)
