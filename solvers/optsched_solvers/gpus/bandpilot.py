"""Searches and baselines of BandPilot (arXiv 2506.15595, 4.3): `eha`, `pts`, `hybrid`, `topo`, ...

All judge candidates by `contention.shares`, many at a time; none proves a bound.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import numpy as np

from optsched.bandwidth.models.contention import shares
from optsched.bandwidth.models.model import CountModel, UnmeasuredPattern
from optsched.bandwidth.placement.problem import GpuPlacement
from optsched.bandwidth.search.by_counts import fewest, trays_first
from optsched.bandwidth.topology.intra import MOST_BY_SUBSET
from optsched.bandwidth.topology.policy import Policy
from optsched.io.values import integer
from optsched.solving.result import Result
from optsched.solving.solver import Support
from optsched_solvers.gpus.even_spreads import candidates
from optsched_solvers.gpus.proximity import proximity
from optsched_solvers.gpus.topo import nearest_links

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence

    from optsched.bandwidth.models.model import Selection
    from optsched.model.schedule import IntArray, Problem
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor

UNKNOWN: Final = "no candidate of this search has a known bandwidth"
"""Reason of a result without a choice, unless a limit is the reason."""

RULES: Final = ("exclude", "apart", "apart_level")
"""Rules of a policy that all these solvers obey: they leave fewer free GPUs."""

MAX_CANDIDATES: Final = 200
MOST_CANDIDATES: Final = 100_000
MOST_HOSTS: Final = 4096
MOST_ALONE: Final = 16
"""Hosts up to which each is a class of its own; beyond, equivalent hosts are one class."""

_MOST_NUMBERS: Final = 10_000_000  # in the array of candidates
_BLOCK: Final = 256  # candidates that are evaluated at once

Found = tuple[int, tuple[int, ...]]  # value, -1 if it is not known, and GPUs


def supported(problem: Problem, rules: Sequence[str]) -> Support:
    """Whether a search that obeys only these rules (fields of `Policy`) takes a problem."""
    if not isinstance(problem, GpuPlacement):
        return Support(False, "it only chooses GPUs (GpuPlacement)")
    if problem.cluster.rails:
        return Support(False, "it cannot keep to rails (counts can)")
    free, policy = Policy(), problem.policy
    for rule in Policy.__dataclass_fields__:
        if rule not in rules and getattr(policy, rule) != getattr(free, rule):
            return Support(False, f"it cannot obey the policy's {rule}")
    return Support(True)


def host_sets(problem: GpuPlacement) -> list[list[int]]:
    """Sets of hosts with enough free GPUs in which every choice is feasible."""
    cluster, policy = problem.cluster, problem.policy
    free = policy.usable(problem.state).room
    domains: Iterable[Sequence[int]] = [range(cluster.n_hosts)]
    if (level := policy.level(cluster)) is not None:
        domains = cluster.domains(level).values()
    sets = ([h for h in hosts if free[h]] for hosts in domains)
    return [hosts for hosts in sets if int(free[hosts].sum()) >= problem.k]


def free_on(problem: GpuPlacement, hosts: Iterable[int]) -> list[int]:
    """Usable free GPUs of some hosts, by global number."""
    free = np.array(problem.policy.usable(problem.state).free, np.int64)
    found: list[int] = free[np.isin(problem.cluster.host_of[free], list(hosts))].tolist()
    return found


class Judge:
    """Bandwidths of choices beside the running jobs, many at a time; see `contention.shares`."""

    def __init__(self, problem: GpuPlacement) -> None:
        self.problem, self.cluster = problem, problem.cluster
        self.state = problem.policy.usable(problem.state)
        self._best: dict[tuple[int, int], tuple[int, ...]] = {}

    def values(self, rows: Selection) -> IntArray:
        """Bandwidth of every row of a selection; -1 where it is not known."""
        problem = self.problem
        return shares(problem.model, problem.state, rows, problem.demands).value

    def selection(self, sets: Sequence[Sequence[int]]) -> Selection:
        """Sets of GPUs as booleans, shape (n, GPUs)."""
        rows = np.zeros((len(sets), self.cluster.n_gpus), np.bool_)
        for row, gpus in zip(rows, sets, strict=True):
            row[list(gpus)] = True
        return rows

    def fastest(self, host: int, count: int) -> tuple[int, ...]:
        """The fastest `count` free GPUs of a host; of equal sets the lowest ids."""
        if (host, count) not in self._best:
            cluster, free = self.cluster, free_on(self.problem, [host])
            first = int(cluster.first[host])
            if cluster.sizes[host] > MOST_BY_SUBSET:
                local = trays_first([gpu - first for gpu in free], count, cluster.type(host).tray)
                best = tuple(first + i for i in local)
            else:
                sets = list(combinations(free, count))
                best = sets[int(self.problem.model.known_values(self.selection(sets)).argmax())]
            self._best[host, count] = best
        return self._best[host, count]


# solvers


class _Search:
    """Options and limits that the solvers of this file share."""

    kinds = ("gpus",)
    options: Mapping[str, str] = MappingProxyType({})

    def runs_inline(self, problem: Problem) -> bool:
        """True for models with tables, which are evaluated in microseconds."""
        return isinstance(problem, GpuPlacement) and problem.tables is not None


class Eha(_Search):
    """Equilibrium heuristic: the best k GPUs of one host if one suffices, else even spreads.

    k is spread evenly over every set of the fewest hosts; a host too small gives all it has. On
    every host the fastest free GPUs are taken; the first of the best in the order of (hosts,
    counts) wins. One iteration is one candidate evaluated; the number is limited by
    `max_candidates` alone.
    """

    name = "eha"
    options: Mapping[str, str] = MappingProxyType(
        {"max_candidates": f"most spreads over several hosts (default {MAX_CANDIDATES})"}
    )

    def supports(self, problem: Problem) -> Support:
        """Up to 4,096 hosts, no rules but `required`, `exclude` and `apart`."""
        support = supported(problem, ("required", *RULES))
        if support and problem.cluster.n_hosts > MOST_HOSTS:  # type: ignore[attr-defined]
            return Support(False, f"it takes up to {MOST_HOSTS} hosts")
        return support

    def solve(self, problem: Problem, limits: Limits, monitor: Monitor) -> Result:
        """Compare all candidates."""
        assert isinstance(problem, GpuPlacement)
        most = checked_candidates(limits)
        judge, reason = Judge(problem), UNKNOWN
        for hosts in host_sets(problem):
            if monitor.should_stop():
                reason = ""
                break
            for listed in (_single(judge, hosts), _several(judge, hosts, most)):
                monitor.advance(len(listed[0]))
                value, gpus = _first_best(judge, *listed, monitor)
                if value >= 0:
                    monitor.incumbent(gpus, -value, self.name)
                    break
        return Result("unknown", reason="" if monitor.objective is not None else reason)


class Pts(_Search):
    """Pruned tree search: from a large set remove the GPU that is missed least, until k are left.

    It starts from the free GPUs of the host with k or more with the highest bandwidth B, else from
    all. Each step evaluates every set with one GPU less beside the running jobs; of equal sets the
    lowest id goes. One iteration is one evaluation, but a limit of iterations is ignored: there is
    no answer before the end.
    """

    name = "pts"

    def supports(self, problem: Problem) -> Support:
        """No rules but `required`, `exclude` and `apart`."""
        return supported(problem, ("required", *RULES))

    def solve(self, problem: Problem, limits: Limits, monitor: Monitor) -> Result:
        """Prune once in every domain that the policy allows."""
        assert isinstance(problem, GpuPlacement)
        judge = Judge(problem)
        for hosts in host_sets(problem):
            enough = [h for h in hosts if judge.state.room[h] >= problem.k]
            begin = [free_on(problem, [h]) for h in enough] or [free_on(problem, hosts)]
            first = int(problem.model.known_values(judge.selection(begin)).argmax())
            value, gpus = _pruned(judge, begin[first], monitor)
            if value >= 0:
                monitor.incumbent(gpus, -value, self.name)
            if monitor.should_stop():
                return Result("unknown")
        return Result("unknown", reason="" if monitor.objective is not None else UNKNOWN)


class Hybrid(_Search):
    """`eha`, then `pts`, which replaces the former's choice only if it is better."""

    name = "hybrid"
    options: Mapping[str, str] = MappingProxyType({**Eha.options, **Pts.options})

    def supports(self, problem: Problem) -> Support:
        """What both searches support."""
        first, second = Eha().supports(problem), Pts().supports(problem)
        return second if first else first

    def solve(self, problem: Problem, limits: Limits, monitor: Monitor) -> Result:
        """Run one after the other."""
        result = Eha().solve(problem, limits, monitor)
        if monitor.should_stop():
            return result
        return Pts().solve(problem, replace(limits, options={}), monitor)


