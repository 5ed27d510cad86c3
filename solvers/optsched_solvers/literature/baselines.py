"""Dispatchers that ask for no bandwidths: `topo`, `proximity`, `random_subset`."""

from __future__ import annotations

import random
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import numpy as np

from optsched.bandwidth.models.model import UnmeasuredPattern
from optsched.bandwidth.placement.problem import GpuPlacement, GpuSets
from optsched.bandwidth.topology.links import published_weight, weight
from optsched.bandwidth.topology.proximity import proximity
from optsched.errors import InputError
from optsched.solving.result import Result
from optsched_solvers.gpus.judge import RULES, free_on, grounds, supported

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from optsched.bandwidth.topology.cluster import Cluster, HostType
    from optsched.model.schedule import IntArray, Problem
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor
    from optsched.solving.solver import Support

WEIGHTS: Final = ("nearness", "published")


class _Baseline:
    """Chooses without looking at bandwidths."""

    kinds = ("gpus",)
    options: Mapping[str, str] = MappingProxyType({})

    def runs_inline(self, problem: Problem) -> bool:
        """Always."""
        return True

    def supports(self, problem: Problem) -> Support:
        """One request, no rule but `exclude` and `apart`."""
        return supported(problem, RULES, measured=False)


class Proximity(_Baseline):
    """What schedulers do by default (BandPilot's "Default"); see `bandwidth.proximity`.

    Of a policy it obeys `exclude` and `apart`.
    """

    name = "proximity"

    def solve(self, problem: Problem, limits: Limits, monitor: Monitor) -> Result:
        """Choose once; the bandwidth is computed afterwards."""
        assert isinstance(problem, GpuPlacement)
        chosen = proximity(problem.cluster, _free(problem), problem.k)
        return _answer(problem, chosen, monitor, self.name)


class Topo(_Baseline):
    """The fewest hosts, on them GPUs with the nearest links to each other.

    If one host suffices: the one whose greedy choice has the highest sum of link weights. Else
    hosts by falling number of free GPUs, whole, and of the last as many as are missing. The greedy
    choice begins with every GPU in turn, adds the GPU whose links to the chosen ones weigh most,
    and the heaviest of all is taken. Ties go to the lowest ids. It obeys `exclude` and
    `apart`.
    """

    name = "topo"
    options: Mapping[str, str] = MappingProxyType(
        {
            "weights": 'of links: by "nearness" (default: SYS < NODE < PHB < PXB < PIX < NVLinks), '
            'or as "published", PXB above PIX'
        }
    )

    def solve(self, problem: Problem, limits: Limits, monitor: Monitor) -> Result:
        """Choose once; the bandwidth is computed afterwards."""
        assert isinstance(problem, GpuPlacement)
        given = limits.options.get("weights", "nearness")
        if not isinstance(given, str) or given not in WEIGHTS:
            raise InputError(f"options.weights: expected nearness or published, got {given!r:.60}")
        rank = published_weight if given == "published" else weight
        chosen = nearest_links(problem.cluster, _free(problem), problem.k, rank)
        return _answer(problem, chosen, monitor, self.name)


class RandomSubset(_Baseline):
    """k of the free GPUs, every set as likely as any other. It obeys `exclude` and `apart`."""

    name = "random_subset"

    def solve(self, problem: Problem, limits: Limits, monitor: Monitor) -> Result:
        """Draw once, by the seed of the limits."""
        assert isinstance(problem, GpuPlacement)
        chosen = sorted(random.Random(limits.seed).sample(_free(problem), problem.k))
        return _answer(problem, chosen, monitor, self.name)


def nearest_links(
    cluster: Cluster, free: Sequence[int], k: int, rank: Callable[[str], int] = weight
) -> tuple[int, ...]:
    """The choice of `Topo`, ascending.

    Parameters
    ----------
    cluster
        Hosts and their links; where these are unknown all weigh the same.
    free
        Global numbers, ascending, at least k.
    k
        How many.
    rank
        Weight of a link.
    """
    by_host: dict[int, list[int]] = {}
    for gpu in free:
        h = int(cluster.host_of[gpu])
        by_host.setdefault(h, []).append(gpu - int(cluster.first[h]))
    tables = {t: _link_weights(cluster.types[t], rank) for t in set(cluster.type_of)}
    fitting = [h for h, local in by_host.items() if len(local) >= k]
    if fitting:
        picks = {h: greedy(tables[cluster.type_of[h]], by_host[h], k) for h in fitting}
        host = max(fitting, key=lambda h: (picks[h][0], -h))
        return tuple(int(cluster.first[host]) + i for i in picks[host][1])
    chosen: list[int] = []
    for h in sorted(by_host, key=lambda h: (-len(by_host[h]), h)):
        count = min(len(by_host[h]), k - len(chosen))
        _, local = greedy(tables[cluster.type_of[h]], by_host[h], count)
        chosen += [int(cluster.first[h]) + i for i in local]
        if len(chosen) == k:
            break
    return tuple(sorted(chosen))


def greedy(weights: IntArray, free: Sequence[int], count: int) -> tuple[int, list[int]]:
    """Summed link weight and local ids, ascending, of the heaviest greedy choice."""
    ids = list(free)
    if count == len(ids) or count == 1:
        some = ids[:count]
        return int(weights[np.ix_(some, some)].sum()) // 2, some
    near = weights[np.ix_(ids, ids)]
    best, heaviest = list(range(count)), -1
    for seed in range(len(ids)):
        total, chosen = 0, [seed]
        gain = near[seed].copy()
        gain[seed] = -1
        while len(chosen) < count:
            nearest = int(np.argmax(gain))
            total += int(gain[nearest])
            chosen.append(nearest)
            gain += near[nearest]
            gain[chosen] = -1
        chosen.sort()
        if total > heaviest or (total == heaviest and chosen < best):
            best, heaviest = chosen, total
    return heaviest, [ids[i] for i in best]


def _link_weights(kind: HostType, rank: Callable[[str], int]) -> IntArray:
    table = np.zeros((kind.gpus, kind.gpus), np.int64)
    if kind.links is not None:
        of = {link: rank(link) for row in kind.links for link in row if link != "X"}
        for i, row in enumerate(kind.links):
            table[i] = [of.get(link, 0) for link in row]
    return table


def _free(problem: GpuPlacement) -> list[int]:
    """Free GPUs on hosts that the policy does not exclude, of the fabric that has most of them."""
    return max((free_on(problem, hosts) for hosts in grounds(problem)), key=len)


def _answer(problem: GpuPlacement, chosen: Sequence[int], monitor: Monitor, name: str) -> Result:
    """Report a choice with what it is worth, if the model knows that."""
    try:
        value = problem.worth([chosen])
    except UnmeasuredPattern as error:
        return Result("unknown", reason=f"its choice has no known bandwidth: {error.args[0]}")
    monitor.advance(1)
    monitor.incumbent(GpuSets.of([chosen]), -value, name)
    return Result("unknown")
