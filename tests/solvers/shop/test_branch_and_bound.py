"""The engine `branch_and_bound`: proofs, limits, and living with other engines."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from state_oracle import best_by_states

import optsched
from optsched import JobArray, JobShop
from optsched.errors import InputError, UnsupportedProblem
from optsched.solving.limits import Limits
from optsched.solving.monitor import Monitor
from optsched.testing.random_problems import random_array, random_graph, random_shop
from optsched_solvers.shop.branch_and_bound import BranchAndBound

if TYPE_CHECKING:
    from optsched.model.schedule import Problem
    from optsched.solving.result import Result

INSTANCES = Path(__file__).parents[3] / "instances" / "jobshop"
FT06 = JobShop.read(INSTANCES / "ft06.txt")


def solve(problem: Problem, **limits: Any) -> Result:
    """`optsched.solve` with this engine."""
    return optsched.solve(problem, BranchAndBound(), **(limits or {"iterations": 10**6}))


def test_proofs() -> None:
    """Status, objective and bound of ft06, and of an array with everything."""
    for problem, optimum in ((FT06, 55), (capped(), best_by_states(capped().graph()))):
        result = solve(problem)
        assert (result.status, result.objective, result.lower_bound) == (
            "optimal", optimum, optimum,
        )  # fmt: skip
        assert result.solver == "branch_and_bound"


def capped() -> JobArray:
    """Three jobs with switches, lags and room for two activations."""
    return JobArray(
        [[2, 3], [4, 1], [1, 5]], [[3, 4], [2, 2], [4, 3]], switch=2, lag_forward=1,
        activation=4, memory=[8, 5],
    )  # fmt: skip


def test_brute_force_agrees() -> None:
    """On random graphs, arrays and shops: one optimum, or all say infeasible."""
    problems: list[Problem] = [random_graph(Random(s), 6, gangs=False) for s in range(60)]
    problems += [random_array(Random(s), 2, 2) for s in range(25)]
    problems += [random_shop(Random(s), 3, 3) for s in range(25)]
    for problem in problems:
        check(problem)


@pytest.mark.slow
def test_brute_force_agrees_in_depth() -> None:
    """Hundreds more."""
    for seed in range(100, 450):
        check(random_graph(Random(seed), 7, gangs=False))


def check(problem: Problem) -> None:
    """The optimum with proof, or a proof that there is nothing."""
    optimum = best_by_states(problem.graph())
    result = solve(problem, iterations=10**5)
    if optimum is None:
        assert result.status == "infeasible" and result.reason
    else:
        assert (result.status, result.objective) == ("optimal", optimum)


@pytest.mark.slow
def test_agrees_with_cp_sat() -> None:
    """On problems beyond brute force, where both prove."""
    compared = 0
    for seed in range(40):
        problem: Problem = random_array(Random(seed), 4, 3)
        if seed % 2:
            problem = random_shop(Random(seed), 5, 4)
        ours = solve(problem, iterations=60_000)
        theirs = optsched.solve(problem, "cpsat", iterations=2 * 10**6)
        if "unknown" not in (ours.status, theirs.status):
            assert (ours.lower_bound or 0) <= (theirs.objective or 2**62)
            assert (theirs.lower_bound or 0) <= (ours.objective or 2**62)
        if ours.status == theirs.status == "optimal":
            compared += 1
            assert ours.objective == theirs.objective
    assert compared > 20


def test_what_is_refused() -> None:
    """Options, of which it has none; the period."""
    with pytest.raises(InputError, match="has no option 'depth'"):
        optsched.solve(FT06, BranchAndBound(), options={"depth": 3}, iterations=1)
    with pytest.raises(UnsupportedProblem, match="it takes no problem of the kind periodic"):
        solve(JobArray([[1]], [[1]], objective="period"))


def test_one_iteration_is_one_node() -> None:
    """Or a rule tried before; counted exactly, whatever the slices; the same schedule always."""
    shop = JobShop.read(INSTANCES / "uniform-10x10.jobshop.json")
    for nodes in (1, 300, 4001):
        runs = [solve(shop, iterations=nodes) for _ in range(2)]
        assert runs[0].schedule == runs[1].schedule
        assert runs[0].lower_bound == runs[1].lower_bound
        monitor = run_beside(shop, Limits(iterations=nodes))
        assert monitor.iteration == nodes or monitor.proved


def run_beside(shop: Problem, limits: Limits, before: Any = None) -> Monitor:
    """The engine on a monitor that others may have written on."""
    monitor = Monitor(limits)
    monitor.bound(shop.lower_bound(), "bounds")
    if before is not None:
        before(monitor)
    BranchAndBound().solve(shop, monitor.limits, monitor)
    return monitor


def test_other_engines_are_heard() -> None:
    """Their schedule cuts the tree, their bound ends it."""
    optimal = solve(FT06)
    assert optimal.schedule is not None and optimal.schedule.sequences is not None
    orders = optimal.schedule.sequences

    def schedule(monitor: Monitor) -> None:
        monitor.incumbent(orders, 55, "another")

    def both(monitor: Monitor) -> None:
        schedule(monitor)
        monitor.bound(55, "another")

    alone = run_beside(FT06, Limits(time_limit=600))
    helped = run_beside(FT06, Limits(time_limit=600), schedule)
    told = run_beside(FT06, Limits(time_limit=600), both)
    assert alone.proved and helped.proved and told.proved
    assert told.iteration == 0 < helped.iteration < alone.iteration


def test_a_target_is_kept_to_the_node() -> None:
    """The first schedule at most as long as the target ends the search."""
    result = solve(JobShop.read(INSTANCES / "uniform-10x5.jobshop.json"), target=660)
    assert result.objective is not None and result.objective <= 660