class Proximity(_Search):
    """Default rule of schedulers (BandPilot's "Default"); see `proximity`."""

    name = "proximity"

    def runs_inline(self, problem: Problem) -> bool:
        """Always."""
        return True

    def supports(self, problem: Problem) -> Support:
        """No rule but `exclude` and `apart`."""
        return supported(problem, RULES)

    def solve(self, problem: Problem, limits: Limits, monitor: Monitor) -> Result:
        """Choose once; the bandwidth is computed afterwards."""
        assert isinstance(problem, GpuPlacement)
        # of fabrics that are not joined the one with most free GPUs
        free = max((free_on(problem, hosts) for hosts in host_sets(problem)), key=len)
        chosen = self.choose(problem, free, limits)
        try:
            value = problem.share(chosen).value
        except UnmeasuredPattern as error:
            return Result("unknown", reason=f"its choice has no known bandwidth: {error.args[0]}")
        monitor.advance(1)
        monitor.incumbent(tuple(chosen), -value, self.name)
        return Result("unknown")

    def choose(self, problem: GpuPlacement, free: list[int], limits: Limits) -> Sequence[int]:
        """Choose k of the free GPUs."""
        return proximity(problem.cluster, free, problem.k)


class Topo(Proximity):
    """The fewest hosts, on them GPUs with the nearest links; see `nearest_links`."""

    name = "topo"

    def choose(self, problem: GpuPlacement, free: list[int], limits: Limits) -> Sequence[int]:
        """Choose k of the free GPUs."""
        return nearest_links(problem.cluster, free, problem.k)


