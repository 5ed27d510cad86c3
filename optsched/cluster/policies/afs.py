"""`afs`: each GPU to the winner of pairwise comparisons, between short and elastic jobs.

AFS-L of Hwang et al., *Elastic Resource Sharing for Distributed Deep Learning*, NSDI 2021: of two
jobs, with a the one that ends earlier at its present size, b is preferred if and only if
(f_b(g+1) - f_b(g)) / f_b(g+1) > (f_a(g+1) - f_a(g)) / f_a(g), each at its own g. A job without
GPUs wins by ending earlier, so all smallest sizes come first, by estimated remaining time; where
g+1 is not allowed, the next size stands for it. Remaining times are estimates; none is preempted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np

from optsched.cluster.policies.room import in_order, smallest

if TYPE_CHECKING:
    from optsched.cluster.policy import ClusterView, Decision

_NEVER: Final = 0
_PAIRWISE: Final = 3


class Afs:
    """Apathetic future share, greedy version."""

    name: ClassVar[str] = "afs"
    options: ClassVar[tuple[str, ...]] = ()
    clairvoyant: bool = False

    def decide(self, view: ClusterView) -> Decision:
        """Quotas now."""
        left = view.remaining.astype(np.float64)
        slow = np.ones(len(view.job))
        slots = smallest(view) > 0
        slow[slots] = view.rate[view.size_ptr[:-1][slots]]
        return in_order(view, left / slow, _NEVER, _PAIRWISE, left)
