"""Job shops in the JSON of two other projects: job_shop_lib's and ScheduleOpt's."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from optsched.errors import InputError
from optsched.formats.registry import Reader, Source
from optsched.formats.standard import named_shop
from optsched.io.strict_json import MAX_INTEGER, decode, placed
from optsched.problems.jobshop.document import Count, check_machine
from optsched.problems.jobshop.problem import JobShop

Size = Annotated[int, msgspec.Meta(ge=1, le=MAX_INTEGER)]
Matrix = Annotated[
    list[Annotated[list[Count], msgspec.Meta(min_length=1)]], msgspec.Meta(min_length=1)
]


class _JobShopLib(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: str
    duration_matrix: Matrix
    machines_matrix: Matrix
    metadata: dict[str, Any] = {}


class _Task(msgspec.Struct, forbid_unknown_fields=True):
    job: Count
    operation: Count
    machine: Count
    duration: Count


class _ScheduleOpt(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    jobs: Size
    machines: Size
    data: list[_Task]
    instance: str = ""
    family: str = ""
    family_long: str = ""
    year: str = ""


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


def from_schedule_opt(tree: Any, name: str) -> JobShop:
    """``data``: a list of operations with their job, place in it, machine and duration."""
    found = decode(tree, _ScheduleOpt, name)
    n, m = found.jobs, found.machines
    chains: dict[int, dict[int, tuple[int, int]]] = {}
    for t, task in enumerate(found.data):
        if task.job >= n:
            raise InputError(
                f"{name}: data[{t}].job: expected 0..{n - 1}, got {task.job} (jobs are 0-based)"
            )
        check_machine(task.machine, m, f"{name}: data[{t}].machine")
        chain = chains.setdefault(task.job, {})
        if task.operation in chain:
            raise InputError(
                f"{name}: data[{t}].operation: job {task.job} has {task.operation} already"
            )
        chain[task.operation] = (task.machine, task.duration)
    if len(chains) != n:
        raise InputError(f"{name}: data: expected operations of {n} jobs, got {len(chains)} jobs")
    jobs = []
    for j in range(n):
        missing = next((i for i in range(len(chains[j])) if i not in chains[j]), None)
        if missing is not None:
            raise InputError(f"{name}: data: job {j} has no operation {missing}, but later ones")
        jobs.append([chains[j][i] for i in range(len(chains[j]))])
    facts = {"family": found.family, "family_long": found.family_long, "year": found.year}
    metadata = {key: value for key, value in facts.items() if value}
    return named_shop(jobs, m, name, found.instance, metadata)


def _has(source: Source, *keys: str) -> bool:
    tree = source.tree
    return isinstance(tree, dict) and "format" not in tree and bool(tree.keys() & set(keys))


JOB_SHOP_LIB = Reader(
    "job_shop_lib",
    recognises=lambda source: _has(source, "duration_matrix", "machines_matrix"),
    read=lambda source: from_job_shop_lib(source.tree, source.file),
)
SCHEDULE_OPT = Reader(
    "schedule_opt",
    recognises=lambda source: _has(source, "data"),
    read=lambda source: from_schedule_opt(source.tree, source.file),
)
