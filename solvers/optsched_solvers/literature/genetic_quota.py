"""A genetic algorithm on quotas, with DEAP: vectors of options, repaired to fit the GPUs."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.solving.result import Result
from optsched_solvers._loading import load
from optsched_solvers.literature.genetic_counts import Evolution, population_size
from optsched_solvers.quota.first import first_answer
from optsched_solvers.quota.ground import NOT_LOADED, offer, place, ready, supported
from optsched_solvers.quota.marginal import greedy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optsched.model.schedule import Problem
    from optsched.problems.quota.problem import QuotaPlan
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor
    from optsched.solving.solver import Support

CROSSOVER_RATE: Final = 0.7
PATIENCE: Final = 40
"""Generations without a better answer after which all but the best begin anew."""

WRONG: Final = 2**61
"""Cost of a vector that cannot be repaired or placed."""


def supports(problem: Problem) -> Support:
    """Every plan up to some size."""
    return supported(problem)


def solve(plan: Any, limits: Limits, monitor: Monitor) -> Result:
    """Evolve until a limit; one iteration is one individual evaluated.

    The first population holds the greedy answer and random ones. A child takes each job's option
    from either parent, or a random one; then quotas shrink (or grow, where all GPUs must be handed
    out) at random until they fit. Raises `MissingExtra` without DEAP.
    """
    size = population_size(limits.options, "quotas")
    if not load(monitor, "deap.tools") or not ready(plan, monitor):
        first_answer(plan, monitor)
        return Result("unknown", reason=NOT_LOADED)
    if not plan.jobs:
        offer(plan, monitor, np.zeros(0, np.int64), None, "genetic")
        return Result("unknown")
    left = 2**62 if limits.iterations is None else limits.iterations
    _Run(plan, size, limits.seed, monitor, left).evolve()
    return Result("unknown")


class _Run(Evolution):
    """One population; fitness is cost."""

    weight = -1
    patience = PATIENCE

    def __init__(self, plan: QuotaPlan, size: int, seed: int, monitor: Monitor, left: int) -> None:
        super().__init__(size, seed, monitor, left)
        self.plan = plan
        table = plan.table
        self.ptr: list[int] = table.ptr.tolist()
        self.kind: list[int] = table.kind.tolist()
        self.gpus: list[int] = table.size.tolist()
        self.cost: list[int] = table.cost.tolist()
        self.best = WRONG

    def _rank(self, one: Any) -> tuple[float, ...]:
        values: tuple[float, ...] = one.fitness.values
        return values

    def _begin(self) -> list[Any]:
        """The greedy answer, the start if there is one, and random vectors."""
        begun = []
        found = greedy(self.plan)
        if found is not None:
            begun.append(self.plan._find(*found).tolist())
        if self.monitor.solution is not None:
            begun.append(self.plan._find(*self.plan.sizes(self.monitor.solution)).tolist())
        while len(begun) < self.size:
            begun.append(self._repaired([
                self.random.randrange(self.ptr[j], self.ptr[j + 1])
                for j in range(len(self.plan.jobs))
            ]))  # fmt: skip
        return [self.individual(vector) for vector in begun[: self.size]]

    def _child(self, first: list[int], second: list[int]) -> Any:
        random = self.random
        child = list(first)
        if random.random() < CROSSOVER_RATE:
            child = [a if random.random() < 0.5 else b for a, b in zip(first, second, strict=True)]
        if child == first or random.random() < 0.5:
            for j in random.sample(range(len(child)), min(len(child), random.randint(1, 3))):
                child[j] = random.randrange(self.ptr[j], self.ptr[j + 1])
        return self.individual(self._repaired(child))

    def _repaired(self, vector: list[int]) -> list[int]:
        """Shrink random jobs of a type that is overdrawn; where all must be handed out, grow."""
        left = list(self.plan.budgets)
        if self.plan.hands_out_all:
            left = [self.plan.total]
        for o in vector:
            left[self.kind[o]] -= self.gpus[o]
        for j in self.random.sample(range(len(vector)), len(vector)):
            o = vector[j]
            kind = self.kind[o]
            if left[kind] >= 0:
                continue
            room = left[kind] + self.gpus[o]
            able = [
                p for p in range(self.ptr[j], self.ptr[j + 1])
                if self.gpus[p] <= (room if self.kind[p] == kind else left[self.kind[p]])
            ]  # fmt: skip
            some = range(self.ptr[j], self.ptr[j + 1])
            pick = self.random.choice(able) if able else min(some, key=self.gpus.__getitem__)
            left[kind] += self.gpus[o]
            left[self.kind[pick]] -= self.gpus[pick]
            vector[j] = pick
        if self.plan.hands_out_all and left[0] > 0:
            for j in self.random.sample(range(len(vector)), len(vector)):
                more = min(left[0], self.ptr[j + 1] - 1 - vector[j])  # sizes have no gaps
                vector[j] += more
                left[0] -= more
        return vector

    def _measure(self, some: list[Any]) -> None:
        for one in some:
            key = tuple(one)
            if key not in self.known:
                self.known[key] = self._cost(one)
            one.fitness.values = (self.known[key],)
        if len(self.known) > 500_000:
            self.known.clear()

    def _cost(self, vector: list[int]) -> int:
        left = list(self.plan.budgets)
        for o in vector:
            left[self.kind[o]] -= self.gpus[o]
        over = -sum(min(0, room) for room in left)
        if self.plan.hands_out_all:
            over += abs(sum(self.gpus[o] for o in vector) - self.plan.total)
        if over:
            return WRONG + over
        costs = [self.cost[o] for o in vector]
        cost = max(costs) if self.plan.highest else sum(costs)
        if cost >= self.best:
            return cost  # where it would be placed does not matter
        sizes = np.array([self.gpus[o] for o in vector], np.int64)
        kinds = np.array([self.kind[o] for o in vector], np.int64)
        rows, failed = place(self.plan, sizes, kinds)
        if failed >= 0:
            return WRONG
        self.best = cost
        self.monitor.incumbent(rows, cost, "genetic")
        return cost


class Genetic:
    """A genetic algorithm on vectors of options; one iteration is one individual."""

    name = "genetic"
    kinds = ("quota",)
    options: Mapping[str, str] = MappingProxyType(
        {
            "population": "individuals",
        }
    )

    supports = staticmethod(supports)
    solve = staticmethod(solve)
