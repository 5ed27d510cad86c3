"""First in, first out."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from optsched.cluster.policies.queue_order import Queue, in_order

if TYPE_CHECKING:
    from optsched.cluster.policy import ClusterView, Decision


class Fifo(Queue):
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
    shortest: ClassVar[bool] = False

    def decide(self, view: ClusterView) -> Decision:
        """Start what may start."""
        return in_order(view, None, self.gang, self.backfill)
