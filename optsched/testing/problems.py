"""Small problems of every kind that the solver checks run on."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from optsched.problems.jobarray import JobArray
from optsched.problems.jobshop import JobShop

if TYPE_CHECKING:
    from optsched.problem import Problem


def tiny_problems() -> list[Problem]:
    """At most nine operations each, so that brute force knows the optimum."""
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
        JobArray(blocks, blocks, update=1, update_mode="block", name="update blocks"),
        JobArray([[2, 3]], [[3, 1]], micro_batches=2, name="micro-batches"),
        JobArray(blocks, blocks, place=[0, 0], activation=2, memory=6, name="one device"),
        JobArray([[1, 2]], [[2, 1]], weight=[[1, 1]], activation=3, weight_memory=1, memory=3,
                 name="split backward"),
        JobArray(blocks, blocks, recompute=1, recompute_mode="always", checkpoint=1,
                 recompute_workspace=2, memory=4, name="recomputation"),
    ]  # fmt: skip


def infeasible_problems() -> list[Problem]:
    """Problems that no schedule solves."""
    return [
        JobShop([[(0, 3), (1, 2)]], deadline=[4], name="deadline below the chain"),
        JobArray([[1, 1]], [[1, 1]], activation=5, memory=4, name="does not fit alone"),
    ]


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
    ]  # fmt: skip
