"""What hosts of a large cluster allow within themselves, by local model and type."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from optsched.bandwidth.search.flat import FlatSearch

if TYPE_CHECKING:
    from optsched.bandwidth.models.model import CountModel
    from optsched.bandwidth.topology.policy import Policy
    from optsched.bandwidth.topology.state import ClusterState
    from optsched.model.schedule import IntArray


class HostLimits:
    """What depends on the model alone is kept."""

    def __init__(self, model: CountModel, policy: Policy | None = None) -> None:
        cluster = model.cluster
        self.model = model
        self.flat = [FlatSearch(model, policy)]
        """One search by patterns for every local model."""
        self.rates = model.line_rates()
        """kB/s that so many GPUs of a host bring to the network, if nothing else limits it."""
        self.of: IntArray = np.zeros((2, cluster.n_hosts), np.int64)
        """Of every host its model in `flat`, and its type there."""
        self.of[1] = cluster.type_of

    def rows(self, state: ClusterState, hosts: IntArray, k: int) -> IntArray:
        """Best bandwidth within hosts by number of free GPUs taken, -1: too few are free."""
        most = min(k, int(state.cluster.sizes.max()))
        rows = np.zeros((len(hosts), most + 1), np.int64)
        for local, search in enumerate(self.flat):
            at = np.flatnonzero(self.of[0, hosts] == local)
            if len(at):
                rows[at] = search.best_rows(self.of[1, hosts[at]], state.masks[hosts[at]], most)
        return rows

    def joint_rows(self, hosts: IntArray, fill: str) -> IntArray:
        """Bandwidth within hosts of joint allocations, by number of GPUs."""
        rows = np.full((len(hosts), int(self.model.cluster.sizes.max()) + 1), -1)
        kinds, at = np.unique(self.of[:, hosts], axis=1, return_inverse=True)
        for i, (local, kind) in enumerate(kinds.T.tolist()):
            row = self.flat[local].joint_row(kind, fill)
            rows[at.reshape(-1) == i, : len(row)] = row
        return rows

    def lowest(self, host: int, free: int, count: int, value: int) -> int:
        """The lowest ids of a host's free GPUs, so many of them, with this bandwidth, as a mask."""
        local, kind = self.of[:, host].tolist()
        found: int = self.flat[local].lowest(kind, free, count, value)
        return found
