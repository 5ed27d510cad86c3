"""Count vectors of GPU choices, judged many at a time in numpy: values, rules, and their GPUs."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optsched.bandwidth.models.contention import interferes
from optsched.bandwidth.search.ask import domain_numbers
from optsched.bandwidth.topology.intra import MOST_BY_SUBSET
from optsched.bandwidth.topology.policy import ANY
from optsched.bandwidth.topology.rates import NO_LIMIT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optsched.bandwidth.placement.problem import GpuPlacement, Request
    from optsched.model.schedule import IntArray
    from optsched.solving.monitor import Monitor


class Shares(NamedTuple):
    """What the choices of count vectors get with the best subset of each host; arrays, kB/s."""

    value: IntArray
    """B(S, traffic); -1 where a pattern is not measured."""
    standalone: IntArray
    """B(S), cut to the unit of the contention rule; -1 where not measured."""
    raw: IntArray
    """B(S) before the cut."""
    capacity: IntArray
    """C; `NO_LIMIT` if no job interferes."""
    demand: IntArray
    """Of the jobs that interfere."""


class CountVectors:
    """Judges vectors of counts on the hosts that one request may use.

    Parameters
    ----------
    problem
        With tables; joint allocations with their exact GPUs are judged as if they were the best.
    request
        One of its requests; the others are not there.
    """

    def __init__(self, problem: GpuPlacement, request: Request) -> None:
        tables = problem.tables
        assert tables is not None
        cluster, policy = problem.cluster, request.policy
        self.problem, self.request, self.tables = problem, request, tables.ruled(policy)
        self.state = policy.usable(problem.state)
        room = self.state.room
        self.hosts = np.flatnonzero(room).tolist()
        """Hosts that may be used: the columns of a vector."""
        most = min(request.gpus, policy.max_per_host or ANY)
        self.room: IntArray = np.minimum(room[self.hosts], most)
        """Most GPUs by host."""
        self.types = np.array(cluster.type_of, np.int64)[self.hosts]
        self.must = {cluster.host_index(name) for name in policy.include or ()}
        self._best = [self._row(h, "best") for h in self.hosts]
        self._joint = {h: self._row(h, "joint") for h in range(cluster.n_hosts)}

    @cached_property
    def jobs(self) -> list[int]:
        """Jobs that may interfere."""
        problem, may = self.problem, interferes(self.problem.state)
        return [j for j in range(len(problem.state.jobs)) if may[j] and problem.demands[j] > 0]

    def _row(self, h: int, which: str) -> IntArray:
        """Bandwidth by count within a host: of the best free subset, or of a joint allocation."""
        if which == "best":
            return self.tables.best_within(h, int(self.state.masks[h]))
        return self.tables.joint_within(h)

    # rules

    def levels(self) -> list[int | None]:
        """Numbers of domains of the preferred level to try in turn, see `Policy.preferred`."""
        preferred, cluster = self.request.policy.preferred, self.problem.cluster
        if preferred is None:
            return [None]
        number = len(cluster.domains(cluster.level(preferred)))
        return list(range(1, min(number, self.request.gpus) + 1))

    def excess(self, vectors: IntArray, level: int | None = None) -> IntArray:
        """How far vectors are from obeying the policy, in GPUs or hosts; 0: they obey it."""
        policy, cluster = self.request.policy, self.problem.cluster
        used = vectors > 0
        number = used.sum(axis=1)
        most = vectors.max(axis=1, initial=0)
        least = np.where(used, vectors, ANY).min(axis=1, initial=ANY)
        wrong = np.maximum(most - least - policy.most_difference, 0)
        wrong += np.maximum(policy.min_hosts - number, 0)
        if policy.max_hosts is not None:
            wrong += np.maximum(number - policy.max_hosts, 0)
        if policy.same_type:
            wrong += self._outside(vectors, self.types)
        columns = [u for u, h in enumerate(self.hosts) if h in self.must]
        wrong += (~used[:, columns]).sum(axis=1) + len(self.must) - len(columns)
        if policy.slice_size is not None and policy.slice_level is not None:
            numbers = domain_numbers(cluster, cluster.level(policy.slice_level))[self.hosts]
            for domain in np.unique(numbers):
                wrong += vectors[:, numbers == domain].sum(axis=1) % policy.slice_size
        if (required := policy.level(cluster)) is not None:
            wrong += self._outside(vectors, domain_numbers(cluster, required)[self.hosts])
        if level is not None and policy.preferred is not None:
            numbers = domain_numbers(cluster, cluster.level(policy.preferred))[self.hosts]
            groups = [used[:, numbers == d].any(axis=1) for d in np.unique(numbers)]
            wrong += np.maximum(np.sum(groups, axis=0) - level, 0)
        return np.asarray(wrong, np.int64)

    @staticmethod
    def _outside(vectors: IntArray, group: IntArray) -> IntArray:
        """GPUs outside the group of hosts that has most of them."""
        inside = [vectors[:, group == g].sum(axis=1) for g in np.unique(group)]
        return np.asarray(vectors.sum(axis=1) - np.max(inside, axis=0), np.int64)

    # values

    def shares(self, vectors: IntArray) -> Shares:
        """What vectors get; shape (n, hosts that may be used), sums of at least 1."""
        n = len(vectors)
        counts = np.zeros((n, self.problem.cluster.n_hosts), np.int64)
        counts[:, self.hosts] = vectors
        raw = self.network(counts)
        for u, row in enumerate(self._best):
            raw = np.minimum(raw, row[vectors[:, u]])
        sure = raw >= 0
        own = self._limited(raw, counts)
        across = (vectors > 0).sum(axis=1) >= 2
        capacity, demand = np.full(n, NO_LIMIT, np.int64), np.zeros(n, np.int64)
        for j in self.jobs:
            held = self.problem.state.held[j]
            touched = across & ((counts > 0) & (held > 0)).any(axis=1)
            joint = self.joint(counts, held)
            sure &= ~touched | (joint >= 0)
            capacity = np.where(touched, np.minimum(capacity, joint), capacity)
            demand += np.where(touched, self.problem.demands[j], 0)
        value = divided(own, capacity, own + demand)
        value[~sure] = -1
        own[raw < 0] = -1
        return Shares(value, own, raw, capacity, demand)

    def network(self, counts: IntArray) -> IntArray:
        """The network's limit of counts on all hosts; -1 where it is not measured."""
        machine = self.tables.automaton
        state = np.zeros(len(counts), np.int64)
        for h in range(counts.shape[1]):
            state = machine.step[state, counts[:, h]]
        return np.asarray(self.tables.network[state], np.int64)

    def joint(self, counts: IntArray, held: IntArray) -> IntArray:
        """Bandwidth of joint allocations with a job's counts; -1 where it is not measured."""
        return self._filled(counts + held)

    def _filled(self, counts: IntArray) -> IntArray:
        limit = self.network(counts)
        for h in range(counts.shape[1]):
            limit = np.minimum(limit, self._joint[h][counts[:, h]])
        return self._limited(limit, counts)

    def _limited(self, value: IntArray, counts: IntArray) -> IntArray:
        """Bandwidths after uplinks and factors of the levels."""
        levels = self.problem.cluster.network_levels
        if not levels.matter:
            return value.copy()
        hosts = (counts > 0).sum(axis=1)
        return levels.limited(value, counts.sum(axis=1), hosts, levels.lowest(counts))

    # vectors

    def count(self) -> int:
        """How many vectors there are, rules aside."""
        ways = [1] + [0] * self.request.gpus
        for most in self.room.tolist():
            ways = [sum(ways[max(0, s - most) : s + 1]) for s in range(len(ways))]
        return ways[-1]

    def blocks(self, most: int = 1 << 16) -> Iterator[IntArray]:
        """All vectors that add up to k, in blocks of about `most`."""
        behind = np.concatenate([np.cumsum(self.room[::-1])[::-1], [0]])
        todo = [np.zeros((1, 0), np.int64)]
        while todo:
            prefix = todo.pop()
            u = prefix.shape[1]
            if u == len(self.hosts):
                if u:
                    yield prefix
                continue
            if len(prefix) > most:
                todo += [prefix[most:], prefix[:most]]
                continue
            left = self.request.gpus - prefix.sum(axis=1)
            first = np.maximum(left - behind[u + 1], 0)
            times = np.maximum(np.minimum(left, self.room[u]) - first + 1, 0)
            rows = np.repeat(np.arange(len(prefix)), times)
            steps = np.arange(len(rows)) - np.repeat(np.cumsum(times) - times, times)
            todo.append(np.column_stack([prefix[rows], first[rows] + steps]))

    def gpus(self, vector: IntArray) -> tuple[int, ...]:
        """The best GPUs for a vector of counts; of equals the lowest ids."""
        from optsched.bandwidth.search.ask import gpus_of

        cluster, parts = self.problem.cluster, []
        for h, count in zip(self.hosts, vector.tolist(), strict=True):
            if not count:
                continue
            part = count
            if cluster.sizes[h] <= MOST_BY_SUBSET:
                part = self.tables.best_subset(h, int(self.state.masks[h]), count)
            parts.append((h, part))
        return gpus_of(self.state, parts)


def claim(
    problem: GpuPlacement, monitor: Monitor, upper: int, source: str, best: int | None = None
) -> None:
    """Report that no choice has more than `upper`; `best`: the engine's own best, else the same.

    Under a policy with a wish that is true of choices that fulfil it as far as any can: beside a
    start that is better, as it ignores the wish, nothing is claimed.
    """
    wishes = any(request.policy.preferred is not None for request in problem.requests)
    objective, own = monitor.objective, upper if best is None else best
    if not (wishes and objective is not None and objective < -own):
        monitor.bound(-upper, source)


def divided(own: IntArray, capacity: IntArray, total: IntArray) -> IntArray:
    """What is left of standalone bandwidths where all demands together exceed the capacity."""
    value = own.copy()
    tight = (total > capacity) & (total > 0)
    value[tight] = own[tight] * capacity[tight] // total[tight]
    return value
