"""Job shops in the JSON of job_shop_lib."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from optsched.errors import InputError
from optsched.formats.registry import Reader, Source
from optsched.io.strict_json import decode, placed
from optsched.problems.jobshop.document import Count
from optsched.problems.jobshop.problem import JobShop

Matrix = Annotated[
    list[Annotated[list[Count], msgspec.Meta(min_length=1)]], msgspec.Meta(min_length=1)
]


class _JobShopLib(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: str
    duration_matrix: Matrix
    machines_matrix: Matrix
    metadata: dict[str, Any] = {}


def from_job_shop_lib(tree: Any, name: str) -> JobShop:
    """``duration_matrix`` and ``machines_matrix``, one row a job."""
    found = decode(tree, _JobShopLib, name)
    times, places = found.duration_matrix, found.machines_matrix
    if len(times) != len(places):
        raise InputError(
            f"{name}: machines_matrix: expected {len(times)} rows as in duration_matrix, "
            f"got {len(places)}"
        )
    for j, (row, p) in enumerate(zip(places, times, strict=True)):
        if len(row) != len(p):
            raise InputError(
                f"{name}: machines_matrix[{j}]: expected {len(p)} machines as there are "
                f"durations, got {len(row)}"
            )
    jobs = [list(zip(row, p, strict=True)) for row, p in zip(places, times, strict=True)]
    with placed(f"{name}: "):
        return JobShop(jobs, None, name=found.name, metadata=found.metadata)


def _recognises(source: Source) -> bool:
    keys = source.tree.keys() if isinstance(source.tree, dict) else set()
    return "format" not in keys and bool({"duration_matrix", "machines_matrix"} & keys)


READER = Reader(
    "job_shop_lib", _recognises, lambda source: from_job_shop_lib(source.tree, source.file)
)
