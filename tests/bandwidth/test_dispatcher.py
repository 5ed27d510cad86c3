"""One call with a deadline, from a few hosts to hundreds, flat or of pods, idle or with tenants."""

from __future__ import annotations

import random
import time

import pytest
from even_spreads import nearest_sets

from optsched.bandwidth import synthetic
from optsched.bandwidth.models.bottleneck import BottleneckBandwidth
from optsched.bandwidth.models.contention import demands, share
from optsched.bandwidth.models.pods import PodBandwidth
from optsched.bandwidth.search.dispatcher import Dispatcher
from optsched.bandwidth.topology.cluster import Cluster, Host
from optsched.bandwidth.topology.policy import Policy
from optsched.bandwidth.topology.state import ClusterState, Job
from optsched.errors import Infeasible, InputError


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
    return Cluster(tuple(names), (kind,), ("pod",), pod="pod")


@pytest.mark.parametrize("hosts", [2, 6, 12, 20, 64])
@pytest.mark.parametrize("kind", ["flat", "pods"])
@pytest.mark.parametrize("tenants", [False, True])
def test_never_worse_than_even_spreads(hosts: int, kind: str, tenants: bool) -> None:
    """Value and bound hold by the definition; idle clusters are answered exactly."""
    cluster = pods_of(hosts) if kind == "pods" else synthetic.cluster("nvswitch", hosts)
    flat = kind == "flat"
    model = BottleneckBandwidth(cluster) if flat else PodBandwidth(BottleneckBandwidth, cluster)
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
                near = [share(model, state, s, wanted).value for s in nearest_sets(state, k)]
                assert max(near) <= found.value <= found.upper_bound
                assert found.exact or tenants, (k, seed)


def test_a_fitted_model_beyond_tables() -> None:
    """Patterns are listed while they are few; beyond there is a bound of the hosts' links."""
    cluster = synthetic.cluster("nvswitch", 20)
    table = synthetic.network(synthetic.cluster("nvswitch", 4))
    fast = Dispatcher(cluster, BottleneckBandwidth(cluster).fit(table))
    state = state_of(cluster, 0.7, 0, tenants=False)
    for k, exact in ((8, True), (16, True), (90, False)):
        found = fast.answer(state, k, 2.0)
        assert found.exact or not exact
        assert found.value == fast.model.of(found.gpus) <= found.upper_bound < 600_000_000


def test_values_of_tables_are_those_of_the_model() -> None:
    """Of any set, by masks of small hosts and by counts of large ones; what kernels read of it."""
    for cluster in (synthetic.cluster("nvlink_pairs", 3), synthetic.cluster("nvl72", 2)):
        model, rng = BottleneckBandwidth(cluster), random.Random(2)
        tables = model.tables()
        assert tables is not None
        for _ in range(50):
            gpus = tuple(sorted(rng.sample(range(cluster.n_gpus), rng.randint(1, 20))))
            assert tables.value(gpus) == model.of(gpus)
            state = ClusterState.idle(cluster).take(gpus, "a")
            held = [sum(cluster.host_of[list(gpus)] == h) for h in range(cluster.n_hosts)]
            assert state.held.tolist() == [held]
            assert (state.room == cluster.sizes - held).all()
            again = ClusterState(cluster, state.free, state.jobs)
            assert (state.masks == again.masks).all()
            some = [g - cluster.first[1] for g in state.free if cluster.host_of[g] == 1]
            small = cluster.sizes[1] <= 16
            assert state.masks[1] == (sum(1 << int(i) for i in some) if small else len(some))


def test_a_deadline_is_kept() -> None:
    """On a warm machine, with a margin for a busy one."""
    cluster = synthetic.cluster("nvswitch", 12)
    fast = Dispatcher(cluster, BottleneckBandwidth(cluster), traffic="heavy")
    rng = random.Random(5)
    ids = rng.sample(range(96), 96)
    jobs = [Job(f"j{i}", tuple(ids[60 + 9 * i : 69 + 9 * i])) for i in range(4)]
    state = ClusterState(cluster, tuple(ids[:60]), tuple(jobs))
    fast.answer(state, 40, 0.01)
    begin = time.process_time()
    cut = fast.answer(state, 40, 0.02)
    assert time.process_time() - begin < 0.2
    full = fast.answer(state, 40)
    assert cut.value <= full.value <= cut.upper_bound


def test_policies_beyond_tables() -> None:
    """Domains, excluded hosts and numbers of hosts are kept; what cannot be had is infeasible."""
    cluster = pods_of(20)
    model = BottleneckBandwidth(cluster)
    state = state_of(cluster, 0.7, 1, tenants=True)
    for policy in (
        Policy(required="pod"), Policy(exclude=("n0", "n1")), Policy(min_hosts=6),
        Policy(balance="exact"), Policy(preferred="pod"),
    ):  # fmt: skip
        found = Dispatcher(cluster, model, policy=policy).answer(state, 12)
        counts: dict[int, int] = {}
        for gpu in found.gpus:
            h = int(cluster.host_of[gpu])
            counts[h] = counts.get(h, 0) + 1
        assert not policy.broken_by(cluster, counts)
    with pytest.raises(Infeasible, match="required"):
        Dispatcher(cluster, model, policy=Policy(required="pod")).choose(state, 40)
    with pytest.raises(InputError, match="deadline: expected seconds > 0"):
        Dispatcher(cluster, model).choose(state, 2, 0)
