"""The best choice of GPUs by all subsets, with the rule among equal choices."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple

from oracles.best_gpus import _by_host, all_subsets

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from optsched.bandwidth.placement.problem import GpuPlacement
    from optsched.bandwidth.topology.policy import Policy
    from optsched.bandwidth.topology.state import ClusterState


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
) -> Subset | None:
    """The choice that the rules of `GpuPlacement` single out, or None if nothing is allowed."""
    found = list(all_subsets(state, bandwidth, demands, k, policy))
    if not found:
        return None
    best = max(value for value, _ in found)
    here = state if policy is None else policy.usable(state)  # what it excludes is not left
    judged = [
        Subset(value, gpus, rest(here, bandwidth, gpus)) for value, gpus in found if value == best
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
