"""`counts`: the exact choice of GPUs by the numbers of GPUs on every host."""

from __future__ import annotations

import time
from functools import lru_cache
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from optsched.bandwidth.models.model import CountModel
from optsched.bandwidth.models.patterns import written_pattern
from optsched.bandwidth.models.tables import CountTables
from optsched.bandwidth.placement.problem import GpuPlacement, GpuSets
from optsched.bandwidth.search.ask import MOST_LEAVES, MOST_NODES, UNPROVED, ask, leaves_in_python
from optsched.solving.result import Result
from optsched.solving.solver import Support
from optsched_solvers._loading import load, load_behind, loaded
from optsched_solvers.gpus.vectors import claim

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optsched.bandwidth.search.ask import Answer
    from optsched.bandwidth.search.large import LargeSearch
    from optsched.model.schedule import Problem
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor

KERNEL = "optsched.bandwidth.search.counts"

LARGE = ("optsched.bandwidth.search.request", "optsched.bandwidth.search.cells")

NODES_A_SECOND = 5_000_000
"""Steps of the kernel that a slow core does beside some jobs."""

INSTANT = 100_000
"""Count vectors that take milliseconds at worst."""


class Counts:
    """Depth-first search over count vectors with the best subset of each host.

    One iteration is one count vector evaluated. Ties are broken as `GpuPlacement` says. Clusters
    too large for that are searched by thresholds and jobs that are met, with a proven bound: see
    `optsched.bandwidth.search.large`.
    """

    name = "counts"
    kinds = ("gpus",)
    options: Mapping[str, str] = MappingProxyType({})

    def runs_inline(self, problem: Problem) -> bool:
        """Where there are not too many count vectors to look at them all."""
        return isinstance(problem, GpuPlacement) and vectors(problem) <= INSTANT

    def supports(self, problem: Problem) -> Support:
        """One request, and a model with tables or any `CountModel`."""
        if not isinstance(problem, GpuPlacement):
            return Support(False, "it only chooses GPUs (GpuPlacement)")
        return Support(True) if is_large(problem) else supported(problem)

    def solve(self, problem: Problem, limits: Limits, monitor: Monitor) -> Result:
        """Search all count vectors, or as many as the iterations allow; then go on as on large."""
        assert isinstance(problem, GpuPlacement)
        state = problem.state
        if problem.tables is None:
            return self._large(problem, limits, monitor)
        leaves = MOST_LEAVES if limits.iterations is None else limits.iterations
        ready = loaded(KERNEL)
        few = leaves if ready else min(leaves, leaves_in_python(state.room, problem.k))
        nodes = MOST_NODES
        if limits.iterations is None:
            nodes = int(min(nodes, monitor.remaining * NODES_A_SECOND))
        found = _asked(problem, few, nodes) if few else None
        if few < leaves and (found is None or not found.compared):
            if load(monitor, KERNEL):
                found = _asked(problem, leaves, nodes)
            elif found is None:
                offer_nearest(problem, monitor)
                return Result("unknown")
        if found is None:
            if vectors(problem) > min(leaves, nodes // 32):
                return self._large(problem, limits, monitor)
            return nothing_found(problem)
        if not ready:
            load_behind(KERNEL)  # for the next question
        monitor.advance(found.visited)
        monitor.incumbent(GpuSets.of([found.gpus]), -found.value, self.name)
        if found.upper_bound < UNPROVED:
            claim(problem, monitor, found.upper_bound, self.name)
            return Result("unknown")
        return self._large(problem, limits, monitor)

    def _large(self, problem: GpuPlacement, limits: Limits, monitor: Monitor) -> Result:
        if monitor.should_stop() or not is_large(problem):
            return Result("unknown")
        if not load(monitor, *LARGE):
            offer_nearest(problem, monitor)
            return Result("unknown")
        return search_large(problem, limits, monitor, self.name)


def search_large(problem: GpuPlacement, limits: Limits, monitor: Monitor, name: str) -> Result:
    """The search without tables, until the time is over if there is a limit."""
    assert isinstance(problem.model, CountModel)
    given = limits.time_limit is not None and not limits.by_default
    found = large_search(problem.model).choose(
        problem.state, problem.k, problem.demands, problem.policy,
        time.monotonic() + monitor.remaining if given else None,
    )  # fmt: skip
    if found is not None:
        monitor.incumbent(GpuSets.of([found.gpus]), -found.value, name)
        claim(problem, monitor, found.upper_bound, name, found.value)
    return Result("unknown")


def _asked(problem: GpuPlacement, leaves: int, nodes: int) -> Answer | None:
    assert problem.tables is not None
    return ask(
        problem.tables, problem.state, problem.demands, problem.k, problem.policy,
        ties=True, tolerance=problem.tolerance, leaves=leaves, nodes=nodes,
    )  # fmt: skip


@lru_cache(maxsize=4)
def large_search(model: CountModel) -> LargeSearch:
    """What depends on a model, which is listed once."""
    from optsched.bandwidth.search.large import LargeSearch

    return LargeSearch(model)


def supported(problem: GpuPlacement) -> Support:
    """Whether counts on hosts decide what a choice is worth."""
    if len(problem.requests) != 1:
        return Support(False, "it takes one request at a time")
    if not problem.model.intra_monotone:
        return Support(False, "the model may rate a choice lower that has faster hosts")
    if problem.tables is None:
        return Support(False, "the model has no tables by counts for this cluster")
    return Support(True)


def vectors(problem: GpuPlacement) -> int:
    """Number of count vectors, most of which a search cuts off."""
    return prod(int(n) + 1 for n in problem.state.room)


def is_large(problem: GpuPlacement) -> bool:
    """Whether the search without tables takes it."""
    return (
        isinstance(problem.model, CountModel)
        and len(problem.requests) == 1
        and problem.on_unmeasured == "predict"
        and not problem.is_robust
    )


def offer_nearest(problem: GpuPlacement, monitor: Monitor) -> None:
    """An answer when there is no time for kernels: whole hosts and NUMA groups first."""
    from optsched.bandwidth.models.model import UnmeasuredPattern
    from optsched.bandwidth.topology.proximity import proximity

    chosen = sorted(proximity(problem.cluster, problem.state.free, problem.k))
    if problem.on_unmeasured == "measured" or problem.faults([chosen]):
        return
    try:
        monitor.incumbent(GpuSets.of([chosen]), -problem.worth([chosen]), "proximity")
    except UnmeasuredPattern:
        return


def nothing_found(problem: GpuPlacement) -> Result:
    """Infeasible; or unknown, if a choice is allowed whose pattern is not measured."""
    tables = problem.model.tables("high") or problem.tables
    assert tables is not None
    state = problem.state
    everything = CountTables.of(tables.cluster, np.maximum(tables.network, 0), tables.intra)
    found = ask(everything, state, (0,) * len(state.jobs), problem.k, problem.policy)
    if found is None:
        return Result("infeasible", reason=f"no set of {problem.k} free GPUs obeys the policy")
    pattern = written_pattern(problem.cluster.counts(found.gpus))
    return Result(
        "unknown",
        reason=f"every choice of {problem.k} GPUs needs a pattern that is not measured, such as "
        f"{pattern} or, beside running jobs, theirs together: measure it, or predict",
    )
