"""Choice on flat idle clusters equals brute force; its parts equal their plain twins."""

from __future__ import annotations

import random
from itertools import combinations, permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_pods import TableModel, host_types

from optsched.bandwidth.cluster import Cluster, Host, HostType
from optsched.bandwidth.flat import FlatSearch, choose_flat, count_partitions, keeps, partitions
from optsched.bandwidth.intra import IntraTable
from optsched.bandwidth.model import UnmeasuredPattern
from optsched.bandwidth.state import ClusterState
from optsched.errors import Infeasible, InputError

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
    search = FlatSearch(model)
    for k in range(1, len(state.free) + 1):
        best = plain_best(model, state, k)
        if best is None:
            with pytest.raises(InputError, match="not measured"):
                search.choose(state, k)
            continue
        found = search.choose(state, k)
        assert (found.value, found.upper_bound, found.exact) == (best, best, True)
        assert len(set(found.gpus)) == k
        assert set(found.gpus) <= set(state.free)
        assert model.of(found.gpus) == best


@given(SEEDS, st.integers(2, 14))
def test_listing_is_kept_between_states(seed: int, k: int) -> None:
    """A search that has seen other states answers as a fresh one."""
    model, first = random_flat(seed, 20, 0.0)
    search = FlatSearch(model)
    states = [first, ClusterState.idle(model.cluster), first]
    for state in states:
        if k <= len(state.free):
            assert search.choose(state, k) == choose_flat(model, state, k)


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
    found = choose_flat(model, state, 24)
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


def test_of_equal_values_the_lowest_ids() -> None:
    """Where all is worth the same."""
    kind = HostType("h", 4, intra=IntraTable(4, [7] * 16))

    class Seven(TableModel):
        def value(self, pattern: tuple[int, ...]) -> int:
            return 7

    cluster = Cluster.uniform(kind, 3)
    state = ClusterState.with_free(cluster, (2, 3, 4, 5, 6, 9, 10))
    found = choose_flat(Seven(cluster), state, 3)
    assert found.value == 7
    assert found.gpus == (4, 5, 6)  # one host has no limit of the network
    assert choose_flat(Seven(cluster), state, 7).gpus == state.free


def test_large_hosts() -> None:
    """Hosts of 20 GPUs, counted only."""
    kind = HostType("rack", 20, intra=IntraTable(20, [0, 0, *range(50, 31, -1)]))
    cluster = Cluster.uniform(kind, 3)
    model = TableModel(cluster, 1, 60)
    state = ClusterState.with_free(cluster, (*range(0, 12), *range(25, 36), *range(41, 50)))
    for k in (2, 12, 17, 32):
        found = choose_flat(model, state, k)
        rows = [(a, b, k - a - b) for a in range(13) for b in range(12) if 0 <= k - a - b <= 9]
        selection = np.zeros((len(rows), 60), np.bool_)
        for row, counts in zip(selection, rows, strict=True):
            for h, count in enumerate(counts):
                row[20 * h : 20 * h + count] = True
        assert found.value == model.predict(selection).max() == model.of(found.gpus)
        assert set(found.gpus) <= set(state.free)


def test_hostile_requests() -> None:
    """Too many patterns or GPUs, no k, another cluster; each is said in a sentence."""
    kind = HostType("h", 8, intra=IntraTable(8, [0, 0, *range(2, 9)]))
    cluster = Cluster.uniform(kind, 200)
    model, idle = TableModel(cluster), ClusterState.idle(cluster)
    with pytest.raises(InputError, match=r"k: 200 GPUs on hosts of up to 8 have \d+ patterns"):
        choose_flat(model, idle, 200)
    for k in (0, -3, 1601, 2.0, "8"):
        with pytest.raises(InputError, match="k: expected an integer"):
            choose_flat(model, idle, k)  # type: ignore[arg-type]
    few = ClusterState.with_free(cluster, (0, 9, 11))
    with pytest.raises(Infeasible, match="k: asks 4 GPUs, free are 3 on 2 hosts"):
        choose_flat(model, few, 4)
    with pytest.raises(InputError, match="another cluster"):
        choose_flat(model, ClusterState.idle(Cluster.uniform(kind, 2)), 4)
    rack = HostType("rack", 72, intra=IntraTable(72, [0, 0, *range(2, 73)]))
    racks = Cluster.uniform(rack, 2)
    with pytest.raises(InputError, match="parts up to 70 are too large"):
        choose_flat(TableModel(racks), ClusterState.idle(racks), 70)


def test_unmeasured_answers_are_never_given() -> None:
    """If the only measured patterns are on one host, the answer is there."""
    model, state = random_flat(8, 16, 1.0)
    k = int(state.room.max())
    assert k > 1
    found = choose_flat(model, state, k)
    assert len({int(model.cluster.host_of[gpu]) for gpu in found.gpus}) == 1
    with pytest.raises(UnmeasuredPattern):
        model.of(state.free)
