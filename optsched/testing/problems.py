"""Small problems of every kind of `optsched.solving.solver.KINDS` that the solver checks run on."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from optsched.model.objectives import LATENESS, TOTAL
from optsched.model.schedule import Arcs, Csr, Resource, Schedule
from optsched.problems.jobarray.problem import JobArray
from optsched.problems.jobshop.problem import JobShop
from optsched.problems.quota.job import QuotaJob
from optsched.problems.quota.problem import QuotaPlan
from optsched.testing.gpu_placements import random_placement, tiny_placements
from optsched.testing.quota_plans import tiny_plans
from optsched.testing.random_problems import random_graph, random_rolling, with_goal

if TYPE_CHECKING:
    from optsched.model.schedule import Problem


RANDOM, GPUS, QUOTAS = 12, 40, 60
"""Random graphs and periodic arrays, choices of GPUs and quota plans that brute force judges."""


def tiny_problems() -> list[Problem]:
    """Problems for brute force: up to nine operations (twelve if they repeat) or GPUs."""
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
        *_tiny_goals(), *_tiny_rolling(), *tiny_placements(GPUS), *tiny_plans(QUOTAS),
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
        Schedule(resources=two, duration=np.array([3, 2, 4]), op_resources=Csr.of([[0], [], [0]]),
                 arcs=Arcs.of([(0, 1, -2), (1, 2, 5)]), name="no resource"),
        Schedule(resources=two, duration=np.array([4, 3]), op_resources=Csr.of([[0], [1]]),
                 arcs=Arcs.of([(0, 1, -4)]), name="start together"),
        Schedule(resources=(Resource("a", 4),), duration=np.array([2, 2, 2, 2]),
                 op_resources=Csr.of([[0]] * 4), arcs=Arcs.of([(0, 1), (2, 3)]),
                 acquire=np.array([3, 0, 3, 0]), free=np.array([0, 3, 0, 3]),
                 workspace=np.array([1, 1, 0, 1]), name="room for one, with workspace"),
        Schedule(resources=(Resource("a"),), duration=np.array([2, 1, 2]),
                 op_resources=Csr.of([[0]] * 3), family=np.array([0, 1, 2]),
                 setup_out=np.array([20, 0, 0]), setup_in=np.array([0, 0, 9]),
                 name="setups that are not triangular"),
    ]  # fmt: skip


def _tiny_goals() -> list[Problem]:
    """The objectives that count the ends of single jobs."""
    chains = [[(0, 3), (1, 2), (2, 2)], [(0, 2), (2, 1), (1, 4)], [(1, 4), (2, 3)]]
    blocks = [[2, 3], [4, 1]]
    single = [[(0, p)] for p in (4, 2, 6, 3, 5)]
    late: dict[str, Any] = {"objective": LATENESS}
    total: dict[str, Any] = {"objective": TOTAL}
    return [
        JobShop(chains, **late, due=[9, 30, 4], name="3x3, lateness"),
        JobShop(chains, **late, due=[20, 31, 40], name="3x3, all early"),
        JobShop(chains, **total, name="3x3, total completion"),
        JobShop(chains, **total, job_weight=[3, 0, 7], release=[0, 2, 1], name="3x3, weighted"),
        JobShop(single, **total, job_weight=[1, 2, 3, 4, 5], release=[0, 13, 2, 9, 3],
                name="one machine with releases, weighted"),
        JobShop(single, **late, due=[5, 5, 5, 5, 5], name="one machine, lateness"),
        JobArray(blocks, [[3, 4], [2, 2]], **late, due=[7, 20], switch=3, name="array, lateness"),
        JobArray(blocks, blocks, **total, job_weight=[1, 4], activation=5, memory=5,
                 name="room for one, weighted"),
    ]  # fmt: skip


def _tiny_rolling() -> list[Problem]:
    blocks, unlike = [[2, 3], [4, 1]], [[3, 4], [2, 2]]

    def rolling(name: str, forward: Any, backward: Any, **options: Any) -> JobArray:
        return JobArray(forward, backward, objective="period", name=name, **options)

    return [
        rolling("rolling", blocks, unlike),
        rolling("rolling, one job", [[2, 3]], [[4, 1]]),
        rolling("rolling, lags", blocks, blocks, lag_forward=2, lag_backward=1),
        rolling("rolling, switches", blocks, blocks, switch=3),
        rolling("rolling, may idle", [[1, 1]] * 2, [[1, 1]] * 2, switch=[[100, 0]] * 2),
        rolling("rolling, room for one", blocks, blocks, activation=5, memory=5),
        rolling("rolling, room for two", [*blocks, [1, 1]], [*unlike, [2, 3]], activation=1,
                memory=2),
        rolling("rolling, copies", blocks, blocks, multiplicity=[2, 1]),
        rolling("rolling, micro-batches", blocks, blocks, micro_batches=[2, 1]),
        rolling("rolling, split backward", blocks, blocks, weight=[[1, 1], [2, 1]], activation=3,
                weight_memory=1, memory=5),
        rolling("rolling, chunks", [[1, 2, 1], [1, 1, 2]], [[2, 1, 2], [1, 1, 1]], place=[0, 1, 0]),
        rolling("rolling, updates", blocks, blocks, update=1, update_mode="block"),
        rolling("rolling, nothing but zeros", [[0, 0]] * 2, [[0, 0]] * 2),
    ]  # fmt: skip


def random_problems(seed: int = 0) -> list[Problem]:
    """Bare graphs and periodic arrays with every feature mixed; no order at all may be feasible."""
    rng = random.Random(seed)
    found: list[Problem] = []
    for k in range(RANDOM):
        array = random_rolling(rng)
        while array.n_operations > 8:  # a minute of brute force
            array = random_rolling(rng)
        found.append(array.replace(name=f"random rolling {k}"))
        graph = random_graph(rng)
        found.append(replace(with_goal(rng, graph) if k % 2 else graph, name=f"random {k}"))
    return found


def infeasible_problems() -> list[Problem]:
    """Problems that no schedule solves."""
    return [
        JobShop([[(0, 3), (1, 2)]], deadline=[4], name="deadline below the chain"),
        JobArray([[1, 1]], [[1, 1]], activation=5, memory=4, name="does not fit alone"),
        JobArray([[1, 1]], [[1, 1]], activation=5, memory=4, objective="period",
                 name="does not fit alone, rolling"),
    ]  # fmt: skip


def small_problems(seed: int = 0) -> list[Problem]:
    """Up to a hundred operations or 24 GPUs: enough that a search has something to do."""
    rng = random.Random(seed)

    def table(jobs: int, stages: int) -> list[list[int]]:
        return [[rng.randint(1, 20) for _ in range(stages)] for _ in range(jobs)]

    shop = [
        [(machine, rng.randint(1, 30)) for machine in rng.sample(range(6), 6)] for _ in range(8)
    ]
    mixed: dict[str, Any] = {
        "lag_forward": 3, "lag_backward": 3, "switch": 5, "activation": 4, "memory": [12, 8, 4],
    }  # fmt: skip
    jobs = [
        QuotaJob(f"j{i}", utility=[rng.randint(0, 90) for _ in range(6)], weight=rng.choice([1, 2]))
        for i in range(12)
    ]
    return [
        JobShop(shop, name="8x6"),
        JobShop(shop, objective=LATENESS, due=[70, 80, 90, 60] * 2, name="8x6, lateness"),
        JobShop(shop, objective=TOTAL, job_weight=[1, 2, 3, 4] * 2, name="8x6, weighted"),
        JobArray(table(10, 4), table(10, 4), name="10 jobs"),
        JobArray(table(6, 3), table(6, 3), **mixed, name="6 jobs with everything"),
        JobArray(table(5, 3), table(5, 3), **mixed, objective="period",
                 name="5 rolling jobs with everything"),
        JobArray(table(6, 4), table(6, 4), objective="period", name="6 rolling jobs"),
        random_placement(rng, [6, 6, 6, 6], "24 GPUs"),
        QuotaPlan(jobs, budget=40, name="12 jobs on 40 GPUs"),
    ]  # fmt: skip
