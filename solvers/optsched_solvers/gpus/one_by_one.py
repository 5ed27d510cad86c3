"""Several requests: placed one after the other in several orders, then improved by local search.

A request gets its best GPUs in competition with the running jobs and the requests placed before.
The local search removes single requests and pairs and places them again, also on hosts that no
other request uses, or without one of their hosts. The bound is the sum of what every request could
get alone.
"""

from __future__ import annotations

import random
import time
from dataclasses import replace
from itertools import combinations, permutations
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from optsched.bandwidth.models.model import CountModel, UnmeasuredPattern
from optsched.bandwidth.placement.problem import RATIO, GpuPlacement, GpuSets
from optsched.bandwidth.search.ask import ask
from optsched.bandwidth.topology.rates import MOST
from optsched.bandwidth.topology.state import Job
from optsched.solving.result import Result
from optsched.solving.solver import Support
from optsched_solvers._loading import load
from optsched_solvers.gpus.counts import KERNEL, LARGE, large_search

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from optsched.bandwidth.topology.policy import Policy
    from optsched.model.schedule import Problem
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor

    Sets = dict[int, tuple[int, ...]]  # GPUs by request

ORDERS: Final = 6
"""Number of orders: as given, by falling size, by rising size, and random orders."""

MOST_BARRED: Final = 4
"""Hosts of a request without which it is placed again, one at a time."""

NODES: Final = 500_000
"""Steps of the exact search for one request, some 20 ms."""

_SECONDS: Final = 0.1  # for one request without tables, unless iterations count


class OneByOne:
    """Several requests, one after the other; one iteration is one request placed."""

    name = "one_by_one"
    kinds = ("gpus",)
    options: Mapping[str, str] = MappingProxyType({})

    def supports(self, problem: Problem) -> Support:
        """Any number of requests, and a model with tables or any `CountModel`."""
        if not isinstance(problem, GpuPlacement):
            return Support(False, "it only chooses GPUs (GpuPlacement)")
        if problem.tables is not None and problem.model.intra_monotone:
            return Support(True)
        predicts = problem.on_unmeasured == "predict" and not problem.is_robust
        if not isinstance(problem.model, CountModel) or not predicts:
            return Support(False, "the model has no tables by counts for this cluster")
        if problem.objective == "max_min":
            return Support(False, "max_min needs a model with tables by counts for this cluster")
        return Support(True)

    def solve(self, problem: Problem, limits: Limits, monitor: Monitor) -> Result:
        """Try all orders, then the local search until a limit or a local optimum."""
        assert isinstance(problem, GpuPlacement)
        if not load(monitor, *(LARGE if problem.tables is None else [KERNEL])):
            return Result("unknown")
        search = Sequences(problem, limits, monitor)
        search.improve()
        upper = search.bound()
        if upper is not None:
            monitor.bound(-upper, self.name)
        found = monitor.objective is not None
        return Result("unknown", reason="" if found else "no order of the requests places all")


