"""Several requests at once: the joint search against all disjoint tuples of subsets."""

from __future__ import annotations

import random

import numpy as np
import pytest
from random_subsets import best_batch, random_batch

import optsched
from optsched.bandwidth.models.contention import Contention
from optsched.bandwidth.topology.policy import Policy
from optsched.bandwidth.topology.state import ClusterState, Job
from optsched.problems.gpus.problem import GpuPlacement, Request
from optsched.testing.best_gpus import Tables, all_subsets
from optsched_solvers.gpus import batch as subset_batch
from optsched_solvers.gpus import tree as subset_tree


def test_optimum_and_status():  # type: ignore[no-untyped-def]
    """Optimal with the best value of all disjoint tuples, or infeasible; true bounds on the way."""
    seen = improved = 0
    for seed in [*range(130), *range(500, 630)]:
        problem = random_batch(random.Random(seed))
        if problem is None:
            continue
        result, best = optsched.solve(problem, "branch_and_bound"), best_batch(problem)
        if best is None:
            assert (result.status, result.objective) == ("infeasible", None) and result.reason, seed
            continue
        assert (result.status, result.objective, result.lower_bound) == ("optimal", -best, -best)
        assert problem.check(result.schedule) == []
        for event in result.history:
            assert event.lower_bound is None or event.lower_bound <= -best, seed
        seen += 1
        first = subset_batch.one_after_the_other(problem)
        improved += first is not None and problem.worth(first) < best
    assert seen > 120 and improved >= 6


def four_by_eight(seed: int, many: int = 3, by_count: bool = False) -> GpuPlacement:
    """Requests for most of four hosts of eight GPUs beside tenants."""
    rng = random.Random(seed)
    model = Tables(rng, [8] * 4)
    if by_count:  # one value for all subsets of a size
        sizes = [mask.bit_count() for mask in range(256)]
        model.intra_of = lambda kind, which="value": np.array(  # type: ignore[method-assign]
            [0 if n < 2 else 400_000_000 + 7_000_000 * n for n in sizes], np.int64
        )
    free = rng.sample(range(32), rng.randint(18, 30))
    busy = [gpu for gpu in range(32) if gpu not in free]
    jobs = tuple(Job(f"j{i}", tuple(busy[i::2])) for i in range(2) if busy[i::2])
    cut = sorted(rng.sample(range(1, len(free)), many))
    sizes_asked = [b - a for a, b in zip([0, *cut[:-1]], cut, strict=True)]
    requests = [Request(f"r{i}", k) for i, k in enumerate(sizes_asked)]
    return GpuPlacement(
        ClusterState(model.cluster, tuple(free), jobs), model, requests=requests, traffic="heavy",
        objective=rng.choice(["sum", "max_min"]),
    )  # fmt: skip


def test_three_requests_on_four_by_eight():  # type: ignore[no-untyped-def]
    """Proved, in about a second at most, and never below one after the other."""
    for seed in range(8):
        problem = four_by_eight(seed, by_count=True)
        result = optsched.solve(problem, "branch_and_bound")
        assert result.status == "optimal" and result.seconds < 5, seed
        first = subset_batch.one_after_the_other(problem)
        assert first is not None and -result.objective >= problem.worth(first)
        assert problem.check(result.schedule) == []


def test_one_after_the_other_is_what_it_says():  # type: ignore[no-untyped-def]
    """Each is the best for itself beside the earlier ones as tenants, on what they left."""
    for seed in range(30):
        problem = random_batch(random.Random(seed))
        found = None if problem is None else subset_batch.one_after_the_other(problem)
        if problem is None or found is None:
            continue
        state, wanted = problem.state, problem.demands
        for request, gpus in zip(problem.requests, found, strict=True):
            every = all_subsets(
                state, problem.model.known, wanted, request.gpus, problem.contention,  # type: ignore[attr-defined]
                request.policy,
            )  # fmt: skip
            values = {chosen: value for value, chosen in every}
            assert values[tuple(sorted(gpus))] == max(values.values()), seed
            state = state.take(gpus, f"taken by {request.name}")
            wanted = (*wanted, problem.model.of(gpus))


