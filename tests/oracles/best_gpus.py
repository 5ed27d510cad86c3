"""Small random GPU placements and their optimum by brute force over all subsets."""

from __future__ import annotations

import random
from functools import cache
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from optsched.bandwidth.models.model import CountModel
from optsched.bandwidth.placement.problem import GpuPlacement
from optsched.bandwidth.topology.cluster import Cluster, Host, HostType
from optsched.bandwidth.topology.intra import IntraTable
from optsched.bandwidth.topology.policy import Policy
from optsched.bandwidth.topology.rates import NO_LIMIT, UNMEASURED
from optsched.bandwidth.topology.state import ClusterState, Job

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence


class Tables(CountModel):
    """Model of random integers; `known` computes B(S) independently, in plain Python.

    Parameters
    ----------
    rng
        Source of all numbers.
    sizes
        GPUs of every host.
    gaps
        Share of patterns without a value.
    levels
        Draw factors and uplinks of the levels too.
    """

    def __init__(
        self, rng: random.Random, sizes: list[int], *, gaps: float = 0.0, levels: bool = False
    ) -> None:
        kinds: list[HostType] = []
        hosts, racks = [], rng.randint(1, 3)
        for i, n in enumerate(sizes):
            same = [kind for kind in kinds if kind.gpus == n]
            if same and rng.random() < 0.6:
                kind = rng.choice(same)
            else:
                values = [rng.randint(2, 40) * 10_000_000 for _ in range(1 << n)]
                inner, ids = random.Random(repr(values)), range(n)
                side = [inner.randrange(2) for _ in ids]
                numa = tuple(tuple(g for g in ids if side[g] == s) for s in {*side})
                links = [["X"] * n for _ in ids]
                for a, b in combinations(ids, 2):
                    links[a][b] = links[b][a] = inner.choice(["SYS", "SYS", "PIX", "NV1", "NV4"])
                kind = HostType(
                    f"t{i}", n, tuple(map(tuple, links)), numa, intra=IntraTable(n, values)
                )
                kinds.append(kind)
            rack = i * racks // len(sizes)
            hosts.append(Host(f"n{i}", kind.name, (f"b{rack // 2}", f"r{rack}")))
        names = ("block", "rack")
        self.cluster = Cluster(tuple(hosts), tuple(kinds), names, **_limits(rng, names, levels))
        self.rng, self.gaps = random.Random(rng.random()), gaps
        self.limits: dict[tuple[int, ...], int] = {}
        few = rng.random() < 0.5  # few distinct values: many ties
        self.values = [10, 20, 40] if few else list(range(3, 60))

    def limit(self, pattern: tuple[int, ...]) -> int:
        """Network limit of a pattern (falling counts)."""
        if sum(pattern) <= 1:
            return 0
        if len(pattern) == 1:
            return NO_LIMIT
        if pattern not in self.limits:
            rng = random.Random(repr((pattern, self.cluster.sha256)))
            lost = rng.random() < self.gaps
            self.limits[pattern] = UNMEASURED if lost else rng.choice(self.values) * 9_000_001
        return self.limits[pattern]

    def network(self, patterns: Any, which: str = "value") -> Any:
        """Limit of every row."""
        return np.array(
            [self.limit(tuple(c for c in row if c)) for row in patterns.tolist()], np.int64
        ).reshape(len(patterns))

    def intra_of(self, kind: int, which: str = "value") -> Any:
        """Table of the host type."""
        return self.cluster.types[kind].intra.values  # type: ignore[union-attr]

    def known(self, gpus: tuple[int, ...]) -> int | None:
        """B(S) from the definition; None if the pattern is not measured."""
        if len(gpus) <= 1:
            return 0
        by_host: dict[int, int] = {}
        for gpu in gpus:
            h = int(self.cluster.host_of[gpu])
            by_host[h] = by_host.get(h, 0) | 1 << (gpu - int(self.cluster.first[h]))
        pattern = tuple(sorted((m.bit_count() for m in by_host.values()), reverse=True))
        value = self.limit(pattern)
        if value == UNMEASURED:
            return None
        for h, mask in by_host.items():
            if mask.bit_count() >= 2:
                value = min(value, self.cluster.type(h).intra.of(mask))  # type: ignore[union-attr]
        return value if len(by_host) == 1 else self._beyond(value, list(by_host), len(gpus))

    def _beyond(self, value: int, hosts: list[int], gpus: int) -> int:
        """Bandwidth of several hosts after the uplinks and the factor of their lowest level."""
        cluster, m = self.cluster, len(hosts)
        if not any(set(hosts) <= set(fabric) for fabric in cluster.fabrics):
            return 0
        factor = 1.0
        for i in range(len(cluster.levels), -1, -1):  # from the lowest level to the whole cluster
            inside = {cluster.hosts[h].domains[:i] for h in hosts}
            name = cluster.levels[i - 1] if i else "cluster"
            factor = min(factor, cluster.factors.get(name, 1.0))
            if len(inside) == 1:
                break
            if i and name in cluster.uplinks:
                rate = round(cluster.uplinks[name] * 1_000_000)
                line = rate * ((gpus - 1) / gpus) * (m / (m - 1))
                value = min(value, round(line))
        return value * round(factor * 1_000_000) // 1_000_000


