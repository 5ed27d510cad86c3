"""`auto`: rules and bounds first, then a portfolio of tabu search and proof search."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from optsched.errors import InputError
from optsched.io.values import integer
from optsched.model.objectives import MAKESPAN, TOTAL
from optsched.solving.limits import available_cores
from optsched.solving.result import Result
from optsched_solvers._loading import load, load_behind
from optsched_solvers._portfolio import Portfolio, chosen_cores, core_of, member
from optsched_solvers.shop import hand_made
from optsched_solvers.shop.branch_and_bound import PROOF, BranchAndBound
from optsched_solvers.shop.cpsat import CpSat
from optsched_solvers.shop.rules import KERNELS, supported_graph, try_rules
from optsched_solvers.shop.tabu import solver as tabu

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optsched.model.schedule import Problem, Schedule
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor
    from optsched.solving.solver import Solver, Support

STALLED = 0.3
"""Share of the time limit without a better bound after which CP-SAT joins on the prover's core."""

STALLED_SECONDS = (1.0, 3.0)
"""Least and most seconds of this (loading CP-SAT takes half a second); the most is used where there
is no time limit."""

FIRST_EFFORT = 20_000
"""Iterations x operations that proof search has at least if it must find the first schedule."""

MODELLED_UP_TO = 1500
"""Operations; above, a CP-SAT model for bounds takes long to build and improves nothing."""


class Auto:
    """Dispatching rules, which prove long job arrays in milliseconds; then tabu search and proof.

    With one worker tabu search, failure-directed search and, when the bound stalls, CP-SAT share a
    core; with two, tabu search has a core for itself; further workers get CP-SAT's search for
    bounds and further tabu searches. What tabu search refuses (gangs, deadlines) CP-SAT searches.
    With an iteration limit the parts run one after the other, each with that many iterations,
    and the result repeats exactly.
    """

    name = "auto"
    objectives = (MAKESPAN, TOTAL)
    chooses = True
    options: Mapping[str, str] = MappingProxyType(
        {
            "exact_up_to": "number of jobs above which nothing is spent on proofs (default: no "
            "limit)",
        }
    )

    def __init__(self) -> None:
        self.search, self.proof, self.model = tabu.Tabu(), BranchAndBound(), CpSat()

    def supports(self, problem: Problem) -> Support:
        """One iteration of any graph, as CP-SAT."""
        if getattr(problem, "chooses", False):
            from optsched_solvers.shop import recompute_choice

            return self.supports(recompute_choice.simplest(problem))
        return self.model.supports(problem)

    def solve(self, problem: Problem, limits: Limits, monitor: Monitor) -> Result:
        """Try rules; if none meets the bound, run the portfolio."""
        if getattr(problem, "chooses", False):
            from optsched_solvers.shop import recompute_choice
            from optsched_solvers.shop.dispatch import Dispatch

            return recompute_choice.solve(self, Dispatch(), problem, limits, monitor)
        graph = problem.graph()
        prove = _wants_proof(graph, limits)
        if supported_graph(graph):
            hand_made.offer_first(problem, limits, monitor)
            if not monitor.should_stop():
                load_behind(*_modules(graph, prove))
            try_rules(graph, limits, monitor)
            hand_made.offer(problem, monitor)
        if monitor.should_stop() and (monitor.objective is not None or monitor.remaining <= 0):
            return Result("unknown")
        search = self.search if self.search.supports(problem) else self.model
        prover: Solver = self.proof if self.proof.supports(problem) else self.model
        prove = prove and prover is not search
        run = self._portfolio if limits.iterations is None else self._in_turn
        return run(search, prover, prove, problem, limits, monitor)

    def _in_turn(
        self,
        search: Solver,
        prover: Solver,
        prove: bool,
        problem: Problem,
        limits: Limits,
        monitor: Monitor,
    ) -> Result:
        """Run one engine after the other: the same schedule whatever the clock does.

        With a time limit besides the first gets half of the time. While there is no schedule the
        second has enough iterations to find one in a small problem.
        """
        given = replace(limits, options={})
        half = monitor.remaining / 2
        first = member(monitor, lambda: monitor.remaining < half) if prove else monitor
        result = search.solve(problem, given, first)
        empty = monitor.objective is None
        if result.status == "infeasible" or monitor.should_stop() or not (prove or empty):
            return result
        if empty:
            least = FIRST_EFFORT // problem.graph().n_operations
            given = replace(given, iterations=max(least, limits.iterations or 0))
        return prover.solve(problem, given, monitor)

    def _portfolio(
        self,
        search: Solver,
        prover: Solver,
        prove: bool,
        problem: Problem,
        limits: Limits,
        monitor: Monitor,
    ) -> Result:
        """Run engines side by side; `prover` only if the optimum is to be proved."""
        cores = chosen_cores(limits.workers)
        alone = replace(limits, workers=1, options={})
        portfolio = Portfolio(monitor)

        def add_search(k: int) -> None:
            given = replace(alone, seed=(limits.seed + k) % 2**31)
            portfolio.add(lambda shared: search.solve(problem, given, shared), core_of(cores, k))

        def from_below(shared: Monitor) -> Result | None:
            try:
                return self.model.solve(problem, replace(alone, options={"mode": "bound"}), shared)
            except InputError:  # times beyond CP-SAT's range: the others continue
                return None

        add_search(0)
        joined = (
            not prove or prover is not self.proof or problem.graph().n_operations > MODELLED_UP_TO
        )
        if prove and prover is self.model:
            portfolio.add(lambda shared: prover.solve(problem, alone, shared), core_of(cores, 1))
        elif prove:
            portfolio.add(lambda shared: _prove(problem.graph(), alone, shared), core_of(cores, 1))
            if limits.workers >= 3 and not joined:
                portfolio.add(from_below, core_of(cores, 2))
                joined = True
        for k in range(3 if prove else 1, min(limits.workers, len(cores) or available_cores())):
            add_search(k)
        least, most = STALLED_SECONDS
        patience = max(least, min(most, STALLED * monitor.remaining))
        bound, since = monitor.lower_bound, monitor.elapsed
        while portfolio.wait(0.02):
            if monitor.lower_bound != bound:
                bound, since = monitor.lower_bound, monitor.elapsed
            elif not joined and monitor.elapsed - since > patience:
                portfolio.add(from_below, core_of(cores, 1))
                joined = True
        return portfolio.finish()


def _modules(graph: Schedule, prove: bool) -> tuple[str, ...]:
    """Modules whose kernels the engines will need, in this order."""
    if graph.goal is not None:  # CP-SAT proves
        return *KERNELS, *tabu.ANNEALING
    return (*tabu.MODULES, "shop.proof.pipeline_bounds", *PROOF) if prove else tabu.MODULES


def _prove(graph: Schedule, limits: Limits, monitor: Monitor) -> Result:
    """Raise the bound: overtaking in pipelines first, then failure-directed search."""
    if load(monitor, "shop.proof.pipeline_bounds"):
        from optsched_solvers.shop.proof import pipeline_bounds

        pipeline_bounds.improve(graph, monitor)
    if not load(monitor, *PROOF):
        return Result("unknown")
    from optsched_solvers.shop.proof import failure_directed

    return failure_directed.search(graph, limits, monitor, polish=False)


def _wants_proof(graph: Schedule, limits: Limits) -> bool:
    most = limits.options.get("exact_up_to")
    if most is None:
        return True
    return len(np.unique(graph.job)) <= integer("options.exact_up_to", most)
