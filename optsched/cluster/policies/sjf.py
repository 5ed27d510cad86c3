"""Shortest job first."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from optsched.cluster.policies.queue_order import checked_backfill, estimates, in_order
from optsched.cluster.queue_twin_input import checked_gang, gangs_in_view

if TYPE_CHECKING:
    from optsched.cluster.log import Log
    from optsched.cluster.nodes import Nodes
    from optsched.cluster.policies.queue_order import Backfill
    from optsched.cluster.policy import ClusterView, Decision
    from optsched.cluster.settings import Settings
    from optsched.cluster.workload import Workload


class Sjf:
    """Pending jobs start in order of estimated duration, at one size, and run to their ends.

    Parameters
    ----------
    backfill, gang
        As for `Fifo`.

    Raises
    ------
    InputError
        An option is wrong.
    """

    name: ClassVar[str] = "sjf"
    clairvoyant: bool = False
    options: ClassVar[tuple[str, ...]] = ("backfill", "gang")

    def __init__(self, *, backfill: Backfill = "none", gang: int | None = None) -> None:
        self.backfill = checked_backfill(backfill)
        self.gang = checked_gang(gang)

    def decide(self, view: ClusterView) -> Decision:
        """Start what may start."""
        _, rate = gangs_in_view(view, self.gang)
        return in_order(view, estimates(view, rate), self.gang, self.backfill)

    def twin(self, workload: Workload, nodes: Nodes, settings: Settings) -> Log | None:
        """The whole simulation in compiled code."""
        from optsched.cluster.queue_twin import queue_twin

        return queue_twin(
            workload, nodes, settings, shortest=True, gang=self.gang, backfill=self.backfill
        )
