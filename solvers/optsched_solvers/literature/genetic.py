"""A genetic algorithm on DEAP, to compare with: one evolution, and a decoder per kind of problem.

In equal time tabu search beats it clearly on orders, and the exact searches on quotas and GPUs.
"""

from __future__ import annotations

import random
import threading
from contextlib import contextmanager
from itertools import pairwise
from random import Random
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.errors import MissingExtra
from optsched.io.values import integer
from optsched.model.graph import evaluate, machine_orders
from optsched.model.objectives import MAKESPAN, TOTAL, objective_value
from optsched.model.schedule import NO_DEADLINE, Csr
from optsched.solving.result import Result
from optsched.solving.solver import Support
from optsched_solvers._loading import load
from optsched_solvers.shop import rules

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from optsched.bandwidth.placement.problem import GpuPlacement
    from optsched.model.schedule import IntArray, Problem, Schedule
    from optsched.problems.quota.problem import QuotaPlan
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor
    from optsched_solvers.gpus.vectors import CountVectors

Genes = list[int]

MOST: Final = 2000
"""Largest population."""

STUCK: Final = 2**61
"""Cost of an infeasible individual; the amount of the violation is added."""

CROSSOVER_RATE: Final = 0.7
MUTATION_RATE: Final = 0.6
TOURNAMENT: Final = 3
"""Individuals of which the best is selected."""

PATIENCE: Final = 20
"""Generations without a better individual after which all but the best are replaced."""


class Decoder:
    """Operators and cost of the individuals of one kind of problem.

    All random numbers of the operators come from `random`.
    """

    def __init__(self, monitor: Monitor, seed: int) -> None:
        self.monitor, self.random = monitor, Random(seed)

    def first(self, size: int) -> list[Genes]:
        """Make an initial population."""
        raise NotImplementedError

    def mate(self, first: Genes, second: Genes) -> Genes:
        """Combine two parents into a child."""
        raise NotImplementedError

    def mutate(self, genes: Genes) -> None:
        """Change an individual in place."""
        raise NotImplementedError

    def value(self, genes: Genes) -> int:
        """Return the cost of an individual; report improvements to the monitor."""
        raise NotImplementedError

    def values(self, population: Sequence[Genes]) -> list[int]:
        """Return the costs of a population, or of a prefix of it when a limit is reached."""
        found: list[int] = []
        for genes in population:
            if self.monitor.should_stop():
                break
            found.append(self.value(genes))
        return found


_drawing = threading.Lock()  # the global generator continues one stream at a time


@contextmanager
def global_stream(stream: Random) -> Iterator[None]:
    """Let the global generator, from which DEAP draws, continue `stream` within the block."""
    with _drawing:
        before = random.getstate()
        random.setstate(stream.getstate())
        try:
            yield
        finally:
            stream.setstate(random.getstate())
            random.setstate(before)


