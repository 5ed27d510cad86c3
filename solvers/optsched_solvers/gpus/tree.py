"""`branch_and_bound` for GPU placements: `counts` where the model has tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optsched_solvers.gpus.counts import Counts, supported

if TYPE_CHECKING:
    from optsched.model.schedule import Problem
    from optsched.solving.solver import Support


class BranchAndBound(Counts):
    """Depth-first branch and bound over count vectors; one iteration is one vector evaluated."""

    name = "branch_and_bound"

    def supports(self, problem: Problem) -> Support:
        """A model with tables; neither rails nor a preferred level."""
        return supported(problem)
