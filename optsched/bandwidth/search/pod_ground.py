"""A request on a cluster of pods: the slowest pod, times a factor for every step between them."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from optsched.bandwidth.search.ground import Ground
from optsched.bandwidth.search.pod_search import MOST_CELLS, search_idle
from optsched.bandwidth.topology.rates import MOST, NO_LIMIT, UNMEASURED

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from optsched.bandwidth.models.pods import PodBandwidth
    from optsched.bandwidth.models.tables import CountTables
    from optsched.model.schedule import IntArray


class PodGround(Ground):
    """Values from those of pods; idle optima by windows of pods."""

    @property
    def model(self) -> PodBandwidth:
        """The model of pods."""
        assert self.search.pods is not None
        return self.search.pods

    def worth(self, counts: IntArray, within: IntArray) -> IntArray:
        """B(S) by counts of hosts and what these allow; -1 where a pattern is unmeasured."""
        n = len(counts)
        counts = np.column_stack([counts, np.zeros(n, np.int64)])
        within = np.column_stack([within, np.full(n, NO_LIMIT)])
        held = np.zeros((n, len(self.model.pods)), np.int64)
        value = np.zeros((n, len(self.model.pods)), np.int64)
        for pods, columns, tables in self._columns:
            there = counts[:, columns]
            state = np.zeros(there.shape[:2], np.int64)
            for i in range(columns.shape[1]):
                state = tables.automaton.step[state, there[:, :, i]]
            limit = tables.network[state]
            least = np.minimum(np.minimum(limit, within[:, columns].min(axis=2)), MOST - 1)
            held[:, pods] = there.sum(axis=2)
            value[:, pods] = np.where(limit == UNMEASURED, UNMEASURED, least)
        return self.model.joined(held, value)

    @cached_property
    def _columns(self) -> list[tuple[IntArray, IntArray, CountTables]]:
        """By local model its pods, their hosts as columns (the last one is empty), its tables."""
        place = np.full(self.state.cluster.n_hosts, len(self.hosts))
        place[self.hosts] = np.arange(len(self.hosts))
        found = []
        for local, model in enumerate(self.model.locals):
            pods = np.flatnonzero(self.model.local_of == local)
            tables = model.tables()
            assert tables is not None
            hosts = np.array([self.model.hosts_of[p] for p in pods], np.int64)
            found.append((pods, place[hosts], tables))
        return found

    def _least(self, host: int, count: int, _own: int) -> int:
        return int(self.rows[host, count])

    def alone(self, some: npt.NDArray[np.bool_]) -> tuple[IntArray | None, int]:
        """The best counts on some hosts without regard to tenants, proved."""
        cluster, at = self.state.cluster, np.flatnonzero(some)
        if self.room[at].sum() < self.k:
            return None, -1
        if (len(self.model.pods) + 1) * (self.k + 1) > MOST_CELLS:
            return None, MOST
        hosts = self.hosts[at]
        masks, chosen = np.zeros(cluster.n_hosts, np.int64), np.zeros(cluster.n_hosts, np.int64)
        masks[hosts] = self.state.masks[hosts]
        value = int(search_idle(*self.model.pod_tables, masks, self.k, chosen))
        if value < 0:
            return None, -1
        counts = np.zeros(self.n, np.int64)
        for i, h in zip(at.tolist(), hosts.tolist(), strict=True):
            counts[i] = int(chosen[h]).bit_count() if cluster.sizes[h] <= 16 else chosen[h]
        return counts, value

    def _parts(self) -> Iterator[tuple[IntArray, npt.NDArray[np.bool_]]]:
        """From every pod on, pods side by side with room for all."""
        pod = self.model.pod_of[self.hosts]
        room = np.bincount(pod, self.room, len(self.model.pods)).astype(np.int64)
        behind = np.append(0, np.cumsum(room))
        last = np.searchsorted(behind, behind[:-1] + self.k)
        for p in np.flatnonzero((room > 0) & (last <= len(room))).tolist():
            part = (pod >= p) & (pod < last[p])
            counts, _ = self.alone(part[: self.n])
            if counts is not None:
                padded = np.append(counts, np.zeros(len(pod) - self.n, np.int64))
                yield padded, part & (self.room > 0)
