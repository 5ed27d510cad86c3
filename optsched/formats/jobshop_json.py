"""Job shops in JSON: our ``optsched.jobshop/1``, and the documents of two other projects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np

from optsched.errors import InputError
from optsched.io.strict_json import MAX_INTEGER, check_format, decode
from optsched.model import document
from optsched.model.schedule import NO_DEADLINE, Schedule
from optsched.problems.jobshop.checks import MAX_MACHINES
from optsched.problems.jobshop.problem import JobShop

if TYPE_CHECKING:
    from collections.abc import Iterator

FORMAT = "optsched.jobshop/1"

Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_INTEGER)]
Size = Annotated[int, msgspec.Meta(ge=1, le=MAX_INTEGER)]
Chain = Annotated[list[tuple[Count, Count]], msgspec.Meta(min_length=1)]
Matrix = Annotated[
    list[Annotated[list[Count], msgspec.Meta(min_length=1)]], msgspec.Meta(min_length=1)
]


class _Job(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    operations: Chain
    release: Count = 0
    deadline: Count | None = None


class _Document(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    format: str
    name: str = ""
    time_unit: str = ""
    machines: Annotated[list[str], msgspec.Meta(min_length=1)]
    jobs: Annotated[list[_Job], msgspec.Meta(min_length=1)]
    metadata: dict[str, Any] = {}


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


def from_tree(tree: Any, name: str) -> JobShop:
    """Read a job shop from parsed JSON; which document it is its keys tell.

    Parameters
    ----------
    tree
        ``optsched.jobshop/1``; ``optsched.schedule/1`` without sequences whose graph is a job
        shop; job_shop_lib's ``duration_matrix`` and ``machines_matrix``; ScheduleOpt's ``data``.
    name
        File name for messages.

    Raises
    ------
    InputError
        With the path in the document, the rule and the value.
    """
    if isinstance(tree, dict) and "format" not in tree:
        if "duration_matrix" in tree or "machines_matrix" in tree:
            return _from_job_shop_lib(tree, name)
        if "data" in tree:
            return _from_schedule_opt(tree, name)
    if isinstance(tree, dict) and str(tree.get("format")).startswith("optsched.schedule/"):
        return from_graph(document.from_tree(tree, name), name)
    return _from_ours(tree, name)


def to_json(shop: JobShop) -> bytes:
    """The document ``optsched.jobshop/1``, one job a line, fields at their default left out."""
    ends = [None if d == NO_DEADLINE else d for d in shop.deadline.tolist()]
    jobs = [
        _Job(list(chain), release, end)
        for chain, release, end in zip(shop.jobs, shop.release.tolist(), ends, strict=True)
    ]
    encode = msgspec.json.encode
    members = [("format", encode(FORMAT)), ("name", encode(shop.name))]
    members += [("time_unit", encode(shop.time_unit)), ("machines", encode(shop.machines))]
    members += [("jobs", b"[\n    " + b",\n    ".join(map(encode, jobs)) + b"\n  ]")]
    if shop.metadata:
        members += [("metadata", encode(dict(shop.metadata)))]
    body = b",\n".join(b'  "%s": %s' % (key.encode(), value) for key, value in members)
    return b"{\n" + body + b"\n}\n"


def from_graph(graph: Schedule, name: str) -> JobShop:
    """The job shop whose graph this is.

    Raises
    ------
    InputError
        The graph is scheduled already, or has something that a job shop has not.
    """
    if graph.is_scheduled:
        raise InputError(
            f"{name}: sequences: this is a schedule, expected an instance without them"
        )
    if graph.n_operations == 0:
        raise InputError(f"{name}: operations: a job shop needs at least one operation")
    if (np.diff(graph.op_resources.indptr) != 1).any():
        i = int(np.argmax(np.diff(graph.op_resources.indptr) != 1))
        raise _no_shop(name, f"operations[{i}] needs {len(graph.op_resources[i])} resources, not 1")
    job = graph.job
    if job[0] != 0 or (np.diff(job) < 0).any() or (np.diff(job) > 1).any():
        raise _no_shop(name, "its operations are not sorted by jobs 0, 1, 2, ...")
    first = np.flatnonzero(np.diff(job, prepend=-1))
    last = np.append(first[1:], graph.n_operations)
    rows = list(zip(graph.single_resource.tolist(), graph.duration.tolist(), strict=True))
    shop = JobShop(
        [rows[a:b] for a, b in zip(first.tolist(), last.tolist(), strict=True)],
        [resource.name for resource in graph.resources],
        release=graph.release[first],
        deadline=graph.deadline[last - 1],
        name=graph.name,
        time_unit=graph.time_unit,
    )
    # whatever else a graph may hold, the comparison with the shop's own graph finds
    if not shop.graph().same_graph(graph):
        raise _no_shop(
            name, f"{_difference(shop.graph(), graph)} differ from those of its job shop"
        )
    return shop


def _no_shop(name: str, why: str) -> InputError:
    return InputError(f"{name}: the graph is not a job shop: {why}; solve it as a schedule graph")


def _difference(ours: Schedule, theirs: Schedule) -> str:
    if ours.resources != theirs.resources:
        return "resources (memory)"
    if ours.period != theirs.period:
        return "period"
    if any(not np.array_equal(a, b) for a, b in zip(ours.arcs, theirs.arcs, strict=True)):
        return "arcs (chains without lags expected)"
    fields = (
        "release", "deadline", "setup_in", "setup_out", "family", "acquire", "free", "workspace",
        "kind", "stage", "microbatch", "iteration", "offset",
    )  # fmt: skip
    wrong = [f for f in fields if not np.array_equal(getattr(ours, f), getattr(theirs, f))]
    return ", ".join(wrong) or "fields"


def _from_ours(tree: Any, name: str) -> JobShop:
    check_format(tree, FORMAT, name)
    found = decode(tree, _Document, name)
    m = len(found.machines)
    for j, job in enumerate(found.jobs):
        for i, (machine, _) in enumerate(job.operations):
            _check_machine(machine, m, f"{name}: jobs[{j}].operations[{i}][0]")
    return _shop(
        name,
        [job.operations for job in found.jobs],
        found.machines,
        release=[job.release for job in found.jobs],
        deadline=[job.deadline for job in found.jobs],
        name=found.name,
        time_unit=found.time_unit or "s",
        metadata=found.metadata,
    )


def _from_job_shop_lib(tree: Any, name: str) -> JobShop:
    for j, i, entry in _entries(tree.get("machines_matrix")):
        if isinstance(entry, list):
            raise InputError(
                f"{name}: machines_matrix[{j}][{i}]: expected one machine, got a list "
                "(flexible job shops are not supported)"
            )
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
    return _shop(name, jobs, None, name=found.name, metadata=found.metadata)


def _entries(matrix: Any) -> Iterator[tuple[int, int, Any]]:
    for j, row in enumerate(matrix if isinstance(matrix, list) else ()):
        for i, entry in enumerate(row if isinstance(row, list) else ()):
            yield j, i, entry


def _from_schedule_opt(tree: Any, name: str) -> JobShop:
    found = decode(tree, _ScheduleOpt, name)
    n, m = found.jobs, found.machines
    chains: dict[int, dict[int, tuple[int, int]]] = {}
    for t, task in enumerate(found.data):
        if task.job >= n:
            raise InputError(
                f"{name}: data[{t}].job: expected 0..{n - 1}, got {task.job} (jobs are 0-based)"
            )
        _check_machine(task.machine, m, f"{name}: data[{t}].machine")
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
    if m > MAX_MACHINES:
        raise InputError(f"{name}: machines: expected at most {MAX_MACHINES}, got {m}")
    return _shop(
        name,
        jobs,
        [f"m{k}" for k in range(m)],
        name=found.instance,
        metadata={key: value for key, value in facts.items() if value},
    )


def _check_machine(machine: int, m: int, place: str) -> None:
    if machine >= m:
        hint = " (machines are 0-based here)" if machine == m else ""
        raise InputError(f"{place}: expected a machine in 0..{m - 1}, got {machine}{hint}")


def _shop(file: str, jobs: Any, machines: Any, **rest: Any) -> JobShop:
    try:
        return JobShop(jobs, machines, **rest)
    except InputError as error:
        error.args = (f"{file}: {error.args[0]}",)
        raise


__all__ = ["FORMAT", "from_graph", "from_tree", "to_json"]
