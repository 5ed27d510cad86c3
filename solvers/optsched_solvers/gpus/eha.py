"""`eha`: BandPilot's search over even spreads on the fewest hosts (arXiv 2506.15595, 4.3)."""

from __future__ import annotations

from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import numpy as np

from optsched.bandwidth.placement.problem import GpuPlacement, GpuSets
from optsched.io.values import integer
from optsched.solving.result import Result
from optsched.solving.solver import Support
from optsched_solvers.gpus.judge import RULES, UNKNOWN, grounds, judge_of, supported, usable

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping, Sequence

    from optsched.model.schedule import IntArray, Problem
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor

MAX_CANDIDATES: Final = 200
MOST_CANDIDATES: Final = 100_000
MOST_HOSTS: Final = 4096
MOST_ALONE: Final = 16
"""Hosts up to which each counts for itself; beyond, hosts that are alike are one class."""

_MOST_NUMBERS: Final = 10_000_000  # in the array of candidates


class Eha:
    """Equilibrium heuristic: one host if one suffices, else even counts on the fewest hosts.

    1. If hosts have k free GPUs, the best k of each are compared, and nothing else is.
    2. Else k is spread evenly over every set of m hosts with room, m being the fewest that have;
       a host too small gives all it has. On every host the fastest free GPUs are taken. The first
       of the best in the order of (hosts, counts) wins.

    One iteration is one candidate evaluated; not their limit is heeded, but `max_candidates`.
    Models without tables, and joint allocations with their exact GPUs, are judged in plain Python:
    the same picks, thousands of times slower. It obeys `required`, `exclude`, `apart`. It
    proves nothing.
    """

    name = "eha"
    kinds = ("gpus",)
    options: Mapping[str, str] = MappingProxyType(
        {"max_candidates": f"most spreads over several hosts (default {MAX_CANDIDATES})"}
    )

    def runs_inline(self, problem: Problem) -> bool:
        """With tables by counts, which leave no model to be asked."""
        return isinstance(problem, GpuPlacement) and problem.tables is not None

    def supports(self, problem: Problem) -> Support:
        """One request of up to 4,096 hosts, no rules but `required`, `exclude` and `apart`."""
        support = supported(problem, ("required", *RULES))
        if support and problem.cluster.n_hosts > MOST_HOSTS:  # type: ignore[attr-defined]
            return Support(False, f"it takes up to {MOST_HOSTS} hosts")
        return support

    def solve(self, problem: Problem, limits: Limits, monitor: Monitor) -> Result:
        """Compare all candidates."""
        assert isinstance(problem, GpuPlacement)
        most = checked_candidates(limits)
        judge, reason = judge_of(problem), UNKNOWN
        for hosts in grounds(problem):
            if monitor.should_stop():
                reason = ""
                break
            for listed in (_single(problem, hosts), _several(problem, hosts, most)):
                monitor.advance(len(listed[0]))
                value, gpus = judge.first_best(*listed, monitor)
                if value >= 0:
                    monitor.incumbent(GpuSets.of([gpus]), -value, self.name)
                    break
        return Result("unknown", reason="" if monitor.objective is not None else reason)


def checked_candidates(limits: Limits) -> int:
    """The option `max_candidates`."""
    most = limits.options.get("max_candidates", MAX_CANDIDATES)
    return integer("options.max_candidates", most, 1, MOST_CANDIDATES)


def _single(problem: GpuPlacement, hosts: list[int]) -> tuple[IntArray, IntArray]:
    """Every host that suffices, with k."""
    some = np.array(hosts, np.int64)[usable(problem).room[hosts] >= problem.k].reshape(-1, 1)
    return some, np.full_like(some, problem.k)


