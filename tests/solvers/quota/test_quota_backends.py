"""Backends of quota plans: conformance, exactness by objective, ties, localities, limits."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from depth import depth, seeds
from hypothesis import given, settings
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
from optsched.testing.common import against, warm_up
from optsched_solvers.quota.exact import allocate, certificate
from optsched_solvers.quota.plans import first_answer, greedy, remainders

SOLVERS = optsched.solvers("quota")
EXACT = ("auto", "branch_and_bound", "cpsat", "quota")


def solver(name: str) -> Solver:
    """Of quota plans."""
    return find_solver(name, "quota")


@pytest.fixture(autouse=True, scope="module")
def compiled() -> None:
    """Kernels are compiled before anything has a time limit."""
    for name in SOLVERS:
        warm_up(solver(name))


def test_all_are_there() -> None:
    """The names of the design."""
    assert set(SOLVERS) == {
        "auto", "branch_and_bound", "cpsat", "genetic", "greedy_quota", "quota",
    }  # fmt: skip


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
def test_max_min_is_lexicographic(seed: int, tables: bool) -> None:
    """Beyond the bottleneck: the second worst, and so on, where sizes have no gaps."""
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
    assert sorted((-problem.costs(np.asarray(sizes))).tolist()) == _lexicographic(problem)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_certificates_of_large_plans(objective: str) -> None:
    """What brute force cannot see is proved by exchange, by duality or by the table."""
    problem = synthetic(300, 60, 2, objective=objective, gaps=objective == "sum")
    proof = certificate(problem)
    assert proof is not None
    assert proof.holds
    assert optsched.solve(problem).status == "optimal"


def test_certificates_are_refused_by_name() -> None:
    """Several types, or nothing to prove."""
    with pytest.raises(InputError, match="one type"):
        certificate(synthetic(3, 2, types=2))
    job = QuotaJob("a", [3], utility=[1], must_run=True)
    with pytest.raises(InputError, match="'a' must run"):
        certificate(QuotaPlan([job], budget=2))
    gaps = QuotaJob("a", [1, 3], must_run=True)
    assert certificate(QuotaPlan([gaps], budget=4, objective="max_min")) is None


def test_greedy_is_not_exact_on_gangs() -> None:
    """{0} and [4, 5] is not concave: marginal greedy misses what multiple choice finds."""
    jobs = [QuotaJob("gang", [4], utility=[4.1]), QuotaJob("small", [1], utility=[2.0]),
            QuotaJob("mid", [3], utility=[3.2])]  # fmt: skip
    problem = QuotaPlan(jobs, budget=4)
    assert optsched.solve(problem, "quota").objective == -5_200_000
    trap = QuotaPlan(
        [QuotaJob("small", [1], utility=[1.2]), QuotaJob("gang", [4], utility=[4.4])], budget=4
    )
    found = greedy(trap)
    assert found is not None
    assert trap.worth(*found) == -1_200_000 > -4_400_000 == optsched.solve(trap).objective


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


def test_localities_that_quotas_alone_do_not_see() -> None:
    """Two jobs of two GPUs on nodes of 3 and 1: pooled they fit, inside single nodes not."""
    jobs = [QuotaJob(n, [1, 2], utility=[1, 3], locality="single") for n in "ab"]
    problem = QuotaPlan(jobs, nodes=[3, 1])
    alone = optsched.solve(problem, "quota")
    assert (alone.status, alone.lower_bound) == ("feasible", -6_000_000)
    for name in ("auto", "cpsat"):
        result = optsched.solve(problem, name)
        assert (result.status, result.objective) == ("optimal", -4_000_000)


def test_impossible_localities_are_proved() -> None:
    """Counting GPUs says yes, CP-SAT says no."""
    jobs = [QuotaJob(n, [2], utility=[1], locality="single", must_run=True) for n in "ab"]
    problem = QuotaPlan(jobs, nodes=[3, 1])
    assert problem.infeasibility() == ""
    assert optsched.solve(problem).status == "infeasible"
    assert optsched.solve(problem, "quota").status == "unknown"


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


@pytest.mark.parametrize("name", ["branch_and_bound", "cpsat", "genetic"])
def test_limits_and_interrupts(name: str) -> None:
    """A search that is not done stops in time, or when a callback says so, with its best."""
    hard = synthetic(60, 30, 3, gpus=4, types=2)
    result = optsched.solve(hard, name, time_limit=0.5)
    assert result.seconds < 100  # on a busy machine
    assert result.schedule is not None and not result.interrupted
    result = optsched.solve(
        hard, name, time_limit=600, on_progress=lambda p: p.objective is not None
    )
    assert result.interrupted and result.seconds < 300
    assert result.schedule is not None


@pytest.mark.parametrize("name", ["branch_and_bound", "genetic"])
def test_iterations_repeat(name: str) -> None:
    """The same seed and iterations give the same answer."""
    hard = synthetic(30, 8, 3, gpus=4, types=2)
    one, two = (optsched.solve(hard, name, iterations=3000, seed=4) for _ in "ab")
    assert one.schedule == two.schedule


def test_empty_plans() -> None:
    """No jobs, or no GPUs."""
    for objective in OBJECTIVES:
        plan = QuotaPlan([], budget=3, objective=objective)  # type: ignore[arg-type]
        for name in (name for name in SOLVERS if solver(name).supports(plan)):
            result = optsched.solve(plan, name)
            assert (result.status, result.objective) == ("optimal", 0), (name, objective)
    none = QuotaPlan([QuotaJob("a", [1], utility=[1], idle=2)], nodes=[0])
    for name in SOLVERS:
        assert optsched.solve(none, name).objective == -2_000_000, name


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
