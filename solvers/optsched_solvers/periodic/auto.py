"""`auto` for rolling job arrays: constructions, then tabu search beside CP-SAT."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from optsched.errors import InputError
from optsched.solving.limits import available_cores
from optsched.solving.result import Result
from optsched.solving.solver import Support
from optsched_solvers._portfolio import Portfolio, chosen_cores, core_of
from optsched_solvers.periodic import search

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from optsched.model.schedule import Problem
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor

MODELLED_UP_TO: Final = 600
"""Operations; above, CP-SAT neither finds nor refutes a period in any reasonable time."""

CAPPED_UP_TO: Final = 100
"""The same where memory is limited."""


class Auto:
    """Constructions first, which often meet the bound; then tabu search beside CP-SAT."""

    name = "auto"
    kinds = ("periodic",)
    chooses = True
    options: Mapping[str, str] = MappingProxyType({})

    def supports(self, problem: Problem) -> Support:
        """Every rolling array."""
        return Support(True)

    def solve(self, problem: Problem, limits: Limits, monitor: Monitor) -> Result:
        """Constructions, then a portfolio."""
        if getattr(problem, "chooses", False):
            from optsched_solvers.periodic.construct import Dispatch
            from optsched_solvers.shop import recompute_choice

            return recompute_choice.solve(self, Dispatch(), problem, limits, monitor)
        graph = problem.graph()
        alone = replace(limits, workers=1, options={})
        search.begin(problem, alone, monitor)
        if monitor.should_stop():
            return Result("unknown")
        most = CAPPED_UP_TO if graph.memory.any() else MODELLED_UP_TO
        modelled = graph.n_operations <= most
        if limits.iterations is not None:
            return _in_turn(problem, alone, monitor, modelled)
        cores = chosen_cores(limits.workers)

        def searcher(seed: int) -> Callable[[Monitor], Result]:
            return lambda member: search.solve(problem, replace(alone, seed=seed % 2**31), member)

        portfolio = Portfolio(monitor)
        portfolio.add(searcher(limits.seed), core_of(cores, 0))
        if modelled:  # one worker: they share a core
            portfolio.add(lambda member: _modelled(problem, alone, member), core_of(cores, 1))
        for k in range(1 + modelled, min(limits.workers, len(cores) or available_cores())):
            portfolio.add(searcher(limits.seed + k), core_of(cores, k))
        while portfolio.wait(0.02):
            pass
        return portfolio.finish()


def _in_turn(problem: Problem, limits: Limits, monitor: Monitor, modelled: bool) -> Result:
    """One engine after the other: the same schedule whatever the clock does."""
    result = search.solve(problem, limits, monitor)
    if modelled and not monitor.should_stop():
        _modelled(problem, limits, monitor)
    return result


def _modelled(problem: Problem, limits: Limits, monitor: Monitor) -> Result | None:
    """CP-SAT; tabu search goes on in its place when it has ended, unless moves are counted."""
    from optsched_solvers.periodic.cpsat import CpSat

    with suppress(InputError):  # times beyond CP-SAT's range
        CpSat().solve(problem, limits, monitor)
    if limits.iterations is None and not monitor.should_stop():
        return search.solve(problem, replace(limits, seed=(limits.seed + 1) % 2**31), monitor)
    return None
