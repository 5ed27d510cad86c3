"""Shortest job first."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from optsched.cluster.policies.queue_order import Queue, estimates, in_order
from optsched.cluster.queue_twin_input import gangs_in_view

if TYPE_CHECKING:
    from optsched.cluster.policy import ClusterView, Decision


class Sjf(Queue):
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
    shortest: ClassVar[bool] = True

    def decide(self, view: ClusterView) -> Decision:
        """Start what may start."""
        _, rate = gangs_in_view(view, self.gang)
        return in_order(view, estimates(view, rate), self.gang, self.backfill)
