"""Branch and bound over count vectors of one request."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from optsched.solving.result import Result
from optsched_solvers.gpus.counts import nothing_found, supported
from optsched_solvers.gpus.vectors import CountVectors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optsched.model.schedule import Problem
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor
    from optsched.solving.solver import Support

MOST_VECTORS: Final = 200_000
"""Count vectors that it takes."""

_BLOCK: Final = 4096  # vectors that are evaluated at once


class BranchAndBound:
    """All count vectors in lexicographic order, less those with hosts that are too slow.

    The bound of a vector is the least of the best bandwidths within its hosts. One iteration is one
    vector.
    """

    name = "branch_and_bound"
    kinds = ("gpus",)
    options: Mapping[str, str] = MappingProxyType({})

    def supports(self, problem: Problem) -> Support:
        """Up to 200,000 count vectors, and a model with tables."""
        return supported(problem, most_vectors=MOST_VECTORS)

    def solve(self, problem: Any, limits: Limits, monitor: Monitor) -> Result:
        """Evaluate all vectors, in blocks."""
        vectors, best = CountVectors(problem), -1
        left = 2**62 if limits.iterations is None else limits.iterations
        for rows in vectors.blocks(min(_BLOCK, left)):
            if left <= 0 or monitor.should_stop():
                return Result("unknown")
            left -= len(rows)
            monitor.advance(len(rows))
            kept = rows[(vectors.fastest(rows) > best) & (vectors.excess(rows) == 0)]
            values = vectors.values(kept)
            top = int(values.argmax()) if len(kept) else 0
            if len(kept) and values[top] > best:
                best = int(values[top])
                monitor.incumbent(vectors.gpus(kept[top]), -best, self.name)
        if best < 0:
            return nothing_found(problem)
        monitor.bound(-best, self.name)
        return Result("unknown")
