"""A snapshot as numbers of GPUs by host."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np

from optsched.bandwidth.topology.state import host_counts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.bandwidth import ClusterState
    from optsched.plan.snapshot import ClusterSnapshot, PlanJob

WHOLE: Final = -1
"""Number of the level of a fabric, above all levels of the cluster."""


@dataclass(frozen=True, eq=False)
class Counts:
    """Numbers of GPUs by host."""

    snapshot: ClusterSnapshot
    requests: Sequence[PlanJob] | None = None
    """Jobs without GPUs to count in place of the running jobs."""
    after: ClusterState | None = None
    """State in place of that of the snapshot."""
    _cells: dict[int, list[int]] = field(default_factory=dict)

    @property
    def state(self) -> ClusterState:
        """GPUs that are free, held, or down."""
        return self.after or self.snapshot.state

    @cached_property
    def jobs(self) -> Sequence[PlanJob]:
        """The running jobs, or the requests."""
        return [job for job, _ in self.snapshot.running] if self.requests is None else self.requests

    @cached_property
    def unit(self) -> int:
        """Factor of costs that leaves 1 for every change, if some cost nothing."""
        return 1 + len(self.jobs) * any(0 in (job.evict, job.move) for job in self.jobs)

    def cost(self, given: int | None) -> int:
        """Return a cost of a change in a model: of equal sums, fewer changes have the lower one."""
        return self.unit * (given or 0) + (self.unit > 1)

    def total(self, modeled: float) -> float:
        """Return the cost that a sum in a model stands for."""
        return modeled // self.unit if math.isfinite(modeled) else modeled

    @cached_property
    def held(self) -> list[tuple[int, ...]]:
        """GPUs of every job."""
        running = [where.gpus for _, where in self.snapshot.running]
        return running if self.requests is None else [()] * len(self.requests)

    @cached_property
    def at(self) -> list[list[tuple[int, int]]]:
        """Hosts of every job, with numbers of GPUs."""
        return [[*host_counts(self.snapshot.cluster, gpus)[0].items()] for gpus in self.held]

    @cached_property
    def free(self) -> list[int]:
        """Free GPUs by host."""
        return [int(n) for n in self.state.room]

    @cached_property
    def capacity(self) -> list[int]:
        """GPUs by host that are not down."""
        cluster = self.snapshot.cluster
        return [int(n) for n in cluster.sizes - cluster.counts(self.snapshot.state.down)]

    @cached_property
    def kinds(self) -> list[tuple[int, ...]]:
        """Types of hosts, of which one may hold a job elsewhere; none if it runs on several."""
        of, names = self.snapshot.cluster.type_of, self.snapshot.cluster.types
        if self.requests is None:
            found = [tuple({of[h] for h, _ in hosts}) for hosts in self.at]
            return [kinds if len(kinds) == 1 else () for kinds in found]
        return [tuple(t for t, kind in enumerate(names) if job.type in (None, kind.name))
                for job in self.requests]  # fmt: skip

    def on(self, state: ClusterState, requests: Sequence[PlanJob]) -> Counts:
        """Return the counts of requests on another state of the cluster."""
        return Counts(self.snapshot, requests, state, self._cells)

    def level(self, job: PlanJob) -> int:
        """Return the number of the level of a job, from the widest."""
        return WHOLE if job.level is None else self.snapshot.cluster.level(job.level)

    def cells(self, level: int) -> list[int]:
        """Return the domain of a level of every host, those of two types apart."""
        if level not in self._cells:
            cluster = self.snapshot.cluster
            groups = cluster.fabrics if level == WHOLE else cluster.domains(level).values()
            domain = np.zeros(cluster.n_hosts, np.int64)
            for d, hosts in enumerate(groups):
                domain[list(hosts)] = d
            pairs = domain * len(cluster.types) + np.array(cluster.type_of)
            self._cells[level] = np.unique(pairs, return_inverse=True)[1].tolist()
        return self._cells[level]
