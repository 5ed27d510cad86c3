"""Small random clusters of pods with tables that are not monotone, and their plain evaluation."""

from __future__ import annotations

import random
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from optsched.bandwidth.models.model import CountModel, alone, unlimited
from optsched.bandwidth.models.pods import PodBandwidth
from optsched.bandwidth.topology.cluster import Cluster, Host, HostType
from optsched.bandwidth.topology.intra import IntraTable
from optsched.bandwidth.topology.rates import UNMEASURED
from optsched.bandwidth.topology.state import ClusterState, Job

if TYPE_CHECKING:
    from collections.abc import Iterable


class TableModel(CountModel):
    """A network value for every pattern, drawn from a seed; some patterns are not measured."""

    def __init__(
        self, cluster: Cluster, seed: int = 0, most: int = 60, missing: float = 0.0
    ) -> None:
        self.cluster = cluster
        self.seed, self.most, self.missing = seed, most, missing

    def value(self, pattern: tuple[int, ...]) -> int:
        """Limit of falling counts on two hosts or more; `UNMEASURED` where there is none."""
        rng = random.Random(f"{self.seed} {pattern}")
        return UNMEASURED if rng.random() < self.missing else rng.randint(0, self.most)

    def network(self, patterns: Any, which: str = "value") -> Any:
        """Limits by pattern."""
        limits = unlimited(patterns)
        for i in np.flatnonzero(~alone(patterns)):
            limits[i] = self.value(tuple(int(c) for c in patterns[i] if c))
        return limits

    def intra_of(self, kind: int, which: str = "value") -> Any:
        """The measured table of the type."""
        table = self.cluster.types[kind].intra
        return None if table is None else table.values


def host_types(rng: random.Random, sizes: Iterable[int], most: int) -> tuple[HostType, ...]:
    """A type of every size, with a value for every subset, or for every count."""
    kinds = []
    for n in sizes:
        length = n + 1 if rng.random() < 0.3 else 1 << n
        values = [rng.randint(0, most) for _ in range(length)]
        kinds.append(HostType(f"h{n}", n, intra=IntraTable(n, values)))
    return tuple(kinds)


class Case(NamedTuple):
    """A cluster of pods with its model, a state and demands by job."""

    model: PodBandwidth
    state: ClusterState
    demands: list[int]


def random_case(seed: int, gpus: int = 11, jobs: int = 0, missing: float = 0.0) -> Case:
    """Pods whose hosts are not side by side, of 1 to 4 GPUs a host."""
    rng = random.Random(seed)
    most = rng.choice([5, 60, 100_000, 3_000_000_000])
    kinds = host_types(rng, range(1, 5), most)
    n_pods, hosts, total = rng.randint(1, 5), [], 0
    while total < gpus:
        n = rng.randint(1, min(4, gpus - total))
        pod = rng.randrange(n_pods)
        hosts.append(Host(f"n{len(hosts)}", f"h{n}", (f"b{pod % 2}", f"p{pod}")))
        total += n
    cluster = Cluster(tuple(hosts), kinds, ("block", "pod"), pod="pod")
    table_seed = rng.randrange(1 << 30)
    model = PodBandwidth(
        lambda pod: TableModel(pod, table_seed, most, missing),
        cluster,
        rng.choice([0.3, 0.7, 0.95, 1.0, 1 / 3]),
        rng.choice(["nic", "zero"]),
    )
    owner = [rng.choice([-2, *[-1] * (jobs + 2), *range(jobs)]) for _ in range(total)]
    free = [gpu for gpu in range(total) if owner[gpu] == -1] or [0]
    running = [
        Job(f"j{j}", held)
        for j in range(jobs)
        if (held := tuple(g for g in range(total) if owner[g] == j and g not in free))
    ]
    busy = {gpu for job in running for gpu in job.gpus}
    down = tuple(gpu for gpu in range(total) if gpu not in busy and gpu not in free)
    demands = [rng.choice([0, rng.randint(0, most), rng.randint(0, most)]) for _ in running]
    return Case(model, ClusterState(cluster, tuple(free), tuple(running), down), demands)


def plain_bandwidth(model: PodBandwidth, gpus: Iterable[int]) -> int | None:
    """B(S) by the definition, in plain integers; None where a pattern is not measured."""
    cluster = model.cluster
    by_pod: dict[str, dict[int, list[int]]] = {}
    for gpu in gpus:
        h = int(cluster.host_of[gpu])
        local = gpu - int(cluster.first[h])
        by_pod.setdefault(cluster.hosts[h].domains[1], {}).setdefault(h, []).append(local)
    names = list(dict.fromkeys(host.domains[1] for host in cluster.hosts))
    table = model.locals[0]
    assert isinstance(table, TableModel)
    total = sum(len(ids) for hosts in by_pod.values() for ids in hosts.values())
    if total <= 1:
        return 0
    values = []
    for hosts in by_pod.values():
        counts = sorted((len(ids) for ids in hosts.values()), reverse=True)
        if counts == [1]:
            values.append(0 if model.one_gpu_pod == "zero" else table.value((1, 1)))
            continue
        limits = [table.value(tuple(counts))] if len(counts) > 1 else []
        for h, ids in hosts.items():
            intra = cluster.type(h).intra
            assert intra is not None
            if len(ids) > 1:
                limits.append(intra.of(sum(1 << i for i in ids)))
        values.append(UNMEASURED if len(counts) > 1 and limits[0] < 0 else min(limits))
    if min(values) < 0:
        return None
    if len(values) == 1:
        return values[0]
    used = [names.index(name) for name in by_pod]
    exponent = max(1, max(used) - min(used)) + len(used) - 2
    power = int(Fraction(model.factor) ** exponent * 2**30)
    return min(values) * power // 2**30


def plain_value(case: Case, gpus: tuple[int, ...]) -> int | None:
    """B(S, tau) by the definition, joint allocations taking the first local ids of a host."""
    cluster = case.model.cluster
    host = cluster.host_of
    d = plain_bandwidth(case.model, gpus)
    hosts = {int(host[gpu]) for gpu in gpus}
    total, capacity = d, None
    for job, demand in zip(case.state.jobs, case.demands, strict=True):
        its = {int(host[gpu]) for gpu in job.gpus}
        if demand == 0 or len(hosts) < 2 or len(its) < 2 or not hosts & its:
            continue
        both = [int(host[gpu]) for gpu in (*gpus, *job.gpus)]
        joint = [int(cluster.first[h]) + i for h in hosts | its for i in range(both.count(h))]
        limit = plain_bandwidth(case.model, joint)
        if limit is None or total is None:
            return None
        capacity = limit if capacity is None else min(capacity, limit)
        total += demand
    if d is None or total is None or capacity is None or total <= capacity:
        return d
    return d * capacity // total