class RandomSubset(Proximity):
    """k of the free GPUs, uniformly at random by the seed. It obeys `exclude` and `apart`."""

    name = "random_subset"

    def choose(self, problem: GpuPlacement, free: list[int], limits: Limits) -> Sequence[int]:
        """Draw k of the free GPUs."""
        return sorted(random.Random(limits.seed).sample(free, problem.k))


# parts of the searches


def checked_candidates(limits: Limits) -> int:
    """The option `max_candidates`."""
    most = limits.options.get("max_candidates", MAX_CANDIDATES)
    return integer("options.max_candidates", most, 1, MOST_CANDIDATES)


def _single(judge: Judge, hosts: list[int]) -> tuple[IntArray, IntArray]:
    """Every host with k free GPUs, with k."""
    k = judge.problem.k
    some = np.array(hosts, np.int64)[judge.state.room[hosts] >= k].reshape(-1, 1)
    return some, np.full_like(some, k)


def _several(judge: Judge, hosts: list[int], most: int) -> tuple[IntArray, IntArray]:
    """Candidates on the fewest hosts, several, by global number, with counts."""
    state, cluster, k = judge.state, judge.cluster, judge.problem.k
    free = state.room[hosts]
    m = max(2, fewest(free, k))
    kinds: list[Hashable] = list(hosts)
    if len(hosts) > MOST_ALONE:
        domains = cluster.network_levels.matter or not isinstance(judge.problem.model, CountModel)
        kinds = [
            (
                cluster.type_of[h], int(state.masks[h]), tuple(state.held[:, h].tolist()),
                cluster.hosts[h].domains if domains else (),
            )
            for h in hosts
        ]  # fmt: skip
    at, counts = candidates(free, kinds, k, m, max(1, min(most, _MOST_NUMBERS // m)))
    return np.array(hosts, np.int64)[at], counts


def _first_best(judge: Judge, hosts: IntArray, counts: IntArray, monitor: Monitor) -> Found:
    """The first best of rows of counts, on every host the fastest free GPUs."""
    best: Found = -1, ()
    for begin in range(0, len(hosts), _BLOCK):
        if best[0] >= 0 and monitor.should_stop():
            break
        block = slice(begin, begin + _BLOCK)
        sets = [
            [gpu for part in zip(some, numbers, strict=True) for gpu in judge.fastest(*part)]
            for some, numbers in zip(hosts[block].tolist(), counts[block].tolist(), strict=True)
        ]
        values = judge.values(judge.selection(sets))
        row = int(values.argmax())
        if values[row] > best[0]:
            best = int(values[row]), tuple(sets[row])
    return best


def _pruned(judge: Judge, begin: list[int], monitor: Monitor) -> Found:
    """Remove GPU by GPU the one without which the value is highest, down to k."""
    gpus = np.array(begin, np.int64)
    value = int(judge.values(judge.selection([begin]))[0])
    while len(gpus) > judge.problem.k:
        if monitor.should_stop():
            return -1, ()
        rows = np.repeat(judge.selection([gpus.tolist()]), len(gpus), axis=0)
        rows[np.arange(len(gpus)), gpus] = False
        values = judge.values(rows)
        monitor.advance(len(gpus))
        worst = int(values.argmax())
        value, gpus = int(values[worst]), np.delete(gpus, worst)
    return value, tuple(gpus.tolist())
