"""The genetic algorithm on vectors of integers, with DEAP: what quotas and counts share."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any, Final

from optsched.errors import InputError, MissingExtra

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optsched.solving.monitor import Monitor

MOST: Final = 2000
"""Individuals."""

FOREIGN: Final = ("crossover", "mutation", "decoder", "local_search")
"""Options of the genetic algorithm that only make sense for orders."""

TOURNAMENT: Final = 3
"""Individuals of which the best survives."""


def population_size(options: Mapping[str, Any], answers: str) -> int:
    """The option ``population``, checked; options that belong to orders are refused.

    Raises `MissingExtra` without DEAP.
    """
    for key in FOREIGN:
        if key in options:
            raise InputError(f"options.{key}: belongs to orders, not to {answers}")
    size = options.get("population", 60)
    if isinstance(size, bool) or not isinstance(size, int) or not 4 <= size <= MOST:
        raise InputError(f"options.population: expected an integer in 4..{MOST}, got {size!r:.60}")
    try:
        import deap  # noqa: F401
    except ImportError:
        raise MissingExtra("the genetic algorithm", "genetic") from None
    return size


class Evolution:
    """One population of vectors; subclasses begin, cross and measure them."""

    weight: int
    """1 where fitness is to be great, -1 where it is to be small."""

    patience: int
    """Generations without a better answer after which all but the best begin anew."""

    best: int
    """Fitness of the best answer so far."""

    def __init__(self, size: int, seed: int, monitor: Monitor, left: int) -> None:
        from deap import base

        from optsched_solvers.literature.genetic import seeded_selection

        class Fitness(base.Fitness):  # type: ignore[misc]
            weights = (self.weight,)  # integers stay exact

        class Vector(list):  # type: ignore[type-arg]
            def __init__(self, numbers: list[int]) -> None:
                super().__init__(numbers)
                self.fitness = Fitness()

        self.individual: Any = Vector
        self.size, self.monitor, self.left = size, monitor, left
        self.random = Random(seed)
        self.toolbox = base.Toolbox()
        select = seeded_selection(self.random)["selTournament"]
        self.toolbox.register("select", select, tournsize=TOURNAMENT)
        self.known: dict[tuple[int, ...], int] = {}

    def evolve(self) -> None:
        """Generation after generation until `_ended`, or until all iterations are used."""
        population = self._begin()
        still = 0
        great = self.weight > 0
        while self._evaluate(population) and not self._ended():
            before = self.best
            population.sort(key=self._rank, reverse=great)
            if still >= self.patience:
                population[1:] = self._begin()[1:]
                still = 0
                continue
            parents = self.toolbox.select(population, 2 * self.size)
            children = [
                self._child(*pair) for pair in zip(parents[::2], parents[1::2], strict=True)
            ]
            more = self._evaluate(children)
            everyone = {tuple(one): one for one in population}
            everyone.update((tuple(one), one) for one in children if one.fitness.valid)
            ranked = sorted(
                everyone.values(), key=lambda one: (self._rank(one), one), reverse=great
            )
            # the best stay, the others are drawn: copies have been left out
            kept, rest = ranked[: self.size // 4], ranked[self.size // 4 :]
            if len(ranked) > self.size:
                kept += self.toolbox.select(rest, self.size - len(kept))
            else:
                kept = ranked
            population = kept
            if not more:
                return
            still = 0 if self.best != before else still + 1

    def _evaluate(self, individuals: list[Any]) -> bool:
        """Give all their fitness, as many as are left; False if some have none."""
        fresh = [one for one in individuals if not one.fitness.valid]
        some = fresh[: max(0, self.left)]
        self._measure(some)
        self.left -= len(some)
        self.monitor.advance(len(some))
        return len(some) == len(fresh)

    def _ended(self) -> bool:
        return self.monitor.should_stop()

    def _begin(self) -> list[Any]:
        """A first population."""
        raise NotImplementedError

    def _child(self, first: list[int], second: list[int]) -> Any:
        """A new individual of two."""
        raise NotImplementedError

    def _measure(self, some: list[Any]) -> None:
        """Give these their fitness."""
        raise NotImplementedError

    def _rank(self, one: Any) -> tuple[float, ...]:
        """By which individuals are sorted."""
        raise NotImplementedError