class Sequences:
    """State of the search; every new best choice is reported at once."""

    def __init__(self, problem: GpuPlacement, limits: Limits, monitor: Monitor) -> None:
        self.problem, self.limits, self.monitor = problem, limits, monitor
        self.best: Sets | None = None
        self.value, self.steps = -1, 0
        self._alone: dict[tuple[int, ...], int] = {}

    def orders(self) -> Iterator[list[int]]:
        """Orders of the requests to try, as numbers."""
        requests = self.problem.requests
        given = list(range(len(requests)))
        yield given
        yield sorted(given, key=lambda r: -requests[r].gpus)
        yield sorted(given, key=lambda r: requests[r].gpus)
        rng = random.Random(self.limits.seed)
        for _ in range(ORDERS - 3):
            yield rng.sample(given, len(given))

    def improve(self) -> None:
        """Try all orders, then move single requests and pairs until the objective stops rising."""
        for order in self.orders():
            self._offer(self.placed({}, order))
            if self._over():
                return
        every = range(len(self.problem.requests))
        groups = [(r,) for r in every] + list(combinations(every, 2))
        since = 0  # groups since the last improvement
        while self.best is not None and since < len(groups):
            group = groups.pop(0)
            groups.append(group)
            since += 1
            kept = {r: gpus for r, gpus in self.best.items() if r not in group}
            for turn in permutations(group):
                moves: list[tuple[bool, str]] = [(False, ""), (True, "")][: 3 - len(group)]
                moves += [(False, host) for host in self._hosts_of(turn[0])]
                for apart, barred in moves:
                    if self._over():
                        return
                    if self._offer(self.placed(kept, turn, apart, barred)):
                        since = 0

    def _hosts_of(self, r: int) -> list[str]:
        """Hosts that a request may leave, in the best choice so far; some of them."""
        assert self.best is not None
        cluster, policy = self.problem.cluster, self.problem.requests[r].policy
        used = dict.fromkeys(cluster.hosts[int(cluster.host_of[g])].name for g in self.best[r])
        return [name for name in used if name not in (policy.include or ())][:MOST_BARRED]

    def bound(self) -> int | None:
        """Upper bound: sum of what the requests could get alone; None where it is not known."""
        if self.problem.objective == "max_min" and len(self.problem.requests) > 1:
            return RATIO
        total = 0
        for r, request in enumerate(self.problem.requests):
            free = replace(request.policy, preferred=None)
            found = self._best_of(r, {}, free)
            if found is None or found[1] >= MOST:
                return None
            total += found[1]
        return total

    def _over(self) -> bool:
        spent = self.limits.iterations is not None and self.steps >= self.limits.iterations
        return self.monitor.should_stop() or (spent and self.best is not None)

    def _offer(self, chosen: Sets | None) -> bool:
        """Keep sets for all requests if they improve the best; return whether they do."""
        if chosen is None:
            return False
        sets = [chosen[r] for r in range(len(chosen))]
        try:
            value = self.problem.worth(sets)
        except UnmeasuredPattern:  # in competition with requests placed later
            return False
        if value <= self.value:
            return False
        self.best, self.value = chosen, value
        self.monitor.incumbent(GpuSets.of(sets), -value, "one_by_one")
        return True

    def placed(
        self, kept: Sets, order: Iterable[int], apart: bool = False, barred: str = ""
    ) -> Sets | None:
        """Place some requests in an order, the others kept; None if one finds no feasible choice.

        `apart`: on hosts that no placed request uses. `barred`: a host that the first request of
        the order does not use.
        """
        chosen = dict(kept)
        for r in order:
            policy = self.problem.requests[r].policy
            if apart and not policy.apart:
                names = tuple(self._name(other) for other in chosen)
                policy = replace(policy, apart=names, apart_level="host")
            if barred:
                policy, barred = replace(policy, exclude=(*(policy.exclude or ()), barred)), ""
            found = self._best_of(r, chosen, policy)
            self.steps += 1
            self.monitor.advance(1)
            if found is None:
                return None
            chosen[r] = found[0]
        return chosen

    def _name(self, r: int) -> str:
        return f"request {self.problem.requests[r].name}"

    def _best_of(self, r: int, placed: Sets, policy: Policy) -> tuple[tuple[int, ...], int] | None:
        """The best GPUs for a request in competition with placed requests, and an upper bound."""
        problem, k = self.problem, self.problem.requests[r].gpus
        jobs = [Job(self._name(other), gpus) for other, gpus in placed.items()]
        demands = [*problem.demands, *(self._reached(gpus) for gpus in placed.values())]
        state = problem.state.without(gpu for gpus in placed.values() for gpu in gpus)
        state = state.with_jobs([*state.jobs, *jobs])
        if problem.tables is not None:
            found = ask(problem.tables, state, demands, k, policy, ties=True, nodes=NODES)
            if found is None:
                return None
            return found.gpus, found.upper_bound
        until = None
        if self.limits.iterations is None:
            until = time.monotonic() + min(_SECONDS, self.monitor.remaining / 20)
        assert isinstance(problem.model, CountModel)
        if k > len(state.free):
            return None
        other = large_search(problem.model).choose(state, k, demands, policy, until)
        return None if other is None else (other.gpus, other.upper_bound)

    def _reached(self, gpus: tuple[int, ...]) -> int:
        """B(S) of a placed request: its demand."""
        if gpus not in self._alone:
            self._alone[gpus] = self.problem.judged_by.of(gpus)
        return self._alone[gpus]
