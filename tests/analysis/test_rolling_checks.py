"""Brute force of periods against equal jobs, bounds, orders and the verifier."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from depth import seeds
from rolling_problems import circular_orders, random_orders

from optsched import CyclicOrder, JobArray, verify
from optsched.analysis.rolling import rolling
from optsched.testing.brute_force import best_period
from optsched.testing.problems import random_problems, tiny_problems


@seeds(8, 30)
def test_bounds_hold_and_orders_are_no_better(seed: int) -> None:
    """Every bound <= optimum <= every feasible order."""
    every = [*tiny_problems(), *random_problems()]
    arrays: list[Any] = [one for one in every if one.problem_kind == "periodic"]
    array = arrays[7 * seed % len(arrays)]
    best = best_period(array.graph())
    assert (best is None) == bool(array.infeasibility())
    if best is None:
        return
    assert max(array.bounds().values()) <= best, array.bounds()
    import random

    rng = random.Random(seed)
    for attempt in range(60):
        make = circular_orders if attempt % 2 else random_orders
        try:
            plan = rolling(array.graph(), *make(rng, array.graph()))
        except CyclicOrder:
            continue
        if not verify(plan):
            assert plan.period is not None and plan.period >= best


@pytest.mark.parametrize("memory", [0, 2, 3])
def test_brute_force_equals_all_orders_and_offsets(memory: int) -> None:
    """Two jobs on one device, every permutation and every offset, judged by the verifier."""
    from itertools import permutations, product

    array = JobArray(
        [[2], [1]], [[1], [3]], activation=[[2], [1]], memory=[memory], switch=1,
        update=2, update_mode="fused", objective="period",
    )  # fmt: skip
    graph = array.graph()
    found = []
    for row in permutations(range(4)):
        for offset in product(range(2), repeat=4):
            try:
                plan = rolling(graph, type(graph.users).of([row]), np.array(offset))
            except CyclicOrder:
                continue
            if not verify(plan):
                found.append(plan.period)
    assert min(found) == best_period(graph)
