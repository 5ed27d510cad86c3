"""Several requests one by one: against all disjoint tuples of subsets of small clusters."""

from __future__ import annotations

import random

import pytest
from oracles.best_gpus import Tables, all_subsets
from random_subsets import best_batch, random_batch

import optsched
from optsched.bandwidth import BottleneckBandwidth, Dispatcher, synthetic
from optsched.bandwidth.models.model import UnmeasuredPattern
from optsched.bandwidth.placement.problem import GpuPlacement, Request
from optsched.bandwidth.topology.policy import Policy
from optsched.bandwidth.topology.state import ClusterState
from optsched.errors import UnsupportedProblem
from optsched.solving.limits import Limits
from optsched_solvers.gpus.one_by_one import Sequences


class Silent:
    """A monitor without limits."""

    remaining = 60.0
    objective = None

    def advance(self, steps: int) -> None:
        """Ignore the steps."""

    def incumbent(self, *_: object) -> None:
        """Ignore the choice."""

    def should_stop(self) -> bool:
        """Never."""
        return False


def sequences(problem: GpuPlacement) -> Sequences:
    """The search at its local optimum."""
    search = Sequences(problem, Limits(), Silent())  # type: ignore[arg-type]
    search.improve()
    return search


def test_close_to_the_joint_optimum():  # type: ignore[no-untyped-def]
    """Feasible, bounded by the optimum of all disjoint tuples, and close to it on average."""
    shares = []
    for seed in range(90):
        problem = random_batch(random.Random(seed))
        if problem is None:
            continue
        result, best = optsched.solve(problem, "auto"), best_batch(problem)
        if result.objective is None or best is None:
            assert result.objective is None and result.reason, seed
            continue
        assert problem.check(result.schedule) == []
        assert result.lower_bound is None or result.lower_bound <= -best <= result.objective, seed
        shares.append(-result.objective / best if best else 1.0)
    assert len(shares) > 40 and sum(shares) / len(shares) > 0.99, (len(shares), sum(shares))


def test_orders_and_moves():  # type: ignore[no-untyped-def]
    """In an order each request gets its optimum beside the earlier ones; moves never worsen it."""
    better = seen = 0
    for seed in range(120):
        problem = random_batch(random.Random(seed), parts=True)
        if problem is None:
            continue
        search, best = sequences(problem), best_batch(problem)
        bound = search.bound()
        if best is None:
            assert search.best is None, seed
            continue
        assert bound is None or bound >= best, seed
        given = search.placed({}, range(len(problem.requests)))
        if search.best is not None:
            sets = [search.best[r] for r in range(len(problem.requests))]
            assert problem.faults(sets) == [] and problem.worth(sets) == search.value <= best
        if given is None or any(problem.model.known(gpus) is None for gpus in given.values()):
            continue
        seen += 1
        state, demands = problem.state, problem.demands
        for request, gpus in zip(problem.requests, given.values(), strict=True):
            known, policy = problem.model.known, request.policy  # type: ignore[attr-defined]
            every = all_subsets(state, known, demands, request.gpus, policy)
            values = {chosen: value for value, chosen in every}
            assert values[tuple(sorted(gpus))] == max(values.values()), seed
            state = state.take(gpus, f"taken by {request.name}")
            demands = (*demands, problem.model.of(gpus))
        try:
            worth = problem.worth([*given.values()])
        except UnmeasuredPattern:
            continue
        assert worth <= search.value, seed
        better += worth < search.value
    assert seen > 50 and better > 5, (seen, better)


def test_not_worse_than_a_loop_that_dispatches():  # type: ignore[no-untyped-def]
    """Not below `Dispatcher.choose` for the requests in the given order."""
    cluster = synthetic.cluster("nvswitch", 4, seed=1)
    model = BottleneckBandwidth(cluster).fit(synthetic.network(cluster))
    fast = Dispatcher(cluster, model, traffic="heavy")
    for seed in range(104, 112):
        rng = random.Random(seed)
        start = state = synthetic.tenants(cluster, seed, 0.7)
        requests, sets = [], []
        while len(requests) < 6 and (k := rng.choice([2, 3, 4, 6])) <= len(state.free):
            requests.append(Request(f"r{len(requests)}", k))
            sets.append(fast.choose(state, k)[0])
            state = state.take(sets[-1], requests[-1].name)
        problem = GpuPlacement(start, model, requests=requests, traffic="heavy")
        assert sequences(problem).value >= problem.worth(sets), seed


def test_many_requests_and_many_gpus():  # type: ignore[no-untyped-def]
    """Seven requests with tables and without: a bound, and no worse with more time."""
    for hosts in (4, 20):
        cluster = synthetic.cluster("nvswitch", hosts)
        state = ClusterState.idle(cluster).take(range(3, 3 + 8 * hosts // 4), "a")
        requests = [Request(f"r{i}", 1 + 2 * i % 5) for i in range(7)]
        requests[6] = Request("r6", 3, Policy(required="host", within="numa"))
        model = BottleneckBandwidth(cluster)
        problem = GpuPlacement(state, model, requests=requests, traffic="heavy")
        first = optsched.solve(problem, iterations=1)
        result = optsched.solve(problem, time_limit=20)
        assert result.lower_bound <= result.objective <= first.objective < 0
        assert problem.check(result.schedule) == [] and result.lower_bound > 1.3 * result.objective
    with pytest.raises(UnsupportedProblem, match="max_min needs a model with tables"):
        optsched.solve(problem.changed(objective="max_min"))


def test_requests_that_do_not_fit_together():  # type: ignore[no-untyped-def]
    """Each fits alone: no choice, with a reason and without a claim of infeasibility."""
    model = Tables(random.Random(1), [4, 4])
    host = model.cluster.hosts[0].name
    requests = [Request(name, 3, Policy(include=(host,), max_hosts=1)) for name in ("a", "b")]
    problem = GpuPlacement(ClusterState.idle(model.cluster), model, requests=requests)
    result = optsched.solve(problem, "auto")
    assert result.status == "unknown" and "no order" in result.reason
