"""Choice across pods equals brute force over all subsets: idle, and beside running jobs."""

from __future__ import annotations

import random
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from random_pods import Case, TableModel, host_types, plain_bandwidth, plain_value, random_case

from optsched.bandwidth.models.contention import share
from optsched.bandwidth.models.pods import PodBandwidth
from optsched.bandwidth.search import pod_search
from optsched.bandwidth.search.large import LargeSearch
from optsched.bandwidth.search.pod_local import local_values
from optsched.bandwidth.search.pod_search import (
    PodChoice,
    choose_pods,
    fewest_pods,
    search_windows,
)
from optsched.bandwidth.search.pod_windows import capacity_needed
from optsched.bandwidth.topology.cluster import Cluster, Host, HostType
from optsched.bandwidth.topology.intra import IntraTable
from optsched.bandwidth.topology.policy import Policy
from optsched.bandwidth.topology.rates import MOST
from optsched.bandwidth.topology.state import ClusterState, Job
from optsched.errors import InputError
from optsched.testing.best_gpus import contention_of

SEEDS = st.integers(0, 10**9)


def best_of_all(case: Case, k: int) -> int | None:
    """The best value of all subsets; None if none of them is measured."""
    values = (plain_value(case, gpus) for gpus in combinations(case.state.free, k))
    return max((value for value in values if value is not None), default=None)


def assert_best(case: Case, k: int) -> None:
    """The answer is one of the best, its value what the definition says."""
    best = best_of_all(case, k)
    if best is None:
        with pytest.raises(InputError, match="not measured"):
            choose_pods(case.model, case.state, k, case.demands)
        return
    found = choose_pods(case.model, case.state, k, case.demands)
    assert len(set(found.gpus)) == k
    assert set(found.gpus) <= set(case.state.free)
    assert found == PodChoice(best, found.gpus, best, True)
    assert plain_value(case, found.gpus) == best


@given(SEEDS, st.sampled_from([0.0, 0.0, 0.2, 0.6]))
def test_idle_is_the_best_of_all_subsets(seed: int, missing: float) -> None:
    """Without jobs, for every k, whether or not all patterns are measured."""
    case = random_case(seed, missing=missing)
    for k in range(1, len(case.state.free) + 1):
        assert_best(case, k)


@given(SEEDS, st.integers(1, 5), st.sampled_from([0.0, 0.0, 0.2]))
def test_beside_tenants_is_the_best_of_all_subsets(seed: int, jobs: int, missing: float) -> None:
    """With jobs over hosts and pods."""
    case = random_case(seed, gpus=13, jobs=jobs, missing=missing)
    n = len(case.state.free)
    for k in {n, *random.Random(seed).sample(range(1, n + 1), min(3, n))}:
        assert_best(case, k)


def test_a_job_without_measured_joint_allocations_hides_no_other() -> None:
    """Once a set of jobs that no measured choice touches ended the search for larger ones."""
    assert_best(random_case(3001590, gpus=13, jobs=2, missing=0.2), 3)


@given(SEEDS, st.integers(1, 4), st.sampled_from([0, 1, 300, 3000]))
def test_little_work_leaves_a_bound(seed: int, jobs: int, work: int) -> None:
    """The value is reached, the best is between value and bound, and a proof is one."""
    case = random_case(seed, gpus=12, jobs=jobs)
    k = random.Random(seed).randint(1, len(case.state.free))
    best = best_of_all(case, k)
    found = choose_pods(case.model, case.state, k, case.demands, work)
    assert best is not None
    assert found.value == plain_value(case, found.gpus) <= best <= found.upper_bound
    assert len(set(found.gpus)) == k
    assert found.exact == (found.value == found.upper_bound)


@given(SEEDS, st.integers(0, 4))
@example(65, 0)  # a pod with one GPU, which a rule forbade
def test_any_contention_and_policy_beside_few_hosts(seed: int, jobs: int) -> None:
    """What the search across pods does not take: all counts are tried."""
    case, rng = random_case(seed, gpus=9, jobs=jobs), random.Random(seed)
    state, cluster = case.state, case.state.cluster
    gpu = f"{cluster.hosts[0].name}:0"
    rules = Policy(), Policy(max_hosts=2), Policy(max_per_host=2), Policy(exclude=(gpu,))
    rule, policy = contention_of(rng), rng.choice([*rules, Policy(whole="numa", max_hosts=3)])
    k = rng.randint(1, len(state.free))
    found = LargeSearch(case.model).choose(state, k, case.demands, policy, rule)
    values = []
    for gpus in combinations(state.free, k):
        if not policy.fault(state, gpus):
            values.append(share(case.model, state, gpus, case.demands, rule).value)
    if found is None:
        assert not values
        return
    got = share(case.model, state, found.gpus, case.demands, rule)
    assert (got.value, got.standalone) == (found.value, found.standalone)
    assert found.value == max(values) == found.upper_bound


