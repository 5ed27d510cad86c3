"""Choice on flat idle clusters equals brute force; its parts equal their plain twins."""

from __future__ import annotations

import random
from itertools import combinations, permutations, product

import numpy as np
import pytest
from even_spreads import nearest_sets
from hypothesis import given
from hypothesis import strategies as st
from oracles.best_gpus import (
    Tables,
    all_subsets,
    policy_of,
    sizes_of,
    state_of,
)
from random_tables import TableModel, host_types

from optsched.bandwidth.models.bottleneck import BottleneckBandwidth
from optsched.bandwidth.models.contention import share
from optsched.bandwidth.models.model import UnmeasuredPattern
from optsched.bandwidth.search.flat import FlatSearch, count_partitions, keeps, partitions
from optsched.bandwidth.search.large import LargeSearch
from optsched.bandwidth.search.thresholds import filled
from optsched.bandwidth.topology.cluster import Cluster, Host, HostType
from optsched.bandwidth.topology.intra import IntraTable
from optsched.bandwidth.topology.state import ClusterState
from optsched.errors import InputError

SEEDS = st.integers(0, 10**9)


def random_flat(seed: int, gpus: int, missing: float) -> tuple[TableModel, ClusterState]:
    """Hosts of 1 to 4 GPUs, some of them free."""
    rng = random.Random(seed)
    most = rng.choice([4, 60, 3_000_000_000])
    kinds = host_types(rng, range(1, 5), most)
    hosts, total = [], 0
    while total < gpus:
        n = rng.randint(1, min(4, gpus - total))
        hosts.append(Host(f"n{len(hosts)}", f"h{n}"))
        total += n
    cluster = Cluster(tuple(hosts), kinds)
    free = [gpu for gpu in range(total) if rng.random() < 0.7] or [0]
    return TableModel(cluster, seed, most, missing), ClusterState.with_free(cluster, free)


def plain_best(model: TableModel, state: ClusterState, k: int) -> int | None:
    """Best of all subsets, by the definition."""
    best: int | None = None
    cluster = model.cluster
    for gpus in combinations(state.free, k):
        masks: dict[int, int] = {}
        for gpu in gpus:
            h = int(cluster.host_of[gpu])
            masks[h] = masks.get(h, 0) | 1 << gpu - int(cluster.first[h])
        counts = tuple(sorted((mask.bit_count() for mask in masks.values()), reverse=True))
        limits = [model.value(counts)] if len(counts) > 1 else []
        if limits and limits[0] < 0:
            continue
        for h, mask in masks.items():
            intra = cluster.type(h).intra
            assert intra is not None
            limits += [intra.of(mask)] if mask.bit_count() > 1 else []
        value = min(limits) if k > 1 else 0
        best = value if best is None else max(best, value)
    return best


@given(SEEDS, st.sampled_from([0.0, 0.0, 0.3, 0.8]))
def test_equals_the_best_of_all_subsets(seed: int, missing: float) -> None:
    """Every k, tables that are not monotone, patterns that are not measured."""
    model, state = random_flat(seed, 11, missing)
    search = LargeSearch(model)
    for k in range(1, len(state.free) + 1):
        best = plain_best(model, state, k)
        found = search.choose(state, k)
        if best is None or found is None:
            assert found is None and best is None
            continue
        assert (found.value, found.upper_bound, found.exact) == (best, best, True)
        assert len(set(found.gpus)) == k
        assert set(found.gpus) <= set(state.free)
        assert model.of(found.gpus) == best


@given(SEEDS)
def test_line_rates_equal_the_best_of_all_subsets(seed: int) -> None:
    """Hosts of several types without measurements; irregular bandwidths within them."""
    rng = random.Random(seed)
    kinds = [
        HostType(
            f"t{n}", n, nics=rng.randint(0, 5), nic_rate=rng.randint(1, 60),
            intra=IntraTable(n, [rng.randint(0, 200) * 1_000_000 for _ in range(1 << n)]),
        )
        for n in rng.sample(range(1, 5), 3)
    ]  # fmt: skip
    hosts: list[Host] = []
    while sum(int(host.type[1:]) for host in hosts) < 10:
        hosts.append(Host(f"n{len(hosts)}", rng.choice(kinds).name))
    cluster = Cluster(tuple(hosts), tuple(kinds))
    free = [gpu for gpu in range(cluster.n_gpus) if rng.random() < 0.7] or [0]
    model, state = BottleneckBandwidth(cluster), ClusterState.with_free(cluster, free)
    search = LargeSearch(model)
    for k in range(1, len(free) + 1):
        sets = list(combinations(free, k))
        rows = np.zeros((len(sets), cluster.n_gpus), np.bool_)
        rows[np.arange(len(sets))[:, None], np.array(sets)] = True
        best = int(model.predict(rows).max())
        found = search.choose(state, k)
        assert found is not None
        assert (found.value, found.upper_bound) == (best, best), k
        assert model.of(found.gpus) == best


