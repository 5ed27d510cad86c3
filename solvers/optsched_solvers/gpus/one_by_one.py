"""Several requests one after the other, in several orders; then taken back and placed again.

Each gets the best for itself beside the running jobs and the requests before it, as tenants. From
the best order on, single requests and pairs are taken back and placed again, also on hosts of their
own, while that makes all together better. The bound is what all could get alone.
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
"""Orders that are tried: as given, by falling and by rising size, and at random."""

NODES: Final = 500_000
"""Steps of the exact search for one request, some 20 ms."""

_SECONDS: Final = 0.1  # for one request without tables, unless iterations count


class OneByOne:
    """One iteration is one request placed."""

    name = "one_by_one"
    kinds = ("gpus",)
    options: Mapping[str, str] = MappingProxyType({})

    def supports(self, problem: Problem) -> Support:
        """Any number of requests, joint allocations by counts."""
        if not isinstance(problem, GpuPlacement):
            return Support(False, "it is no choice of GPUs")
        if problem.tables is not None and problem.model.intra_monotone:
            return Support(True)
        believed = problem.on_unmeasured == "predict" and not problem.is_robust
        if not isinstance(problem.model, CountModel) or not believed:
            return Support(False, "the model has no tables by counts for this cluster")
        if problem.objective == "max_min":
            return Support(False, "max_min needs a model with tables by counts for this cluster")
        return Support(True)

    def solve(self, problem: Problem, limits: Limits, monitor: Monitor) -> Result:
        """Orders first, then exchanges, until nothing is better."""
        assert isinstance(problem, GpuPlacement)
        if not load(monitor, *(LARGE if problem.tables is None else [KERNEL])):
            return Result("unknown")
        search = Sequences(problem, limits, monitor)
        search.improve()
        upper = search.bound()
        if upper is not None:
            monitor.bound(-upper, self.name)
        found = monitor.objective is not None
        return Result(
            "unknown", reason="" if found else "no order of the requests has room for all"
        )


class Sequences:
    """Requests placed one after the other; the best of all is reported as it is found."""

    def __init__(self, problem: GpuPlacement, limits: Limits, monitor: Monitor) -> None:
        self.problem, self.limits, self.monitor = problem, limits, monitor
        self.best: Sets | None = None
        self.value, self.steps = -1, 0
        self._alone: dict[tuple[int, ...], int] = {}

    def orders(self) -> Iterator[list[int]]:
        """Of the requests: as given, by size, and at random."""
        requests = self.problem.requests
        given = list(range(len(requests)))
        yield given
        yield sorted(given, key=lambda r: -requests[r].gpus)
        yield sorted(given, key=lambda r: requests[r].gpus)
        rng = random.Random(self.limits.seed)
        for _ in range(ORDERS - 3):
            yield rng.sample(given, len(given))

    def improve(self) -> None:
        """The best order; then single requests and pairs again, while all together get more."""
        for order in self.orders():
            self._offer(self.placed({}, order))
            if self._over():
                return
        everybody = range(len(self.problem.requests))
        groups = [(r,) for r in everybody] + list(combinations(everybody, 2))
        since = 0  # groups since the last that was better
        while self.best is not None and since < len(groups):
            group = groups.pop(0)
            groups.append(group)
            since += 1
            kept = {r: gpus for r, gpus in self.best.items() if r not in group}
            for turn in permutations(group):
                for apart in (False, True)[: 3 - len(group)]:
                    if self._over():
                        return
                    if self._offer(self.placed(kept, turn, apart)):
                        since = 0

    def bound(self) -> int | None:
        """What all requests could get alone; None where that is not known."""
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
        """Whether sets for all are better than what there was."""
        if chosen is None:
            return False
        sets = [chosen[r] for r in range(len(chosen))]
        try:
            value = self.problem.worth(sets)
        except UnmeasuredPattern:  # beside those that came later
            return False
        if value <= self.value:
            return False
        self.best, self.value = chosen, value
        self.monitor.incumbent(GpuSets.of(sets), -value, "one_by_one")
        return True

    def placed(self, there: Sets, order: Iterable[int], apart: bool = False) -> Sets | None:
        """Some requests placed beside others, one after the other; None if one has no room."""
        chosen = dict(there)
        for r in order:
            policy = self.problem.requests[r].policy
            if apart and not policy.apart:
                names = tuple(self._name(other) for other in chosen)
                policy = replace(policy, apart=names, apart_level="host")
            found = self._best_of(r, chosen, policy)
            self.steps += 1
            self.monitor.advance(1)
            if found is None:
                return None
            chosen[r] = found[0]
        return chosen

    def _name(self, r: int) -> str:
        return f"request {self.problem.requests[r].name}"

    def _best_of(self, r: int, there: Sets, policy: Policy) -> tuple[tuple[int, ...], int] | None:
        """The best GPUs for a request beside others, and what none exceeds."""
        problem, k = self.problem, self.problem.requests[r].gpus
        jobs = [Job(self._name(other), gpus) for other, gpus in there.items()]
        wanted = [*problem.demands, *(self._reached(gpus) for gpus in there.values())]
        state = problem.state.without(gpu for gpus in there.values() for gpu in gpus)
        state = state.with_jobs([*state.jobs, *jobs])
        if problem.tables is not None:
            found = ask(problem.tables, state, wanted, k, policy, ties=True, nodes=NODES)
            if found is None:
                return None
            return found.gpus, found.upper_bound
        until = None
        if self.limits.iterations is None:
            until = time.monotonic() + min(_SECONDS, self.monitor.remaining / 20)
        assert isinstance(problem.model, CountModel)
        if k > len(state.free):
            return None
        other = large_search(problem.model).choose(state, k, wanted, policy, until)
        return None if other is None else (other.gpus, other.upper_bound)

    def _reached(self, gpus: tuple[int, ...]) -> int:
        """B(S), which a request demands as a tenant."""
        if gpus not in self._alone:
            self._alone[gpus] = self.problem.judged_by.of(gpus)
        return self._alone[gpus]