@given(SEEDS, st.sampled_from([0.0, 0.3]))
def test_local_values_equal_their_plain_twin(seed: int, missing: float) -> None:
    """Of every pod and count: the best of all subsets of its free GPUs, of several GPUs."""
    case = random_case(seed, gpus=14, missing=missing)
    model, state = case.model, case.state
    cluster, tables, k = model.cluster, model.pod_tables, 1 + seed % 9
    local = np.full(len(model.pods) * (k + 1), -1, np.int64)
    local_values(*tables[:4], state.masks, k, k + 1, local)
    for p, hosts in enumerate(model.hosts_of):
        free = [gpu for gpu in state.free if cluster.host_of[gpu] in hosts]
        for count in range(2, k + 1):
            subsets = (plain_bandwidth(model, gpus) for gpus in combinations(free, count))
            plain = max((value for value in subsets if value is not None), default=-1)
            assert local[p * (k + 1) + count] == plain


@given(SEEDS)
def test_in_one_pod_the_lowest_ids_of_the_best(seed: int) -> None:
    """Of all best subsets the one that comes first in the order of sorted ids."""
    rng = random.Random(seed)
    kinds = host_types(rng, range(1, 5), 3)
    hosts = [Host(f"n{i}", f"h{rng.randint(1, 4)}", ("p",)) for i in range(4)]
    cluster = Cluster(tuple(hosts), kinds, ("pod",), pod="pod")
    model = PodBandwidth(lambda pod: TableModel(pod, seed, 3), cluster)
    free = [gpu for gpu in range(cluster.n_gpus) if rng.random() < 0.8]
    state = ClusterState.with_free(cluster, free)
    local = TableModel(cluster, seed, 3)
    for k in range(2, len(free) + 1):
        rows = list(combinations(free, k))
        selection = np.zeros((len(rows), cluster.n_gpus), np.bool_)
        for row, gpus in zip(selection, rows, strict=True):
            row[list(gpus)] = True
        values = local.predict(selection)
        assert choose_pods(model, state, k).gpus == rows[int(np.argmax(values))]


@given(SEEDS)
def test_windows_equal_their_plain_twin(seed: int) -> None:
    """The kernel over pods, on tables of its own: all count vectors over up to five pods."""
    rng = random.Random(seed)
    n_pods, width, k = rng.randint(1, 5), rng.randint(2, 5), rng.randint(2, 9)
    rows = [[rng.choice([-1, *range(9)]) for _ in range(width)] for _ in range(n_pods)]
    local = np.array(rows, np.int64)
    local[:, 0] = -1
    powers = np.array([int(rng.choice([0.6, 0.9, 1]) ** e * 2**30) for e in range(2 * n_pods)])
    powers = np.minimum.accumulate(powers)
    best = -1
    for counts in product(range(width), repeat=n_pods):
        used = [p for p in range(n_pods) if counts[p]]
        if sum(counts) != k or min(rows[p][counts[p]] for p in used) < 0:
            continue
        v = min(rows[p][counts[p]] for p in used)
        m = len(used)
        best = max(best, v if m == 1 else v * int(powers[used[-1] - used[0] + m - 2]) >> 30)
    chosen = np.zeros(n_pods, np.int64)
    assert search_windows(local.reshape(-1), width, powers, k, chosen) == best
    if best >= 0:
        assert chosen.sum() == k


@given(SEEDS)
def test_fewest_pods_equals_its_plain_twin(seed: int) -> None:
    """Exactly k with as few pods as can be."""
    rng = random.Random(seed)
    n_pods, width, k, least = rng.randint(1, 5), rng.randint(2, 5), rng.randint(1, 9), 4
    rows = [[rng.randint(0, 8) for _ in range(width)] for _ in range(n_pods)]
    a = rng.randrange(n_pods)
    b = rng.randrange(a, n_pods)
    sums = [
        sum(c > 0 for c in counts)
        for counts in product(range(width), repeat=b - a + 1)
        if sum(counts) == k and all(c == 0 or rows[a + i][c] >= least for i, c in enumerate(counts))
    ]
    layers = np.zeros((n_pods + 1) * (k + 1), np.int64)
    table = np.array(rows, np.int64).reshape(-1)
    found = fewest_pods(table, width, a, b, k, least, layers)
    assert found == min(sums) if sums else found > n_pods


@given(st.integers(-1, 50), st.integers(0, 60), st.integers(0, 200))
def test_capacity_needed_is_least(aim: int, more: int, demand: int) -> None:
    """One less does not give the value; the capacity itself does."""
    d = max(aim, 0) + more

    def value(capacity: int) -> int:
        return d if d + demand <= capacity else d * capacity // (d + demand)

    least = capacity_needed(aim, d, demand)
    assert value(least) >= aim
    assert least == 0 or value(least - 1) < aim


