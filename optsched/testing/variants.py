"""Other problems whose optimum follows from a known one: for checks without an oracle."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from optsched.model.schedule import COLUMNS, NO_DEADLINE, Arcs, Csr, Resource, Schedule
from optsched.problems.jobshop.problem import JobShop
from optsched.problems.quota.problem import QuotaPlan

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optsched.model.schedule import Problem


class Variant(NamedTuple):
    """A problem with ``least * optimum <= its optimum <= most * optimum``; None = no such limit."""

    what: str
    problem: Problem
    least: int | None
    most: int | None


def variants(problem: Problem, seed: int = 0) -> Iterator[Variant]:
    """Variants of any problem for the makespan, more of a job shop; quotas of permuted jobs."""
    rng = random.Random(seed)
    if isinstance(problem, QuotaPlan):
        yield Variant(
            "jobs permuted", problem.changed(jobs=rng.sample(problem.jobs, len(problem.jobs))), 1, 1
        )
        return
    graph = problem.graph()
    yield Variant("operations and resources renamed", renamed(graph, rng), 1, 1)
    yield Variant("all times times 7", stretched(graph, 7), 7, 7)
    if reversible(graph):
        yield Variant("time reversed", mirrored(graph), 1, 1)
    yield Variant("an operation lengthened", lengthened(graph, rng), 1, None)
    if isinstance(problem, JobShop):
        jobs = [list(chain) for chain in problem.jobs]
        windows: dict[str, Any] = {"release": problem.release, "deadline": problem.deadline}
        j = rng.randrange(len(jobs))

        def shop(chain: list[tuple[int, int]]) -> JobShop:
            return JobShop([*jobs[:j], chain, *jobs[j + 1 :]], problem.machines, **windows)

        if not problem.has_windows:
            order = rng.sample(range(len(jobs)), len(jobs))
            yield Variant("jobs permuted", JobShop([jobs[k] for k in order]), 1, 1)
            k = rng.randrange(problem.n_machines)
            yield Variant("an operation of 0 added", shop([*jobs[j], (k, 0)]), 1, 1)
        i = rng.randrange(len(jobs[j]))
        machine, duration = jobs[j][i]
        halves = [(machine, duration // 2), (machine, duration - duration // 2)]
        yield Variant("an operation split", shop([*jobs[j][:i], *halves, *jobs[j][i + 1 :]]), 0, 1)


def renamed(graph: Schedule, rng: random.Random) -> Schedule:
    """Operations and resources in another order, resources with other names."""
    order = rng.sample(range(graph.n_operations), graph.n_operations)
    place = {i: k for k, i in enumerate(order)}
    where = rng.sample(range(graph.n_resources), graph.n_resources)
    seats = {r: k for k, r in enumerate(where)}
    columns: dict[str, Any] = {
        key: getattr(graph, key)[np.array(order, np.int64)] for key in COLUMNS
    }
    rows = graph.op_resources.to_lists()
    arcs = zip(*(column.tolist() for column in graph.arcs), strict=True)
    return replace(
        graph.graph(),
        resources=tuple(Resource(f"x{k}", graph.resources[r].memory) for k, r in enumerate(where)),
        op_resources=Csr.of([[seats[r] for r in rows[i]] for i in order]),
        arcs=Arcs.of([(place[i], place[j], *rest) for i, j, *rest in arcs]),
        **columns,
    )


def stretched(graph: Schedule, factor: int) -> Schedule:
    """All times multiplied."""
    free = graph.deadline == NO_DEADLINE
    deadline = np.where(free, NO_DEADLINE, np.where(free, 0, graph.deadline) * factor)
    keys = ("duration", "release", "setup_in", "setup_out")
    columns: dict[str, Any] = {key: getattr(graph, key) * factor for key in keys}
    arcs = graph.arcs._replace(lag=graph.arcs.lag * factor)
    return replace(graph.graph(), arcs=arcs, deadline=deadline, **columns)


def reversible(graph: Schedule) -> bool:
    """Whether the mirrored graph can be expressed: no windows, no memory, lags not too short."""
    held = graph.memory.any() or graph.acquire.any() or graph.workspace.any()
    short = (graph.arcs.lag < -graph.duration[graph.arcs.head]).any()
    windows = graph.release.any() or (graph.deadline != NO_DEADLINE).any()
    return not (held or short or windows)


def mirrored(graph: Schedule) -> Schedule:
    """The graph seen from its end; a lag between two operations stays what it is."""
    arcs = graph.arcs._replace(tail=graph.arcs.head, head=graph.arcs.tail)
    return replace(graph.graph(), arcs=arcs, setup_in=graph.setup_out, setup_out=graph.setup_in)


def lengthened(graph: Schedule, rng: random.Random) -> Schedule:
    """One operation takes 3 longer; deadlines, which might become impossible, are dropped."""
    duration = graph.duration.copy()
    duration[rng.randrange(graph.n_operations)] += 3
    deadline = np.full(graph.n_operations, NO_DEADLINE)
    return replace(graph.graph(), duration=duration, deadline=deadline)
