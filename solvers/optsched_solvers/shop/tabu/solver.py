"""`tabu`: N7 tabu search with path relinking between elite schedules (Peng, Lü & Cheng 2015)."""

from __future__ import annotations

import time
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from optsched.io.values import integer
from optsched.model.objectives import MAKESPAN, TOTAL
from optsched.model.schedule import NO_DEADLINE, Csr
from optsched.solving.limits import Limits
from optsched.solving.result import Result
from optsched.solving.solver import Support
from optsched_solvers._loading import load
from optsched_solvers._portfolio import SubSearch
from optsched_solvers.shop.rules import (
    KERNELS,
    RULES,
    Dispatcher,
    is_pipeline,
    order_of,
    supported_graph,
    supported_objective,
    try_rules,
    variants,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optsched.model.schedule import IntArray, Problem, Schedule
    from optsched.solving.monitor import Monitor
    from optsched_solvers.shop.tabu.path_relinking import Elite

ELITES = 8
PATIENCE = 3000
"""Moves without improvement after which a walk ends."""
FIRST_PATIENCE = 8
"""Walks that only fill the pool have the patience divided by this: relinking improves on them, and
the sooner it begins the better."""

STUCK_COST = 100
"""Moves that a walk without any possible move costs, so that the search ends."""

APART = 0.05
"""Least distance of elites, as a share of their mean distance when the pool is full."""

SLICE = 0.012
"""Seconds of a slice of moves, between two checks of the monitor."""

NOISE = 0.3
"""Noise on a rule's ranks for a new start, as a share of the operations."""

FIRST_LOOK = 0.005
"""Share of the limit of a first search on job orders: moves from there prove many long arrays."""
JOB_ORDER_SHARE = 0.5
"""Share that the search on job orders then gets, before further moves."""
JOB_ORDER_SECONDS = 60.0
"""Longest search on job orders."""
FRESH_JOB_ORDERS = 2000
"""List schedules for every further start."""

MOST_SWAPS = 20_000
"""Most exchanges on a path, which is not cut into slices."""
LARGE = 20_000
"""Operations from which the pool holds two elites only: distances are slow to compute."""


MODULES = (
    *KERNELS, "shop.job_orders", "shop.tabu.neighbourhoods", "shop.tabu.state",
    "shop.tabu.path_relinking",
)  # fmt: skip
"""Modules with kernels, for the makespan."""
ANNEALING = ("shop.tabu.annealing", "shop.tabu.state")
"""Those for the total weighted completion time, beside the rules'."""


class Tabu:
    """Tabu search: the best machine orders in the neighbourhood, again and again.

    The total weighted completion time is searched by annealing (`annealing`) instead.

    One iteration is one move. The makespan after every move is exact. Nothing is proved: the status
    comes from the bounds of other engines.
    """

    name = "tabu"
    objectives = (MAKESPAN, TOTAL)
    options: Mapping[str, str] = MappingProxyType(
        {
            "elites": f"number of elite schedules (default {ELITES})",
            "patience": f"moves without improvement before a walk ends (default {PATIENCE})",
        }
    )

    def supports(self, problem: Problem) -> Support:
        """Makespan, at most one resource per operation, no deadlines."""
        goal = supported_objective(problem, *self.objectives)
        if not goal:
            return goal
        graph = problem.graph()
        if (graph.deadline != NO_DEADLINE).any():
            i = int(np.argmax(graph.deadline != NO_DEADLINE))
            return Support(False, f"operation {i} has a deadline, which moves do not respect")
        return supported_graph(graph)

    def solve(self, problem: Problem, limits: Limits, monitor: Monitor) -> Result:
        """Walk from the best known schedule, or the best dispatching rule, until a limit."""
        elites = integer("options.elites", limits.options.get("elites", ELITES), 2, 10**9)
        patience = integer("options.patience", limits.options.get("patience", PATIENCE), 1, 10**9)
        graph = problem.graph()
        if graph.n_operations == 0:
            monitor.incumbent(Csr.of([[]] * graph.n_resources), 0, self.name)
            return Result("unknown")
        if monitor.solution is None:
            try_rules(graph, limits, monitor)
        if not monitor.should_stop() and graph.goal is not None:
            self._anneal(graph, limits, monitor)
        elif not monitor.should_stop() and load(monitor, *MODULES):
            search = _Search(graph, limits, monitor, elites, patience)
            if is_pipeline(graph):
                search.look_at_job_orders()
                search.search_job_orders(JOB_ORDER_SHARE)
            if search.take_over():
                search.run()
        return Result("unknown")

    def _anneal(self, graph: Schedule, limits: Limits, monitor: Monitor) -> None:
        """Search for the total weighted completion time, of which moves have no quick estimate."""
        start = monitor.best[1]
        if start is not None and load(monitor, *ANNEALING):
            from optsched_solvers.shop.tabu import annealing

            annealing.improve(graph, start, limits, monitor)


class _Search:
    """Walks between elites until the monitor stops or the moves are used up."""

    def __init__(
        self, graph: Schedule, limits: Limits, monitor: Monitor, size: int, patience: int
    ) -> None:
        from optsched_solvers.shop.tabu.path_relinking import Elites
        from optsched_solvers.shop.tabu.walk import Walk

        self.graph, self.monitor, self.patience = graph, monitor, patience
        self.limits = limits
        self.moves_left = limits.iterations  # moves
        self.walk = Walk(graph, limits.seed)
        self.elites = Elites(graph, size if graph.n_operations < LARGE else 2)
        self.random = np.random.default_rng(limits.seed)
        self.dispatcher = Dispatcher(graph, limits.seed)
        self.speed = 1e6 / graph.n_operations  # moves a second: a low first guess
        self.known: Csr | None = None

    def look_at_job_orders(self) -> None:
        """Walk from what a short search on job orders finds, if time alone is limited."""
        if self.moves_left is None:
            self.search_job_orders(FIRST_LOOK)
            if self.take_over():
                self.explore(self.elites.best.order, self.patience)

    def search_job_orders(self, share: float) -> None:
        """On pipelines the orders of jobs decide first; moves polish what they reach."""
        from optsched_solvers.shop.job_orders import improve

        budget = None if self.moves_left is None else int(self.moves_left * share)
        seconds = min(JOB_ORDER_SECONDS, self.monitor.remaining * share)
        made = improve(
            self.graph, self.monitor, seed=self.limits.seed, iterations=budget, seconds=seconds
        )
        if self.moves_left is not None:
            self.moves_left -= made

    def run(self) -> None:
        """Fill the pool, relink all pairs of it, and restart.

        The best stays, unless the pool has not improved on it: it would lead back to itself.
        """
        more = self.explore(self.elites.best.order, self.patience)
        while more:
            before = self.monitor.objective
            tries = 2 * self.elites.size
            while more and tries and len(self.elites.members) < self.elites.size:
                more = self.explore(self.fresh(), max(1, self.patience // FIRST_PATIENCE))
                tries -= 1
            self.elites.keep_apart(APART)
            while more and (pair := self.elites.next_pair(self.random)):
                more = self.explore(self.between(*pair), self.patience)
            self.elites.restart(keep_best=self.monitor.objective != before)

    def fresh(self) -> IntArray:
        """Make a schedule to begin a new walk with."""
        if is_pipeline(self.graph):
            found = self.job_orders()
            if found is not None:
                return found
        return self.dispatched()

    def job_orders(self) -> IntArray | None:
        """Make a schedule by a short search on job orders."""
        from optsched_solvers.shop.job_orders import improve

        short = SubSearch(Limits(iterations=FRESH_JOB_ORDERS), self.monitor.should_stop)
        seed = int(self.random.integers(2**31))
        made = improve(self.graph, short, seed=seed, iterations=FRESH_JOB_ORDERS, from_rules=False)
        self.spend(made)
        return None if short.solution is None else order_of(self.graph, short.solution)

    def dispatched(self) -> IntArray:
        """Make a list schedule by a random rule with noise; the best schedule if it gets stuck."""
        rules = list(variants(self.graph, RULES))
        variant = rules[int(self.random.integers(len(rules)))]
        rank = self.dispatcher.priority(variant)
        noisy = rank + self.random.uniform(0, NOISE * len(rank), len(rank))
        priority = np.empty(len(rank), np.int64)
        priority[np.argsort(noisy, kind="stable")] = np.arange(len(rank))
        found = self.dispatcher.listed(priority, variant.active, variant.backwards)
        if found is None:
            assert self.known is not None
            return order_of(self.graph, self.known)
        return order_of(self.graph, found[0])

    def between(self, start: Elite, guide: Elite) -> IntArray:
        """Make a schedule on the path from one elite to another, near neither."""
        from optsched_solvers.shop.tabu.path_relinking import relink

        apart = self.elites.distance(start.order, guide.order)
        swaps = min(MOST_SWAPS, int(apart * self.random.uniform(0.3, 0.6)))
        return relink(self.walk, start.order, guide.order, swaps)[0]

    def explore(self, order: IntArray, patience: int) -> bool:
        """Walk from a schedule until patience ends; whether time is left for another walk."""
        from optsched_solvers.shop.tabu.neighbourhoods import RUNNING

        walk = self.walk
        walk.load(order)
        first = walk.moves
        self.report()
        status = RUNNING
        while status == RUNNING and not self.is_over():
            moves = max(16, int(self.speed * SLICE))
            if self.moves_left is not None:
                moves = min(moves, self.moves_left)
            before, begin = walk.moves, time.perf_counter()
            status = walk.run(moves, patience=patience, target=self.target())
            made, spent = walk.moves - before, time.perf_counter() - begin
            if made > 10 and spent > 0:
                self.speed = made / spent
            self.spend(made)
            self.report()
        if walk.moves == first:
            self.spend(STUCK_COST)
        self.elites.add(walk.best, walk.best_order)
        if self.moves_left is None:
            self.take_over()
        return not self.is_over()

    def target(self) -> int:
        """Return the makespan at which a walk may end: a bound, or the target."""
        return max(self.monitor.lower_bound or 0, self.limits.target or 0)

    def spend(self, moves: int) -> None:
        self.monitor.advance(moves)
        if self.moves_left is not None:
            self.moves_left -= moves

    def is_over(self) -> bool:
        return self.monitor.should_stop() or (self.moves_left is not None and self.moves_left <= 0)

    def report(self) -> None:
        """Report a new best schedule."""
        if self.monitor.objective is None or self.walk.best < self.monitor.objective:
            self.known = self.walk.best_sequences()
            self.monitor.incumbent(self.known, self.walk.best, "tabu")

    def take_over(self) -> bool:
        """Add the monitor's best schedule to the pool; False if the pool is empty."""
        value, sequences = self.monitor.best
        if sequences is not None and value is not None and sequences is not self.known:
            self.known = sequences
            self.elites.add(value, order_of(self.graph, sequences))
        return bool(self.elites.members)
