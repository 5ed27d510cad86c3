"""A genetic algorithm on the order in which jobs are inserted into a circle, with DEAP."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.solving.result import Result
from optsched.solving.solver import Support
from optsched_solvers._loading import load
from optsched_solvers.literature.genetic_counts import Evolution, population_size
from optsched_solvers.periodic.first import first_orders
from optsched_solvers.periodic.rules import busiest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optsched.model.schedule import IntArray, Problem, Schedule
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor

CROSSOVER_RATE: Final = 0.7
PATIENCE: Final = 60
"""Generations without a better period after which all but the best begin anew."""

LENGTHS: Final = 64
"""Lengths of the circle: gene g stands for the bound times 1 + g^2 / 4096, up to twice."""

FAILED: Final = 2**60
"""Fitness of an order that leaves jobs without room, which are counted on top."""


def solve(problem: Problem, limits: Limits, monitor: Monitor) -> Result:
    """Evolve until a limit; one iteration is one construction or one individual evaluated.

    A chromosome is the length of the circle and the order of insertion: genes are jobs, the n-th
    occurrence is the n-th unit (micro-batch of an iteration) of the job. Raises `MissingExtra`
    without DEAP.
    """
    size = population_size(limits.options, "periodic orders")
    graph = problem.graph()
    used = first_orders(problem, limits, monitor)
    if monitor.should_stop() or not load(monitor, "deap.tools", "periodic.orders"):
        return Result("unknown")
    left = 2**62 if limits.iterations is None else limits.iterations - used
    if left > 0:
        _Run(graph, size, limits.seed, monitor, left).evolve()
    return Result("unknown")


class _Run(Evolution):
    """One population; fitness is the period."""

    weight = -1
    patience = PATIENCE

    def __init__(self, graph: Schedule, size: int, seed: int, monitor: Monitor, left: int) -> None:
        from optsched_solvers.periodic.insertion import Circle

        super().__init__(size, seed, monitor, left)
        self.circle = Circle.of(graph)
        self.bound = max(monitor.lower_bound or 1, busiest(graph))
        first = self.circle.unit_operations[self.circle.unit_indptr[:-1]]
        jobs = graph.job[first]
        self.jobs: list[int] = jobs.tolist()
        self.work: IntArray = np.bincount(graph.job, weights=graph.duration).astype(np.int64)
        self.best = monitor.objective or FAILED

    def _rank(self, one: Any) -> tuple[float, ...]:
        values: tuple[float, ...] = one.fitness.values
        return values

    def _begin(self) -> list[Any]:
        """Large jobs first and small jobs first, and random orders."""
        random = self.random
        by_work = sorted(self.jobs, key=lambda job: (-int(self.work[job]), job))
        begun = [[length, *by_work] for length in (0, 4, 8, 16)]
        while len(begun) < self.size:
            begun.append(
                [random.randrange(LENGTHS // 2), *random.sample(self.jobs, len(self.jobs))]
            )
        return [self.individual(genes) for genes in begun[: self.size]]

    def _child(self, first: list[int], second: list[int]) -> Any:
        """Job-based order crossover, then swaps, insertions and another length of the circle."""
        random = self.random
        child = list(first)
        if random.random() < CROSSOVER_RATE:
            kept = {job for job in set(self.jobs) if random.random() < 0.5}
            rest = iter([job for job in second[1:] if job not in kept])
            child[1:] = [job if job in kept else next(rest) for job in first[1:]]
            child[0] = random.choice((first[0], second[0]))
        if child == first or random.random() < 0.5:
            a, b = random.randrange(1, len(child)), random.randrange(1, len(child))
            if random.random() < 0.5:
                child[a], child[b] = child[b], child[a]
            else:
                child.insert(b, child.pop(a))
        if random.random() < 0.3:
            child[0] = min(LENGTHS - 1, max(0, child[0] + random.choice((-3, -1, 1, 3))))
        return self.individual(child)

    def _measure(self, some: list[Any]) -> None:
        stopped = False
        for one in some:
            key = tuple(one)
            if key not in self.known:
                # after a stop what remains is not looked at any more
                stopped = stopped or self.monitor.should_stop()
                self.known[key] = FAILED if stopped else self._period(one)
            one.fitness.values = (self.known[key],)
        if len(self.known) > 200_000:
            self.known.clear()

    def _period(self, genes: list[int]) -> int:
        """The least period of the orders that insertion finds."""
        from optsched_solvers.periodic.insertion import Places, insert_all
        from optsched_solvers.periodic.orders import folded

        length = self.bound + self.bound * genes[0] ** 2 // LENGTHS**2
        order = self._units(genes[1:])
        places = Places.none(self.circle)
        placed = insert_all(self.circle, places, order, length, self.monitor.should_stop)
        if placed < len(order):
            return FAILED + len(order) - placed
        found = folded(self.circle, places.start, length, self.bound)
        if found is None:
            return 2 * FAILED
        if found.period < self.best:
            self.best = found.period
            self.monitor.incumbent(found.answer, found.period, "genetic")
        return found.period

    def _units(self, jobs: list[int]) -> IntArray:
        """Units in the order of their jobs; those of one job ascending."""
        row = np.array(jobs)
        order = np.empty(len(row), np.int64)
        order[np.argsort(row, kind="stable")] = np.arange(len(row))
        return order


__all__ = ["solve"]


class Genetic:
    """A genetic algorithm on the order of insertion; one iteration is one individual."""

    name = "genetic"
    kinds = ("periodic",)
    options: Mapping[str, str] = MappingProxyType({"population": "individuals"})

    def supports(self, problem: Problem) -> Support:
        """Every rolling array."""
        return Support(True)

    solve = staticmethod(solve)
