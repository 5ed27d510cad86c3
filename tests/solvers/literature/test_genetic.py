"""The genetic algorithm on orders and counts: its operators, and what it promises."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from depth import depth
from hypothesis import given
from hypothesis import strategies as st
from random_shops import random_shop
from subset_cases import ruled_problem

import optsched
from optsched import JobArray, JobShop, MissingExtra, Schedule, UnsupportedProblem, verify
from optsched.errors import InputError
from optsched.model.graph import scheduled
from optsched.solving.limits import Limits
from optsched.solving.monitor import Monitor
from optsched.testing import best_makespan
from optsched.testing.random_problems import random_array, random_graph
from optsched_solvers.literature.genetic import Genetic, GpuGenetic
from optsched_solvers.literature.giffler_thompson import GifflerThompson

if TYPE_CHECKING:
    from random import Random


def shop_of(jobs: int, machines: int, seed: int) -> JobShop:
    """A classic shop of this size."""
    rng = random.Random(seed)
    orders = [rng.sample(range(machines), machines) for _ in range(jobs)]
    return JobShop([[(k, rng.randint(1, 30)) for k in order] for order in orders])


SHOP = shop_of(8, 8, 4)
"""No rule comes near its optimum."""


@given(st.randoms(use_true_random=False))
def test_every_incumbent_is_a_schedule(rng: random.Random) -> None:
    """Incumbents are feasible, have the reported makespan, and are never below the optimum."""
    array = rng.random() < 0.5
    problem = random_array(rng, 2, 2) if array else random_graph(
        rng, 6, gangs=False, deadlines=False
    )  # fmt: skip
    graph = problem.graph()

    class Checked(Monitor):
        def incumbent(self, sequences: optsched.Csr, objective: int, source: str = "") -> bool:
            schedule = scheduled(graph, sequences)
            assert verify(schedule) == [] and schedule.makespan == objective
            return super().incumbent(sequences, objective, source)

    limits = Limits(iterations=400, options={"population": 8})
    monitor = Checked(limits)
    Genetic().solve(problem, limits, monitor)
    if graph.n_operations <= 8:
        optimum = best_makespan(graph)
        assert monitor.objective is None or (optimum is not None and monitor.objective >= optimum)


def test_it_evolves() -> None:
    """It improves on the best rule, repeats exactly, and leaves the global generator unchanged."""
    rules = optsched.solve(SHOP, "dispatch", iterations=500)
    random.seed(5)
    before = random.getstate()
    found = optsched.solve(SHOP, Genetic(), iterations=2000, seed=1)
    assert random.getstate() == before
    random.seed(6)
    again = optsched.solve(SHOP, Genetic(), iterations=2000, seed=1)
    assert found.objective is not None and rules.objective is not None
    assert found.objective < rules.objective
    assert found.schedule is not None and again.schedule is not None
    assert found.schedule.sequences == again.schedule.sequences


@pytest.mark.parametrize("iterations", [0, 35, 101])
def test_iterations_are_individuals(iterations: int) -> None:
    """List schedules of rules, and individuals."""
    limits = Limits(iterations=iterations)
    monitor = Monitor(limits)
    Genetic().solve(SHOP, limits, monitor)
    assert monitor.iteration == iterations


def test_large_times_are_exact() -> None:
    """Makespans near 2^53 pass through DEAP's fitness unchanged."""
    shop = JobShop([[(0, 2**50 + 1), (1, 2**49 + 3)], [(1, 2**50 - 1), (0, 7)]])
    found = optsched.solve(shop, Genetic(), iterations=300)
    assert found.objective == best_makespan(shop.graph())


@pytest.mark.parametrize("population", [3, "many"])
def test_wrong_options(population: Any) -> None:
    """Refused by name, with the expected range."""
    with pytest.raises(InputError, match=r"options\.population: expected"):
        optsched.solve(SHOP, Genetic(), iterations=10, options={"population": population})


def test_deadlines_are_refused() -> None:
    """With a sentence."""
    with pytest.raises(UnsupportedProblem, match="deadlines are not kept"):
        optsched.solve(JobShop([[(0, 1)]], deadline=[9]), Genetic())


def test_without_deap(monkeypatch: pytest.MonkeyPatch) -> None:
    """`supports` needs nothing; `solve` names the package to install."""
    monkeypatch.setitem(sys.modules, "deap", None)
    assert Genetic().supports(SHOP)
    with pytest.raises(MissingExtra, match=r'pip install "\.\[genetic\]"'):
        optsched.solve(SHOP, Genetic(), iterations=10)


# choices of GPUs


def test_finds_the_optimum_of_small_clusters() -> None:
    """Never better than all subsets, with all of these as good."""
    for seed in range(depth(60, 150)):
        problem = ruled_problem(seed)
        result = optsched.solve(problem, GpuGenetic(), iterations=2000, seed=seed)
        assert result.objective == optsched.solve(problem, "counts").objective, seed
        if result.schedule is not None:
            assert problem.check(result.schedule) == []


# giffler and Thompson's tree is exact on small problems, and refuses others with a reason

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
