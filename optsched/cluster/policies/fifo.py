"""First in, first out."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from optsched.cluster.policies.queue_order import checked_backfill, in_order
from optsched.cluster.queue_twin_input import checked_gang

if TYPE_CHECKING:
    from optsched.cluster.log import Log
    from optsched.cluster.nodes import Nodes
    from optsched.cluster.policies.queue_order import Backfill
    from optsched.cluster.policy import ClusterView, Decision
    from optsched.cluster.settings import Settings
    from optsched.cluster.workload import Workload


class Fifo:
    """Jobs start in order of arrival, at one size, and run to their ends.

    Parameters
    ----------
    backfill
        ``"none"``: nobody passes the first job that does not fit; ``"first_fit"``: whoever fits
        starts; ``"easy"``: whoever fits and, by the estimates, does not delay that first job.
    gang
        Elastic jobs run on their largest allowed size up to this; None: their largest.

    Raises
    ------
    InputError
        An option is wrong.
    """

    name: ClassVar[str] = "fifo"
    clairvoyant: bool = False
    options: ClassVar[tuple[str, ...]] = ("backfill", "gang")

    def __init__(self, *, backfill: Backfill = "none", gang: int | None = None) -> None:
        self.backfill = checked_backfill(backfill)
        self.gang = checked_gang(gang)

    def decide(self, view: ClusterView) -> Decision:
        """Start what may start."""
        return in_order(view, None, self.gang, self.backfill)

    def twin(self, workload: Workload, nodes: Nodes, settings: Settings) -> Log | None:
        """The whole simulation in compiled code."""
        from optsched.cluster.queue_twin import queue_twin

        return queue_twin(
            workload, nodes, settings, shortest=False, gang=self.gang, backfill=self.backfill
        )
