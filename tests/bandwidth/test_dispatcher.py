"""One call with a deadline, from a few hosts to hundreds, idle or with tenants."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING

import pytest
from oracles.best_gpus import Tables, all_subsets, policy_of, sizes_of
from oracles.best_gpus import share as value_of
from oracles.best_gpus import state_of as some_state

from optsched.bandwidth import synthetic
from optsched.bandwidth.models.bottleneck import BottleneckBandwidth
from optsched.bandwidth.models.contention import demands, share
from optsched.bandwidth.search.dispatcher import Dispatcher
from optsched.bandwidth.topology.cluster import Cluster, Host
from optsched.bandwidth.topology.policy import Policy
from optsched.bandwidth.topology.state import ClusterState, Job
from optsched.errors import Infeasible, InputError

if TYPE_CHECKING:
    from collections.abc import Iterable


def state_of(cluster: Cluster, free: float, seed: int, tenants: bool) -> ClusterState:
    """Some GPUs free; the others down, or held by jobs on a few hosts side by side."""
    rng = random.Random(seed)
    ids = [gpu for gpu in range(cluster.n_gpus) if rng.random() < free]
    busy = sorted(set(range(cluster.n_gpus)) - set(ids))
    if not tenants:
        return ClusterState.with_free(cluster, ids)
    jobs = []
    while busy:
        n = rng.choice([1, 4, 8, 16])
        jobs.append(Job(f"j{len(jobs)}", tuple(busy[:n])))
        busy = busy[n:]
    return ClusterState(cluster, tuple(ids), tuple(jobs))


def pods_of(hosts: int) -> Cluster:
    """Hosts of eight GPUs, four a pod."""
    kind = synthetic.cluster("nvswitch", 1).types[0]
    names = (Host(f"n{i}", kind.name, (f"p{i // 4}",)) for i in range(hosts))
    return Cluster(tuple(names), (kind,), ("pod",))


@pytest.mark.parametrize("hosts", [2, 6, 12, 20, 64])
@pytest.mark.parametrize("pods", [False, True])
@pytest.mark.parametrize("tenants", [False, True])
def test_values_and_bounds_hold_by_the_definition(hosts: int, pods: bool, tenants: bool) -> None:
    """Value and bound hold by the definition; idle clusters are answered exactly."""
    cluster = pods_of(hosts) if pods else synthetic.cluster("nvswitch", hosts)
    model = BottleneckBandwidth(cluster)
    fast = Dispatcher(cluster, model, traffic="heavy")
    for seed in range(2):
        state = state_of(cluster, 0.6, seed, tenants)
        wanted = demands(model, state, "heavy")
        for k in (1, 2, 8, 20, 64, 96, 200):
            if k > len(state.free):
                continue
            for deadline in (None, 0.01):
                found = fast.answer(state, k, deadline)
                assert len(set(found.gpus)) == k and set(found.gpus) <= set(state.free)
                got = share(model, state, found.gpus, wanted)
                assert (got.value, got.standalone) == (found.value, found.standalone)
                assert found.value <= found.upper_bound
                assert found.exact or tenants, (k, seed)


def test_values_of_sets_are_those_of_the_model() -> None:
    """Of any set, by masks of small hosts and by counts of large ones; what kernels read of it."""
    leveled = synthetic.cluster("nvswitch", 6, levels={"leaf": 2, "rack": 4})
    leveled = replace(leveled, factors={"leaf": 0.7})
    for cluster in (synthetic.cluster("nvlink_pairs", 3), synthetic.cluster("nvl72", 2), leveled):
        model, rng = BottleneckBandwidth(cluster), random.Random(2)
        for _ in range(50):
            gpus = tuple(sorted(rng.sample(range(cluster.n_gpus), rng.randint(1, 20))))
            assert model.tables().value(gpus) == model.of(gpus)
            state = ClusterState.idle(cluster).take(gpus, "a")
            held = [sum(cluster.host_of[list(gpus)] == h) for h in range(cluster.n_hosts)]
            assert state.held.tolist() == [held]
            assert (state.room == cluster.sizes - held).all()
            again = ClusterState(cluster, state.free, state.jobs)
            assert (state.masks == again.masks).all()
            some = [g - cluster.first[1] for g in state.free if cluster.host_of[g] == 1]
            small = cluster.sizes[1] <= 16
            assert state.masks[1] == (sum(1 << int(i) for i in some) if small else len(some))


def two_types(other: str) -> tuple[Cluster, BottleneckBandwidth]:
    """24 hosts in pods of four, every other one of another type; and their model."""
    types = [synthetic.cluster(name, 1).types[0] for name in ("nvswitch", other)]
    hosts = (Host(f"n{i}", types[i % 2].name, (f"p{i // 4}",)) for i in range(24))
    cluster = Cluster(tuple(hosts), tuple(types), ("pod",))
    return cluster, BottleneckBandwidth(cluster)


def test_rules_that_leave_few_choices_beyond_tables() -> None:
    """What a count of free GPUs shows to be possible is found, at once where no time is left."""
    cluster, model = two_types("pcie")
    ways = {
        Policy(same_type=True): lambda room: sum(room[0::2]),
        Policy(max_per_host=2): lambda room: sum(min(n, 2) for n in room),
    }
    for policy, most_of in ways.items():
        dispatcher = Dispatcher(cluster, model, policy=policy)
        for seed in range(3):
            state = state_of(cluster, 0.2 + 0.2 * seed, seed, tenants=True)
            most = most_of(state.room.tolist())
            for k in {most, most // 8 * 8} - {0}:
                for deadline in (1e-6, None):
                    found = dispatcher.answer(state, k, deadline)
                    assert not policy.fault(state, found.gpus), (policy, seed, k)
                    assert found.value <= found.upper_bound
    with pytest.raises(Infeasible, match="required"):
        Dispatcher(cluster, model, policy=Policy(required="pod")).choose(state, 40)
    with pytest.raises(InputError, match="deadline: expected seconds > 0"):
        dispatcher.choose(state, 2, 0)


def test_one_host_of_many() -> None:
    """All on one host is answered and scored by what each host gives, whatever the deadline."""
    cluster, model = two_types("nvlink_pairs")
    state = state_of(cluster, 0.5, 3, tenants=True)
    for policy in (
        Policy(required="host"),
        Policy(required="host", exclude=("n2",)),
    ):
        fast = Dispatcher(cluster, model, policy=policy)
        for k in (1, 2, 3):
            value = {}
            for host in cluster.hosts:
                free = [gpu for gpu in state.free if cluster.hosts[cluster.host_of[gpu]] is host]
                sets = [one for one in combinations(free, k) if not policy.fault(state, one)]
                if sets:
                    value[host.name] = max(model.of(one) for one in sets)
            best = max(value.values())
            found = fast.answer(state, k, deadline=1e-6)
            assert found.exact and found.value == found.standalone == best
            assert model.of(found.gpus) == best and not policy.fault(state, found.gpus)
            assert fast.scores(state, k, deadline=1e-6, packing=0) == {
                name: 100 * one // best if best else 100 for name, one in value.items()
            }
    with pytest.raises(Infeasible, match="required"):
        fast.scores(state.fail("n1"), 8)


def domains_used(cluster: Cluster, level: str | None, hosts: Iterable[int]) -> int:
    """Number of domains of a level; 0 without one."""
    if level is None:
        return 0
    domains = cluster.domains(cluster.level(level)).values()
    return sum(not {*some}.isdisjoint(hosts) for some in domains)


def test_verbs_against_all_subsets() -> None:
    """Scores, the best choices and what-if of random small cases, with tables and beyond.

    Fewer domains of a preferred level come before bandwidth in all of them.
    """
    done = 0
    for seed in range(150):
        rng = random.Random(seed)
        model = Tables(rng, sizes_of(rng, 9))
        cluster, known = model.cluster, model.known
        state = some_state(rng, cluster)
        policy = policy_of(rng, cluster)
        level = rng.choice([None, None, "block", "rack", "host"])
        policy = replace(policy, preferred=level)
        k, n = rng.randint(1, len(state.free)), rng.randint(1, 6)
        best_of: dict[tuple[int, ...], tuple[int, int]] = {}  # minus domains, then bandwidth
        host: dict[int, tuple[int, int]] = {}
        wanted = demands(model, state, "heavy")
        for value, gpus in all_subsets(state, known, wanted, k, policy):
            of = tuple(cluster.host_of[list(gpus)].tolist())
            worth = -domains_used(cluster, level, of), value
            best_of[of] = max(worth, best_of.get(of, worth))
            host |= {h: max(worth, host.get(h, worth)) for h in of}
        top = sorted(best_of.values(), reverse=True)[:n]
        for large in (False, True):
            fast = Dispatcher(cluster, model, policy=policy, traffic="heavy")
            if large:
                fast._tables = None
            if not top:
                with pytest.raises(Infeasible):
                    fast.scores(state, k)
                with pytest.raises(Infeasible):
                    fast.best(state, k, n)
                continue
            found, scores = fast.best(state, k, n), fast.scores(state, k, packing=0)
            best = top[0][1]
            part = {h: min(99, 100 * v // best) if best else 99 for h, (_, v) in host.items()}
            full = {h: 100 if host[h] == top[0] else part[h] for h in sorted(host)}
            expected = {cluster.hosts[h].name: score for h, score in full.items()}
            values = [
                (-domains_used(cluster, level, cluster.host_of[list(one.gpus)]), one.value)
                for one in found
            ]
            assert (values, scores) == (top, expected), seed
            assert len({tuple(cluster.host_of[list(one.gpus)]) for one in found}) == len(found)
            assert values == sorted(values, reverse=True) and values[0] == top[0], seed
            assert all(scores[name] <= expected.get(name, 0) for name in scores)
            for one in found:
                assert best_of[tuple(cluster.host_of[list(one.gpus)])][1] >= one.value
                assert share(model, state, one.gpus, wanted).value == one.value
                assert not policy.fault(state, one.gpus)
            done += large
        gpus = tuple(sorted(rng.sample(state.free, k)))
        what = fast.what_if(state, gpus)
        assert what.share == share(model, state, gpus, wanted)
        assert what.best == (top[0][1] if top else None)
        assert bool(what.fault) == bool(policy.fault(state, gpus))
        around = [*state.jobs, Job("new", gpus)]
        own = known(gpus) or 0
        for j, job in enumerate(state.jobs):
            theirs, asked = state.jobs[:j] + state.jobs[j + 1 :], wanted[:j] + wanted[j + 1 :]
            before = value_of(state.with_jobs(theirs), known, asked, job.gpus)
            there = state.with_jobs([one for one in around if one is not job])
            after = value_of(there, known, (*asked, own), job.gpus)
            lost = (before or 0) - (after or 0)
            assert what.victims.get(job.name, 0) == max(0, lost), seed
    assert done > 80


@pytest.mark.parametrize("levels", [{}, {"pod": 4}])
def test_every_host_of_a_large_cluster_is_scored_at_once(levels: dict[str, int]) -> None:
    """A choice with each host is found long before all could be asked for; none is left at 0."""
    cluster = synthetic.cluster("nvswitch", 96, levels=levels)
    model = BottleneckBandwidth(cluster)
    state = ClusterState.with_free(cluster, [g for g in range(cluster.n_gpus) if g % 5])
    found = Dispatcher(cluster, model).scores(state, 24, deadline=0.001, packing=0)
    assert len(found) == 96
    assert min(found.values()) > 0
    assert max(found.values()) == 100
