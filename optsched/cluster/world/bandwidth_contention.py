"""Contention by bandwidth: jobs on shared hosts divide what `optsched.bandwidth` says they have."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from optsched.bandwidth.models.contention import check_traffic, demands, share
from optsched.bandwidth.models.model import BandwidthModel
from optsched.bandwidth.topology.state import ClusterState, Job
from optsched.errors import InputError
from optsched.io.values import format_value, number

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optsched.bandwidth.models.contention import Traffic
    from optsched.cluster.world.placement import FloatArray, Placement


class BandwidthContention:
    """A step's communication takes B(S) / B(S, traffic) times as long as without neighbours.

    With the share c of a step that communication takes without neighbours, the factor is
    1 / (1 + c (B(S) / B(S, traffic) - 1)). The simulator knows how many GPUs a job has on a node,
    not which: on every node jobs are taken to hold the lowest free ids, in order of their numbers.

    Parameters
    ----------
    model
        Bandwidths; host i of its cluster is node i, with at least as many GPUs.
    communication
        c, in [0, 1].
    traffic
        What running jobs ask for: ``"heavy"`` (all that they reach alone), ``"moderate"``,
        ``"idle"``.
    seed
        Of ``"moderate"``.

    Raises
    ------
    InputError
        Not a model, or a share outside [0, 1].
    """

    def __init__(
        self,
        model: BandwidthModel,
        communication: float,
        *,
        traffic: Traffic = "heavy",
        seed: int = 0,
    ) -> None:
        if not isinstance(model, BandwidthModel):
            raise InputError(f"model: expected a BandwidthModel, got {format_value(model)}")
        self.communication = number("communication", communication)
        if self.communication > 1:
            raise InputError(f"communication: expected 0..1, got {format_value(communication)}")
        check_traffic(traffic)
        self.model, self.traffic, self.seed = model, traffic, seed

    def factors(self, placement: Placement) -> FloatArray:
        """By the jobs on the hosts of every row; 1 for jobs on a single GPU."""
        found = np.ones(len(placement.job))
        jobs = {row: Job(str(row), gpus) for row, gpus in self._gpus(placement) if len(gpus) > 1}
        idle = ClusterState.idle(self.model.cluster)
        wants = demands(self.model, idle.with_jobs(jobs.values()), self.traffic, self.seed)
        demand = dict(zip(jobs, wants, strict=True))
        for row, job in jobs.items():
            others = [other for other in jobs if other != row]
            state = idle.with_jobs(jobs[other] for other in others)
            theirs = [demand[other] for other in others]
            got = share(self.model, state, job.gpus, theirs)
            slower = got.standalone / max(1, got.value) if got.standalone else 1.0
            found[row] = 1.0 / (1.0 + self.communication * (slower - 1.0))
        return found

    def _gpus(self, placement: Placement) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Rows and global numbers of their GPUs; a pair that shares GPUs has the same."""
        cluster = self.model.cluster
        first, sizes = cluster.first.tolist(), cluster.sizes.tolist()
        used = [0] * len(sizes)
        known: dict[int, tuple[int, ...]] = {}
        for row in range(len(placement.job)):
            partner = int(placement.partner[row])
            if partner in known:
                known[row] = known[partner]
                continue
            gpus: list[int] = []
            for i in range(int(placement.node_ptr[row]), int(placement.node_ptr[row + 1])):
                node, count = int(placement.node[i]), int(placement.count[i])
                if node >= len(sizes) or used[node] + count > sizes[node]:
                    raise InputError(
                        f"contention: node {node} is no host of the bandwidth model with "
                        "so many GPUs"
                    )
                gpus += range(first[node] + used[node], first[node] + used[node] + count)
                used[node] += count
            known[row] = tuple(gpus)
        yield from known.items()
