"""Giffler and Thompson's tree is exact on small problems, and refuses others with a reason."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_shops import random_shop

import optsched
from optsched import JobArray, JobShop, Schedule, verify
from optsched.errors import InputError, UnsupportedProblem
from optsched.testing import best_makespan
from optsched.testing.random_problems import random_array, random_graph
from optsched_solvers.literature.giffler_thompson import GifflerThompson

if TYPE_CHECKING:
    from random import Random

INSTANCES = Path(__file__).parents[3] / "instances" / "jobshop"


def check_exact(problem: JobShop | JobArray | Schedule) -> bool:
    """Proved, and the optimum of all sequences; whether it takes the problem at all."""
    if problem.graph().n_operations > 8 or not GifflerThompson().supports(problem):
        return False
    result = optsched.solve(problem, GifflerThompson())
    assert result.status == "optimal" and result.schedule is not None
    assert verify(result.schedule) == []
    assert result.objective == best_makespan(problem.graph())
    return True


@given(st.randoms(use_true_random=False))
def test_any_problem_that_it_takes(rng: Random) -> None:
    """Lags, releases, zero durations, no resource, several micro-batches."""
    check_exact(random_graph(rng, 6, gangs=False))
    check_exact(random_shop(rng, 3, 3))
    check_exact(random_array(rng, 2, 2))


def test_known_optimum() -> None:
    """ft06 is proved; at an earlier limit the bound is valid."""
    result = optsched.solve(JobShop.read(INSTANCES / "ft06.txt"), GifflerThompson())
    assert (result.status, result.objective) == ("optimal", 55)
    few = optsched.solve(JobShop.read(INSTANCES / "ft06.txt"), GifflerThompson(), iterations=60)
    assert few.status == "feasible" and few.lower_bound is not None and few.lower_bound <= 55


def test_algorithm_1_as_printed() -> None:
    """With one child a node: one schedule after at most one conflict an operation, and no proof."""
    shop = JobShop.read(INSTANCES / "ft06.txt")
    result = optsched.solve(shop, GifflerThompson(), options={"children": 1})
    assert result.status == "feasible" and result.objective is not None
    assert result.lower_bound == 52 < 55 <= result.objective
    assert result.schedule is not None and verify(result.schedule) == []
    with pytest.raises(InputError, match=r"options\.children: expected"):
        optsched.solve(shop, GifflerThompson(), options={"children": 0})


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (JobShop([[(0, 1)]], deadline=[9]), "deadlines are not kept"),
        (JobArray([[1]] * 2, [[1]] * 2, activation=1, memory=[1]), "memory limits are not kept"),
        (JobArray([[1]] * 2, [[1]] * 2, switch=1), "setups are not kept"),
    ],
)
def test_refusals(problem: JobShop | JobArray, reason: str) -> None:
    """In a sentence."""
    with pytest.raises(UnsupportedProblem, match=reason):
        optsched.solve(problem, GifflerThompson())
