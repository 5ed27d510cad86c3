"""Branch and bound over count vectors chooses GPUs: for one request."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.bandwidth.placement.problem import GpuSets
from optsched.solving.result import Result
from optsched.solving.solver import Support
from optsched_solvers.gpus.counts import nothing_found
from optsched_solvers.gpus.vectors import CountVectors, claim

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optsched.model.schedule import IntArray, Problem
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor

MOST_VECTORS: Final = 200_000
"""Count vectors, which are all judged first."""

_STEP: Final = 32
"""Vectors between two bounds that are told."""


def supports(problem: Problem) -> Support:
    """One request of up to `MOST_VECTORS` count vectors."""
    from optsched.bandwidth.placement.problem import GpuPlacement

    if not isinstance(problem, GpuPlacement):
        return Support(False, "it is no choice of GPUs")
    if not problem.model.intra_monotone:
        return Support(False, "the model may rate a choice lower that has faster hosts")
    if problem.tables is None:
        return Support(False, "the model has no tables by counts for this cluster")
    if len(problem.requests) > 1:
        return Support(False, "it takes one request at a time")
    number = CountVectors(problem, problem.requests[0]).count()
    if number > MOST_VECTORS:
        return Support(False, f"it judges up to {MOST_VECTORS} count vectors, not {number}")
    return Support(True)


def solve(problem: Any, limits: Limits, monitor: Monitor) -> Result:
    """Count vectors by falling bound, in each the best subsets of its hosts; one iteration is one.

    The bound of a vector has the best subset of each host for the choice, and for its joint
    allocations; where these depend on counts only it is had.
    """
    vectors = CountVectors(problem, problem.requests[0])
    left = 2**62 if limits.iterations is None else limits.iterations
    levels = vectors.levels()
    for level in levels:
        rows, bounds = _ranked(vectors, level)
        best = -1
        for i, (row, bound) in enumerate(zip(rows, bounds.tolist(), strict=True)):
            # at a preferred level there may be no choice, and a higher one at the next
            if (best >= 0 or level == levels[-1]) and (i % _STEP == 0 or bound <= best):
                claim(problem, monitor, max(bound, best), "branch_and_bound", best)
            if bound <= best:
                break
            if left <= 0 or monitor.should_stop():
                return Result("unknown")
            left -= 1
            monitor.advance(1)
            value, gpus = bound, vectors.gpus(row)
            if value > best:
                best = value
                monitor.incumbent(GpuSets.of([gpus]), -value, "branch_and_bound")
        else:
            if best >= 0:
                claim(problem, monitor, best, "branch_and_bound", best)
        if best >= 0:
            return Result("unknown")
    return nothing_found(problem)


def _ranked(vectors: CountVectors, level: int | None) -> tuple[IntArray, IntArray]:
    """Vectors that obey the policy, by falling bound."""
    rows, bounds = [], []
    for block in vectors.blocks():
        value = vectors.shares(block).value
        kept = (value >= 0) & (vectors.excess(block, level) == 0)
        rows.append(block[kept])
        bounds.append(value[kept])
    if not rows:
        return np.zeros((0, 0), np.int64), np.zeros(0, np.int64)
    every, most = np.concatenate(rows), np.concatenate(bounds)
    order = np.argsort(-most, kind="stable")
    return every[order], most[order]


class BranchAndBound:
    """Branch and bound over count vectors; one iteration is one of them."""

    name = "branch_and_bound"
    kinds = ("gpus",)
    options: Mapping[str, str] = MappingProxyType({})

    supports = staticmethod(supports)
    solve = staticmethod(solve)