def _several(problem: GpuPlacement, hosts: list[int], most: int) -> tuple[IntArray, IntArray]:
    """Candidates on the fewest hosts, several, by global number, with counts."""
    state, cluster, k = usable(problem), problem.cluster, problem.k
    room = state.room[hosts]
    m = max(2, fewest(room, k))
    kinds: list[Hashable] = list(hosts)
    if len(hosts) > MOST_ALONE:
        kinds = [
            (
                cluster.type_of[h], int(state.masks[h]), tuple(state.held[:, h].tolist()),
                () if problem.tables is not None else cluster.hosts[h].domains,
            )
            for h in hosts
        ]  # fmt: skip
    at, counts = candidates(room, kinds, k, m, max(1, min(most, _MOST_NUMBERS // m)))
    return np.array(hosts, np.int64)[at], counts


def fewest(room: IntArray, k: int) -> int:
    """The fewest hosts whose free GPUs reach k; their number + 1 if all do not."""
    return int(np.searchsorted(np.cumsum(-np.sort(-room)), k)) + 1


def candidates(
    room: IntArray, kinds: Sequence[Hashable], k: int, m: int, most: int
) -> tuple[IntArray, IntArray]:
    """Sets of m hosts with the counts of an even spread of k, the first `most` of them.

    In lexicographic order of (hosts, counts). Even means: no host could give a GPU to one with two
    less and room for it; every such spread is listed. Of hosts that are alike only the first are
    taken, and of equal spreads over them the first one.

    Parameters
    ----------
    room
        Free GPUs of every host, at least 1.
    kinds
        Hosts of the same kind are alike and have the same room.
    k
        GPUs asked.
    m
        Hosts in a set, at most k.
    most
        Most candidates.

    Returns
    -------
    hosts, counts : IntArray, shape (candidates, m)
        Positions in `room`, ascending, and GPUs on them.
    """
    sizes = room.tolist()
    every = (
        (some, counts)
        for some in _host_sets(sizes, kinds, k, m)
        for counts in _even_counts([sizes[h] for h in some], [kinds[h] for h in some], k)
    )
    if not 1 <= m <= min(len(sizes), k):
        return np.zeros((0, max(m, 0)), np.int64), np.zeros((0, max(m, 0)), np.int64)
    found = np.array(list(islice(every, most)), np.int64).reshape(-1, 2, m)
    return np.ascontiguousarray(found[:, 0]), np.ascontiguousarray(found[:, 1])


def _host_sets(room: list[int], kinds: Sequence[Hashable], k: int, m: int) -> Iterator[list[int]]:
    """Sets of m hosts with room for k in lexicographic order, of like hosts the first ones."""
    members: dict[Hashable, list[int]] = {}
    for h, kind in enumerate(kinds):
        members.setdefault(kind, []).append(h)
    by_room = sorted(members, key=lambda kind: -room[members[kind][0]])
    taken = dict.fromkeys(members, 0)

    def most_behind(first: int, need: int) -> int:
        """Most room of `need` hosts from `first` on; too little if there are not so many."""
        total = 0
        for kind in by_room:
            rest = members[kind][taken[kind] :]
            if need and rest and rest[0] >= first:
                total += min(need, len(rest)) * room[rest[0]]
                need -= min(need, len(rest))
        return -k if need else total

    chosen: list[int] = []
    total, h = 0, 0
    while True:
        need = m - len(chosen) - 1
        while h < len(room) - need:
            kind = kinds[h]
            at = taken[kind]
            if at < len(members[kind]) and members[kind][at] == h:
                taken[kind] += 1
                if total + room[h] + most_behind(h + 1, need) >= k:
                    break
                taken[kind] -= 1
            h += 1
        if h < len(room) - need:
            chosen.append(h)
            total += room[h]
            if need:
                h += 1
                continue
            yield list(chosen)
        elif not chosen:
            return
        h = chosen.pop()
        total -= room[h]
        taken[kinds[h]] -= 1
        h += 1


def _even_counts(room: list[int], kinds: list[Hashable], k: int) -> Iterator[list[int]]:
    """Even spreads of k over hosts in lexicographic order, one of those that are alike.

    The level is the highest that all hosts with room can have; some of those with more get one
    more, of like hosts the last ones.
    """
    level = k // len(room)
    while sum(min(size, level + 1) for size in room) <= k and max(room) > level:
        level += 1  # a host too small leaves its share to the others
    base = [min(size, level) for size in room]
    able = [i for i, size in enumerate(room) if size > level]
    before: list[int | None] = []
    for j, i in enumerate(able):
        before.append(next((q for q in range(j - 1, -1, -1) if kinds[able[q]] == kinds[i]), None))
    more = k - sum(base)
    flags = [0] * (len(able) - more) + [1] * more
    while True:
        counts = list(base)
        for i, flag in zip(able, flags, strict=True):
            counts[i] += flag
        yield counts
        ones = 0
        for i in range(len(able) - 1, -1, -1):
            if flags[i]:
                ones += 1
                continue
            if not ones:
                continue
            # turn it on: behind it one less is left, and all of its kind are on
            tried = [*flags[:i], 1]
            for q in range(i + 1, len(able)):
                b = before[q]
                tried.append(1 if b is not None and tried[b] else 0)
            left = ones - 1 - sum(tried[i + 1 :])
            if left < 0:
                continue
            for q in range(len(able) - 1, i, -1):
                if left and not tried[q]:
                    tried[q] = 1
                    left -= 1
            flags = tried
            break
        else:
            return
