"""`optimus`: GPU by GPU to the job whose remaining time falls most.

Peng et al., *Optimus*, EuroSys 2018, section 4.1 (all workers; parameter servers do not exist
here): every job gets its smallest size by arrival, then the next step goes to the largest
R/f(g) - R/f(g+1), per GPU where steps are larger. R is the estimate; none is preempted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np

from optsched.cluster.policies.room import in_order

if TYPE_CHECKING:
    from optsched.cluster.policy import ClusterView, Decision

_NEVER: Final = 0
_MARGINAL: Final = 1


class Optimus:
    """Greedy by marginal gain in remaining time, without weights."""

    name: ClassVar[str] = "optimus"
    options: ClassVar[tuple[str, ...]] = ()
    clairvoyant: bool = False

    def decide(self, view: ClusterView) -> Decision:
        """Quotas now."""
        n = len(view.job)
        left = view.remaining.astype(np.float64)
        return in_order(view, np.arange(n), _NEVER, _MARGINAL, left, weight=np.ones(n))
