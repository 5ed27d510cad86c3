"""Vectors of GPU counts by host: their bandwidths, policy violations, and GPUs, in NumPy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from optsched.bandwidth.models.contention import shares
from optsched.bandwidth.search.by_counts import domain_numbers, gpus_of
from optsched.bandwidth.topology.intra import MOST_BY_SUBSET
from optsched.bandwidth.topology.policy import ANY

if TYPE_CHECKING:
    from optsched.bandwidth.placement.problem import GpuPlacement
    from optsched.model.schedule import IntArray


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

    # bandwidths

    def values(self, vectors: IntArray) -> IntArray:
        """Bandwidths beside the running jobs; -1 where a pattern is not measured."""
        problem = self.problem
        selection = np.zeros((len(vectors), problem.cluster.n_gpus), np.bool_)
        for u, counts in enumerate(vectors.T):
            for count in np.unique(counts[counts > 0]).tolist():
                selection[np.ix_(counts == count, self._subset(u, count))] = True
        return shares(problem.model, problem.state, selection, problem.demands).value

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
            wrong += _outside(vectors, domain_numbers(cluster, level)[self.hosts])
        return np.asarray(wrong, np.int64)

    # vectors

    def count(self) -> int:
        """Number of vectors, feasible or not."""
        number = [1] + [0] * self.problem.k
        for most in self.most.tolist():
            number = [sum(number[max(0, s - most) : s + 1]) for s in range(len(number))]
        return number[-1]

    def every(self) -> IntArray:
        """All vectors with sum k in lexicographic order."""
        k = self.problem.k
        rows: list[tuple[int, ...]] = [()] * bool(self.hosts)
        for u, most in enumerate(self.most.tolist()):
            behind = int(self.most[u + 1 :].sum())
            rows = [
                (*row, count)
                for row in rows
                for count in range(max(0, k - sum(row) - behind), min(most, k - sum(row)) + 1)
            ]
        return np.array(rows, np.int64).reshape(len(rows), len(self.hosts))

    def gpus(self, vector: IntArray) -> tuple[int, ...]:
        """GPUs of a vector: the best subset of each host; of equal subsets the lowest ids."""
        return tuple(
            gpu for u, count in enumerate(vector.tolist()) for gpu in self._subset(u, count)
        )

    def _subset(self, u: int, count: int) -> tuple[int, ...]:
        """The best free GPUs of the host of a column."""
        h, part = self.hosts[u], count
        if count and self.problem.cluster.sizes[h] <= MOST_BY_SUBSET:
            part = self.tables.best_subset(h, int(self.state.masks[h]), count)
        return gpus_of(self.state, [(h, part)])


def _outside(vectors: IntArray, group: IntArray) -> IntArray:
    """GPUs outside the group of hosts that has most of them."""
    groups = (*np.unique(group), -1)  # -1: none of them, there may be no hosts
    sums = np.stack([vectors[:, group == g].sum(axis=1) for g in groups], axis=1)
    return np.asarray(sums.sum(axis=1) - sums.max(axis=1), np.int64)
