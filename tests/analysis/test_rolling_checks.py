"""The conformance suite on engines that find periodic orders: right ones pass, wrong ones fail."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from depth import seeds
from rolling_problems import circular_orders, random_orders

from optsched import CyclicOrder, JobArray, Result, verify
from optsched.analysis.rolling import rolling
from optsched.problems.jobarray.cycle import answer_of
from optsched.testing.brute_force import best_period
from optsched.testing.problems import equal_jobs, random_problems, tiny_problems
from optsched.testing.result_checks import check_equal_jobs, check_feasible_and_bounded

if TYPE_CHECKING:
    from optsched import Limits, Monitor


class OneAfterTheOther:
    """A correct engine: all blocks of a cycle in the order of their numbers."""

    name = "one after the other"
    options = MappingProxyType[str, str]({})
    kinds = ("periodic",)

    def supports(self, problem: Any) -> bool:
        """Every rolling array."""
        return True

    def solve(self, problem: Any, limits: Limits, monitor: Monitor) -> Result:
        """Report one schedule."""
        plan = rolling(problem.graph(), problem.graph().users)
        monitor.incumbent(answer_of(plan), self.worth(plan.period or 0), self.name)
        return Result("unknown")

    def worth(self, period: int) -> int:
        """What it claims."""
        return period


class Boasts(OneAfterTheOther):
    """Claims a shorter period."""

    def worth(self, period: int) -> int:
        """One less."""
        return period - 1


class BoundsTooHigh(OneAfterTheOther):
    """Takes what it found for the best there is."""

    def solve(self, problem: Any, limits: Limits, monitor: Monitor) -> Result:
        """Lie about the bound."""
        super().solve(problem, limits, monitor)
        monitor.bound(monitor.objective)  # type: ignore[arg-type]
        return Result("unknown")


def test_a_correct_engine_passes() -> None:
    """Verified, worth what it says, never below the optimum."""
    check_feasible_and_bounded(OneAfterTheOther(), (), 0.1)
    check_equal_jobs(OneAfterTheOther(), (), 0.1)


@pytest.mark.parametrize("engine", [Boasts, BoundsTooHigh])
def test_a_wrong_engine_fails(engine: Any) -> None:
    """Whatever it is wrong in."""
    with pytest.raises(Exception, match=r"wrong schedule|bound \d+ >"):
        check_feasible_and_bounded(engine(), (), 0.1)


@pytest.mark.parametrize("jobs,stages", [(1, 3), (2, 2), (3, 2), (2, 3)])
def test_brute_force_knows_equal_jobs(jobs: int, stages: int) -> None:
    """``max(K, S) (f + b)``."""
    array, best = equal_jobs(jobs, stages)
    assert best_period(array.graph()) == best


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
