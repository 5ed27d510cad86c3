"""A genetic algorithm on permutations with repetition, with DEAP."""

from __future__ import annotations

import logging
import time
from itertools import accumulate
from random import Random
from types import FunctionType, MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from optsched.errors import InputError, MissingExtra
from optsched.model.schedule import NO_DEADLINE, Rows
from optsched.solving.result import Result
from optsched.solving.solver import Support
from optsched_solvers._loading import load
from optsched_solvers.shop.rules import (
    supported_graph,
    supported_objective,
    try_insertion,
    try_rules,
)
from optsched_solvers.shop.tabu.solver import kernels

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from optsched.model.schedule import IntArray, Problem, Schedule
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor
    from optsched_solvers.literature.operation_based import Encoding, Population
    from optsched_solvers.shop.tabu.walk import Walk

_log = logging.getLogger("optsched.genetic")

MOST: Final = 2000
"""Individuals."""

STUCK: Final = 2**62
"""Value of an individual without schedule, as in `operation_based`."""

CROSSOVERS: Final = ("pox", "jox")
MUTATIONS: Final = ("insertion", "swap", "inversion")
DECODERS: Final = ("active", "semi-active")
"""The first is the default: in equal time it won on every family, though it is slower."""

CROSSOVER_RATE: Final = 0.8
MUTATION_RATE: Final = 0.5
TOURNAMENT: Final = 3
"""Individuals of which the best survives."""

POLISHED: Final = 8
"""Children of a generation that local search polishes."""

MOVES: Final = 1000
"""Tabu moves for each of them."""

MODULES: Final = ("literature.operation_based", "literature.crossover", "deap.tools")
"""What takes long to load."""

_SLICE = 0.02  # seconds of decoding between two looks at the limits


class Genetic:
    """A genetic algorithm: POX or JOX, roulette for mating, tournament for survivors, elitism.

    The first population holds the schedules of all dispatching rules and of best insertion, so the
    result is never worse than theirs. It is here for comparison, and for who wants to try an
    operator or a decoder: in equal time tabu search beats it clearly. With ``local_search`` it
    comes near tabu search, which then does most of the work.

    One iteration is one individual evaluated, those of the first population included.
    """

    name = "genetic"
    options: Mapping[str, str] = MappingProxyType(
        {
            "population": f"individuals (4 to {MOST}; default 100)",
            "crossover": f"one of {', '.join(CROSSOVERS)} (default pox)",
            "mutation": f"one of {', '.join(MUTATIONS)} (default insertion)",
            "decoder": f"one of {', '.join(DECODERS)} (default active)",
            "local_search": "polish some children by a short tabu walk (default false)",
        }
    )

    def supports(self, problem: Problem) -> Support:
        """One iteration: at most one resource per operation, no deadlines."""
        goal = supported_objective(problem)
        if not goal:
            return goal
        graph = problem.graph()
        if (graph.deadline != NO_DEADLINE).any():
            return Support(False, "deadlines are not kept by the genetic algorithm")
        return supported_graph(graph)

    def solve(self, problem: Problem, limits: Limits, monitor: Monitor) -> Result:
        """Evolve until a limit; raises `MissingExtra` without DEAP."""
        settings = _Settings.of(limits.options)
        try:
            import deap  # noqa: F401
        except ImportError:
            raise MissingExtra("the genetic algorithm", "genetic") from None
        graph = problem.graph()
        if graph.n_operations == 0:
            monitor.incumbent(Rows.of([[]] * graph.n_resources), 0, self.name)
        starts = [] if monitor.solution is None else [monitor.solution]
        tried = try_rules(graph, limits, monitor, keep=starts.append)
        if tried != limits.iterations and not monitor.should_stop():
            tried += try_insertion(graph, monitor, starts.append)
        left = 2**62 if limits.iterations is None else limits.iterations - tried
        modules = (*MODULES, *kernels(graph)) if settings.local_search else MODULES
        if left and not monitor.should_stop() and load(monitor, *modules):
            _Run(graph, settings, limits, monitor, left).run(starts)
        return Result("unknown")


