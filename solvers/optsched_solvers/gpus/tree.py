"""Branch and bound over hosts chooses GPUs: for one request, and for several at once."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from optsched.model.schedule import Rows
from optsched.solving.result import Result
from optsched.solving.solver import Support
from optsched_solvers._loading import load
from optsched_solvers.gpus.counts import nothing_found
from optsched_solvers.gpus.vectors import claim

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optsched.model.schedule import Problem
    from optsched.problems.gpus.problem import SubsetChoice
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor

NODES: Final = 20_000
"""Nodes between two looks at the limits: some milliseconds."""

FIRST: Final = 500
"""Nodes before the first look."""


def supports(problem: Problem) -> Support:
    """Any joint allocations for one request; for several see `subset_batch.supports`."""
    from optsched.problems.gpus.problem import SubsetChoice

    if not isinstance(problem, SubsetChoice):
        return Support(False, "it is no choice of GPUs")
    if not problem.model.intra_monotone:
        return Support(False, "the model may rate a choice lower that has faster hosts")
    if problem.tables is None:
        return Support(False, "the model has no tables by counts for this cluster")
    if len(problem.requests) == 1:
        return Support(True)
    from optsched_solvers.gpus import batch as subset_batch

    return subset_batch.supports(problem)


def solve(problem: Any, limits: Limits, monitor: Monitor) -> Result:
    """Depth first over hosts by falling number of free GPUs; one iteration is one node.

    The bound of a node is the least of the best bandwidths within the hosts already decided and
    the largest limit of all patterns of k GPUs that contain their counts, shared with the jobs met.
    """
    if len(problem.requests) > 1:
        from optsched_solvers.gpus import batch as subset_batch

        return subset_batch.solve(problem, limits, monitor)
    if not load(monitor, "optsched.bandwidth.subset_search"):
        return Result("unknown")
    from optsched.bandwidth.ask import levels_of
    from optsched.bandwidth.subsets import SubsetSearch

    assert problem.tables is not None
    left = 2**62 if limits.iterations is None else limits.iterations
    levels = levels_of(problem.cluster, problem.policy)
    for level in levels:
        search = SubsetSearch(
            problem.tables, problem.state, problem.demands, problem.k, problem.policy,
            problem.contention, level,
        )  # fmt: skip
        best, upper, nodes = -1, -1, FIRST
        while not search.finished:
            nodes = min(nodes, left)
            if nodes <= 0 or monitor.should_stop():
                return Result("unknown")
            search.run(nodes)
            monitor.advance(nodes)
            left -= nodes
            nodes = NODES
            if search.value > best:
                best = search.value
                _offer(problem, monitor, search.parts, best)
            # at a preferred level there may be no choice, and a higher one at the next
            if (best >= 0 or level == levels[-1]) and 0 <= search.upper != upper:
                upper = search.upper
                claim(problem, monitor, upper, "branch_and_bound", best)
        if best >= 0:
            return Result("unknown")
    return nothing_found(problem)


def _offer(
    problem: SubsetChoice, monitor: Monitor, parts: tuple[tuple[int, int], ...], value: int
) -> None:
    from optsched.bandwidth.ask import gpus_of

    monitor.incumbent(Rows.of([gpus_of(problem.state, parts)]), -value, "branch_and_bound")


class BranchAndBound:
    """Branch and bound over hosts; one iteration is one node."""

    name = "branch_and_bound"
    kinds = ("gpus",)
    options: Mapping[str, str] = MappingProxyType({})

    supports = staticmethod(supports)
    solve = staticmethod(solve)
