"""Random little choices of GPUs, and the best one by trying every subset; shares no code."""

from __future__ import annotations

import random
from functools import cache
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from optsched.bandwidth.models.contention import Contention
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
    """A model of random numbers; what it should say, `known` says in another way."""

    def __init__(self, rng: random.Random, sizes: list[int], *, gaps: float = 0.0) -> None:
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
        self.cluster = Cluster(tuple(hosts), tuple(kinds), ("block", "rack"))
        self.rng, self.gaps = random.Random(rng.random()), gaps
        self.limits: dict[tuple[int, ...], int] = {}
        few = rng.random() < 0.5  # few distinct values: many ties
        self.values = [10, 20, 40] if few else list(range(3, 60))

    def limit(self, pattern: tuple[int, ...]) -> int:
        """The network's limit of falling counts."""
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
        """The limits of all rows."""
        return np.array(
            [self.limit(tuple(c for c in row if c)) for row in patterns.tolist()], np.int64
        ).reshape(len(patterns))

    def intra_of(self, kind: int, which: str = "value") -> Any:
        """The type's own table."""
        return self.cluster.types[kind].intra.values  # type: ignore[union-attr]

    def known(self, gpus: tuple[int, ...]) -> int | None:
        """B(S), in plain Python."""
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
        return value


def sizes_of(rng: random.Random, most: int) -> list[int]:
    """GPUs of a few hosts, in all at most so many."""
    sizes: list[int] = []
    while sum(sizes) < most and len(sizes) < 5:
        sizes.append(min(rng.choice([1, 2, 2, 3, 4, 4, 6]), most - sum(sizes)))
    return sizes


def state_of(rng: random.Random, cluster: Cluster) -> ClusterState:
    """Some GPUs free, some down, some held by up to three jobs."""
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


def contention_of(rng: random.Random) -> Contention:
    """Any but those with exact joint allocations."""
    return Contention(
        fill=rng.choice(["first", "best"]), sides=rng.choice(["one", "two"]),
        cross_only=rng.random() < 0.7, skip_idle=rng.random() < 0.7, whole=rng.random() < 0.2,
    )  # fmt: skip


def policy_of(rng: random.Random, cluster: Cluster) -> Policy:
    """None, or a rule or two."""
    rules: dict[str, Any] = {}
    if rng.random() < 0.5:
        return Policy()
    for key in rng.sample(
        [
            "required", "balance", "hosts", "type", "include", "exclude", "slice", "apart",
            "max_per_host", "within", "whole",
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
        elif key in ("within", "whole"):
            rules[key] = rng.choice(["numa", "nvlink", "NV4", "PIX"])
        elif key == "slice":
            rules.update(slice_size=rng.randint(1, 2), slice_level=rng.choice(["rack", "host"]))
    return Policy(**rules)


@cache
def subset_problems(n: int, seed: int = 0, most: int = 9) -> tuple[GpuPlacement, ...]:
    """Random choices from clusters of at most so many GPUs, each with its oracle in the model."""
    return tuple(
        random_subset(random.Random(k), most, f"subset choice {k}") for k in range(seed, seed + n)
    )


def random_subset(rng: random.Random, most: int = 9, name: str = "") -> GpuPlacement:
    """A choice from a cluster of at most so many GPUs."""
    model = Tables(rng, sizes_of(rng, rng.randint(2, most)))
    state = state_of(rng, model.cluster)
    k = rng.randint(1, len(state.free))
    rule, policy = contention_of(rng), policy_of(rng, model.cluster)
    if rng.random() < 0.5:
        rule, policy = Contention(), Policy()
    return GpuPlacement(state, model, k, policy=policy, contention=rule, name=name)


@cache
def optimum(problem: GpuPlacement) -> int | None:
    """Optimal objective by trying all subsets; None if there is no choice."""
    assert isinstance(problem.model, Tables)
    values = all_subsets(
        problem.state, problem.model.known, problem.demands, problem.k, problem.contention,
        problem.policy,
    )  # fmt: skip
    return min((-value for value, _ in values), default=None)


def all_subsets(
    state: ClusterState,
    bandwidth: Callable[[tuple[int, ...]], int | None],
    demands: Sequence[int],
    k: int,
    contention: Contention,
    policy: Policy | None = None,
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Value and GPUs of every allowed set of k free GPUs whose bandwidths are all known.

    Parameters
    ----------
    state
        Free GPUs and running jobs.
    bandwidth
        Standalone bandwidth of a set in kB/s; None where it is not known.
    demands
        Of the running jobs.
    k, contention, policy
        The request.
    """
    for chosen in combinations(state.free, k):
        if policy is not None and policy.fault(state, chosen):
            continue
        value = share(state, bandwidth, demands, chosen, contention)
        if value is not None:
            yield value, chosen


def share(
    state: ClusterState,
    bandwidth: Callable[[tuple[int, ...]], int | None],
    demands: Sequence[int],
    chosen: Iterable[int],
    rule: Contention,
) -> int | None:
    """What a choice gets beside the running jobs; None if a bandwidth is not known."""
    unit = 1_000_000 if rule.whole else 1
    own = tuple(chosen)
    alone = bandwidth(own)
    if alone is None:
        return None
    alone -= alone % unit
    hosts, capacities, total = _by_host(state, own), [], alone
    for job, demand in zip(state.jobs, demands, strict=True):
        theirs = _by_host(state, job.gpus)
        if not set(hosts) & set(theirs) or len(theirs) < 2:
            continue
        if (rule.cross_only and len(hosts) < 2) or (rule.skip_idle and demand == 0):
            continue
        where = [set(hosts) | set(theirs)]
        if rule.sides == "two":
            where = [set(hosts), set(theirs)]
        for around in where:
            joint: list[int] = []
            for h in around:
                both = [*hosts.get(h, []), *theirs.get(h, [])]
                joint += _fill(state, bandwidth, h, both, rule.fill)
            reached = bandwidth(tuple(sorted(joint)))
            if reached is None:
                return None
            capacities.append(reached - reached % unit)
        total += demand
    if not capacities or total <= min(capacities):
        return alone
    return alone * min(capacities) // total


def _by_host(state: ClusterState, gpus: Iterable[int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for gpu in sorted(gpus):
        found.setdefault(int(state.cluster.host_of[gpu]), []).append(gpu)
    return found


def _fill(
    state: ClusterState,
    bandwidth: Callable[[tuple[int, ...]], int | None],
    host: int,
    both: list[int],
    fill: str,
) -> list[int]:
    """The GPUs that a joint allocation is taken to have on a host."""
    if fill == "exact":
        return both
    first, size = int(state.cluster.first[host]), int(state.cluster.sizes[host])
    every = range(first, first + size)
    if fill == "first" or len(both) < 2:
        return list(every[: len(both)])
    subsets = list(combinations(every, len(both)))
    return list(max(subsets, key=lambda some: bandwidth(tuple(some)) or 0))