def test_iterations_are_a_limit():  # type: ignore[no-untyped-def]
    """Few nodes: the start at least, true bounds, the same twice."""
    unfinished = 0
    for seed in range(4):
        problem = four_by_eight(seed, by_count=True)
        best = optsched.solve(problem, "branch_and_bound").objective
        for iterations in (0, 1, 2, 20):
            runs = [
                optsched.solve(problem, "branch_and_bound", iterations=iterations) for _ in range(2)
            ]
            assert runs[0].objective == runs[1].objective >= best >= runs[0].lower_bound
            unfinished += runs[0].status != "optimal"
    assert unfinished


@pytest.mark.parametrize(("states", "effort"), [(1, 10_000), (2, 10_000), (20_000, 30)])
def test_lost_combinations_leave_a_true_bound(states, effort, monkeypatch):  # type: ignore[no-untyped-def]
    """Where combinations are left out their bound stays: nothing false is claimed."""
    monkeypatch.setattr(subset_batch, "MOST_STATES", states)
    monkeypatch.setattr(subset_batch, "MOST_EFFORT", effort)
    lost = 0
    for seed in range(90):
        problem = random_batch(random.Random(seed))
        if problem is None or not subset_tree.supports(problem):
            continue
        search = subset_batch.BatchSearch(problem)
        best = best_batch(problem)
        for _ in search.steps():
            if best is not None:
                assert search.value <= best <= search.upper, seed
        if best is not None:
            assert search.value <= best <= search.upper, seed
        if search.value >= 0:
            assert problem.worth(search.gpus()) == search.value, seed
        lost += search.lost >= 0
    assert lost


def test_hosts_that_are_alike_change_nothing():  # type: ignore[no-untyped-def]
    """Breaking the symmetry of hosts loses no optimum: it is that of distinguishable hosts."""
    for seed in range(12):
        rng = random.Random(seed)
        model = Tables(rng, [2, 2, 2])
        state = ClusterState.idle(model.cluster)
        sizes = rng.choice([(2, 2), (3, 2), (2, 2, 2), (3, 3), (1, 2, 3)])
        requests = [Request(f"r{i}", k) for i, k in enumerate(sizes)]
        problem = GpuPlacement(state, model, requests=requests)
        result = optsched.solve(problem, "branch_and_bound")
        assert (result.status, -result.objective) == ("optimal", best_batch(problem)), seed


def test_refusals(monkeypatch):  # type: ignore[no-untyped-def]
    """What it cannot judge is refused in a sentence that says why."""
    problem = four_by_eight(0)
    state, model = problem.state, problem.model

    def reason(*requests: Request, **fields) -> str:  # type: ignore[no-untyped-def]
        return subset_tree.supports(GpuPlacement(state, model, requests=requests, **fields)).reason

    pair = (Request("a", 1), Request("b", 2))
    assert reason(*pair) == ""
    assert "up to 5 requests" in reason(*(Request(f"r{i}", 1) for i in range(6)))
    assert "exact GPUs" in reason(*pair, contention=Contention(fill="exact"))
    wish = Request("c", 2, Policy(preferred="rack"))
    assert "preferred" in reason(pair[0], wish)
    monkeypatch.setattr(subset_batch, "MOST_ASSIGNMENTS", 10)
    assert "divide" in reason(*pair)
    monkeypatch.setattr(subset_batch, "MOST_VECTORS", 3)
    assert "count vectors" in reason(*pair)


def test_no_room_for_all():  # type: ignore[no-untyped-def]
    """Requests that fit each alone but not together: infeasible, with a sentence."""
    model = Tables(random.Random(1), [4, 4])
    host = model.cluster.hosts[0].name
    requests = [Request(name, 3, Policy(include=(host,), max_hosts=1)) for name in ("a", "b")]
    problem = GpuPlacement(ClusterState.idle(model.cluster), model, requests=requests)
    result = optsched.solve(problem, "branch_and_bound")
    assert result.status == "infeasible" and "a, b" in result.reason
