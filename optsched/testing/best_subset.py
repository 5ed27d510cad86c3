"""The best subset of free GPUs by trying all of them; shares no code with any solver."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from optsched.bandwidth import Contention, Policy
    from optsched.bandwidth.state import ClusterState


class Subset(NamedTuple):
    """A choice, its value, and what it leaves."""

    value: int
    gpus: tuple[int, ...]
    rest: tuple[int, int, int]
    """Hosts left whole, weight of the best pairs of the rest, sum of best bandwidths of it."""


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
    host_of = state.cluster.host_of.tolist()
    for chosen in combinations(state.free, k):
        counts: dict[int, int] = {}
        for gpu in chosen:
            counts[host_of[gpu]] = counts.get(host_of[gpu], 0) + 1
        if policy is not None and policy.broken_by(state.cluster, counts):
            continue
        value = share(state, bandwidth, demands, chosen, contention)
        if value is not None:
            yield value, chosen


def best_subset(
    state: ClusterState,
    bandwidth: Callable[[tuple[int, ...]], int | None],
    demands: Sequence[int],
    k: int,
    contention: Contention,
    policy: Policy | None = None,
    tolerance: int = 0,
) -> Subset | None:
    """The choice that the rules of `GpuPlacement` single out, or None if nothing is allowed.

    `tolerance` in millionths; other parameters as in `all_subsets`.
    """
    found = list(all_subsets(state, bandwidth, demands, k, contention, policy))
    if not found:
        return None
    best = max(value for value, _ in found)
    least = best - best * tolerance // 1_000_000
    judged = [
        Subset(value, gpus, rest(state, bandwidth, gpus)) for value, gpus in found if value >= least
    ]
    return max(judged, key=lambda s: (s.rest, s.value, [-gpu for gpu in s.gpus]))


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


def rest(
    state: ClusterState,
    bandwidth: Callable[[tuple[int, ...]], int | None],
    chosen: tuple[int, ...],
) -> tuple[int, int, int]:
    """Hosts left whole, heaviest pairs of the rest, and its best bandwidths, summed by host."""
    left = _by_host(state, set(state.free) - set(chosen))
    whole = pairs = best = 0
    for h in range(state.cluster.n_hosts):
        gpus = left.get(h, [])
        whole += len(gpus) == int(state.cluster.sizes[h])
        pairs += _matching(tuple(gpus), bandwidth)
        for c in range(2, len(gpus) + 1):
            best += max(bandwidth(some) or 0 for some in combinations(gpus, c))
    return whole, pairs, best


def _matching(gpus: tuple[int, ...], bandwidth: Callable[[tuple[int, ...]], int | None]) -> int:
    if len(gpus) < 2:
        return 0
    first, others = gpus[0], gpus[1:]
    best = _matching(others, bandwidth)
    for k, other in enumerate(others):
        pair = bandwidth((first, other)) or 0
        best = max(best, pair + _matching(others[:k] + others[k + 1 :], bandwidth))
    return best


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
