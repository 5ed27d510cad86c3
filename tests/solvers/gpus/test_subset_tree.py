"""Branch and bound over hosts: statuses, bounds and optima against all subsets."""

from __future__ import annotations

import random
from dataclasses import replace
from types import MappingProxyType

import pytest
from depth import depth
from random_subsets import Tables, allowed, contention_of, policy_of, sizes_of, state_of

import optsched
from optsched.bandwidth.policy import Policy
from optsched.bandwidth.state import ClusterState, Job
from optsched.problems.gpus.problem import SubsetChoice
from optsched.testing.best_gpus import all_subsets
from optsched_solvers.gpus import tree as subset_tree


class Tree:
    """The functions under test as a solver."""

    name = "tree"
    kinds = ("gpus",)
    options = MappingProxyType({})  # type: ignore[var-annotated]
    supports = staticmethod(subset_tree.supports)
    solve = staticmethod(subset_tree.solve)


def problem_of(seed: int, most: int = 9, **fields) -> SubsetChoice:  # type: ignore[no-untyped-def]
    """A random choice with tenants and rules."""
    rng = random.Random(seed)
    model = Tables(rng, sizes_of(rng, rng.randint(2, most)), gaps=rng.choice([0, 0, 0.2]))
    state = state_of(rng, model.cluster) if rng.random() < 0.5 else crowded(rng, model)
    jobs = tuple(
        Job(
            job.name,
            job.gpus,
            rng.randint(0, 300) * 1_000_000 if job.demand is None else job.demand,
        )
        for job in state.jobs
    )
    state = ClusterState(state.cluster, state.free, jobs, state.down)
    rule = contention_of(rng)
    if rng.random() < 0.3:
        rule = replace(rule, fill="exact")
    k = rng.randint(1, len(state.free))
    fields.setdefault("policy", policy_of(rng, model.cluster))
    return SubsetChoice(state, model, k, contention=rule, **fields)


def crowded(rng: random.Random, model: Tables) -> ClusterState:
    """Half of the GPUs free, the others held by two jobs across hosts."""
    gpus = list(range(model.cluster.n_gpus))
    rng.shuffle(gpus)
    half = (len(gpus) + 1) // 2
    held = [gpus[half::2], gpus[half + 1 :: 2]]
    jobs = tuple(Job(f"j{j}", tuple(part)) for j, part in enumerate(held) if part)
    return ClusterState(model.cluster, tuple(gpus[:half]), jobs)


def best_of(problem: SubsetChoice) -> int | None:
    """By brute force."""
    every = all_subsets(
        problem.state, problem.model.known, problem.demands, problem.k, problem.contention,  # type: ignore[attr-defined]
        problem.policy,
    )  # fmt: skip
    return max((value for value, _ in every), default=None)


def four_by_eight(seed: int) -> SubsetChoice:
    """Four hosts of eight GPUs, tenants, random rules."""
    rng = random.Random(seed)
    model = Tables(rng, [8] * 4)
    free = rng.sample(range(32), rng.randint(2, 32))
    busy = [gpu for gpu in range(32) if gpu not in free]
    rng.shuffle(busy)
    jobs = []
    while busy:
        count = min(len(busy), rng.choice([1, 2, 4, 8, 16]))
        jobs.append(Job(f"j{len(jobs)}", tuple(busy[:count])))
        busy = busy[count:]
    return SubsetChoice(
        ClusterState(model.cluster, tuple(free), tuple(jobs)), model, rng.randint(1, len(free)),
        traffic=rng.choice(["idle", "moderate", "heavy"]), contention=contention_of(rng),
        policy=policy_of(rng, model.cluster),
    )  # fmt: skip


