"""CP-SAT chooses GPUs: counts by host, the rules of the policy, and a table of their worth."""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from optsched.bandwidth.placement.problem import GpuSets
from optsched.bandwidth.search.ask import domain_numbers
from optsched.solving.result import Result
from optsched.solving.solver import Support
from optsched_solvers._cores import confined
from optsched_solvers._cpsat import Call
from optsched_solvers._loading import load
from optsched_solvers.gpus.counts import nothing_found, supported
from optsched_solvers.gpus.vectors import CountVectors, claim

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from optsched.model.schedule import IntArray, Problem
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor

MOST_VECTORS: Final = 10_000
"""Count vectors, each a row of the table."""

STEP: Final = 1e-3
"""Least improvement of the bound that is reported before the end."""


def supports(problem: Problem) -> Support:
    """One request with few count vectors, joint allocations by counts."""
    from optsched.bandwidth.placement.problem import GpuPlacement

    if not isinstance(problem, GpuPlacement):
        return Support(False, "it is no choice of GPUs")
    able = supported(problem)
    if not able:
        return able
    number = CountVectors(problem, problem.requests[0]).count()
    if number > MOST_VECTORS:
        return Support(
            False, f"its table has a row for each of {number} count vectors, up to {MOST_VECTORS}"
        )
    return Support(True)


def solve(problem: Any, limits: Limits, monitor: Monitor) -> Result:
    """Search until proof or limit; options, threads and iterations are those of `CpSat`."""
    from optsched_solvers._cpsat import checked_options

    checked_options(limits)
    if monitor.should_stop() or not load(monitor, "ortools.sat.python.cp_model"):
        return Result("unknown")
    vectors = CountVectors(problem, problem.requests[0])
    levels = vectors.levels()
    for level in levels:
        run = _Run(vectors, level, level == levels[-1], limits, monitor)
        run.run()
        if run.infeasible:
            continue
        return Result("unknown")
    return nothing_found(problem) if levels else Result("unknown")


class Model:
    """The CP-SAT model of one request at one level of its policy."""

    def __init__(self, vectors: CountVectors, level: int | None) -> None:
        from ortools.sat.python import cp_model

        self.model = model = cp_model.CpModel()
        self.vectors = vectors
        self.count = [model.new_int_var(0, int(most), "") for most in vectors.room]
        model.add(sum(self.count) == vectors.request.gpus)
        self.used = [model.new_bool_var("") for _ in self.count]
        for count, used in zip(self.count, self.used, strict=True):
            model.add(count >= 1).only_enforce_if(used)
            model.add(count == 0).only_enforce_if(used.negated())
        self._rules()
        self._values(level)
        model.minimize(-self.value)

    def _rules(self) -> None:
        model, vectors = self.model, self.vectors
        policy, cluster, hosts = vectors.request.policy, vectors.problem.cluster, vectors.hosts
        k = vectors.request.gpus
        if policy.balance != "free":
            least, most = model.new_int_var(1, k, "least"), model.new_int_var(1, k, "most")
            model.add(most - least <= policy.most_difference)
            for count, used in zip(self.count, self.used, strict=True):
                model.add(count <= most)
                model.add(count >= least).only_enforce_if(used)
        model.add(sum(self.used) >= policy.min_hosts)
        if policy.max_hosts is not None:
            model.add(sum(self.used) <= policy.max_hosts)
        if policy.same_type:
            self._one_group(vectors.types)
        if (required := policy.level(cluster)) is not None:
            self._one_group(domain_numbers(cluster, required)[hosts])
        for u, h in enumerate(hosts):
            if h in vectors.must:
                model.add(self.used[u] == 1)
        if not vectors.must <= set(hosts):
            model.add_bool_or([])
        if policy.slice_size is not None and policy.slice_level is not None:
            of = domain_numbers(cluster, cluster.level(policy.slice_level))[hosts]
            for domain in np.unique(of):
                slices = model.new_int_var(0, k // policy.slice_size, "")
                counts = [self.count[u] for u in np.flatnonzero(of == domain)]
                model.add(sum(counts) == policy.slice_size * slices)

    def _one_group(self, group: IntArray) -> None:
        """Only hosts of one group are used."""
        chosen = {int(g): self.model.new_bool_var("") for g in np.unique(group)}
        self.model.add_exactly_one(chosen.values())
        for used, g in zip(self.used, group.tolist(), strict=True):
            self.model.add_implication(used, chosen[g])

    def _values(self, level: int | None) -> None:
        """One table from counts to the value."""
        rows = []
        for block in self.vectors.blocks():
            value = self.vectors.shares(block).value
            kept = (value >= 0) & (self.vectors.excess(block, level) == 0)
            rows += np.column_stack([block, value])[kept].tolist()
        top = max((row[-1] for row in rows), default=0)
        self.value = self.model.new_int_var(0, top, "value")
        self.model.add_allowed_assignments([*self.count, self.value], rows)

    def hint(self, chosen: Sequence[int]) -> None:
        """Begin with the counts of these GPUs."""
        cluster = self.vectors.problem.cluster
        counts = np.bincount(cluster.host_of[list(chosen)], minlength=cluster.n_hosts)
        for u, h in enumerate(self.vectors.hosts):
            if counts[h] <= self.vectors.room[u]:
                self.model.add_hint(self.count[u], int(counts[h]))


class _Run(Call):
    """One call of CP-SAT at one level of the policy."""

    def __init__(
        self, vectors: CountVectors, level: int | None, last: bool, limits: Limits, monitor: Monitor
    ) -> None:
        self.vectors, self.last = vectors, last
        self.built = Model(vectors, level)
        if monitor.solution is not None:
            self.built.hint(monitor.solution.gpus[0])
        self.best = -1
        super().__init__(self.built.model, limits, monitor)
        self.solver.best_bound_callback = self._bound

    def _search(self) -> None:
        with confined(self.cores):
            solved = self._solved()
        if solved:
            self._bound(self.solver.best_objective_bound, final=True)

    def _solution(self, value: Callable[[Any], int]) -> None:
        counts = np.array([value(count) for count in self.built.count], np.int64)
        worth = value(self.built.value)
        self.best = max(self.best, worth)
        self.monitor.incumbent(GpuSets.of([self.vectors.gpus(counts)]), -worth, "cpsat")

    def _bound(self, bound: float, final: bool = False) -> None:
        try:
            # of a preferred level it counts only once there is a choice
            if (self.last or self.best >= 0) and abs(bound) <= 2**53:
                upper = -math.ceil(bound - 1e-3)  # floats near an integer mean that integer
                told = self.monitor.lower_bound
                # it lowers its bound by single kB/s: only steps worth telling are told
                if final or told is None or -told - upper > STEP * upper:
                    claim(self.vectors.problem, self.monitor, upper, "cpsat", self.best)
        except BaseException as error:
            self._fail(error)


class CpSat:
    """CP-SAT on counts of GPUs per host; one iteration is 10^-6 deterministic seconds."""

    name = "cpsat"
    kinds = ("gpus",)
    options: Mapping[str, str] = MappingProxyType(
        {
            "parameters": "mapping of further CP-SAT parameters",
        }
    )

    supports = staticmethod(supports)
    solve = staticmethod(solve)
