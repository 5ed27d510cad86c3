"""Shortest remaining time first."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from optsched.cluster.policies.gangs import checked_gang, gangs_in_view
from optsched.cluster.policies.preemptive_walk import walk_in_order

if TYPE_CHECKING:
    from optsched.cluster.log import Log
    from optsched.cluster.nodes import Nodes
    from optsched.cluster.policy import ClusterView, Decision
    from optsched.cluster.settings import Settings
    from optsched.cluster.workload import Workload


class Srtf:
    """All jobs by true remaining time, restarts included; who does not fit is preempted.

    Ties: pending jobs first, then by arrival.

    Parameters
    ----------
    gang
        As for `Fifo`.

    Notes
    -----
    It need not be asked when a running job overtakes a pending one: the running job was selected
    with the pending one ahead of it, so it still is, and the other still is not.
    """

    name: ClassVar[str] = "srtf"
    clairvoyant: bool = True
    options: ClassVar[tuple[str, ...]] = ("gang",)

    def __init__(self, *, gang: int | None = None) -> None:
        self.gang = checked_gang(gang)

    def decide(self, view: ClusterView) -> Decision:
        """Walk all jobs."""
        size, rate = gangs_in_view(view, self.gang)
        begun = view.starts > view.running
        served = np.where(view.running, view.time - view.entered, 0)
        owed = np.where(begun, np.maximum(view.restart_cost - served, 0), 0)
        left = -(-view.remaining // rate) + owed
        return walk_in_order(view, size, np.lexsort((view.running, left)))

    def twin(self, workload: Workload, nodes: Nodes, settings: Settings) -> Log | None:
        """The whole simulation in compiled code."""
        from optsched.cluster.policies.rigid import simulate_walk

        return simulate_walk(workload, nodes, settings, self.gang, None, self.name)
