"""A genetic algorithm on vectors of counts, with DEAP: every individual has exactly k GPUs."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.model.schedule import Rows
from optsched.solving.result import Result
from optsched.solving.solver import Support
from optsched_solvers._loading import load
from optsched_solvers.gpus.counts import supported
from optsched_solvers.gpus.vectors import CountVectors
from optsched_solvers.literature.genetic_counts import Evolution, population_size

if TYPE_CHECKING:
    from collections.abc import Mapping
    from random import Random

    from optsched.model.schedule import Problem
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor

CROSSOVER_RATE: Final = 0.6
SWAP_RATE: Final = 0.3
"""Of mutations; the others move a GPU."""

PATIENCE: Final = 30
"""Generations without a better choice after which all but the best begin anew."""


def supports(problem: Problem) -> Support:
    """One request, joint allocations by counts."""
    from optsched.problems.gpus.problem import SubsetChoice

    if not isinstance(problem, SubsetChoice):
        return Support(False, "it is no choice of GPUs")
    return supported(problem)


def solve(problem: Any, limits: Limits, monitor: Monitor) -> Result:
    """Evolve until a limit; one iteration is one individual evaluated.

    Vectors that break the policy live on, behind all that obey it; levels that are preferred are
    tried from the narrowest, each with its share of the iterations or time, until one has a choice.
    Raises `MissingExtra` without DEAP.
    """
    size = population_size(limits.options, "choices of GPUs")
    if not load(monitor, "deap.tools"):
        return Result("unknown")
    vectors = CountVectors(problem, problem.requests[0])
    left = 2**62 if limits.iterations is None else limits.iterations
    levels = vectors.levels()
    if int(vectors.room.sum()) < problem.k:
        return Result("unknown")
    for i, level in enumerate(levels):
        parts = len(levels) - i
        run = _Run(vectors, level, size, limits.seed, monitor, left // parts)
        run.run(None if parts == 1 else monitor.remaining / parts)
        left -= run.evaluated
        if run.found or monitor.should_stop():
            break
    return Result("unknown")


def move(vector: list[int], room: list[int], random: Random) -> None:
    """One GPU, or several, from a host to another that has room."""
    givers = [u for u, count in enumerate(vector) if count]
    a = random.choice(givers)
    takers = [u for u, count in enumerate(vector) if u != a and count < room[u]]
    if takers:
        b = random.choice(takers)
        most = min(vector[a], room[b] - vector[b])
        times = 1 if random.random() < 0.5 else random.randint(1, most)
        vector[a] -= times
        vector[b] += times


def swap(vector: list[int], room: list[int], random: Random) -> None:
    """Two hosts exchange their counts, if both have room."""
    a = random.randrange(len(vector))
    others = [
        u
        for u, count in enumerate(vector)
        if count != vector[a] and count <= room[a] and vector[a] <= room[u]
    ]
    if others:
        b = random.choice(others)
        vector[a], vector[b] = vector[b], vector[a]


def between(first: list[int], second: list[int], random: Random) -> list[int]:
    """A child on the way from one parent to the other: so many GPUs move that lie elsewhere."""
    child = list(first)
    more = [u for u, (a, b) in enumerate(zip(first, second, strict=True)) for _ in range(a - b)]
    less = [u for u, (a, b) in enumerate(zip(first, second, strict=True)) for _ in range(b - a)]
    random.shuffle(more)
    random.shuffle(less)
    times = random.randint(0, len(more))
    for a, b in zip(more[:times], less[:times], strict=True):
        child[a] -= 1
        child[b] += 1
    return child


class _Run(Evolution):
    """One population at one level of the policy; fitness is bandwidth, or minus what is wrong."""

    weight = 1
    patience = PATIENCE

    def __init__(
        self, vectors: CountVectors, level: int | None, size: int, seed: int, monitor: Monitor,
        left: int,
    ) -> None:  # fmt: skip
        super().__init__(size, seed, monitor, left)
        self.vectors, self.level = vectors, level
        self.evaluated = 0
        self.end: float | None = None
        self.room: list[int] = vectors.room.tolist()
        self.toolbox.register("mate", between, random=self.random)
        self.toolbox.register("move", move, room=self.room, random=self.random)
        self.toolbox.register("swap", swap, room=self.room, random=self.random)
        self.best = -1
        self.total = vectors.count()

    @property
    def found(self) -> bool:
        """Whether an individual obeys the policy and is measured."""
        return self.best >= 0

    def run(self, seconds: float | None) -> None:
        """Evolve until a limit, or for so many seconds."""
        self.end = None if seconds is None else self.monitor.elapsed + seconds
        self.evolve()

    def _ended(self) -> bool:
        if self.monitor.should_stop():
            return True
        late = self.end is not None and self.monitor.elapsed >= self.end
        return late or len(self.known) == self.total  # there are no others

    def _rank(self, one: Any) -> tuple[float, ...]:
        values: tuple[float, ...] = one.fitness.wvalues
        return values

    def _begin(self) -> list[Any]:
        """Fewest hosts, most even, the start if there is one, and random vectors."""
        k, room = self.vectors.request.gpus, self.room
        full, even = [0] * len(room), [0] * len(room)
        order = sorted(range(len(room)), key=lambda u: (-room[u], u))
        for u in order:
            full[u] = min(room[u], k - sum(full))
        while sum(even) < k:
            for u in order:
                if even[u] < room[u] and sum(even) < k:
                    even[u] += 1
        begun = [full, even]
        if self.monitor.solution is not None:
            hosts = self.vectors.problem.cluster.host_of[self.monitor.solution.to_lists()[0]]
            start = [int((hosts == h).sum()) for h in self.vectors.hosts]
            if sum(start) == k:
                begun.append(start)
        while len(begun) < self.size:
            vector = [0] * len(room)
            hosts_used = self.random.sample(range(len(room)), len(room))
            for u in hosts_used:
                vector[u] = self.random.randint(0, min(room[u], k - sum(vector)))
            for u in hosts_used:
                vector[u] += min(room[u] - vector[u], k - sum(vector))
            begun.append(vector)
        return [self.individual(vector) for vector in begun[: self.size]]

    def _child(self, first: list[int], second: list[int]) -> Any:
        random = self.random.random
        child = list(first)
        if random() < CROSSOVER_RATE:
            child = self.toolbox.mate(first, second)
        if child == first or random() < 0.5:
            (self.toolbox.swap if random() < SWAP_RATE else self.toolbox.move)(child)
        return self.individual(child)

    def _evaluate(self, individuals: list[Any]) -> bool:
        before = self.left
        all_have = super()._evaluate(individuals)
        self.evaluated += before - self.left
        # who had a fitness before is no better than the best
        measured = (one for one in individuals if one.fitness.valid)
        top = max(measured, key=lambda one: one.fitness.wvalues, default=None)
        if top is not None and top.fitness.values[0] > self.best:
            self.best = int(top.fitness.values[0])
            gpus = self.vectors.gpus(np.array(top, np.int64))
            self.monitor.incumbent(Rows.of([gpus]), -self.best, "genetic")
        return all_have

    def _measure(self, some: list[Any]) -> None:
        new = list({tuple(one): None for one in some if tuple(one) not in self.known})
        if new:
            table = np.array(new, np.int64)
            wrong = self.vectors.excess(table, self.level)
            value = self.vectors.shares(table).value
            # not measured is wrong too, but nearer to right than what breaks the policy
            fitness = np.where(wrong > 0, -1 - wrong, value)
            self.known.update(zip(new, fitness.tolist(), strict=True))
        for one in some:
            one.fitness.values = (self.known[tuple(one)],)
        if len(self.known) > 1_000_000:
            self.known.clear()


class Genetic:
    """A genetic algorithm on counts per host; one iteration is one individual."""

    name = "genetic"
    kinds = ("gpus",)
    options: Mapping[str, str] = MappingProxyType(
        {
            "population": "individuals",
        }
    )

    supports = staticmethod(supports)
    solve = staticmethod(solve)
