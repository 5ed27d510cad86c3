"""Backends of quota plans: conformance, exactness by objective, ties, localities, limits."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from depth import depth, seeds
from hypothesis import example, given, settings
from hypothesis import strategies as st
from oracles.best_quota import answers as all_answers
from oracles.best_quota import best_quota as optimum
from oracles.best_quota import random_plan

import optsched
from optsched import InputError, QuotaJob, QuotaPlan
from optsched.problems.quota.problem import OBJECTIVES
from optsched.problems.quota.synthetic import synthetic
from optsched.solving.limits import Limits
from optsched.solving.monitor import Monitor
from optsched.solving.solver import Solver
from optsched.solving.solver import solver as find_solver
from optsched.testing.common import against
from optsched_solvers.quota.exact import allocate, certificate
from optsched_solvers.quota.plans import first_answer, remainders

SOLVERS = optsched.solvers("quota")
EXACT = ("auto", "branch_and_bound", "cpsat", "quota")


def solver(name: str) -> Solver:
    """Of quota plans."""
    return find_solver(name, "quota")


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("name", SOLVERS)
def test_random_plans(name: str, objective: str) -> None:
    """Feasible, verified, bounded by the optimum; equal to it where the backend is exact."""

    @settings(max_examples=depth(3 if name in ("cpsat", "genetic") else 15), derandomize=True)
    @given(st.integers(0, 10**6))
    def check(seed: int) -> None:
        problem = random_plan(random.Random(seed), objective, f"seed {seed}")
        engine = solver(name)
        if not engine.supports(problem):
            return
        limits: dict[str, Any] = {"iterations": 200} if name == "genetic" else {"time_limit": 600}
        result = optsched.solve(problem, engine, **limits)
        against(problem, result, optimum(problem))
        strict = any(job.locality != "any" for job in problem.jobs)
        if name in EXACT and not (strict and name == "quota"):
            assert result.status == ("infeasible" if optimum(problem) is None else "optimal")

    check()


@given(st.integers(0, 10**6))
def test_the_special_algorithms_need_no_bound_of_others(seed: int) -> None:
    """Quotas of `allocate` cost the optimum of the plan without localities."""
    problem = random_plan(random.Random(seed))
    if len(problem.kinds) > 1 or problem.infeasibility() or not problem.jobs:
        return
    free = problem.changed(jobs=[_free(job) for job in problem.jobs])
    sizes, bound = allocate(free)
    assert free.worth(np.asarray(sizes)) == optimum(free) == bound


def _free(job: QuotaJob) -> QuotaJob:
    return QuotaJob(**{**job.given(), "locality": "any", "current": None})


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 3), st.integers(0, 4)), min_size=1,
             max_size=5),
    st.integers(0, 9),
    st.sampled_from([1, 7, 10**6]),
)  # fmt: skip
def test_largest_remainders_are_optimal(
    jobs: list[tuple[int, int, int]], extra: int, unit: int
) -> None:
    """Both on exact shares (`quota`) and on rounded ones they reach the least distance."""
    rows = [
        QuotaJob(f"j{i}", minimum=low, maximum=low + more, score=score, must_run=True)
        for i, (score, low, more) in enumerate(jobs)
    ]
    budget = sum(low for _, low, _ in jobs) + extra
    problem = QuotaPlan(rows, budget=budget, objective="proportional", resolution=unit)
    best = optimum(problem)
    assert best == problem.lower_bound()
    assert problem.worth(remainders(problem)) == problem.worth(allocate(problem)[0]) == best


def _lexicographic(problem: QuotaPlan) -> list[int]:
    """The best sorted vector of levels by trying everything."""
    rows = problem.table.rows()
    level = {
        (int(j), int(g)): -int(c)
        for j, g, c in zip(rows, problem.table.size, problem.table.cost, strict=True)
    }
    return max(
        sorted(level[j, gpus] for j, (_, gpus) in enumerate(choice))
        for choice in all_answers(problem)
    )


@given(st.integers(0, 10**6), st.booleans())
@example(27, True)
def test_max_min_is_lexicographic(seed: int, tables: bool) -> None:
    """Beyond the bottleneck: the second worst, and so on, if the certificate holds.

    Where tables stand still and jump, the rest may be a knapsack: then it does not hold.
    """
    rng = random.Random(seed)
    jobs = []
    for j in range(rng.randint(1, 4)):
        n = rng.randint(1, 4)
        fields: dict[str, Any] = {"maximum": n}
        if tables:
            fields["utility"] = sorted(rng.randint(0, 9) for _ in range(n))
        jobs.append(QuotaJob(f"j{j}", must_run=True, weight=rng.choice([1, 2, 3]), **fields))
    problem = QuotaPlan(jobs, budget=len(jobs) + rng.randint(0, 6), objective="max_min")
    sizes, _ = allocate(problem)
    levels, best = sorted((-problem.costs(np.asarray(sizes))).tolist()), _lexicographic(problem)
    proof = certificate(problem)
    assert proof is not None
    assert levels == best if proof.holds else levels[0] == best[0]
    assert proof.holds or tables


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_certificates_of_large_plans(objective: str) -> None:
    """What brute force cannot see is proved by exchange, by duality or by the table."""
    problem = synthetic(300, 60, 2, objective=objective, gaps=objective == "sum")
    proof = certificate(problem)
    assert proof is not None
    assert proof.holds
    assert optsched.solve(problem).status == "optimal"


def test_equal_quotas_are_placed_tidily() -> None:
    """Fewest nodes spanned, then fewest GPUs moved."""
    jobs = [
        QuotaJob("a", [2], utility=[1], must_run=True, current={"n1": 2}),
        QuotaJob("b", [2], utility=[1], must_run=True, current={"n0": 2}),
        QuotaJob("c", [4], utility=[1], must_run=True),
    ]
    problem = QuotaPlan(jobs, nodes=[4, 4])
    for name in ("cpsat", "quota"):
        result = optsched.solve(problem, name)
        assert result.status == "optimal"
        assert problem.tidiness(result.schedule) == (3, 2, 0), name  # type: ignore[arg-type]


def test_refusals() -> None:
    """Types go to others, localities too, and the sentence says where."""
    two = synthetic(4, 2, gpus=2, types=2)
    assert "cpsat" in solver("quota").supports(two).reason  # type: ignore[attr-defined]
    strict = synthetic(4, 2, gpus=2, locality="whole")
    assert "cpsat" in solver("branch_and_bound").supports(strict).reason  # type: ignore[attr-defined]
    huge = QuotaPlan([QuotaJob("a", must_run=True)], budget=250_000, objective="max_min")
    assert "50000" in solver("cpsat").supports(huge).reason  # type: ignore[attr-defined]
    assert optsched.solve(huge).status == "optimal"
    with pytest.raises(InputError, match="population"):
        optsched.solve(strict, "genetic", options={"population": 1})
    with pytest.raises(InputError, match="crossover"):
        optsched.solve(strict, "genetic", options={"crossover": "pox"})


@seeds(12, 60)
def test_first_answer_is_an_answer(seed: int) -> None:
    """What is said while kernels compile is allowed, and worth what it says."""
    plan = random_plan(random.Random(seed))
    if plan.infeasibility():
        return
    monitor = Monitor(Limits(time_limit=10))
    first_answer(plan, monitor)
    if monitor.solution is None:
        assert any(job.locality != "any" for job in plan.jobs) or len(plan.kinds) > 1
        return
    assert plan.faults(monitor.solution) == []
    assert monitor.objective == plan.evaluate(plan.scheduled(monitor.solution))
    best = optimum(plan)
    assert best is not None
    assert monitor.objective >= best
