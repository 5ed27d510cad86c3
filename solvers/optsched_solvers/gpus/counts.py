"""`counts`: the exact choice of GPUs by the numbers of GPUs on every host."""

from __future__ import annotations

import time
from contextlib import suppress
from functools import lru_cache
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import numpy as np

from optsched.bandwidth.models.model import CountModel, UnmeasuredPattern
from optsched.bandwidth.models.patterns import written_pattern
from optsched.bandwidth.models.tables import CountTables
from optsched.bandwidth.placement.problem import GpuPlacement
from optsched.bandwidth.search.by_counts import (
    MOST_LEAVES,
    MOST_NODES,
    STEPS_A_SECOND,
    UNPROVED,
    best_by_counts,
    leaves_in_python,
)
from optsched.solving.result import Result
from optsched.solving.solver import Support
from optsched_solvers._loading import load, load_behind, loaded
from optsched_solvers.gpus.proximity import proximity
from optsched_solvers.gpus.vectors import CountVectors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optsched.bandwidth.search.large import LargeSearch
    from optsched.model.schedule import Problem
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor

KERNEL: Final = "optsched.bandwidth.search.counts"
LARGE: Final = ("optsched.bandwidth.search.request", "optsched.bandwidth.search.cells")

INSTANT: Final = 100_000
"""Count vectors that take milliseconds at worst."""


class Counts:
    """Depth-first search over count vectors with the best subset of each host.

    One iteration is one count vector evaluated. Ties are broken as `GpuPlacement` says. Without
    tables, or with too many count vectors, `optsched.bandwidth.search.large` searches.
    """

    name = "counts"
    kinds = ("gpus",)
    options: Mapping[str, str] = MappingProxyType({})

    def runs_inline(self, problem: Problem) -> bool:
        """Whether the count vectors are few."""
        return isinstance(problem, GpuPlacement) and _vectors(problem) <= INSTANT

    def supports(self, problem: Problem) -> Support:
        """A model with tables or any `CountModel`."""
        if isinstance(problem, GpuPlacement) and isinstance(problem.model, CountModel):
            return Support(True)
        return supported(problem, is_counts=True)

    def solve(self, problem: Problem, limits: Limits, monitor: Monitor) -> Result:
        """Search all count vectors, or as many as the iterations allow; then as without tables."""
        assert isinstance(problem, GpuPlacement)
        if problem.tables is None:
            return self._large(problem, limits, monitor)
        leaves = MOST_LEAVES if limits.iterations is None else limits.iterations
        ready = loaded(KERNEL)
        in_python = leaves_in_python(problem.state.room, problem.k) >= leaves
        if not ready and not in_python and not load(monitor, KERNEL):
            return _nearest(problem, monitor)
        nodes = MOST_NODES
        if limits.iterations is None:
            nodes = int(min(nodes, monitor.remaining * STEPS_A_SECOND))
        found = best_by_counts(
            problem.tables, problem.state, problem.demands, problem.k, problem.policy,
            ties=True, leaves=leaves, nodes=nodes,
        )  # fmt: skip
        if not ready:
            load_behind(KERNEL)  # for the next request
        if found is None:
            if _vectors(problem) > min(leaves, nodes // 32):
                return self._large(problem, limits, monitor)
            return nothing_found(problem)
        monitor.advance(found.visited)
        monitor.incumbent(found.gpus, -found.value, self.name)
        if found.upper_bound < UNPROVED:
            self._claim(problem, monitor, found.upper_bound, found.value)
            return Result("unknown")
        return self._large(problem, limits, monitor)

    def _large(self, problem: GpuPlacement, limits: Limits, monitor: Monitor) -> Result:
        """Search without tables; until the deadline if one is given."""
        if monitor.should_stop() or not isinstance(problem.model, CountModel):
            return Result("unknown")
        if not load(monitor, *LARGE):
            return _nearest(problem, monitor)
        given = limits.time_limit is not None and not limits.by_default
        found = None
        for bounds in problem.policy.tiers(problem.state, problem.k):
            found = found or large_search(problem.model).choose(
                problem.state, problem.k, problem.demands, problem.policy,
                time.monotonic() + monitor.remaining if given else None, bounds,
            )  # fmt: skip
        if found is not None:
            monitor.incumbent(found.gpus, -found.value, self.name)
            self._claim(problem, monitor, found.upper_bound, found.value)
        return Result("unknown")

    def _claim(self, problem: GpuPlacement, monitor: Monitor, upper: int, best: int) -> None:
        """Report the upper bound of a search with the best value found.

        With a preferred level it holds for as few domains: none is reported for a better start.
        """
        objective = monitor.objective
        if problem.policy.preferred is None or objective is None or objective >= -best:
            monitor.bound(-upper, self.name)


@lru_cache(maxsize=4)
def large_search(model: CountModel) -> LargeSearch:
    """The search for large clusters, prepared once for a model."""
    from optsched.bandwidth.search.large import LargeSearch

    return LargeSearch(model)


def supported(
    problem: Problem, *, is_counts: bool = False, most_vectors: int | None = None
) -> Support:
    """Whether counts by host decide all bandwidths of a problem, at most `most_vectors` of them.

    `is_counts`: for the solver that keeps to rails and to a preferred level.
    """
    if not isinstance(problem, GpuPlacement):
        return Support(False, "it only chooses GPUs (GpuPlacement)")
    if problem.cluster.rails and not is_counts:
        return Support(False, "it cannot keep to rails (counts can)")
    if problem.policy.preferred is not None and not is_counts:
        return Support(False, "it cannot obey the policy's preferred (counts can)")
    if not problem.model.intra_monotone:
        return Support(False, "the model may rate a choice lower that has faster hosts")
    if problem.tables is None:
        return Support(False, "the model has no tables by counts for this cluster")
    if most_vectors is not None:
        number = CountVectors(problem).count()
        if number > most_vectors:
            return Support(False, f"it takes up to {most_vectors} count vectors, not {number}")
    return Support(True)


def nothing_found(problem: GpuPlacement) -> Result:
    """Result without a choice: infeasible, or every feasible choice has an unmeasured pattern."""
    tables = problem.model.tables("high") or problem.tables
    assert tables is not None
    state = problem.state
    measured = CountTables.of(tables.cluster, np.maximum(tables.network, 0), tables.intra)
    found = best_by_counts(measured, state, (0,) * len(state.jobs), problem.k, problem.policy)
    if found is None:
        return Result("infeasible", reason=f"no set of {problem.k} free GPUs obeys the policy")
    pattern = written_pattern(problem.cluster.counts(found.gpus))
    return Result(
        "unknown",
        reason=f"every choice of {problem.k} GPUs needs a pattern that is not measured, such as "
        f"{pattern} or, beside running jobs, theirs together: measure it, or predict",
    )


def _nearest(problem: GpuPlacement, monitor: Monitor) -> Result:
    """Choice of `proximity` in the largest fabric, if no time is left to load kernels."""
    cluster, state, k = problem.cluster, problem.policy.usable(problem.state), problem.k
    fabric = max(cluster.fabrics, key=lambda hosts: int(state.room[list(hosts)].sum()))
    free = [gpu for gpu in state.free if int(cluster.host_of[gpu]) in fabric]
    chosen = sorted(proximity(cluster, free, k)) if len(free) >= k else []
    if not problem.faults(chosen):
        with suppress(UnmeasuredPattern):
            monitor.incumbent(tuple(chosen), -problem.share(chosen).value, "proximity")
    return Result("unknown")


def _vectors(problem: GpuPlacement) -> int:
    """Number of count vectors, feasible or not."""
    return prod(int(n) + 1 for n in problem.state.room)