@pytest.mark.parametrize("step", [1, 20_000])
def test_optimum_and_status(step, monkeypatch):  # type: ignore[no-untyped-def]
    """Optimal with the best value of all subsets, or infeasible; whatever the step."""
    monkeypatch.setattr(subset_tree, "FIRST", step)
    monkeypatch.setattr(subset_tree, "NODES", step)
    for seed in range(depth(40, 100)):
        problem = problem_of(seed)
        result = optsched.solve(problem, Tree())
        best = best_of(problem)
        if best is None:
            expected = "unknown" if allowed(problem) else "infeasible"
            assert (result.status, result.objective) == (expected, None) and result.reason, seed
            continue
        assert (result.status, result.objective, result.lower_bound) == ("optimal", -best, -best)
        assert problem.check(result.schedule) == []
        for event in result.history:  # every claim on the way was true
            assert event.lower_bound is None or event.lower_bound <= -best, seed
            assert event.objective is None or event.objective >= -best, seed


def test_agrees_with_counts_on_four_by_eight():  # type: ignore[no-untyped-def]
    """Same status, value and bound as the exact kernel over counts."""
    for seed in range(12):
        problem = four_by_eight(seed)
        result = optsched.solve(problem, Tree())
        other = optsched.solve(problem, "counts")
        assert (result.status, result.objective, result.lower_bound) == (
            other.status, other.objective, other.lower_bound,
        ), seed  # fmt: skip


def test_iterations_are_a_limit(monkeypatch):  # type: ignore[no-untyped-def]
    """Few nodes: never a false claim; the same twice; more nodes are never worse."""
    monkeypatch.setattr(subset_tree, "FIRST", 1)
    unfinished = 0
    for seed in range(6):
        problem = replace_policy(four_by_eight(seed))
        best = optsched.solve(problem, "counts").objective
        values = []
        for nodes in (1, 4, 8, 40):
            result = optsched.solve(problem, Tree(), iterations=nodes)
            again = optsched.solve(problem, Tree(), iterations=nodes)
            assert (result.status, result.objective) == (again.status, again.objective)
            assert result.lower_bound <= best
            assert result.status != "infeasible"
            values.append(0 if result.objective is None else result.objective)
            unfinished += result.status != "optimal"
        assert values == sorted(values, reverse=True)
    assert unfinished


def replace_policy(problem: SubsetChoice) -> SubsetChoice:
    """The same without rules."""
    return SubsetChoice(
        problem.state, problem.model, problem.k, traffic=problem.traffic,
        contention=problem.contention,
    )  # fmt: skip


def test_no_time():  # type: ignore[no-untyped-def]
    """Without time nothing is claimed."""
    result = optsched.solve(four_by_eight(3), Tree(), time_limit=0)
    assert result.status in ("unknown", "feasible")


def test_preference_and_a_better_start():  # type: ignore[no-untyped-def]
    """A preferred rack wins over a faster choice; a start that ignores it stands unharmed."""
    seen = 0
    for seed in range(80):
        wish = problem_of(seed, policy=Policy(preferred="rack"))
        if wish.contention.fill == "exact":
            continue
        result = optsched.solve(wish, Tree())
        assert result.objective == optsched.solve(wish, "counts").objective
        free = wish.changed(requests=(wish.requests[0]._replace(policy=Policy()),))
        start = optsched.solve(free, "counts")
        if result.objective is None or start.objective >= result.objective:
            continue
        seen += 1
        later = optsched.solve(wish, Tree(), warm_start=start.schedule)
        assert later.objective == start.objective
        assert later.lower_bound == wish.lower_bound()  # nothing is said of what others reach
    assert seen


def test_refusals():  # type: ignore[no-untyped-def]
    """What it cannot judge is refused in a sentence."""
    problem = four_by_eight(0)
    model = problem.model
    problem.__dict__["model"] = type("Odd", (), {"intra_monotone": False})()
    assert "faster hosts" in subset_tree.supports(problem).reason
    problem.__dict__["model"] = model
    problem.__dict__["tables"] = None
    assert "no tables" in subset_tree.supports(problem).reason
    assert not subset_tree.supports(optsched.JobShop([[(0, 1)]]))
