"""Several requests at once: the joint search against all disjoint tuples of subsets."""

from __future__ import annotations

import random

import numpy as np
import pytest
from oracles.best_gpus import Tables, all_subsets
from random_subsets import best_batch, random_batch

import optsched
from optsched.bandwidth import BottleneckBandwidth, Dispatcher, synthetic
from optsched.bandwidth.models.contention import Contention
from optsched.bandwidth.models.model import UnmeasuredPattern
from optsched.bandwidth.placement.problem import GpuPlacement, Request
from optsched.bandwidth.topology.policy import Policy
from optsched.bandwidth.topology.state import ClusterState, Job
from optsched.errors import UnsupportedProblem
from optsched.solving.limits import Limits
from optsched_solvers.gpus import batch as subset_batch
from optsched_solvers.gpus import tree as subset_tree
from optsched_solvers.gpus.one_by_one import Sequences


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
        improved += sequences(problem).value < best
    assert seen > 120 and improved >= 3


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
        assert -result.objective >= sequences(problem).value
        assert problem.check(result.schedule) == []


class Silent:
    """A monitor without limits."""

    remaining = 60.0
    objective = None

    def advance(self, steps: int) -> None:
        """Nothing is counted."""

    def incumbent(self, *_: object) -> None:
        """Nothing is kept."""

    def should_stop(self) -> bool:
        """Never."""
        return False


def sequences(problem: GpuPlacement) -> Sequences:
    """The best of one by one, of which nothing gets more by being placed again."""
    search = Sequences(problem, Limits(), Silent())  # type: ignore[arg-type]
    search.improve()
    return search


def test_one_by_one():  # type: ignore[no-untyped-def]
    """In an order each is the best for itself beside the earlier ones, on what they left.

    Exchanged it is never worse, between there and the best; bounds hold, every rule is kept.
    """
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
        state, wanted = problem.state, problem.demands
        for request, gpus in zip(problem.requests, given.values(), strict=True):
            every = all_subsets(
                state, problem.model.known, wanted, request.gpus,  # type: ignore[attr-defined]
                request.policy,
            )  # fmt: skip
            values = {chosen: value for value, chosen in every}
            assert values[tuple(sorted(gpus))] == max(values.values()), seed
            state = state.take(gpus, f"taken by {request.name}")
            wanted = (*wanted, problem.model.of(gpus))
        try:
            worth = problem.worth([*given.values()])
        except UnmeasuredPattern:
            continue
        assert worth <= search.value, seed
        better += worth < search.value
    assert seen > 50 and better > 5, (seen, better)


def test_not_worse_than_a_loop_that_dispatches():  # type: ignore[no-untyped-def]
    """Requests in the given order by `Dispatcher.choose`, which leaves the best rest."""
    cluster = synthetic.cluster("nvswitch", 4, seed=1)
    model = BottleneckBandwidth(cluster).fit(synthetic.network(cluster))
    fast = Dispatcher(cluster, model, traffic="heavy")
    for seed in range(104, 112):  # 110 needs the ties that the dispatcher breaks
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
    """Beyond the joint search `auto` places one by one, with a bound, by tables and without."""
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