def test_capacity_needed_does_not_overflow() -> None:
    """Demands of many jobs beside a tiny bandwidth: no capacity is enough."""
    assert capacity_needed(3, 3, 62 * MOST) == MOST
    assert capacity_needed(MOST - 1, MOST - 1, 5) == MOST


def by_hand() -> tuple[PodBandwidth, Cluster]:
    """Three pods of one host with two GPUs: 100 kB/s within a host, a single GPU has 60."""
    kind = HostType("h", 2, intra=IntraTable(2, [0, 0, 100]))
    hosts = tuple(Host(f"n{i}", "h", (f"p{i}",)) for i in range(3))
    cluster = Cluster(hosts, (kind,), ("pod",), pod="pod")

    class Sixty(TableModel):
        def value(self, pattern: tuple[int, ...]) -> int:
            return 60

    return PodBandwidth(Sixty, cluster, 0.5), cluster


def test_by_hand() -> None:
    """Pods side by side halve the value; a third one halves it twice more (span and number)."""
    model, cluster = by_hand()
    idle = ClusterState.idle(cluster)
    assert [choose_pods(model, idle, k).value for k in range(1, 7)] == [0, 100, 30, 50, 7, 12]
    gone = ClusterState.with_free(cluster, (0, 1, 4, 5))
    assert choose_pods(model, gone, 4).value == 25
    assert choose_pods(model, gone, 4).gpus == (0, 1, 4, 5)
    assert choose_pods(model, idle, 2).gpus == (0, 1)


def test_a_job_by_hand() -> None:
    """A job on two hosts is passed by if others are free; else its demand is shared."""
    model, cluster = by_hand()
    state = ClusterState(cluster, (1, 3, 4, 5), (Job("a", (0, 2), 30),))
    assert choose_pods(model, state, 2, [30]).gpus == (4, 5)
    with_it = choose_pods(model, state, 4, [30])  # alone 60 / 8, with the job 100 / 8, demand 30
    assert with_it.value == 7 * 12 // 37
    assert choose_pods(model, state, 4, [0]).value == 7


def test_answers_are_the_same_twice_and_in_order() -> None:
    """GPUs ascend, and equal requests have equal answers."""
    case = random_case(5, gpus=14, jobs=3)
    k = max(2, len(case.state.free) // 2)
    one = choose_pods(case.model, case.state, k, case.demands)
    assert list(one.gpus) == sorted(one.gpus)
    assert one == choose_pods(case.model, case.state, k, case.demands)


def test_of_equal_values_the_lowest_ids() -> None:
    """Where every choice is worth the same, the first GPUs of the first pod."""
    kind = HostType("h", 4, intra=IntraTable(4, [7] * 16))
    hosts = tuple(Host(f"n{i}", "h", (f"p{i // 2}",)) for i in range(4))
    cluster = Cluster(hosts, (kind,), ("pod",), pod="pod")

    class Seven(TableModel):
        def value(self, pattern: tuple[int, ...]) -> int:
            return 7

    model = PodBandwidth(Seven, cluster, 1.0)
    state = ClusterState.with_free(cluster, (2, 3, 4, 5, 6, 9, 10, 12, 13))
    assert choose_pods(model, state, 4).gpus == (2, 3, 4, 5)
    assert choose_pods(model, state, 7).gpus == (2, 3, 4, 5, 6, 9, 10)


def test_large_hosts_are_counted() -> None:
    """Hosts of more than 16 GPUs, whose GPUs are alike: brute force over counts."""
    values = [0, 0, *(90 - 3 * c for c in range(2, 19))]
    kind = HostType("rack", 18, intra=IntraTable(18, values))
    hosts = tuple(Host(f"r{i}", "rack", (f"p{i}",)) for i in range(2))
    cluster = Cluster(hosts, (kind,), ("pod",), pod="pod")
    model = PodBandwidth(TableModel, cluster, 0.9)
    free = (*range(3, 14), *range(20, 30))
    state = ClusterState.with_free(cluster, free)
    for k in (2, 11, 12, 20, 21):
        found = choose_pods(model, state, k)
        best = max(plain_value_of_counts(model, (a, k - a)) for a in range(12) if 0 <= k - a <= 10)
        assert found.value == best
        assert set(found.gpus) <= set(free)
        assert len(found.gpus) == k


def plain_value_of_counts(model: PodBandwidth, counts: tuple[int, int]) -> int:
    """B(S) of so many GPUs on both hosts."""
    row = [*range(counts[0]), *range(18, 18 + counts[1])]
    selection = np.zeros((1, 36), np.bool_)
    selection[0, row] = True
    return int(model.predict(selection)[0])


def test_too_much_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pods times GPUs asked are limited."""
    model, cluster = by_hand()
    monkeypatch.setattr(pod_search, "MOST_CELLS", 10)
    with pytest.raises(InputError, match="k: 5 GPUs on 3 pods are more than this search has"):
        choose_pods(model, ClusterState.idle(cluster), 5)
