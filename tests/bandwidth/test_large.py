"""The search on large clusters against brute force, the definition, and what rules allow."""

from __future__ import annotations

import random
import time
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.best_gpus import Tables, all_subsets, policy_of, sizes_of, state_of

from optsched.bandwidth import synthetic
from optsched.bandwidth.models.bottleneck import BottleneckBandwidth
from optsched.bandwidth.models.contention import demands, share
from optsched.bandwidth.search import groups
from optsched.bandwidth.search.dispatcher import Dispatcher
from optsched.bandwidth.search.large import LargeSearch
from optsched.bandwidth.search.request import HostTables, Judge, request_of
from optsched.bandwidth.topology.cluster import Cluster, Host, HostType
from optsched.bandwidth.topology.intra import IntraTable
from optsched.bandwidth.topology.policy import Policy
from optsched.bandwidth.topology.state import ClusterState, Job

SEEDS = st.integers(0, 10**9)


def leveled(rng: random.Random) -> ClusterState:
    """Four to six hosts of up to two types, factors, an uplink, jobs; perhaps not all joined."""
    kinds = []
    for t in range(rng.randint(1, 2)):
        n, odd = rng.choice([2, 3, 4, 4]), rng.random() < 0.5
        values = [rng.randint(1, 200) * 1_000_000 if odd else 150_000_000 for _ in range(1 << n)]
        rate, intra = float(rng.randint(5, 60)), IntraTable(n, values)
        kinds.append(HostType(f"t{t}", n, nics=rng.randint(1, 4), nic_rate=rate, intra=intra))
    hosts = tuple(
        Host(f"n{i}", rng.choice(kinds).name, (f"s{i // 4}", f"l{i // 2}"))
        for i in range(rng.randint(4, 6))
    )
    drawn = sorted(rng.choices([1.0, 0.8, 0.5], k=3))
    factors = dict(zip(("cluster", "spine", "leaf"), drawn, strict=True))
    if rng.random() < 0.2:
        del factors["cluster"]  # spines are not joined
    uplinks = {"leaf": float(rng.randint(10, 200))} if rng.random() < 0.5 else {}
    cluster = Cluster(hosts, tuple(kinds), ("spine", "leaf"), factors=factors, uplinks=uplinks)
    gpus = rng.sample(range(cluster.n_gpus), cluster.n_gpus)
    n = rng.randint(3, min(9, len(gpus)))
    free, busy, jobs = gpus[:n], gpus[n:], list[Job]()
    while busy and len(jobs) < 4:
        n, demand = rng.randint(1, 6), rng.choice([None, 0, rng.randint(1, 200) * 1_000_000])
        jobs.append(Job(f"j{len(jobs)}", tuple(busy[:n]), demand))
        busy = busy[n:]
    return ClusterState(cluster, tuple(free), tuple(jobs), tuple(busy))


def judge_of(model: BottleneckBandwidth, state: ClusterState, k: int) -> Judge:
    """The arrays of a request without rules."""
    free, wanted = Policy(), demands(model, state)
    bounds = free.bounds(state.cluster)
    return request_of(HostTables(model), state, k, wanted, free, bounds)


def order(state: ClusterState, counts: np.ndarray) -> tuple[int, ...]:
    """The rule for ties but for ids: domains from the top, hosts, whole hosts, free GPUs."""
    used = np.flatnonzero(counts)
    whole = state.room[used] == state.cluster.sizes[used]
    domains = (len({*of[used].tolist()}) for of in state.cluster.network_levels.domain[::-1])
    return *domains, len(used), int(whole.sum()), int(state.room[used].sum())