@given(SEEDS)
def test_beside_tenants_on_few_hosts(seed: int) -> None:
    """Any policy: all counts are tried."""
    rng = random.Random(seed)
    sizes = sizes_of(rng, rng.randint(4, 10))
    model = Tables(rng, sizes, gaps=rng.choice([0, 0, 0.2]))
    state = state_of(rng, model.cluster)
    policy = policy_of(rng, model.cluster)
    wanted = [rng.randint(0, 300) * 1_000_000 for _ in state.jobs]
    k = rng.randint(1, len(state.free))
    found = LargeSearch(model).choose(state, k, wanted, policy)
    values = [v for v, _ in all_subsets(state, model.known, wanted, k, policy)]
    if found is None:
        assert not values
        return
    got = share(model, state, found.gpus, wanted)
    assert (got.value, got.standalone) == (found.value, found.standalone)
    assert found.value == max(values) == found.upper_bound
    assert not policy.fault(state, found.gpus)


@given(SEEDS)
def test_beside_tenants_at_line_rate(seed: int) -> None:
    """The same where network cards alone limit; spreads by hand are never better."""
    rng = random.Random(seed)
    kind = HostType("t", 4, nics=4, nic_rate=25, intra=IntraTable(4, [0, 0, *[150_000_000] * 3]))
    model = BottleneckBandwidth(Cluster.uniform(kind, 3))
    state = state_of(rng, model.cluster)
    wanted = [rng.randint(0, 100) * 1_000_000 for _ in state.jobs]
    k = rng.randint(1, len(state.free))
    found = LargeSearch(model).choose(state, k, wanted)
    assert found is not None
    values = [share(model, state, s, wanted).value for s in combinations(state.free, k)]
    assert share(model, state, found.gpus, wanted).value == found.value
    assert found.value == max(values) == found.upper_bound
    near = [share(model, state, s, wanted).value for s in nearest_sets(state, k)]
    assert found.value >= max(near)


@pytest.mark.parametrize("k", [3, 8])
def test_sums_of_irregular_hosts(k: int) -> None:
    """Counts that hosts cannot give in between."""
    good = np.zeros((4, 9), np.bool_)
    good[0, [1, 8]] = good[1, [1, 8]] = good[2, 3] = good[3, [2, 5]] = True
    ways = {
        m: {sum(p) for some in combinations(good, m) for p in product(*map(np.flatnonzero, some))}
        for m in range(1, 5)
    }
    for m, sums in ways.items():
        counts = filled(good, m, k, np.zeros(4, np.int64))
        assert (counts is not None) == (k in sums)
        if counts is not None:
            assert counts.sum() == k and (counts > 0).sum() == m
            assert all(good[h, c] for h, c in enumerate(counts.tolist()) if c)


@given(SEEDS)
def test_halls_condition_equals_trying_all_ways(seed: int) -> None:
    """Parts to hosts: by the kernel, and by all permutations of up to six hosts."""
    rng = random.Random(seed)
    hosts = [rng.randrange(16) for _ in range(rng.randint(1, 6))]
    parts = [0, 0, 0, 0]
    for _ in range(rng.randint(1, len(hosts))):
        parts[rng.randrange(4)] += 1
    wanted = [c for c in range(4) for _ in range(parts[c])]
    ways = permutations(hosts, len(wanted))
    plain = any(all(h >> c & 1 for h, c in zip(way, wanted, strict=True)) for way in ways)
    sets, number = np.unique(np.array(hosts, np.int64), return_counts=True)
    assert keeps(np.array(parts, np.int64), sets, number.astype(np.int64)) == plain


