"""Small problems of every kind that the solver checks run on."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np

from optsched.model.schedule import NO_DEADLINE, Arcs, Resource, Rows, Schedule
from optsched.problems.jobarray.problem import JobArray
from optsched.problems.jobshop.problem import JobShop
from optsched.testing.rolling_problems import small_rolling, tiny_rolling

if TYPE_CHECKING:
    from optsched.model.schedule import Problem


def tiny_problems() -> list[Problem]:
    """At most nine operations each, twelve if they repeat: brute force knows the optimum."""
    blocks = [[2, 3], [4, 1]]
    return [
        JobShop([[(0, 3), (1, 2)], [(1, 4), (0, 1)]], name="two jobs"),
        JobShop([[(0, 3), (1, 2), (2, 2)], [(0, 2), (2, 1), (1, 4)], [(1, 4), (2, 3)]], name="3x3"),
        JobShop([[(0, 5)]], name="one operation"),
        JobShop([[(0, 0), (1, 0)], [(1, 0), (0, 0)]], name="all durations 0"),
        JobShop([[(0, 2)], [(0, 2)], [(0, 2)], [(0, 2)]], name="one machine, all equal"),
        JobShop([[(0, 2), (0, 1), (0, 3)], [(0, 1), (0, 4)]], name="a machine met again and again"),
        JobShop([[(0, 2**40), (1, 2**41)], [(1, 2**40), (0, 3)]], name="huge durations"),
        JobShop([[(0, 2), (1, 3)], [(0, 4)]], release=[3, 0], deadline=[None, 4], name="windows"),
        JobArray(blocks, [[3, 4], [2, 2]], name="array"),
        JobArray(blocks, blocks, lag_forward=2, lag_backward=1, name="array with lags"),
        JobArray(blocks, blocks, switch=3, name="array with switches"),
        JobArray([[1, 1], [1, 1]], [[1, 1], [1, 1]], switch=[[100, 0], [100, 0]], name="may idle"),
        JobArray(blocks, blocks, activation=5, memory=5, name="room for one"),
        JobArray([[2], [4]], [[3], [2]], update=1, update_mode="block", name="update blocks"),
        JobArray([[2, 3]], [[3, 1]], micro_batches=2, name="micro-batches"),
        JobArray(blocks, blocks, place=[0, 0], activation=2, memory=6, name="one device"),
        JobArray([[1, 2]], [[2, 1]], weight=[[1, 1]], activation=3, weight_memory=1, memory=3,
                 name="split backward"),
        JobArray(blocks, blocks, recompute=1, recompute_mode="always", checkpoint=1,
                 recompute_workspace=2, memory=4, name="recomputation"),
        *tiny_rolling(),
    ]  # fmt: skip


def degenerate_problems() -> list[Problem]:
    """Corners of the problem, at most eight operations each."""
    two = (Resource("a"), Resource("b"))
    return [
        JobShop([[(0, 3), (2, 1), (1, 2), (3, 4)]], name="one job"),
        JobShop([[(0, 3), (1, 2)], [(1, 4), (0, 1)]], ["a", "b", "c"], name="an idle machine"),
        JobShop([[(0, p)] for p in (4, 2, 6, 3, 5)], release=[0, 13, 2, 9, 3],
                name="one machine with releases"),
        JobShop([[(0, p) for p in (1, 2, 3, 2, 1)], [(1, 4), (0, 2)]],
                name="a machine met five times"),
        JobShop([[(k, 1) for k in row] for row in ([0, 1, 2], [1, 2, 0], [2, 0, 1])],
                name="all equal"),
        JobShop([[(0, 0), (1, 3), (0, 0)], [(0, 4), (1, 0)], [(0, 0)]], name="durations of 0"),
        JobShop([[(0, 2**51)], [(0, 2**51 - 1)]], name="nearly 2^53"),
        JobShop([[(0, 3), (1, 2)], [(1, 4), (0, 1)]], deadline=[7, 5], name="tight deadlines"),
        Schedule(resources=two, duration=np.array([3, 2, 4]), op_resources=Rows.of([[0], [], [0]]),
                 arcs=Arcs.of([(0, 1, -2), (1, 2, 5)]), name="no resource"),
        Schedule(resources=two, duration=np.array([4, 3]), op_resources=Rows.of([[0], [1]]),
                 arcs=Arcs.of([(0, 1, -4)]), name="start together"),
        Schedule(resources=(Resource("a", 4),), duration=np.array([2, 2, 2, 2]),
                 op_resources=Rows.of([[0]] * 4), arcs=Arcs.of([(0, 1), (2, 3)]),
                 acquire=np.array([3, 0, 3, 0]), free=np.array([0, 3, 0, 3]),
                 workspace=np.array([1, 1, 0, 1]), name="room for one, with workspace"),
        Schedule(resources=(Resource("a"),), duration=np.array([2, 1, 2]),
                 op_resources=Rows.of([[0]] * 3), family=np.array([0, 1, 2]),
                 setup_out=np.array([20, 0, 0]), setup_in=np.array([0, 0, 9]),
                 name="setups that are not triangular"),
    ]  # fmt: skip


def random_problems(count: int, seed: int = 0) -> list[Schedule]:
    """Bare graphs of two or three jobs, at most seven operations, with every feature mixed.

    Lags down to minus the duration, setups of any shape, zero durations, releases, deadlines,
    held memory and workspace. No order at all may be feasible.
    """
    rng = random.Random(seed)
    return [_random_graph(rng, f"random {k}") for k in range(count)]


def _random_graph(rng: random.Random, name: str) -> Schedule:
    job = sorted(rng.choices(range(rng.randint(2, 3)), k=rng.randint(3, 7)))
    n, machines = len(job), rng.randint(1, 3)
    duration = [rng.choice([0, 1, 2, 3, 5]) for _ in range(n)]
    on = [rng.randrange(machines) for _ in range(n)]
    arcs = [
        (i, i + 1, rng.choice([0, 0, 0, 1, 4, -duration[i], -duration[i] // 2]))
        for i in range(n - 1)
        if job[i] == job[i + 1]
    ]
    columns: dict[str, list[int]] = {"duration": duration, "job": job, "family": job}
    if rng.random() < 0.5:
        columns["setup_out"] = [rng.choice([0, 0, 1, 2, 9]) for _ in range(n)]
        columns["setup_in"] = [rng.choice([0, 0, 0, 3]) for _ in range(n)]
    if rng.random() < 0.3:
        columns["release"] = [rng.choice([0, 0, 2, 6]) for _ in range(n)]
    if rng.random() < 0.2:
        columns["deadline"] = [rng.choice([NO_DEADLINE, NO_DEADLINE, 9, 15]) for _ in range(n)]
    capacity = [0] * machines
    if rng.random() < 0.5:
        capacity = [rng.choice([0, 3, 4]) for _ in range(machines)]
        columns["workspace"] = [rng.choice([0, 0, 1]) for _ in range(n)]
        columns["acquire"], columns["free"] = [0] * n, [0] * n
        for i in range(n):  # what the first operation of a job takes, its last one there gives back
            last = max(k for k in range(n) if (job[k], on[k]) == (job[i], on[i]))
            size = rng.choice([0, 1, 2, 3]) if last > i else 0
            columns["acquire"][i] += size
            columns["free"][last] += size
    return Schedule(
        resources=tuple(Resource(f"m{r}", memory) for r, memory in enumerate(capacity)),
        op_resources=Rows.of([[r] for r in on]),
        arcs=Arcs.of(arcs),
        name=name,
        **{key: np.array(column, np.int64) for key, column in columns.items()},  # type: ignore[arg-type]
    )


def infeasible_problems() -> list[Problem]:
    """Problems that no schedule solves."""
    return [
        JobShop([[(0, 3), (1, 2)]], deadline=[4], name="deadline below the chain"),
        JobArray([[1, 1]], [[1, 1]], activation=5, memory=4, name="does not fit alone"),
        JobArray([[1, 1]], [[1, 1]], activation=5, memory=4, objective="period",
                 name="does not fit alone, rolling"),
    ]  # fmt: skip


def small_problems(seed: int = 0) -> list[Problem]:
    """Up to a hundred operations: enough that a search has something to do."""
    rng = random.Random(seed)

    def row(n: int) -> list[int]:
        return [rng.randint(1, 20) for _ in range(n)]

    shop = [
        [(machine, rng.randint(1, 30)) for machine in rng.sample(range(6), 6)] for _ in range(8)
    ]
    return [
        JobShop(shop, name="8x6"),
        JobArray([row(4) for _ in range(10)], [row(4) for _ in range(10)], name="10 jobs"),
        JobArray(
            [row(3) for _ in range(6)], [row(3) for _ in range(6)], lag_forward=3, lag_backward=3,
            switch=5, activation=4, memory=[12, 8, 4], name="6 jobs with everything",
        ),
        *small_rolling(seed),
    ]  # fmt: skip