def test_against_all_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is the definition, no choice is above the bound, nearly all are the best."""
    monkeypatch.setattr(groups, "MOST_EVERY", -1)  # the search itself, not the list of all
    best = first = total = 0
    for seed in range(100):
        rng = random.Random(seed)
        state = leveled(rng)
        model, k = BottleneckBandwidth(state.cluster), rng.randint(1, min(9, len(state.free)))
        wanted, judge = demands(model, state), judge_of(model, state, k)
        counts = np.array(
            [c for c in product(*(range(n + 1) for n in judge.q.free)) if sum(c) == k]
        )
        values = judge.values(counts)
        for i in rng.sample(range(len(counts)), min(4, len(counts))):
            used = np.flatnonzero(counts[i])
            gpus = [
                gpu
                for h in used
                for gpu in judge.gpus(h, int(counts[i, h]), int(judge.q.rows[h, counts[i, h]]))
            ]
            got = share(model, state, gpus, wanted)
            assert values[i].tolist() in ([got.value, got.standalone], [-1, -1])
            joined = any(
                {*judge.hosts[used].tolist()} <= {*fabric} for fabric in state.cluster.fabrics
            )
            assert (values[i, 0] >= 0) == joined
        found = LargeSearch(model).choose(state, k, wanted)
        assert (found is None) == (values[:, 0].max() < 0)
        if found is None:
            continue
        got = share(model, state, found.gpus, wanted)
        assert (got.value, got.standalone) == (found.value, found.standalone)
        assert found.value <= values[:, 0].max() <= found.upper_bound
        total += 1
        if found.value == values[:, 0].max():
            best += 1
            rows = np.zeros((len(counts), state.cluster.n_hosts), np.int64)
            rows[:, judge.hosts] = counts
            least = min(order(state, row) for row in rows[values[:, 0] == found.value])
            first += order(state, state.cluster.counts(found.gpus)) == least
    assert best >= 0.97 * total > 80 and first >= 0.98 * best


@given(SEEDS)
def test_any_model_and_policy_on_few_hosts(seed: int) -> None:
    """Levels, rules and patterns without a value: all counts are tried, the best is chosen."""
    rng = random.Random(seed)
    model = Tables(rng, sizes_of(rng, rng.randint(4, 10)), gaps=rng.choice([0, 0, 0.2]))
    state = state_of(rng, model.cluster)
    policy, wanted = (
        policy_of(rng, model.cluster),
        [rng.randint(0, 300) * 10**6 for _ in state.jobs],
    )
    k = rng.randint(1, len(state.free))
    found = LargeSearch(model).choose(state, k, wanted, policy)
    values = [v for v, _ in all_subsets(state, model.known, wanted, k, policy)]
    assert (found is None) == (not values)
    if found is not None:
        got = share(model, state, found.gpus, wanted)
        assert (got.value, got.standalone) == (found.value, found.standalone)
        assert found.value == max(values) == found.upper_bound
        assert not policy.fault(state, found.gpus)


def two_levels(hosts: int, *, alike: bool = False) -> Cluster:
    """Hosts of eight GPUs, leaves of 16, spines of eight leaves; `alike`: all choices are equal."""
    kind = synthetic.cluster("nvswitch", 1).types[0]
    factors = {"leaf": 1.0, "spine": 0.8, "cluster": 0.5}
    if alike:
        intra = IntraTable(8, [0, 0, *[50_000_000] * 7])
        kind, factors = HostType("h", 8, nics=1, nic_rate=50.0, intra=intra), {"cluster": 1.0}
    names = (Host(f"n{i}", kind.name, (f"s{i // 128}", f"l{i // 16}")) for i in range(hosts))
    return Cluster(tuple(names), (kind,), ("spine", "leaf"), factors=factors)


def some_free(cluster: Cluster, seed: int, part: float = 0.7) -> ClusterState:
    """Any GPUs free, the others down."""
    n = round(part * cluster.n_gpus)
    return ClusterState.with_free(cluster, random.Random(seed).sample(range(cluster.n_gpus), n))


def scattered(cluster: Cluster, seed: int) -> ClusterState:
    """Jobs of 2 to 16 GPUs on four hosts side by side, 70 % of the GPUs free."""
    rng, state = random.Random(seed), ClusterState.idle(cluster)
    while len(state.free) > 0.7 * cluster.n_gpus:
        first = rng.randrange(cluster.n_gpus // 32)
        pool = [gpu for gpu in state.free if gpu // 32 == first]
        if len(pool) > 16:
            state = state.take(rng.sample(pool, rng.choice([2, 4, 8, 16])), f"j{len(state.jobs)}")
    return state


@pytest.mark.parametrize("hosts", [16, 64, 512])
def test_idle_clusters_are_proved_and_packed(hosts: int) -> None:
    """Proved with any factors; among equals no needless spine, leaf, host or whole host."""
    clusters = two_levels(hosts), two_levels(hosts, alike=True)
    search, packing = (LargeSearch(BottleneckBandwidth(cluster)) for cluster in clusters)
    for seed in range(3):
        for k in (3, 12, 40, 96, 300):
            if k > 0.7 * 8 * hosts:
                continue
            found = search.choose(some_free(clusters[0], seed), k)
            assert found is not None and found.exact
            state = some_free(clusters[1], seed)
            found = packing.choose(state, k)
            assert found is not None and found.exact
            used = np.flatnonzero(clusters[1].counts(found.gpus))
            inside = np.ones(hosts, np.bool_)
            for of in clusters[1].network_levels.domain[::-1]:
                free = np.sort(np.bincount(of, state.room * inside))[::-1]
                inside = np.isin(of, of[used])
                assert len({*of[used].tolist()}) == np.searchsorted(np.cumsum(free), k) + 1
            if k == 3:  # the host with fewest free GPUs
                assert state.room[used].tolist() == [state.room[state.room >= 3].min()]


def test_time_and_rounds_only_improve() -> None:
    """A deadline is kept to the grain of a call; more time is never worse, the bound holds."""
    cluster = synthetic.cluster("nvswitch", 32)
    model, search = BottleneckBandwidth(cluster), LargeSearch(BottleneckBandwidth(cluster))
    for seed in range(4):
        state = scattered(cluster, seed)
        wanted = demands(model, state)
        for k in (24, 48, 96):
            full = search.choose(state, k, wanted)
            quick = search.choose(state, k, wanted, None, time.monotonic() + 0.002)
            assert full is not None and quick is not None
            assert quick.value <= full.value <= min(full.upper_bound, quick.upper_bound)
            assert share(model, state, quick.gpus, wanted).value == quick.value


def fewest(room: np.ndarray, of: np.ndarray, k: int) -> int:
    """Number of the domains with most room that hold k GPUs."""
    return int(np.searchsorted(np.cumsum(-np.sort(-np.bincount(of, room))), k)) + 1


@pytest.mark.parametrize("level", ["leaf", "host", "spine"])
def test_preferred_domains_come_before_bandwidth(level: str) -> None:
    """One domain where one suffices, else the fewest, in every answer; the bound holds."""
    for cluster in (two_levels(64), two_levels(256)):
        state, model = scattered(cluster, 1), BottleneckBandwidth(cluster)
        fast = Dispatcher(cluster, model, policy=Policy(preferred=level))
        numbers = {name: i for i, name in enumerate(cluster.network_levels.names)}
        of = np.arange(cluster.n_hosts)
        of = of if level == "host" else cluster.network_levels.domain[numbers[level]]
        for k in (4, 64, 100, 260):
            least = fewest(state.room, of, k)
            found, several = fast.answer(state, k), fast.best(state, k, 3)
            gang = fast.gang(state, {"a": k})["a"]
            for one in (found, gang, several[0], fast.answer(state, k, 1e-6)):
                used = np.unique(of[cluster.host_of[list(one.gpus)]])
                assert len(used) == least, (k, least)
                assert one.value <= found.upper_bound
            scores = fast.scores(state, k, 1.0, packing=0)
            used = cluster.counts(found.gpus) > 0
            assert {scores[cluster.hosts[h].name] for h in np.flatnonzero(used)} == {100}
            assert len(scores) == (state.room > 0).sum()


@pytest.mark.slow
def test_some_of_many_sets_of_preferred_domains(monkeypatch: pytest.MonkeyPatch) -> None:
    """As few domains as all sets of them show to suffice, nearly as fast, and a true bound."""
    kind = synthetic.cluster("nvswitch", 1).types[0]
    hosts = tuple(Host(f"n{i}", kind.name, (f"s{i // 8}", f"l{i // 2}")) for i in range(32))
    factors = {"leaf": 1.0, "spine": 0.8, "cluster": 0.5}
    cluster = Cluster(hosts, (kind,), ("spine", "leaf"), factors=factors)
    model, best, total = BottleneckBandwidth(cluster), 0, 0
    for policy in (Policy(preferred="leaf"), Policy(preferred="leaf", balance="exact")):
        fast = Dispatcher(cluster, model, policy=policy, traffic="heavy")
        for seed, k in product(range(3), (30, 44)):
            state = scattered(cluster, seed)
            answers = []
            for most in (64, 10**6):
                monkeypatch.setattr(groups, "MOST_GROUPS", most)
                answers.append(fast.answer(state, k))
            one, other = answers
            numbers = [policy.domains(cluster, found.gpus) for found in answers]
            able = [
                fewest(np.where(state.room >= c, c, 0), np.arange(32) // 2, k)
                for c in range(1, 9)
                if k % c == 0 and (state.room >= c).sum() * c >= k
            ]
            least = fewest(state.room, np.arange(32) // 2, k)
            assert numbers == [min(able) if policy.balance == "exact" else least] * 2
            assert one.value <= other.value <= one.upper_bound
            best, total = best + (one.value == other.value), total + 1
    assert best >= 0.9 * total


RULES = (
    Policy(required="leaf"), Policy(balance="even"), Policy(balance="exact"), Policy(min_hosts=7),
    Policy(max_hosts=3), Policy(include=("n3", "n40")),
    Policy(max_per_host=5, exclude=("n0",)),
    Policy(required="host"), Policy(min_hosts=5, balance="even", include=("n9",)),
)  # fmt: skip


@pytest.mark.parametrize("policy", RULES)
def test_rules_on_many_hosts(policy: Policy) -> None:
    """Every rule is kept next to jobs, in `choose`, `best` and `by_host`."""
    cluster = two_levels(64)
    state, model = scattered(cluster, 5), BottleneckBandwidth(cluster)
    k, wanted = 8 if policy.required == "host" else 24, demands(model, state)
    search = LargeSearch(model)
    found, several = (
        search.choose(state, k, wanted, policy),
        search.best(state, k, 5, wanted, policy),
    )
    assert found is not None and several[0] == found
    for one in several:
        assert not policy.fault(state, one.gpus) and len({*one.gpus}) == k
        assert share(model, state, one.gpus, wanted).value == one.value <= found.upper_bound
    assert len({cluster.counts(one.gpus).tobytes() for one in several}) == len(several)
    values = [one.value for one in several]
    assert values == sorted(values, reverse=True)
    by_host = search.by_host(state, k, wanted, policy)
    assert max(by_host.values()) == found.value
    for h in {*cluster.host_of[[*found.gpus]].tolist()}:
        assert by_host[h] == found.value


def test_a_fitted_network() -> None:
    """The model judges; a choice on one host or spread evenly is never better."""
    cluster = synthetic.cluster("nvswitch", 24)
    model = BottleneckBandwidth(cluster).fit(synthetic.network(synthetic.cluster("nvswitch", 4)))
    state = scattered(cluster, 2)
    wanted = demands(model, state)
    for k in (6, 12, 30):
        found = LargeSearch(model).choose(state, k, wanted)
        assert found is not None
        assert share(model, state, found.gpus, wanted).value == found.value <= found.upper_bound
        order_ = np.argsort(-state.room)
        for m in range(1, 9):
            counts = np.full(m, k // m) + (np.arange(m) < k % m)
            if (counts <= state.room[order_[:m]]).all():
                of = zip(order_[:m].tolist(), counts.tolist(), strict=True)
                gpus = [
                    g for h, n in of for g in [f for f in state.free if cluster.host_of[f] == h][:n]
                ]
                assert share(model, state, gpus, wanted).value <= found.value * 1.0001
