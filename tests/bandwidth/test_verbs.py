"""Rails, packing in scores, gangs and explanations of a dispatcher, against brute force."""

from __future__ import annotations

import random
from itertools import combinations, permutations

import numpy as np
import pytest
from depth import depth

import optsched
from optsched.bandwidth import (
    BottleneckBandwidth,
    Cluster,
    ClusterState,
    CountModel,
    Dispatcher,
    Host,
    HostType,
    Job,
    Policy,
    synthetic,
)
from optsched.bandwidth.models.contention import demands, share
from optsched.bandwidth.search.by_counts import order_of
from optsched.bandwidth.topology.rates import NO_LIMIT
from optsched.errors import Infeasible, InputError, UnsupportedProblem

PAIRS = tuple(
    tuple("X" if i == k else "NV4" if i // 2 == k // 2 else "SYS" for k in range(4))
    for i in range(4)
)


def small(rng: random.Random, *, rails: bool) -> tuple[Cluster, ClusterState]:
    """Three hosts of four GPUs in two racks, some of them held by one job."""
    kind = HostType("h", 4, PAIRS, nics=2, nic_rate=10.0)
    hosts = tuple(Host(f"n{i}", "h", (f"r{i // 2}",)) for i in range(3))
    factors = {"cluster": rng.choice([0.5, 1.0])}
    cluster = Cluster(hosts, (kind,), ("rack",), factors=factors, rails=rails)
    free = [gpu for gpu in range(12) if rng.random() < 0.7] or [0]
    busy = tuple(gpu for gpu in range(12) if gpu not in free)
    jobs = (Job("a", busy),) if busy else ()
    return cluster, ClusterState(cluster, tuple(free), jobs)


@pytest.mark.parametrize("large", [False, True])
def test_rails(large: bool) -> None:
    """On several hosts the same local ids; of these the best, by the rule for ties."""
    for seed in range(depth(10, 60)):
        rng = random.Random(seed)
        cluster, state = small(rng, rails=True)
        model = BottleneckBandwidth(cluster)
        fast = Dispatcher(cluster, model, traffic="heavy")
        if large:
            fast._tables = None
        wanted = demands(model, state, "heavy")
        for k in range(1, len(state.free) + 1):
            keys = [
                (-share(model, state, gpus, wanted).value, *order_of(state, gpus))
                for gpus in combinations(state.free, k)
                if not Policy().fault(state, gpus)
            ]
            if not keys:
                with pytest.raises(Infeasible, match="rails"):
                    fast.answer(state, k)
                continue
            found = fast.answer(state, k)
            assert Policy().fault(state, found.gpus) == ""
            assert (-found.value, *order_of(state, found.gpus)) == min(keys), (seed, k)
            assert found.upper_bound >= found.value


@pytest.mark.parametrize("large", [False, True])
def test_rails_open_no_whole_host_where_a_used_one_serves(large: bool) -> None:
    """Though only some ids of every host are looked at."""
    cluster = Cluster(
        tuple(Host(f"n{i}", "h") for i in range(4)),
        (HostType("h", 4, PAIRS, nics=2, nic_rate=10.0),), rails=True,
    )  # fmt: skip
    state = ClusterState.parse(cluster, free="n0 n1 n2:0,1 n3:0,1", down="n2:2,3 n3:2,3")
    fast = Dispatcher(cluster, BottleneckBandwidth(cluster), policy=Policy(min_hosts=2))
    if large:
        fast._tables = None
    assert cluster.written(fast.choose(state, 4)[0]) == "n2:0,1 n3:0,1"


def test_a_half_used_host_scores_above_an_empty_one() -> None:
    """At equal bandwidth, also beyond tables; without packing they are equal."""
    kind = HostType("h", 8, nics=8, nic_rate=50.0)
    for n in (3, 40):
        cluster = Cluster.uniform(kind, n)
        state = ClusterState.idle(cluster).take("n01:0-3", "a")
        fast = Dispatcher(cluster, BottleneckBandwidth(cluster))
        scores = fast.scores(state, 4)
        assert scores["n01"] == 100 and {*scores.values()} == {100, 90}
        assert {*fast.scores(state, 4, packing=0).values()} == {100}
        assert {*fast.scores(state, 8).values()} >= {100}
    with pytest.raises(InputError, match="packing: expected a share"):
        fast.scores(state, 4, packing=2)


def test_gangs() -> None:
    """Disjoint GPUs by name, values beside each other, as good as any order gives."""
    for seed in range(depth(8, 40)):
        rng = random.Random(seed)
        cluster, state = small(rng, rails=False)
        model = BottleneckBandwidth(cluster)
        fast = Dispatcher(cluster, model, traffic="given")
        if len(state.free) < 3:
            continue
        sizes = {"x": 1 + seed % 2, "y": 2}
        found = fast.gang(state, sizes)
        assert list(found) == ["x", "y"]
        after = state
        for name, one in found.items():
            assert len(one.gpus) == sizes[name] and one.value <= one.upper_bound
            after = after.take(one.gpus, name, one.standalone)  # disjoint and free
        total = 0
        for name, one in found.items():
            others = after.give(name)
            total += share(model, others, one.gpus, demands(model, others)).value
        assert total == sum(one.value for one in found.values())
        for order in permutations(sizes):
            other = state
            for name in order:
                got = fast.answer(other, sizes[name])
                other = other.take(got.gpus, name, got.standalone)
            values = [
                share(model, other.give(name), other.job(name).gpus,
                      demands(model, other.give(name))).value
                for name in sizes
            ]  # fmt: skip
            assert total >= sum(values), seed
    with pytest.raises(Infeasible, match="gang: requested 40"):
        fast.gang(state, {"x": 20, "y": 20})
    with pytest.raises(InputError, match="expected requests by name"):
        fast.gang(state, {})
    for requests, deadline, what in (
        (["x"], None, "by name"), ({"x": True}, None, "gang: 'x': expected an integer"),
        ({"x": "1"}, None, "gang: 'x'"), ({"x": 1}, 0, "deadline"), ({"x": 1}, -1.0, "deadline"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=what):
            fast.gang(state, requests, deadline)  # type: ignore[arg-type]


def test_explanations_name_levels_uplinks_and_the_rule() -> None:
    """What limits across a level, and what decided."""
    kind = synthetic.cluster("nvswitch", 1).types[0]
    hosts = tuple(Host(f"n{i}", kind.name, (f"s{i // 4}", f"l{i // 2}")) for i in range(8))
    cluster = Cluster(
        hosts, (kind,), ("spine", "leaf"), factors={"spine": 0.8, "cluster": 0.5},
        uplinks={"leaf": 100},
    )  # fmt: skip
    state = ClusterState.idle(cluster).take("n0:0-3 n2:0-3", "a")
    fast = Dispatcher(cluster, BottleneckBandwidth(cluster))
    text = fast.explain(state, 24)
    for fact in (
        "limited by uplinks below spine: 115.00 GB/s",
        "spine: 1 of 2 (s1)", "leaf: 2 of 4 (l2, l3)", "across spine: 0.8 of the bandwidth",
        "uplinks of 100.00 GB/s allow 143.75 GB/s", "decided by: ",
    ):  # fmt: skip
        assert fact in text


@pytest.mark.parametrize("n", [12, 60])
def test_the_rule_named_is_that_of_the_next_choice(n: int) -> None:
    """Also where more choices are equal than are listed."""
    cluster = Cluster.uniform(HostType("h", 8, nics=8, nic_rate=50.0), n)
    fast = Dispatcher(cluster, BottleneckBandwidth(cluster))
    state = ClusterState.idle(cluster).take(range(8 * n - 4, 8 * n), "a")
    assert "decided by: fewest whole hosts" in fast.explain(state, 4)
    state = state.take(range(8 * n - 12, 8 * n - 8), "b")
    assert "decided by: best fit" in fast.explain(state, 4)
    orders = [order_of(state, one.gpus) for one in fast.best(state, 4, 5)]
    assert orders == sorted(orders) and orders[1] < orders[2]


def test_other_solvers_refuse_rails() -> None:
    """Those that do not keep equal local ids; `auto` and `counts` do."""
    cluster, state = small(random.Random(3), rails=True)
    problem = optsched.GpuPlacement(state, BottleneckBandwidth(cluster), 4)
    for name in ("auto", "counts"):
        result = optsched.solve(problem, name)
        assert result.schedule is not None and problem.check(result.schedule) == []
    for name in ("branch_and_bound", "cpsat", "genetic", "eha", "pts", "hybrid", "topo"):
        with pytest.raises(UnsupportedProblem, match="rails"):
            optsched.solve(problem, name)


class Fabric(CountModel):
    """A model of a user: the network loses a twentieth for every host."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def intra_of(self, kind: int, which: str = "value") -> np.ndarray:
        """By number of GPUs."""
        return np.array([0, 0, 50, 40, 45])

    def network(self, patterns: np.ndarray, which: str = "value") -> np.ndarray:
        """By number of hosts."""
        hosts = (patterns > 0).sum(axis=1)
        return np.where(hosts > 1, 20 * 48 // (20 + hosts), NO_LIMIT)


@pytest.mark.parametrize("large", [False, True])
def test_a_model_of_a_user(large: bool) -> None:
    """The best of all sets; what limits it is not said to be measured."""
    for seed in range(depth(10, 60)):
        cluster, state = small(random.Random(seed), rails=False)
        model = Fabric(cluster)
        fast = Dispatcher(cluster, model, traffic="heavy")
        if large:
            fast._tables = None
        wanted = demands(model, state, "heavy")
        for k in range(1, len(state.free) + 1):
            best = max(
                share(model, state, one, wanted).value for one in combinations(state.free, k)
            )
            answer = fast.answer(state, k)
            assert answer.value == best or (large and answer.value <= best <= answer.upper_bound)
            assert "measured" not in fast.explain(state, k)