@pytest.mark.parametrize(("k", "most", "number"), [(16, 8, 186), (32, 8, 3319), (64, 8, 116263)])
def test_numbers_of_partitions(k: int, most: int, number: int) -> None:
    """As many as the literature counts, all distinct, all of sum k."""
    assert count_partitions(k, most) == number
    found = partitions(k, most, k)
    assert len(np.unique(found, axis=0)) == len(found) == number
    assert (found @ np.arange(1, most + 1) == k).all()


@pytest.mark.parametrize("hosts", range(1, 9))
def test_partitions_on_few_hosts(hosts: int) -> None:
    """Those of all partitions that have no more parts than there are hosts."""
    every = partitions(14, 5, 14)
    few = every[every.sum(axis=1) <= hosts]
    assert sorted(partitions(14, 5, hosts).tolist()) == sorted(few.tolist())


def test_many_hosts_against_single_choices() -> None:
    """Forty hosts of eight: no random choice and no exchange of the answer is better."""
    rng = random.Random(3)
    kinds = host_types(rng, [8], 10**6)
    hosts = tuple(Host(f"n{i}", "h8") for i in range(40))
    cluster = Cluster(hosts, kinds)
    model = TableModel(cluster, 3, 10**6)
    state = ClusterState.with_free(cluster, rng.sample(range(320), 220))
    found = LargeSearch(model).choose(state, 24)
    assert found is not None
    assert model.of(found.gpus) == found.value
    selection = np.zeros((3000, 320), np.bool_)
    for row in selection:
        if rng.random() < 0.5:
            row[rng.sample(state.free, 24)] = True
        else:
            row[list(found.gpus)] = True
            row[rng.choice(found.gpus)] = False
            row[rng.choice([gpu for gpu in state.free if gpu not in found.gpus])] = True
    assert model.predict(selection).max() <= found.value


def test_large_hosts() -> None:
    """Hosts of 20 GPUs, counted only."""
    kind = HostType("rack", 20, intra=IntraTable(20, [0, 0, *range(50, 31, -1)]))
    cluster = Cluster.uniform(kind, 3)
    model = TableModel(cluster, 1, 60)
    state = ClusterState.with_free(cluster, (*range(0, 12), *range(25, 36), *range(41, 50)))
    for k in (2, 12, 17, 32):
        found = LargeSearch(model).choose(state, k)
        assert found is not None
        rows = [(a, b, k - a - b) for a in range(13) for b in range(12) if 0 <= k - a - b <= 9]
        selection = np.zeros((len(rows), 60), np.bool_)
        for row, counts in zip(selection, rows, strict=True):
            for h, count in enumerate(counts):
                row[20 * h : 20 * h + count] = True
        assert found.value == model.predict(selection).max() == model.of(found.gpus)
        assert set(found.gpus) <= set(state.free)


def test_too_many_patterns_to_list() -> None:
    """An answer with a bound all the same."""
    kind = HostType("h", 8, intra=IntraTable(8, [0, 0, *range(2, 9)]))
    rack = HostType("rack", 72, intra=IntraTable(72, [0, 0, *range(2, 73)]))
    for cluster, k in ((Cluster.uniform(kind, 40), 100), (Cluster.uniform(rack, 3), 70)):
        model = TableModel(cluster)
        assert FlatSearch(model).best_counts(np.ones((3, k + 1), np.int64), k, np.zeros(3)) is None
        found = LargeSearch(model).choose(ClusterState.idle(cluster), k)
        assert found is not None and model.of(found.gpus) == found.value <= found.upper_bound
    with pytest.raises(InputError, match=r"k: 200 GPUs on hosts of up to 8 have \d+ patterns"):
        partitions(200, 8, 200)
    with pytest.raises(InputError, match="parts up to 70 are too large"):
        partitions(70, 70, 2)


def test_unmeasured_answers_are_never_given() -> None:
    """If the only measured patterns are on one host, the answer is there."""
    model, state = random_flat(8, 16, 1.0)
    k = int(state.room.max())
    assert k > 1
    found = LargeSearch(model).choose(state, k)
    assert found is not None
    assert len({int(model.cluster.host_of[gpu]) for gpu in found.gpus}) == 1
    with pytest.raises(UnmeasuredPattern):
        model.of(state.free)