def evolve(decoder: Decoder, limits: Limits, iterations: int) -> int:
    """Evolve until a limit; return the number of evaluated individuals, each an iteration.

    Survivors are the best quarter of the distinct parents and children, and winners of tournaments.
    """
    from deap import algorithms, base, tools

    class Fitness(base.Fitness):  # type: ignore[misc]
        weights = (-1,)  # costs; integers stay exact

    class Individual(list):  # type: ignore[type-arg]
        def __init__(self, genes: Genes) -> None:
            super().__init__(genes)
            self.fitness = Fitness()

    def mate(first: Any, second: Any) -> tuple[Any, Any]:
        return Individual(decoder.mate(first, second)), Individual(decoder.mate(second, first))

    def mutate(one: Any) -> tuple[Any]:
        decoder.mutate(one)
        return (one,)

    size, monitor = population_size(limits.options), decoder.monitor
    stream = Random(f"DEAP {limits.seed}")  # decoders have a stream of their own
    toolbox = base.Toolbox()
    toolbox.register("clone", Individual)
    toolbox.register("mate", mate)
    toolbox.register("mutate", mutate)
    population: list[Any] = []
    made, still, best = 0, 0, None
    fresh = [Individual(genes) for genes in decoder.first(size)]
    while made < iterations and not monitor.should_stop():
        fresh = fresh[: iterations - made]
        found = decoder.values(fresh)
        for one, value in zip(fresh, found, strict=False):
            one.fitness.values = (value,)
        monitor.advance(len(found))
        made += len(found)
        if not found or len(found) < len(fresh):  # a limit, or no vector is left
            break
        distinct = {tuple(one): one for one in population + fresh}
        population = sorted(distinct.values(), key=lambda one: (one.fitness.values, one))
        still = still + 1 if population[:1] == best else 0
        best = population[:1]
        if still >= PATIENCE:
            population, fresh = best, [Individual(genes) for genes in decoder.first(size)]
            continue
        with global_stream(stream):
            if len(population) > size:
                elite, others = population[: size // 4], population[size // 4 :]
                population = elite + tools.selTournament(others, size - len(elite), TOURNAMENT)
            parents = tools.selTournament(population, size, TOURNAMENT)
            fresh = algorithms.varAnd(parents, toolbox, CROSSOVER_RATE, MUTATION_RATE)
    return made


def population_size(options: Mapping[str, Any]) -> int:
    """Check the option ``population``; raise `MissingExtra` without DEAP."""
    size = integer("options.population", options.get("population", 60), 4, MOST)
    try:
        import deap  # noqa: F401
    except ImportError:
        raise MissingExtra("the genetic algorithm", "genetic") from None
    return size


class Genetic:
    """Operation-based chromosomes, decoded by the list scheduler; rules' schedules begin."""

    name = "genetic"
    objectives = (MAKESPAN, TOTAL)
    options: Mapping[str, str] = MappingProxyType(
        {"population": f"individuals (4 to {MOST}; default 60)"}
    )

    def supports(self, problem: Problem) -> Support:
        """One iteration: at most one resource per operation, no deadlines."""
        goal = rules.supported_objective(problem, *self.objectives)
        if not goal:
            return goal
        graph = problem.graph()
        if (graph.deadline != NO_DEADLINE).any():
            return Support(False, "deadlines are not kept by the genetic algorithm")
        return rules.supported_graph(graph)

    def solve(self, problem: Problem, limits: Limits, monitor: Monitor) -> Result:
        """Evolve until a limit; one iteration is one rule's schedule or one individual."""
        population_size(limits.options)
        graph = problem.graph()
        starts = [] if monitor.solution is None else [monitor.solution]
        made = rules.try_rules(graph, limits, monitor, keep=starts.append)
        if not monitor.should_stop() and load(monitor, *rules.KERNELS, "deap.tools"):
            evolve(Orders(graph, monitor, limits.seed, starts), limits, _left(limits, made))
        return Result("unknown")


def _left(limits: Limits, made: int = 0) -> int:
    return 2**62 if limits.iterations is None else limits.iterations - made


class Orders(Decoder):
    """A gene names a job's micro-batch; its n-th occurrence stands for that one's n-th operation.

    Bierwirth 1995, "A generalized permutation approach to job shop scheduling with genetic
    algorithms". The order of genes is the priority of an active list schedule, and is replaced by
    the order in which that places the operations.
    """

    def __init__(self, graph: Schedule, monitor: Monitor, seed: int, starts: list[Csr]) -> None:
        from optsched.kernels.list_schedule import DispatchGraph

        super().__init__(monitor, seed)
        self.graph, self.starts = graph, starts
        self.records = DispatchGraph.of(graph)
        place = np.empty(graph.n_operations, np.int64)
        place[evaluate(graph).order] = np.arange(graph.n_operations)
        labels = np.stack([graph.job, graph.microbatch, graph.iteration])
        self.gene: IntArray = np.unique(labels, axis=1, return_inverse=True)[1].ravel()
        self.operation = np.lexsort((place, self.gene))

    def first(self, size: int) -> list[Genes]:
        """The schedules of the rules, and random orders."""
        known = [
            self.gene[rules.order_of(self.graph, start)].tolist() for start in self.starts[:size]
        ]
        self.starts = []
        genes = self.gene.tolist()
        return known + [self.random.sample(genes, len(genes)) for _ in range(size - len(known))]

    def mate(self, first: Genes, second: Genes) -> Genes:
        """Precedence preserving order-based crossover (Zhang, Lee & Gen 2005).

        Genes of a random set keep their places; the others follow in the second parent's order.
        """
        kept = {gene for gene in sorted(set(first)) if self.random.random() < 0.5}
        others = iter([gene for gene in second if gene not in kept])
        return [gene if gene in kept else next(others) for gene in first]

    def mutate(self, genes: Genes) -> None:
        """Exchange two genes, or move one."""
        if not genes:
            return
        a, b = self.random.randrange(len(genes)), self.random.randrange(len(genes))
        if self.random.random() < 0.5:
            genes[a], genes[b] = genes[b], genes[a]
        else:
            genes.insert(b, genes.pop(a))

    def value(self, genes: Genes) -> int:
        """The objective."""
        from optsched.kernels.list_schedule import Mode, run

        priority = np.empty(len(genes), np.int64)
        priority[self.operation] = np.argsort(np.array(genes, np.int64), kind="stable")
        found = run(self.records, priority, Mode.ACTIVE)
        if found is None:
            return STUCK
        order, start = found
        genes[:] = self.gene[order].tolist()
        reached = objective_value(self.graph, start + self.graph.duration)
        if self.monitor.objective is None or reached < self.monitor.objective:
            self.monitor.incumbent(machine_orders(self.graph, order), reached, "genetic")
        return reached


class QuotaGenetic:
    """Vectors of options, repaired to fit the GPUs."""

    name, options, kinds = Genetic.name, Genetic.options, ("quota",)

    def supports(self, problem: Problem) -> Support:
        """Every plan up to some size."""
        from optsched_solvers.quota.plans import supported

        return supported(problem)

    def solve(self, problem: QuotaPlan, limits: Limits, monitor: Monitor) -> Result:
        """Evolve until a limit; one iteration is one individual."""
        from optsched_solvers.quota.plans import NOT_LOADED, first_answer, offer

        population_size(limits.options)
        if not load(monitor, "deap.tools"):
            first_answer(problem, monitor)
            return Result("unknown", reason=NOT_LOADED)
        if not problem.jobs:
            offer(problem, monitor, np.zeros(0, np.int64), np.zeros(0, np.int64), "genetic")
        else:
            evolve(Options(problem, monitor, limits.seed), limits, _left(limits))
        return Result("unknown")


class Options(Decoder):
    """A gene is the option that a job gets."""

    def __init__(self, plan: QuotaPlan, monitor: Monitor, seed: int) -> None:
        super().__init__(monitor, seed)
        self.plan = plan
        table = plan.table
        self.of = [range(*pair) for pair in pairwise(table.ptr.tolist())]
        self.kind, self.gpus = table.kind.tolist(), table.size.tolist()
        self.cost: list[int] = table.cost.tolist()

    def first(self, size: int) -> list[Genes]:
        """The greedy answer, the start if there is one, and random vectors."""
        from optsched_solvers.quota.plans import greedy

        found = greedy(self.plan)
        begun = [] if found is None else [self.plan._find(*found).tolist()]
        if self.monitor.solution is not None:
            begun.append(self.plan._find(*self.plan.sizes(self.monitor.solution)).tolist())
        while len(begun) < size:
            begun.append([self.random.choice(options) for options in self.of])
            self._repair(begun[-1])
        return begun[:size]

    def mate(self, first: Genes, second: Genes) -> Genes:
        """Each job's option from either parent."""
        child = [self.random.choice(pair) for pair in zip(first, second, strict=True)]
        self._repair(child)
        return child

    def mutate(self, genes: Genes) -> None:
        """Other options for up to three jobs."""
        for j in self.random.sample(range(len(genes)), min(len(genes), self.random.randint(1, 3))):
            genes[j] = self.random.choice(self.of[j])
        self._repair(genes)

    def _repair(self, genes: Genes) -> None:
        """Shrink random jobs of a type that is overdrawn; where all must be handed out, grow."""
        kind, gpus, all_out = self.kind, self.gpus, self.plan.hands_out_all
        left = [self.plan.total] if all_out else list(self.plan.budgets)
        for o in genes:
            left[kind[o]] -= gpus[o]
        for j in self.random.sample(range(len(genes)), len(genes)):
            if left[kind[genes[j]]] < 0:
                left[kind[genes[j]]] += gpus[genes[j]]
                able = [p for p in self.of[j] if gpus[p] <= left[kind[p]]]
                genes[j] = (
                    self.random.choice(able) if able else min(self.of[j], key=gpus.__getitem__)
                )
                left[kind[genes[j]]] -= gpus[genes[j]]
        if all_out and left[0] > 0:
            for j in self.random.sample(range(len(genes)), len(genes)):
                more = min(left[0], self.of[j][-1] - genes[j])  # sizes have no gaps
                genes[j] += more
                left[0] -= more

    def value(self, genes: Genes) -> int:
        """The cost, if all find a place."""
        from optsched_solvers.quota.plans import place

        sizes = np.array([self.gpus[o] for o in genes], np.int64)
        kinds = np.array([self.kind[o] for o in genes], np.int64)
        used = np.bincount(kinds, weights=sizes, minlength=len(self.plan.budgets))
        over = int(np.maximum(used - self.plan.budgets, 0).sum())
        if self.plan.hands_out_all:
            over += abs(int(sizes.sum()) - self.plan.total)
        if over:
            return STUCK + over
        costs = [self.cost[o] for o in genes]
        cost = max(costs) if self.plan.highest else sum(costs)
        if self.monitor.objective is not None and cost >= self.monitor.objective:
            return cost  # where it would be placed does not matter
        rows, failed = place(self.plan, sizes, kinds)
        if failed >= 0:
            return STUCK
        self.monitor.incumbent(rows, cost, "genetic")
        return cost


class GpuGenetic:
    """Counts of GPUs on hosts."""

    name, options, kinds = Genetic.name, Genetic.options, ("gpus",)

    def supports(self, problem: Problem) -> Support:
        """A model with tables."""
        from optsched_solvers.gpus.counts import supported

        return supported(problem)

    def solve(self, problem: GpuPlacement, limits: Limits, monitor: Monitor) -> Result:
        """Evolve until a limit; one iteration is one individual."""
        from optsched_solvers.gpus.vectors import CountVectors

        population_size(limits.options)
        if not load(monitor, "deap.tools"):
            return Result("unknown")
        vectors = CountVectors(problem)
        if int(vectors.most.sum()) >= problem.k:
            evolve(Counts(vectors, monitor, limits.seed), limits, _left(limits))
        return Result("unknown")


class Counts(Decoder):
    """A gene is the number of GPUs on a host; every vector has exactly k.

    Vectors that break the policy live on, behind all that obey it.
    """

    def __init__(self, vectors: CountVectors, monitor: Monitor, seed: int) -> None:
        super().__init__(monitor, seed)
        self.vectors = vectors
        self.limit: Genes = vectors.most.tolist()
        self.total = vectors.count()
        self.known: dict[tuple[int, ...], int] = {}
        self.best = 1

    def first(self, size: int) -> list[Genes]:
        """Fewest hosts, most even, the start if there is one, and random vectors."""
        k, limit = self.vectors.problem.k, self.limit
        full, even = [0] * len(limit), [0] * len(limit)
        order = sorted(range(len(limit)), key=lambda u: (-limit[u], u))
        for u in order:
            full[u] = min(limit[u], k - sum(full))
        while sum(even) < k:
            for u in order:
                even[u] += even[u] < limit[u] and sum(even) < k
        begun = [full, even]
        if self.monitor.solution is not None:
            hosts = self.vectors.problem.cluster.host_of[list(self.monitor.solution)]
            start = [int((hosts == h).sum()) for h in self.vectors.hosts]
            begun += [start] if sum(start) == k else []
        slots = [u for u, most in enumerate(limit) for _ in range(most)]
        while len(begun) < size:
            begun.append(np.bincount(self.random.sample(slots, k), minlength=len(limit)).tolist())
        return begun[:size]

    def mate(self, first: Genes, second: Genes) -> Genes:
        """On the way from one parent to the other: so many GPUs move that lie elsewhere."""
        child = list(first)
        differences = [a - b for a, b in zip(first, second, strict=True)]
        more = [u for u, surplus in enumerate(differences) for _ in range(surplus)]
        less = [u for u, surplus in enumerate(differences) for _ in range(-surplus)]
        self.random.shuffle(more)
        self.random.shuffle(less)
        times = self.random.randint(0, len(more))
        for a, b in zip(more[:times], less[:times], strict=True):
            child[a] -= 1
            child[b] += 1
        return child

    def mutate(self, genes: Genes) -> None:
        """Some GPUs go from a host to another; all of them: two hosts exchange."""
        a = self.random.choice([u for u, count in enumerate(genes) if count])
        others = [u for u in range(len(genes)) if u != a and genes[u] < self.limit[u]]
        if not others:
            return
        b = self.random.choice(others)
        most = min(genes[a], self.limit[b] - genes[b])
        times = self.random.choice((1, self.random.randint(1, most)))
        genes[a] -= times
        genes[b] += times

    def values(self, some: Sequence[Genes]) -> list[int]:
        """Minus the bandwidth, of all at once; positive where something is wrong."""
        new = list({tuple(one): None for one in some if tuple(one) not in self.known})
        if self.monitor.should_stop() or (self.known and len(self.known) == self.total):
            return []
        if new:
            table = np.array(new, np.int64)
            wrong = self.vectors.excess(table)
            # not measured (-1) is wrong too, but nearer to right than what breaks the policy
            cost = np.where(wrong > 0, 1 + wrong, -self.vectors.values(table))
            self.known.update(zip(new, cost.tolist(), strict=True))
            top = int(cost.argmin())
            if cost[top] < self.best:
                self.best = int(cost[top])
                answer = self.vectors.gpus(table[top])
                self.monitor.incumbent(answer, self.best, "genetic")
        return [self.known[tuple(one)] for one in some]
