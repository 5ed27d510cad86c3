"""Random periodic schedules, and the walk of a plan by itself."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np

from optsched import JobArray
from optsched.analysis.rolling import rolling
from optsched.arraypipe.plan.plan import routes, topological
from optsched.arraypipe.plan.segments import Segment, Walk
from optsched.model.schedule import Csr
from optsched.solving.result import PeriodicOrders

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched import Schedule
    from optsched.arraypipe import ExecutionPlan


def random_array(draw: random.Random, jobs: int, objective: str) -> JobArray:
    """Jobs of random times, bytes, setups, micro-batches and copies."""
    stages = draw.randint(1, 3)

    def table(low: int, high: int) -> list[list[int]]:
        return [[draw.randint(low, high) for _ in range(stages)] for _ in range(jobs)]

    return JobArray(
        table(1, 9), table(1, 9), recompute=table(0, 3), update=2, activation=table(0, 9),
        switch=[[draw.randint(0, 5)] * stages for _ in range(jobs)],
        lag_forward=[row[1:] for row in table(0, 2)],
        recompute_mode=[draw.random() < 0.3 for _ in range(jobs)],
        recompute_as_block=draw.random() < 0.5,
        update_mode=draw.choice(["fused", "block", "global"]),
        micro_batches=[draw.choice([1, 1, 2]) for _ in range(jobs)],
        multiplicity=[draw.choice([1, 1, 2]) for _ in range(jobs)],
        objective=objective,
        place=[s % draw.randint(1, stages) for s in range(stages)] if draw.random() < 0.3 else None,
    )  # fmt: skip


def random_rolling(array: JobArray, *, spread: int = 2, seed: int = 0) -> Schedule:
    """A periodic schedule of a job array, feasible (memory apart) and otherwise arbitrary.

    Every job draws random times for its blocks, in an order that its dependencies allow and all
    within one cycle of the job's first, and begins up to `spread` whole cycles late; the orders of
    the devices follow from these times.
    """
    draw = random.Random(seed)
    graph = array.graph()
    now = graph.arcs.distance == 0
    inside = zip(graph.arcs.tail[now].tolist(), graph.arcs.head[now].tolist(), strict=True)
    begin = [draw.random() for _ in range(array.n_jobs)]
    late = np.array([draw.randint(0, spread) for _ in begin])
    order = topological(graph.n_operations, inside, draw)
    time = np.zeros(graph.n_operations)
    for i, later in zip(order, sorted(draw.random() for _ in order), strict=True):
        time[i] = begin[graph.job[i]] + later
    rows = [sorted(row, key=lambda i: time[i] % 1) for row in graph.users.to_lists()]
    found = rolling(graph, rows, time.astype(np.int64), {"order": "random, rolling", "seed": seed})
    assert found.period is not None and found.sequences is not None and found.start is not None
    return found.with_cycle(
        found.period, found.offset + late[found.job], found.sequences, found.start, found.objective
    )


def walk(plan: ExecutionPlan, counts: Sequence[int]) -> Walk:
    """All instances of so many iterations per job, in a topological order."""
    slots = tuple(range(plan.n_jobs))
    return Walk(Segment(plan, routes(plan), slots, [0] * len(slots), list(counts)))


def in_turn(problem: JobArray, breadth: bool) -> Schedule:
    """All forwards of a device before its backwards, or one job after the other."""
    n, stages, orders = problem.n_jobs, problem.n_stages, []
    for d in range(problem.n_devices):
        here = [s for s in range(stages) if problem.place[s] == d]
        forward = [[2 * stages * j + s for s in here] for j in range(n)]
        back = [[2 * stages * (j + 1) - 1 - s for s in reversed(here)] for j in range(n)]
        turns = [*forward, *back] if breadth else zip(forward, back, strict=True)
        orders.append(np.ravel([*turns]).tolist())
    return problem.scheduled(PeriodicOrders(Csr.of(orders), np.zeros(2 * stages * n, np.int64)))