class _Settings(NamedTuple):
    """The options, checked."""

    population: int
    crossover: str
    mutation: str
    decoder: str
    local_search: bool

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> _Settings:
        """Refuse wrong values by name."""
        size = options.get("population", 100)
        if isinstance(size, bool) or not isinstance(size, int) or not 4 <= size <= MOST:
            raise InputError(
                f"options.population: expected an integer in 4..{MOST}, got {size!r:.60}"
            )
        chosen = []
        for key, known in (
            ("crossover", CROSSOVERS), ("mutation", MUTATIONS), ("decoder", DECODERS),
        ):  # fmt: skip
            value = options.get(key, known[0])
            if value not in known:
                expected = ", ".join(known)
                raise InputError(f"options.{key}: expected one of {expected}, got {value!r:.60}")
            chosen.append(value)
        local_search = options.get("local_search", False)
        if not isinstance(local_search, bool):
            raise InputError(
                f"options.local_search: expected true or false, got {local_search!r:.60}"
            )
        crossover, mutation, decoder = chosen
        return cls(size, crossover, mutation, decoder, local_search)


class _Individual:
    """A chromosome (a row of the population's matrix) and its fitness, as DEAP wants it."""

    __slots__ = ("fitness", "genes", "row")

    def __init__(self, row: int, genes: IntArray, fitness: Any) -> None:
        self.row, self.genes, self.fitness = row, genes, fitness

    @property
    def makespan(self) -> int:
        """Value of the one objective."""
        return -int(self.fitness.wvalues[0])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> IntArray:
        return np.array(self.genes, dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Individual:
        fitness = type(self.fitness)()
        fitness.wvalues = self.fitness.wvalues
        return _Individual(self.row, self.genes.copy(), fitness)


def roulette(population: Sequence[Any], k: int, random: Random) -> list[Any]:
    """Individuals drawn k times, each with a chance in proportion to Cworst - C + 1.

    DEAP's `selRoulette` looks at raw values, so on makespans it prefers long schedules.
    Individuals without a schedule count as one worse than the worst.
    """
    values = [individual.makespan for individual in population]
    worst = max((value for value in values if value < STUCK), default=STUCK)
    wheel = accumulate(max(worst - value + 1, 0) for value in values)
    return random.choices(population, cum_weights=list(wheel), k=k)


def seeded_selection(random: Random) -> dict[str, Callable[..., Any]]:
    """DEAP's own selection operators, drawing from `random` instead of the global generator."""
    from deap.tools import selection

    # the same code with other globals: nothing of DEAP's, or of the caller's, is changed
    names = dict(vars(selection))
    names["random"] = random
    operators: dict[str, Callable[..., Any]] = {}
    for name, function in vars(selection).items():
        if isinstance(function, FunctionType) and name.startswith("sel"):
            operators[name] = FunctionType(
                function.__code__, names, name, function.__defaults__, function.__closure__
            )
    names.update(operators)
    return operators


def _toolbox(settings: _Settings, encoding: Encoding, random: Random) -> Any:
    """The operators of one run under DEAP's customary names."""
    from deap import base

    from optsched_solvers.literature import crossover

    toolbox = base.Toolbox()
    if settings.crossover == "pox":
        toolbox.register("mate", crossover.pox)
    else:
        toolbox.register("mate", crossover.jox, encoding)
    mutation = {
        "insertion": crossover.insert, "swap": crossover.swap, "inversion": crossover.invert,
    }  # fmt: skip
    toolbox.register("mutate", mutation[settings.mutation])
    toolbox.register("select_mates", roulette, random=random)
    select = seeded_selection(random)["selTournament"]
    toolbox.register("select_survivors", select, tournsize=TOURNAMENT)
    return toolbox


def _statistics() -> Any:
    """Best, mean and worst makespan of a population."""
    from deap import tools

    statistics = tools.Statistics(key=lambda individual: individual.makespan)
    statistics.register("best", min)
    statistics.register("mean", np.mean)
    statistics.register("worst", max)
    return statistics


class _Run:
    """One call: the population, and the counters."""

    def __init__(
        self, graph: Schedule, settings: _Settings, limits: Limits, monitor: Monitor, left: int
    ) -> None:
        from deap import base, tools

        from optsched_solvers.literature.operation_based import Encoding

        class Fitness(base.Fitness):  # type: ignore[misc]
            weights = (-1,)  # the makespan, to be minimised; integers stay exact

        self.graph, self.settings, self.limits, self.monitor = graph, settings, limits, monitor
        self.encoding = Encoding.of(graph)
        self.random = Random(limits.seed)
        self.toolbox = _toolbox(settings, self.encoding, self.random)
        self.best = tools.HallOfFame(1, similar=np.array_equal)
        self.left = left  # individuals that may still be evaluated
        size = settings.population
        # parents above, children below
        self.matrix: Population = np.empty((2 * size, graph.n_operations), np.int64)
        self.pool = [_Individual(row, genes, Fitness()) for row, genes in enumerate(self.matrix)]
        self.slice_rows = 1
        self.slice_moves = 1
        self.walk: Walk | None = None

    def run(self, starts: list[Rows]) -> None:
        """Evolve from these schedules until a limit."""
        size = self.settings.population
        if not self._found(starts):
            return
        parents, children = self.pool[:size], self.pool[size:]
        statistics = _statistics()
        generation = 0
        while self.left > 0:
            if not self._breed(parents, children):
                return
            count = min(size, self.left)
            if not self._evaluate(children[:count]):
                return
            if self.settings.local_search and not self._polish(children[:count]):
                return
            self._survive(parents, children[:count])
            self._join()
            generation += 1
            if _log.isEnabledFor(logging.DEBUG):
                _log.debug("generation %d: %s", generation, statistics.compile(parents))

    def _breed(self, parents: list[_Individual], children: list[_Individual]) -> bool:
        """Children of mates drawn by the wheel; the parents stay as they are.

        False if a limit came first.
        """
        random, mate, mutate = self.random.random, self.toolbox.mate, self.toolbox.mutate
        bits = self.random.getrandbits
        mates = self.toolbox.select_mates(parents, len(children))
        for k in range(0, len(children) - 1, 2):
            if k % 64 == 0 and self.monitor.should_stop():
                return False
            first, second = mates[k].genes, mates[k + 1].genes
            one, other = children[k].genes, children[k + 1].genes
            if random() < CROSSOVER_RATE:
                mate(first, second, bits(62), one, other)
            else:
                one[:], other[:] = first, second
            if random() < MUTATION_RATE:
                mutate(one, bits(62))
            if random() < MUTATION_RATE:
                mutate(other, bits(62))
        if len(children) % 2:
            children[-1].genes[:] = mates[-1].genes
            mutate(children[-1].genes, bits(62))
        return True

    def _polish(self, children: list[_Individual]) -> bool:
        """Put the best schedule of a tabu walk in the place of some children; each counts as one.

        False if a limit came first.
        """
        from optsched_solvers.shop.tabu.walk import Walk

        if self.walk is None:
            self.walk = Walk(self.graph, self.limits.seed)
        walk = self.walk
        count = min(POLISHED, len(children), self.left)
        for child in self.random.sample(children, count):
            if child.makespan == STUCK:
                continue
            walk.load(self.encoding.operations(child.genes))
            done = 0
            while done < MOVES:
                begin, moves = time.perf_counter(), min(self.slice_moves, MOVES - done)
                walk.run(moves)
                spent = (time.perf_counter() - begin) / moves
                self.slice_moves = max(1, min(MOVES, int(_SLICE / max(spent, 1e-7))))
                done += moves
                if self.monitor.should_stop():
                    done = MOVES
            child.genes[:] = self.encoding.gene[walk.best_order]
            child.fitness.wvalues = (-walk.best,)
            self.left -= 1
            self.monitor.advance(1)
            if self.monitor.should_stop():
                self._improved_by(child)
                return False
        return True

    def _survive(self, parents: list[_Individual], children: list[_Individual]) -> None:
        """Fill the parents' rows with survivors of both; the best stays in any case.

        Of individuals of one makespan only the first takes part while there are enough others:
        otherwise a population soon consists of copies of its best.
        """
        self._improved_by(max(children, key=lambda child: child.fitness))
        first: dict[int, _Individual] = {}
        copies = [
            one
            for one in parents + children
            if first.setdefault(one.fitness.wvalues[0], one) is not one
        ]
        chosen = list(first.values())
        if len(chosen) < len(parents):
            chosen += copies[: len(parents) - len(chosen)]
        else:
            chosen = self.toolbox.select_survivors(chosen, len(parents))
        fitness = [one.fitness.wvalues for one in chosen]
        self.matrix[: len(parents)] = self.matrix[[one.row for one in chosen]]
        for parent, values in zip(parents, fitness, strict=True):
            parent.fitness.wvalues = values
        parents[0].genes[:] = self.best[0].genes
        parents[0].fitness.wvalues = self.best[0].fitness.wvalues

    def _improved_by(self, individual: _Individual) -> None:
        """Report an individual that is better than all before."""
        if self.best and individual.fitness <= self.best[0].fitness:
            return
        self.best.update([individual])
        if individual.makespan < STUCK:
            sequences = self.encoding.sequences(self.graph, individual.genes)
            self.monitor.incumbent(sequences, individual.makespan, "genetic")

    def _join(self) -> None:
        """With a time limit, take in what others have found meanwhile."""
        value, sequences = self.monitor.best
        if self.limits.iterations is not None or value is None or sequences is None:
            return
        if value < self.best[0].makespan:
            self.pool[0].genes[:] = self.encoding.encode(self.graph, sequences)
            self._evaluate(self.pool[:1], active=False)
            self.best.update(self.pool[:1])

    def _found(self, starts: list[Rows]) -> bool:
        """The first population: the best of the starts, and active schedules in random order.

        False if a limit came first.
        """
        from optsched_solvers.literature.operation_based import decode

        size, encoding = self.settings.population, self.encoding
        encoded = []
        for sequences in starts:
            encoded.append(encoding.encode(self.graph, sequences))
            if self.monitor.should_stop():
                return False
        seeds = np.unique(np.array(encoded, np.int64).reshape(-1, self.graph.n_operations), axis=0)
        best = np.argsort(decode(encoding, seeds), kind="stable")[:size]
        self.matrix[: len(best)] = seeds[best]
        self.left += len(best)  # the rules have counted already
        if not self._evaluate(self.pool[: len(best)], active=False):
            return False
        rng = np.random.default_rng(self.limits.seed)
        ordered = np.repeat(np.arange(encoding.n_genes), np.diff(encoding.indptr))
        for row in range(len(best), size):
            self.matrix[row] = rng.permutation(ordered)
        last = min(size, len(best) + self.left)
        if not self._evaluate(self.pool[len(best) : last], active=True):
            return False
        for individual in self.pool[last:size]:
            individual.fitness.values = (STUCK,)
        self._improved_by(max(self.pool[:size], key=lambda one: one.fitness))
        return True

    def _evaluate(self, individuals: list[_Individual], active: bool | None = None) -> bool:
        """Decode adjacent rows in slices; False if a limit came before the last one."""
        from optsched_solvers.literature.operation_based import decode

        by_active = self.settings.decoder == "active" if active is None else active
        at = 0
        while at < len(individuals):
            some = individuals[at : at + self.slice_rows]
            begin = time.perf_counter()
            values = decode(
                self.encoding, self.matrix[some[0].row : some[-1].row + 1], active=by_active
            )
            spent = (time.perf_counter() - begin) / len(some)
            self.slice_rows = max(1, min(10_000, int(_SLICE / max(spent, 1e-7))))
            for individual, value in zip(some, values.tolist(), strict=True):
                individual.fitness.wvalues = (-value,)
            at += len(some)
            self.left -= len(some)
            self.monitor.advance(len(some))
            if at < len(individuals) and self.monitor.should_stop():
                self._improved_by(max(individuals[:at], key=lambda one: one.fitness))
                return False
        return True
