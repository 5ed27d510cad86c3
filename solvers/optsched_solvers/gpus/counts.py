"""`counts`: the exact choice of GPUs by the numbers of GPUs on every host."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from optsched.bandwidth.ask import MOST_LEAVES, ask, gpus_of, leaves_in_python
from optsched.bandwidth.intra import MOST_BY_SUBSET
from optsched.bandwidth.model import CountModel
from optsched.bandwidth.patterns import written_pattern
from optsched.bandwidth.tables import CountTables
from optsched.errors import InputError
from optsched.problems.gpus.problem import GpuPlacement, GpuSets
from optsched.solving.result import Result
from optsched.solving.solver import Support
from optsched_solvers._loading import load, load_behind, loaded
from optsched_solvers.gpus.vectors import claim

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optsched.bandwidth.ask import Choice
    from optsched.bandwidth.flat import FlatSearch
    from optsched.model.schedule import Problem
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor

KERNEL = "optsched.bandwidth.counts"

INSTANT = 100_000
"""Count vectors that take milliseconds at worst."""

_YES = Support(True)


class Counts:
    """Depth-first search over count vectors with the best subset of each host.

    One iteration is one count vector evaluated. Ties are broken as `GpuPlacement` says. On clusters
    too large for that a choice without tenants and policy goes through the patterns of k instead:
    there the lowest ids win.
    """

    name = "counts"
    kinds = ("gpus",)
    options: Mapping[str, str] = MappingProxyType({})

    def runs_inline(self, problem: Problem) -> bool:
        """Where there are not too many count vectors to look at them all."""
        return isinstance(problem, GpuPlacement) and vectors(problem) <= INSTANT

    def supports(self, problem: Problem) -> Support:
        """One request, and a model with tables or, without tenants and policy, any `CountModel`."""
        if not isinstance(problem, GpuPlacement):
            return Support(False, "it only chooses GPUs (GpuPlacement)")
        said = supported(problem)
        return said if said or len(problem.requests) > 1 or not by_patterns(problem) else _YES

    def solve(self, problem: Problem, limits: Limits, monitor: Monitor) -> Result:
        """Search all count vectors, or as many as the iterations allow."""
        assert isinstance(problem, GpuPlacement)
        state = problem.state
        if by_patterns(problem) and (problem.tables is None or vectors(problem) > MOST_LEAVES):
            return self._by_patterns(problem, monitor)
        assert problem.tables is not None
        leaves = MOST_LEAVES if limits.iterations is None else limits.iterations
        ready = loaded(KERNEL)
        few = leaves if ready else min(leaves, leaves_in_python(state.room, problem.k))
        found = _asked(problem, few) if few else None
        if few < leaves and (found is None or not found.compared):
            if load(monitor, KERNEL):
                found = _asked(problem, leaves)
            elif found is None:
                offer_nearest(problem, monitor)
                return Result("unknown")
        if found is None:
            if vectors(problem) > leaves:
                return Result("unknown")
            return nothing_found(problem)
        if not ready:
            load_behind(KERNEL)  # for the next question
        monitor.advance(found.visited)
        monitor.incumbent(GpuSets.of([gpus_of(state, found.parts)]), -found.value, self.name)
        if found.exact:
            claim(problem, monitor, found.optimum, self.name)
        return Result("unknown")

    def _by_patterns(self, problem: GpuPlacement, monitor: Monitor) -> Result:
        if not load(monitor, "optsched.bandwidth.flat"):
            offer_nearest(problem, monitor)
            return Result("unknown")
        assert isinstance(problem.model, CountModel)
        try:
            found = _flat(problem.model).choose(problem.state, problem.k)
        except InputError:  # too many patterns of k to list
            return Result("unknown")
        monitor.incumbent(GpuSets.of([found.gpus]), -found.value, self.name)
        if found.exact:
            claim(problem, monitor, found.value, self.name)
        return Result("unknown")


def _asked(problem: GpuPlacement, leaves: int) -> Choice | None:
    assert problem.tables is not None
    state = problem.state
    return ask(
        problem.tables, state.masks, state.held, problem.demands, problem.k, problem.policy,
        problem.contention, ties=True, tolerance=problem.tolerance, leaves=leaves,
    )  # fmt: skip


@lru_cache(maxsize=4)
def _flat(model: CountModel) -> FlatSearch:
    """The patterns of a model, which are listed once."""
    from optsched.bandwidth.flat import FlatSearch

    return FlatSearch(model)


def supported(problem: GpuPlacement) -> Support:
    """Whether counts on hosts decide what a choice is worth."""
    if len(problem.requests) != 1:
        return Support(False, "it takes one request at a time")
    if problem.contention.fill == "exact":
        return Support(False, "joint allocations with their exact GPUs are not functions of counts")
    if not problem.model.intra_monotone:
        return Support(False, "the model may rate a choice lower that has faster hosts")
    if problem.tables is None:
        return Support(False, "the model has no tables by counts for this cluster")
    return Support(True)


def vectors(problem: GpuPlacement) -> int:
    """Number of count vectors, most of which a search cuts off."""
    return prod(int(n) + 1 for n in problem.state.room)


def by_patterns(problem: GpuPlacement) -> bool:
    """Whether nothing but the pattern and the hosts decides: no tenants, no policy."""
    across = (problem.state.held > 0).sum(axis=1) >= 2
    wanting = any(d > 0 for d, a in zip(problem.demands, across, strict=True) if a)
    return (
        isinstance(problem.model, CountModel)
        and problem.on_unmeasured == "predict"
        and not problem.is_robust
        and problem.policy.is_free
        and not wanting
        and problem.contention.skip_idle
        and not problem.contention.whole
    )


def bound_by_patterns(problem: GpuPlacement, monitor: Monitor) -> None:
    """Beside tenants nothing beats the best without them, if its patterns can be listed."""
    model, sure = problem.model, problem.on_unmeasured == "predict" and not problem.is_robust
    if not isinstance(model, CountModel) or not sure:
        return
    if not load(monitor, "optsched.bandwidth.flat"):
        return
    try:
        upper = _flat(model).choose(problem.state, problem.k).upper_bound
    except InputError:
        return
    claim(problem, monitor, upper, "counts")


def offer_nearest(problem: GpuPlacement, monitor: Monitor) -> None:
    """An answer when there is no time for kernels: whole hosts and NUMA groups first."""
    from optsched.bandwidth.model import UnmeasuredPattern
    from optsched.bandwidth.proximity import proximity

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
    found = ask(
        everything, state.masks, state.held, (0,) * len(state.jobs), problem.k, problem.policy
    )
    if found is None:
        return Result("infeasible", reason=no_choice(problem))
    sizes = problem.cluster.sizes
    counts = [p.bit_count() if sizes[h] <= MOST_BY_SUBSET else p for h, p in found.parts]
    pattern = written_pattern(tuple(counts))
    return Result(
        "unknown",
        reason=f"every choice of {problem.k} GPUs needs a pattern that is not measured, such as "
        f"{pattern} or, beside running jobs, theirs together: measure it, or predict",
    )


def no_choice(problem: GpuPlacement) -> str:
    """Why there is none, if counting does not show it."""
    return f"no set of {problem.k} free GPUs obeys the policy"
