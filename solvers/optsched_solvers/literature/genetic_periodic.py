"""The genetic algorithm on rolling arrays: orders of jobs behind list schedules of some cycles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from optsched.solving.result import Result
from optsched.solving.solver import Support
from optsched_solvers._loading import load
from optsched_solvers.literature.genetic import Decoder, Genetic, evolve, population_size
from optsched_solvers.periodic.construct import (
    MODULES,
    Folder,
    cycles_of,
    first_orders,
    unrolled,
)
from optsched_solvers.shop.rules import Dispatcher

if TYPE_CHECKING:
    from optsched.model.schedule import Problem, Schedule
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor
    from optsched_solvers.periodic.construct import Found
    from optsched_solvers.periodic.insertion import Units

CYCLES: Final = 4
"""Of the unrolled cycle whose list schedules are folded."""

STUCK: Final = 2**61
"""Cost of an order without a list schedule."""


class PeriodicGenetic:
    """Orders of jobs, decoded by insertion or list schedules."""

    name, options, kinds = Genetic.name, Genetic.options, ("periodic",)

    def supports(self, problem: Problem) -> Support:
        """Every rolling array."""
        return Support(True)

    def solve(self, problem: Problem, limits: Limits, monitor: Monitor) -> Result:
        """Evolve until a limit; one iteration is one construction or one individual."""
        population_size(limits.options)
        used = first_orders(problem, limits, monitor)
        left = 2**62 if limits.iterations is None else limits.iterations - used
        if left > 0 and not monitor.should_stop() and load(monitor, "deap.tools", *MODULES):
            evolve(JobOrders(problem.graph(), monitor, limits.seed), limits, left)
        return Result("unknown")


class JobOrders(Decoder):
    """Genes are a mode, and jobs: the n-th occurrence is the job's n-th unit.

    They are inserted in this order into a circle, whose length is the mode: the bound times
    1 + g^2 / 4096, up to twice. Where memory is limited a list schedule follows the order instead.
    """

    def __init__(self, graph: Schedule, monitor: Monitor, seed: int) -> None:
        from optsched_solvers.periodic.insertion import Units

        super().__init__(monitor, seed)
        self.graph = graph
        self.folder = Folder(graph, monitor.lower_bound or 1)
        self.capped = bool(graph.memory.any())
        self.modes = 6 if self.capped else 64
        self.cycles = cycles_of(graph, CYCLES)
        self.dispatcher = Dispatcher(unrolled(graph, self.cycles), 0)
        self.units = Units.of(graph)
        self.jobs: list[int] = graph.job[self.units.operations[self.units.indptr[:-1]]].tolist()

    def first(self, size: int) -> list[list[int]]:
        """Large jobs first, and random orders."""
        begun = [[mode, *self.jobs] for mode in range(0, self.modes // 2, 1 + self.modes // 16)]
        while len(begun) < size:
            mode = self.random.randrange(self.modes // 2)
            begun.append([mode, *self.random.sample(self.jobs, len(self.jobs))])
        return begun[:size]

    def mate(self, first: list[int], second: list[int]) -> list[int]:
        """Either mode; jobs of a random set keep their places, the others follow the second."""
        kept = {job for job in sorted(set(self.jobs)) if self.random.random() < 0.5}
        rest = iter([job for job in second[1:] if job not in kept])
        jobs = [job if job in kept else next(rest) for job in first[1:]]
        return [self.random.choice((first[0], second[0])), *jobs]

    def mutate(self, genes: list[int]) -> None:
        """Another mode, two jobs exchanged, or one moved."""
        a, b = self.random.randrange(1, len(genes)), self.random.randrange(1, len(genes))
        kind = self.random.randrange(3)
        if kind == 0:
            genes[0] = min(self.modes - 1, max(0, genes[0] + self.random.choice((-3, -1, 1, 3))))
        elif kind == 1:
            genes[a], genes[b] = genes[b], genes[a]
        else:
            genes.insert(b, genes.pop(a))

    def value(self, genes: list[int]) -> int:
        """The least period of the orders found; the monitor hears of every better one."""
        order = np.empty(len(self.jobs), np.int64)
        order[np.argsort(genes[1:], kind="stable")] = np.argsort(self.jobs, kind="stable")
        units = self.units.ordered(order)
        found = self._listed(units, genes[0]) if self.capped else self._inserted(units, genes[0])
        if found is None:
            return STUCK
        if self.monitor.objective is None or found.period < self.monitor.objective:
            self.monitor.incumbent(found.orders, found.period, "genetic")
        return found.period

    def _inserted(self, units: Units, mode: int) -> Found | None:
        from optsched_solvers.periodic.insertion import inserted

        length = self.folder.least + self.folder.least * mode**2 // 4096
        start = inserted(self.folder.cycle, units, length, self.monitor.should_stop)
        return None if start is None else self.folder.fold(start, length)

    def _listed(self, units: Units, mode: int) -> Found | None:
        """A list schedule of some cycles: B first, earlier cycles first, or both in turn."""
        unit = np.empty(self.graph.n_operations, np.int64)
        unit[units.operations] = np.repeat(np.arange(len(units.path)), np.diff(units.indptr))
        graph = self.dispatcher.graph
        number, forward = np.arange(graph.n_operations), graph.kind == "F"
        cycle, rank = number // len(unit), np.tile(unit, self.cycles)
        keys = [(rank, forward), (rank, forward, cycle), (rank, cycle, forward)][mode // 2]
        priority = np.empty(graph.n_operations, np.int64)
        priority[np.lexsort((number, *keys, np.isin(graph.kind, ("W", "U"))))] = number
        found = self.dispatcher.listed(priority, bool(mode % 2))
        if found is None:
            return None
        return self.folder.best_fold(found[1].reshape(self.cycles, -1))
