"""Vectors of GPU counts by host: their bandwidths, policy violations, and GPUs, in NumPy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from optsched.bandwidth.models.contention import divided, interferes
from optsched.bandwidth.search.by_counts import domain_numbers, gpus_of
from optsched.bandwidth.topology.intra import MOST_BY_SUBSET
from optsched.bandwidth.topology.policy import ANY
from optsched.bandwidth.topology.rates import NO_LIMIT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optsched.bandwidth.placement.problem import GpuPlacement
    from optsched.model.schedule import IntArray

_MOST_CELLS: Final = 1 << 22
"""Counts by vector, job and host that one step of `CountVectors.others` allocates."""


class CountVectors:
    """Evaluate count vectors of a problem with tables.

    A vector stands for the best subset of its size on every host.
    """

    def __init__(self, problem: GpuPlacement) -> None:
        tables, policy = problem.tables, problem.policy
        assert tables is not None
        self.problem, self.tables = problem, tables
        self.state = policy.usable(problem.state)
        self.hosts = np.flatnonzero(self.state.room).tolist()
        """Hosts with free GPUs: the columns of a vector."""
        most = min(problem.k, policy.max_per_host or ANY)
        self.most: IntArray = np.minimum(self.state.room[self.hosts], most)
        """Most GPUs by column."""
        masks = self.state.masks.tolist()
        self._best = _padded([self.tables.best_within(h, masks[h]) for h in self.hosts])
        self._joint = _padded([tables.joint_within(h) for h in range(problem.cluster.n_hosts)])
        held, demand = problem.state.held, np.array(problem.demands, np.int64)
        tenants = interferes(problem.state) & (demand > 0)
        self._held, self._demand = held[tenants], demand[tenants]

    # bandwidths

    def values(self, vectors: IntArray) -> IntArray:
        """Bandwidths beside the running jobs; -1 where a pattern is not measured."""
        counts = np.zeros((len(vectors), self.problem.cluster.n_hosts), np.int64)
        counts[:, self.hosts] = vectors
        standalone = self._limited(counts, self.fastest(vectors))
        return divided(standalone, *self._others(counts))

    def fastest(self, vectors: IntArray) -> IntArray:
        """Least bandwidth within the hosts of vectors."""
        within = self._best[np.arange(len(self.hosts)), vectors]
        return np.asarray(within.min(axis=1, initial=NO_LIMIT), np.int64)

    def _others(self, counts: IntArray) -> tuple[IntArray, IntArray]:
        """Least joint bandwidth with an interfering job, and the demand of all of them."""
        n, n_hosts = counts.shape
        capacity, demand = np.full(n, NO_LIMIT, np.int64), np.zeros(n, np.int64)
        step = max(1, _MOST_CELLS // max(1, len(self._held) * n_hosts))
        for begin in range(0, n if len(self._held) else 0, step):
            some = counts[begin : begin + step]
            meets = (some > 0).astype(np.int64) @ (self._held > 0).T.astype(np.int64) > 0
            meets &= ((some > 0).sum(axis=1) >= 2)[:, None]
            i, j = np.nonzero(meets)
            both = some[i] + self._held[j]
            within = self._joint[np.arange(n_hosts), both].min(axis=1)
            np.minimum.at(capacity, begin + i, self._limited(both, within))
            demand[begin : begin + step] = meets @ self._demand
        return capacity, demand

    def _limited(self, counts: IntArray, within: IntArray) -> IntArray:
        """Bandwidths of counts on all hosts that reach `within` inside them; -1: not measured."""
        step, state = self.tables.automaton.step, np.zeros(len(counts), np.int64)
        for h in np.flatnonzero(counts.any(axis=0)):
            state = step[state, counts[:, h]]
        value = np.minimum(self.tables.network[state], within)
        levels = self.problem.cluster.network_levels
        if levels.matter:
            hosts = (counts > 0).sum(axis=1)
            value = levels.limited(value, counts.sum(axis=1), hosts, levels.lowest(counts))
        return np.asarray(value, np.int64)

    # rules

    def excess(self, vectors: IntArray) -> IntArray:
        """Violation of the policy by vector, in GPUs or hosts; 0 if feasible."""
        policy, cluster = self.problem.policy, self.problem.cluster
        used = vectors > 0
        number = used.sum(axis=1)
        most = vectors.max(axis=1, initial=0)
        least = np.where(used, vectors, ANY).min(axis=1, initial=ANY)
        wrong = np.maximum(most - least - policy.most_difference, 0)
        wrong += np.maximum(policy.min_hosts - number, 0)
        if policy.max_hosts is not None:
            wrong += np.maximum(number - policy.max_hosts, 0)
        if policy.same_type:
            wrong += _outside(vectors, np.array(cluster.type_of)[self.hosts])
        for name in policy.include or ():
            h = cluster.host_index(name)
            wrong += ~used[:, self.hosts.index(h)] if h in self.hosts else 1
        if (level := policy.level(cluster)) is not None:
            wrong += _outside(vectors, self.domains(level))
        return np.asarray(wrong, np.int64)

    def domains(self, level: int) -> IntArray:
        """Number of the domain of every column at a level."""
        return domain_numbers(self.problem.cluster, level)[self.hosts]

    # vectors

    def count(self) -> int:
        """Number of vectors, feasible or not."""
        number = [1] + [0] * self.problem.k
        for most in self.most.tolist():
            number = [sum(number[max(0, s - most) : s + 1]) for s in range(len(number))]
        return number[-1]

    def blocks(self, most: int = 1 << 16) -> Iterator[IntArray]:
        """All vectors with sum k in lexicographic order, in blocks of about `most`."""
        behind = np.concatenate([np.cumsum(self.most[::-1])[::-1], [0]])
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
            left = self.problem.k - prefix.sum(axis=1)
            first = np.maximum(left - behind[u + 1], 0)
            times = np.maximum(np.minimum(left, self.most[u]) - first + 1, 0)
            rows = np.repeat(np.arange(len(prefix)), times)
            steps = np.arange(len(rows)) - np.repeat(np.cumsum(times) - times, times)
            todo.append(np.column_stack([prefix[rows], first[rows] + steps]))

    def gpus(self, vector: IntArray) -> tuple[int, ...]:
        """GPUs of a vector: the best subset of each host; of equal subsets the lowest ids."""
        sizes, masks, parts = self.problem.cluster.sizes, self.state.masks, []
        for h, count in zip(self.hosts, vector.tolist(), strict=True):
            if count and sizes[h] <= MOST_BY_SUBSET:
                parts.append((h, self.tables.best_subset(h, int(masks[h]), count)))
            elif count:
                parts.append((h, count))
        return gpus_of(self.state, parts)


def _by_group(vectors: IntArray, group: IntArray) -> IntArray:
    """Sums of columns by group, shape (n, groups)."""
    return np.stack([vectors[:, group == g].sum(axis=1) for g in np.unique(group)], axis=1)


def _outside(vectors: IntArray, group: IntArray) -> IntArray:
    """GPUs outside the group of hosts that has most of them."""
    sums = _by_group(vectors, group)
    return np.asarray(sums.sum(axis=1) - sums.max(axis=1), np.int64)


def _padded(rows: list[IntArray]) -> IntArray:
    """Rows of different lengths as a table, filled up with -1."""
    table = np.full((len(rows), max(map(len, rows), default=1)), -1, np.int64)
    for i, row in enumerate(rows):
        table[i, : len(row)] = row
    return table