def _limits(rng: random.Random, names: tuple[str, ...], wanted: bool) -> dict[str, Any]:
    """Factors and uplinks for some of these levels."""
    if not wanted:
        return {}
    levels = ("cluster", *names)  # from the top down
    factors = dict(zip(levels, sorted(rng.choices([1.0, 0.75, 0.5], k=len(levels))), strict=True))
    uplinks = {name: float(rng.randint(20, 300)) for name in names if rng.random() < 0.5}
    return {"factors": factors, "uplinks": uplinks}


def sizes_of(rng: random.Random, most: int) -> list[int]:
    """Draw the GPUs of a few hosts, at most `most` in total."""
    sizes: list[int] = []
    while sum(sizes) < most and len(sizes) < 5:
        sizes.append(min(rng.choice([1, 2, 2, 3, 4, 4, 6]), most - sum(sizes)))
    return sizes


def state_of(rng: random.Random, cluster: Cluster) -> ClusterState:
    """Draw free GPUs, up to three jobs and GPUs that are down."""
    gpus = list(range(cluster.n_gpus))
    rng.shuffle(gpus)
    n_free = rng.randint(max(1, len(gpus) // 3), len(gpus))
    free, busy = gpus[:n_free], gpus[n_free:]
    jobs: list[Job] = []
    while busy and len(jobs) < 3:
        take = rng.randint(1, len(busy))
        demand = rng.choice([None, 0, rng.randint(1, 400) * 1_000_000])
        jobs.append(Job(f"j{len(jobs)}", tuple(busy[:take]), demand))
        busy = busy[take:]
    return ClusterState(cluster, tuple(free), tuple(jobs), tuple(busy))


def policy_of(rng: random.Random, cluster: Cluster) -> Policy:
    """Draw a policy of no rule or two."""
    rules: dict[str, Any] = {}
    if rng.random() < 0.5:
        return Policy()
    for key in rng.sample(
        [
            "required", "balance", "hosts", "type", "include", "exclude", "apart",
            "max_per_host",
        ], 2,
    ):  # fmt: skip
        name = rng.choice(cluster.hosts).name
        if key == "required":
            rules["required"] = rng.choice(["block", "rack", "host"])
        elif key == "balance":
            rules["balance"] = rng.choice(["even", "exact"])
        elif key == "hosts":
            rules["min_hosts"] = rng.randint(1, 2)
            rules["max_hosts"] = rng.choice([None, 2, 3])
        elif key == "type":
            rules["same_type"] = True
        elif key == "include" and (name,) != rules.get("exclude"):
            rules["include"] = (name,)
        elif key == "exclude" and (name,) != rules.get("include"):
            rules["exclude"] = (rng.choice([name, f"{name}:0"]),)
        elif key == "apart":
            rules.update(apart=("j0", "gone"), apart_level=rng.choice(["host", "host", "rack"]))
        elif key == "max_per_host":
            rules["max_per_host"] = rng.randint(1, 3)
    return Policy(**rules)


@cache
def subset_problems(n: int, seed: int = 0, most: int = 9) -> tuple[GpuPlacement, ...]:
    """Draw placements on clusters of at most `most` GPUs, with models of class `Tables`."""
    return tuple(
        random_subset(random.Random(k), most, f"subset choice {k}") for k in range(seed, seed + n)
    )


def random_subset(rng: random.Random, most: int = 9, name: str = "") -> GpuPlacement:
    """Draw a placement on a cluster of at most `most` GPUs."""
    model = Tables(rng, sizes_of(rng, rng.randint(2, most)), levels=rng.random() < 0.5)
    state = state_of(rng, model.cluster)
    k = rng.randint(1, len(state.free))
    policy = policy_of(rng, model.cluster)
    return GpuPlacement(state, model, k, policy=policy, name=name)


@cache
def optimum(problem: GpuPlacement) -> int | None:
    """Optimal objective by brute force; None if no choice is feasible."""
    assert isinstance(problem.model, Tables)
    values = all_subsets(
        problem.state, problem.model.known, problem.demands, problem.k, problem.policy
    )
    return min((-value for value, _ in values), default=None)


def all_subsets(
    state: ClusterState,
    bandwidth: Callable[[tuple[int, ...]], int | None],
    demands: Sequence[int],
    k: int,
    policy: Policy | None = None,
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Value and GPUs of every feasible set of k free GPUs whose bandwidths are all known.

    Parameters
    ----------
    state
        Free GPUs and running jobs.
    bandwidth
        Standalone bandwidth of a set in kB/s; None where it is not known.
    demands
        Of the running jobs, kB/s.
    k, policy
        The request.
    """
    for chosen in combinations(state.free, k):
        if policy is not None and policy.fault(state, chosen):
            continue
        value = share(state, bandwidth, demands, chosen)
        if value is not None:
            yield value, chosen


def share(
    state: ClusterState,
    bandwidth: Callable[[tuple[int, ...]], int | None],
    demands: Sequence[int],
    chosen: Iterable[int],
) -> int | None:
    """Bandwidth of a choice in competition with the running jobs; None if not known.

    Jobs interfere that share a host with it, if both use two hosts or more and the job's demand is
    above 0; not a job whose hosts no network joins. A joint allocation has the first local ids of
    every host of either.
    """
    alone = bandwidth(tuple(chosen))
    if alone is None:
        return None
    hosts, capacities, total = _by_host(state, chosen), [], alone
    for job, demand in zip(state.jobs, demands, strict=True):
        held = _by_host(state, job.gpus)
        if not set(hosts) & set(held) or min(len(held), len(hosts)) < 2 or demand == 0:
            continue
        if not any(set(held) <= set(fabric) for fabric in state.cluster.fabrics):
            continue
        joint: list[int] = []
        for h in sorted(set(hosts) | set(held)):
            first = int(state.cluster.first[h])
            joint += range(first, first + len(hosts.get(h, [])) + len(held.get(h, [])))
        capacity = bandwidth(tuple(joint))
        if capacity is None:
            return None
        capacities.append(capacity)
        total += demand
    if not capacities or total <= min(capacities):
        return alone
    return alone * min(capacities) // total


def _by_host(state: ClusterState, gpus: Iterable[int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for gpu in sorted(gpus):
        found.setdefault(int(state.cluster.host_of[gpu]), []).append(gpu)
    return found
