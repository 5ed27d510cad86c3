"""All checks of a quota plan and of its answers; those of one job are in `job`."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.errors import InputError
from optsched.io.strict_json import MAX_INTEGER, format_json, shortened
from optsched.io.values import integer, label, listed
from optsched.problems.quota.answer import Node
from optsched.problems.quota.job import PER_TYPE, QuotaJob, of_kind

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from optsched.problems.quota.options import Span

MOST_GPUS: Final = 10**6
"""Of a plan: each GPU has a name and a sequence in the schedule."""

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
    """Yield fields that do not go with the plan, and why."""
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
        yield "sizes", f"{goal} needs all numbers between two bounds, give minimum and maximum"


def _held(job: QuotaJob, nodes: Sequence[Node], free: dict[str, int]) -> Iterator[tuple[str, str]]:
    """Yield faults of the present place of a job; its GPUs are taken from `free`."""
    if not nodes and (job.locality != "any" or job.current):
        yield "current" if job.current else "locality", "needs a plan with nodes, not a budget"
    for node, gpus in job.current.items():
        if node not in free:
            yield "current", f"there is no node {format_json(node)}"
        free[node] -= gpus
        if free[node] < 0:
            gpus = next(one.gpus for one in nodes if one.name == node)
            held = f"the jobs hold {gpus - free[node]} on it"
            yield "current", f"node {format_json(node)} has {gpus} GPUs, {held}"


def places_of(budget: Any, nodes: Any) -> tuple[tuple[Node, ...], tuple[str, ...], tuple[int, ...]]:
    """Check the nodes or the budget: nodes, types in order of appearance, and GPUs of each."""
    if (budget is None) == (nodes is None):
        raise InputError("budget, nodes: expected one of them")
    machines: tuple[Node, ...] = ()
    if nodes is not None:
        machines = tuple(_nodes_of(nodes))
        of: dict[str, int] = {}
        for node in machines:
            of[node.type] = of.get(node.type, 0) + node.gpus
    elif not isinstance(budget, Mapping):
        of = {"": _gpus("budget", budget)}
    else:
        of = {
            label("budget type", kind): _gpus(f"budget[{kind!r}]", gpus)
            for kind, gpus in budget.items()
        }
        if not of:
            raise InputError("budget: expected at least one type, got an empty mapping")
    if sum(of.values()) > MOST_GPUS:
        raise InputError(
            f"{'nodes' if machines else 'budget'}: a plan names every GPU and takes at most "
            f"{MOST_GPUS}, got {sum(of.values())}; share more by the functions on bare arrays of "
            "optsched_solvers.quota"
        )
    return machines, tuple(of), tuple(of.values())


def _nodes_of(given: Any) -> Iterator[Node]:
    """Check nodes; each gets a distinct name."""
    rows = listed("nodes", given, "a list of GPU numbers or Nodes")
    if not rows:
        raise InputError("nodes: expected at least one, got an empty list")
    seen = set()
    for n, row in enumerate(rows):
        if isinstance(row, tuple) and not 1 <= len(row) <= 3:
            raise InputError(f"nodes[{n}]: expected Node(gpus, type, name), got {row!r:.60}")
        node = Node(*row) if isinstance(row, tuple) else Node(row)
        gpus = _gpus(f"nodes[{n}].gpus", node.gpus)
        kind = label(f"nodes[{n}].type", node.type)
        name = label(f"nodes[{n}].name", node.name) or f"n{n}"
        if name in seen:
            raise InputError(f"nodes[{n}].name: {name!r} is also the name of another node")
        seen.add(name)
        yield Node(gpus, kind, name)


def _gpus(place: str, given: Any) -> int:
    """Check a number of GPUs; larger numbers pass, `places_of` checks the sum."""
    large = isinstance(given, (int, np.integer)) and given > MOST_GPUS
    return integer(place, given, 0, MAX_INTEGER if large else MOST_GPUS)


def check_total(most: int, objective: str, time_unit: str, gpus: int) -> None:
    """Refuse a plan with answers that may cost more than 2^53."""
    if most <= MAX_INTEGER:
        return
    if objective == "makespan":
        raise InputError(
            f"work: the longest job would take {most} {time_unit}, more than 2^53; use "
            "a larger time unit"
        )
    what = f"{gpus} GPUs" if objective == "proportional" else "utility: all jobs together"
    raise InputError(
        f"{what} are worth up to {most} parts of the resolution, more than 2^53; lower the "
        "resolution"
    )


def infeasibility(
    jobs: Sequence[QuotaJob],
    spans: Sequence[Sequence[Span]],
    kinds: Sequence[str],
    budgets: Sequence[int],
) -> str:
    """Return why no answer exists if the numbers of GPUs show it, else ``""``."""
    needed, names = 0, []
    for job, span in ((j, s) for j, s in zip(jobs, spans, strict=True) if j.must_run):
        if not span:
            parts = [
                f"at least {sizes[0]} of {gpus} GPUs" + (f" {kind}" if kind else "")
                for kind, gpus in zip(kinds, budgets, strict=True)
                if (sizes := job.allowed(kind))
            ]
            needs = shortened(parts).replace(", ", " or ") or "a type that is missing"
            return f"job {job.name!r} must run and needs {needs}"
        needed += min(sizes[0] for _, sizes in span)
        names.append(repr(job.name))
    if needed <= sum(budgets):
        return ""
    return (
        f"jobs {shortened(names, 5)} must run and need at least {needed} GPUs together, "
        f"there are {sum(budgets)}"
    )
