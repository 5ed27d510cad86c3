"""What is wrong with a quota plan."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.errors import InputError
from optsched.io.strict_json import MAX_INTEGER, format_json, shortened
from optsched.io.values import integer, label
from optsched.problems.quota.answer import Node
from optsched.problems.quota.job import PER_TYPE, QuotaJob, of_kind

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MOST_GPUS: Final = 10**6
"""Of a plan: each has a name, and a place in the schedule."""

_NEEDED: Final = {
    "sum": ("utility",), "max_min": (), "proportional": ("score",), "makespan": ("work", "rates"),
}  # fmt: skip


def check_jobs(
    jobs: Sequence[QuotaJob],
    nodes: Sequence[Node],
    kinds: Sequence[str],
    objective: str,
    resolution: int,
) -> None:
    """Refuse jobs that do not go with the objective, with each other, or with the nodes."""
    seen: set[str] = set()
    free = {node.name: node.gpus for node in nodes}
    for i, job in enumerate(jobs):
        if not isinstance(job, QuotaJob):
            raise InputError(f"jobs[{i}]: expected a QuotaJob, got {job!r:.60}")
        if job.name in seen:
            raise InputError(
                f"jobs[{i}].name: {format_json(job.name)} is also the name of another job"
            )
        seen.add(job.name)
        faults = chain(_held(job, nodes, free), _faults(job, kinds, objective, resolution))
        for field, fault in faults:
            raise InputError(f"job {job.name!r}.{field}: {fault}")
    if objective == "proportional" and len(kinds) > 1:
        raise InputError('objective: "proportional" shares GPUs of one type; make a plan per type')


def _faults(
    job: QuotaJob, kinds: Sequence[str], objective: str, resolution: int
) -> Iterator[tuple[str, str]]:
    """Fields that do not go with the plan, and why."""
    goal = f'objective "{objective}"'
    for key in _NEEDED[objective]:
        if getattr(job, key) is None:
            yield key, f"missing, {goal} needs it"
    if objective != "sum" and not job.must_run:
        yield (
            "must_run",
            f"{goal} needs every job to run; choose which by optsched_solvers.quota.admit first, "
            "and set must_run",
        )
    for kind in job.kinds or ():
        if kind not in kinds:
            named = next(key for key in PER_TYPE if isinstance(getattr(job, key), Mapping))
            known = shortened([repr(k) for k in kinds])
            yield named, f"names the type {format_json(kind)}, the plan has {known}"
    for key in ("work", "pass_work"):
        if (getattr(job, key) or 0) * resolution >= 2**62:
            yield (
                key,
                f"{getattr(job, key)} times the resolution is beyond 2^62; use a larger time unit",
            )
    for kind in kinds if job.rates is not None else ():
        table = of_kind(job.rates, kind)
        if table is not None and min(table) * resolution <= 0.5:
            yield "rates", f"{min(table)} is below half a part of the resolution"
        if table is not None and max(table) * resolution >= 2**62:
            yield "rates", f"{max(table)} is beyond 2^62 parts"
    sizes = job.allowed(kinds[0]) if objective == "proportional" else ()
    if sizes and sizes[-1] - sizes[0] + 1 != len(sizes):
        yield (
            "sizes",
            '"proportional" needs all numbers between two bounds, give minimum and maximum',
        )


def _held(job: QuotaJob, nodes: Sequence[Node], free: dict[str, int]) -> Iterator[tuple[str, str]]:
    """What is wrong with where a job is; its GPUs are taken from `free`."""
    if not nodes and (job.locality != "any" or job.current):
        yield "current" if job.current else "locality", "needs a plan with nodes, not a budget"
    for node, gpus in job.current.items():
        if node not in free:
            yield "current", f"there is no node {format_json(node)}"
        free[node] -= gpus
        if free[node] < 0:
            own = next(one.gpus for one in nodes if one.name == node)
            yield (
                "current",
                f"node {format_json(node)} has {own} GPUs, the jobs hold {own - free[node]} there",
            )


def nodes_of(given: Any) -> tuple[Node, ...]:
    """The nodes of a plan, each with a name of its own."""
    if isinstance(given, np.ndarray) and given.ndim == 1:
        given = given.tolist()
    if not isinstance(given, (list, tuple)):
        raise InputError(f"nodes: expected a list of GPU numbers or Nodes, got {given!r:.60}")
    if not given:
        raise InputError("nodes: expected at least one, got an empty list")
    found, seen = [], set()
    for n, row in enumerate(given):
        if isinstance(row, tuple) and not 1 <= len(row) <= 3:
            raise InputError(f"nodes[{n}]: expected Node(gpus, type, name), got {row!r:.60}")
        node = Node(*row) if isinstance(row, tuple) else Node(row)
        gpus = _gpus(f"nodes[{n}].gpus", node.gpus)
        kind = label(f"nodes[{n}].type", node.type)
        name = label(f"nodes[{n}].name", node.name) or f"n{n}"
        if name in seen:
            raise InputError(f"nodes[{n}].name: {name!r} is also the name of another node")
        seen.add(name)
        found.append(Node(gpus, kind, name))
    return tuple(found)


def budgets_of(given: Any, nodes: tuple[Node, ...]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Types in the order in which they appear, and GPUs of each."""
    if nodes:
        of: dict[str, int] = {}
        for node in nodes:
            of[node.type] = of.get(node.type, 0) + node.gpus
        return tuple(of), tuple(of.values())
    if not isinstance(given, Mapping):
        return ("",), (_gpus("budget", given),)
    if not given:
        raise InputError("budget: expected at least one type, got an empty mapping")
    kinds = tuple(label("budget type", kind) for kind in given)
    return kinds, tuple(_gpus(f"budget[{kind!r}]", gpus) for kind, gpus in given.items())


def _gpus(place: str, given: Any) -> int:
    """A number of GPUs; too large ones pass, the plan's sum says what to do about them."""
    large = isinstance(given, (int, np.integer)) and given > MOST_GPUS
    return integer(place, given, 0, MAX_INTEGER if large else MOST_GPUS)
