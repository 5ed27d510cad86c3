"""A snapshot as numbers of GPUs by host."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from optsched.plan.snapshot import ClusterSnapshot, PlanJob

WHOLE: Final = -1
"""Number of the level of a fabric, above all levels of the cluster."""


@dataclass(frozen=True)
class Counts:
    """Numbers of GPUs by host."""

    snapshot: ClusterSnapshot
    _cells: dict[int, list[int]] = field(default_factory=dict, init=False)

    @cached_property
    def jobs(self) -> list[PlanJob]:
        """The running jobs."""
        return [job for job, _ in self.snapshot.running]

    @cached_property
    def at(self) -> list[list[tuple[int, int]]]:
        """Hosts of every running job, with numbers of GPUs."""
        host_of = self.snapshot.cluster.host_of
        held = [Counter(host_of[list(job.gpus)].tolist()) for _, job in self.snapshot.running]
        return [sorted(one.items()) for one in held]

    @cached_property
    def free(self) -> list[int]:
        """Free GPUs by host."""
        return [int(n) for n in self.snapshot.state.room]

    @cached_property
    def capacity(self) -> list[int]:
        """GPUs by host that are not down."""
        cluster, down = self.snapshot.cluster, self.snapshot.state.down
        return [int(n) for n in cluster.sizes - cluster.counts(down)]

    @cached_property
    def kinds(self) -> list[int | None]:
        """Type of the hosts of every running job, None if it has several."""
        of = self.snapshot.cluster.type_of
        found = [{of[h] for h, _ in hosts} for hosts in self.at]
        return [kinds.pop() if len(kinds) == 1 else None for kinds in found]

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
