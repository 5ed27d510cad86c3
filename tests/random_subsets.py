"""Random choices of GPUs for one job (`oracles.best_gpus`), and for several."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple

from oracles.best_gpus import (
    Tables,
    _by_host,
    all_subsets,
    policy_of,
    share,
    sizes_of,
    state_of,
)

from optsched.bandwidth.placement.problem import RATIO, GpuPlacement, Request
from optsched.bandwidth.topology.policy import Policy
from optsched.bandwidth.topology.state import ClusterState, Job

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator, Sequence


def random_batch(rng: random.Random, most: int = 9, parts: bool = False) -> GpuPlacement | None:
    """Two or three requests of at most eight free GPUs, tenants, rules; None if too few."""
    gaps = rng.choice([0, 0, 0.15])
    model = Tables(rng, sizes_of(rng, rng.randint(4, most)), gaps=gaps)
    state = state_of(rng, model.cluster)
    jobs = tuple(Job(job.name, job.gpus, rng.randint(0, 200) * 1_000_000) for job in state.jobs)
    state = ClusterState(state.cluster, state.free, jobs, state.down)
    free, many = len(state.free), rng.choice([2, 2, 3])
    if not many <= free <= 8:
        return None
    sizes = [1] * many
    for _ in range(rng.randint(0, free - many)):
        sizes[rng.randrange(many)] += 1
    rules = [policy_of(rng, model.cluster) if rng.random() < 0.4 else Policy() for _ in sizes]
    for i, rule in enumerate(rules):  # whole hosts only, unless parts of hosts are wanted
        names = {word.partition(":")[0] for word in rule.exclude or ()}
        hosts = tuple(names.difference(rule.include or ()))
        rules[i] = rule if parts else replace(rule, within=None, whole=None, exclude=hosts)
    requests = [
        Request(f"r{i}", k, policy) for i, (k, policy) in enumerate(zip(sizes, rules, strict=True))
    ]
    return GpuPlacement(
        state, model, requests=requests, objective=rng.choice(["sum", "max_min"]),
    )  # fmt: skip


def _tuples(free: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """All disjoint subsets of these sizes."""
    if not sizes:
        yield ()
        return
    for chosen in combinations(free, sizes[0]):
        rest = [gpu for gpu in free if gpu not in chosen]
        for more in _tuples(rest, sizes[1:]):
            yield (chosen, *more)


def best_batch(problem: GpuPlacement) -> int | None:
    """The best objective of all disjoint tuples, by the oracle's own evaluation."""
    known: dict[tuple[int, ...], int | None] = {}
    state, model = problem.state, problem.model

    def bandwidth(gpus: tuple[int, ...]) -> int | None:
        if gpus not in known:
            known[gpus] = model.known(gpus)  # type: ignore[attr-defined]
        return known[gpus]

    alone = [
        max(
            (
                value
                for value, _ in all_subsets(
                    state, bandwidth, problem.demands, request.gpus, request.policy,
                )
            ),
            default=0,
        )
        for request in problem.requests
    ]  # fmt: skip
    best = None
    for chosen in _tuples(state.free, [request.gpus for request in problem.requests]):
        if any(
            request.policy.fault(state, gpus)
            for request, gpus in zip(problem.requests, chosen, strict=True)
        ):
            continue
        wanted = [bandwidth(gpus) for gpus in chosen]
        if None in wanted:
            continue
        values = []
        for r, gpus in enumerate(chosen):
            others = [o for o in range(len(chosen)) if o != r]
            jobs = (*state.jobs, *(Job(f"other {o}", chosen[o]) for o in others))
            around = state.with_jobs(jobs)
            demands = (*problem.demands, *(wanted[o] for o in others))
            values.append(share(around, bandwidth, demands, gpus))  # type: ignore[arg-type]
        if None in values:
            continue
        if problem.objective == "sum":
            worth = sum(values)  # type: ignore[arg-type]
        else:
            worth = min(
                value * RATIO // most if most else RATIO  # type: ignore[operator]
                for value, most in zip(values, alone, strict=True)
            )
        best = worth if best is None else max(best, worth)
    return best


class Subset(NamedTuple):
    """A choice, its value, and what it leaves."""

    value: int
    gpus: tuple[int, ...]
    rest: tuple[int, ...]
    """Minus domains by level and hosts, then hosts left whole, weight of the best pairs of the
    rest, sum of best bandwidths of it."""


def best_subset(
    state: ClusterState,
    bandwidth: Callable[[tuple[int, ...]], int | None],
    demands: Sequence[int],
    k: int,
    policy: Policy | None = None,
    tolerance: int = 0,
) -> Subset | None:
    """The choice that the rules of `GpuPlacement` single out, or None if nothing is allowed.

    `tolerance` in millionths; other parameters as in `all_subsets`.
    """
    found = list(all_subsets(state, bandwidth, demands, k, policy))
    if not found:
        return None
    best = max(value for value, _ in found)
    least = best - best * tolerance // 1_000_000
    judged = [
        Subset(value, gpus, rest(state, bandwidth, gpus)) for value, gpus in found if value >= least
    ]
    return max(judged, key=lambda s: (s.rest, s.value, [-gpu for gpu in s.gpus]))


def rest(
    state: ClusterState,
    bandwidth: Callable[[tuple[int, ...]], int | None],
    chosen: tuple[int, ...],
) -> tuple[int, ...]:
    """Minus domains and hosts; hosts left whole, heaviest pairs and best bandwidths of the rest."""
    left = _by_host(state, set(state.free) - set(chosen))
    whole = pairs = best = 0
    for h in range(state.cluster.n_hosts):
        gpus = left.get(h, [])
        whole += len(gpus) == int(state.cluster.sizes[h])
        pairs += _matching(tuple(gpus), bandwidth)
        for c in range(2, len(gpus) + 1):
            best += max(bandwidth(some) or 0 for some in combinations(gpus, c))
    hosts = {int(state.cluster.host_of[gpu]) for gpu in chosen}
    ways = [(*state.cluster.hosts[h].domains, h) for h in hosts]
    used = (-len({way[: level + 1] for way in ways}) for level in range(len(ways[0])))
    return *used, whole, pairs, best


def _matching(gpus: tuple[int, ...], bandwidth: Callable[[tuple[int, ...]], int | None]) -> int:
    if len(gpus) < 2:
        return 0
    first, others = gpus[0], gpus[1:]
    best = _matching(others, bandwidth)
    for k, other in enumerate(others):
        pair = bandwidth((first, other)) or 0
        best = max(best, pair + _matching(others[:k] + others[k + 1 :], bandwidth))
    return best


def subsets_of(gpus: tuple[int, ...]) -> list[tuple[int, ...]]:
    """All subsets, in order of size."""
    return [some for c in range(len(gpus) + 1) for some in combinations(gpus, c)]


def allowed(problem: GpuPlacement) -> bool:
    """Whether the policy allows any set at all, measured or not."""
    every = combinations(problem.state.free, problem.k)
    return any(not problem.policy.fault(problem.state, chosen) for chosen in every)
