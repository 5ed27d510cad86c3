"""The document ``optsched.jobshop/1``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np

from optsched.errors import InputError
from optsched.io.strict_json import decode_document, lines, placed, rows
from optsched.model.difference import difference
from optsched.model.document import Count  # noqa: TC001 (msgspec reads the annotations)
from optsched.model.objectives import MAKESPAN
from optsched.model.schedule import NO_DEADLINE, Schedule
from optsched.problems.jobshop.problem import JobShop

if TYPE_CHECKING:
    from optsched.model.schedule import Problem

FORMAT = "optsched.jobshop/1"


class _Job(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    operations: Annotated[list[tuple[Count, Count]], msgspec.Meta(min_length=1)]
    name: str | None = None
    release: Count = 0
    deadline: Count | None = None
    job_weight: Count = 1
    due: Count = 0


class _Document(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    format: str
    name: str = ""
    time_unit: str = ""
    machines: list[str]
    jobs: Annotated[list[_Job], msgspec.Meta(min_length=1)]
    objective: str = MAKESPAN
    metadata: dict[str, Any] = {}


def from_tree(tree: Any, name: str) -> JobShop:
    """Read a job shop from parsed JSON; `name` is the file in messages."""
    found = decode_document(tree, _Document, FORMAT, name)
    names = [f"job{j}" if job.name is None else job.name for j, job in enumerate(found.jobs)]
    with placed(f"{name}: "):
        return JobShop(
            [job.operations for job in found.jobs],
            found.machines,
            release=[job.release for job in found.jobs],
            deadline=[job.deadline for job in found.jobs],
            objective=found.objective,
            job_weight=[job.job_weight for job in found.jobs],
            due=[job.due for job in found.jobs],
            names=names,
            name=found.name,
            time_unit=found.time_unit,
            metadata=found.metadata,
        )


def to_json(shop: JobShop) -> bytes:
    """Write the document, one job a line, fields at their default left out."""
    ends = [None if d == NO_DEADLINE else d for d in shop.deadline.tolist()]
    names = shop.job_names or [None] * shop.n_jobs
    numbers = (column.tolist() for column in (shop.job_weight, shop.due))
    jobs = map(_Job, map(list, shop.jobs), names, shop.release.tolist(), ends, *numbers)
    members: dict[str, Any] = {"format": FORMAT, "name": shop.name}
    if shop.time_unit:
        members["time_unit"] = shop.time_unit
    members |= {"machines": shop.machines, "jobs": rows(jobs)}
    if shop.objective != MAKESPAN:
        members["objective"] = shop.objective
    if shop.metadata:
        members["metadata"] = dict(shop.metadata)
    return lines(members)


def standard_text(shop: JobShop) -> str:
    """Return ``n m`` and a row ``machine duration ...`` per job: the text that is hashed."""
    chains = (" ".join(f"{k} {p}" for k, p in chain) for chain in shop.jobs)
    return f"{shop.n_jobs} {shop.n_machines}\n" + "".join(f"{chain}\n" for chain in chains)


def shop_of(problem: Problem) -> JobShop:
    """Return the problem if it is a job shop, or the job shop with its graph."""
    return problem if isinstance(problem, JobShop) else from_graph(problem.graph())


def from_graph(graph: Schedule) -> JobShop:
    """Return the job shop with this graph; refuse schedules, and graphs of other problems."""
    if graph.is_scheduled:
        raise InputError("sequences: this is a schedule, expected an instance without them")
    if graph.n_operations == 0:
        raise InputError("operations: a job shop needs at least one operation")
    if (np.diff(graph.op_resources.indptr) != 1).any():
        i = int(np.argmax(np.diff(graph.op_resources.indptr) != 1))
        raise _no_shop(f"operations[{i}] needs {len(graph.op_resources[i])} resources, not 1")
    job = graph.job
    if job[0] != 0 or (np.diff(job) < 0).any() or (np.diff(job) > 1).any():
        raise _no_shop("its operations are not sorted by jobs 0, 1, 2, ...")
    first = np.flatnonzero(np.diff(job, prepend=-1))
    last = np.append(first[1:], graph.n_operations)
    pairs = list(zip(graph.single_resource.tolist(), graph.duration.tolist(), strict=True))
    shop = JobShop(
        [pairs[a:b] for a, b in zip(first.tolist(), last.tolist(), strict=True)],
        [resource.name for resource in graph.resources],
        release=graph.release[first],
        deadline=graph.deadline[last - 1],
        **({} if graph.goal is None else graph.goal._asdict()),
        name=graph.name,
        time_unit=graph.time_unit,
    )
    if not shop.graph().same_graph(graph):  # any other property of a graph
        raise _no_shop(difference(graph, shop.graph()))
    return shop


def _no_shop(why: str) -> InputError:
    return InputError(f"the graph is not a job shop: {why}; solve it as a schedule graph")
