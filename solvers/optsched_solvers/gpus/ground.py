"""What searches over subsets share: which problems they take, where they look, plain judging."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Final

import numpy as np

from optsched.bandwidth.ask import trays_first
from optsched.bandwidth.contention import share
from optsched.bandwidth.intra import MOST_BY_SUBSET
from optsched.bandwidth.model import BandwidthModel, UnmeasuredPattern
from optsched.bandwidth.policy import Policy
from optsched.problems.gpus.problem import SubsetChoice
from optsched.solving.solver import Support

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from optsched.bandwidth.model import Selection, Which
    from optsched.bandwidth.tables import CountTables
    from optsched.model.schedule import IntArray, Problem

UNKNOWN: Final = "no candidate of this search has a known bandwidth"
"""Why there is no answer, if not for a limit."""

MOST_REMEMBERED: Final = 50_000
"""Bandwidths that a search without tables keeps; then it forgets them all."""


def supported(problem: Problem, rules: Sequence[str], *, measured: bool = True) -> Support:
    """Whether a search takes a problem that obeys only these rules of a policy.

    `measured`: whether it can keep to what is measured.
    """
    if not isinstance(problem, SubsetChoice):
        return Support(False, "it only chooses GPUs (SubsetChoice)")
    if len(problem.requests) != 1:
        return Support(False, "it takes one request at a time")
    if problem.on_unmeasured == "measured":
        if not measured:
            return Support(False, 'it does not ask what is measured (on_unmeasured="measured")')
        if problem.tables is None:
            return Support(False, "the model has no tables that tell what is measured")
        if problem.contention.fill == "exact":
            return Support(False, "joint allocations with their exact GPUs are in no table")
    free, policy = Policy(), problem.policy
    for rule in Policy.__dataclass_fields__:
        if rule not in rules and getattr(policy, rule) != getattr(free, rule):
            return Support(False, f"it cannot obey the policy's {rule}")
    return Support(True)


def grounds(problem: SubsetChoice) -> list[list[int]]:
    """Sets of hosts with enough free GPUs in which a choice obeys `required` and `exclude`."""
    cluster, policy, room = problem.cluster, problem.policy, problem.state.room
    barred = {cluster.host_index(name) for name in policy.exclude or ()}
    domains: Iterable[Sequence[int]] = [range(cluster.n_hosts)]
    if policy.required is not None:
        domains = cluster.domains(cluster.level(policy.required)).values()
    found = []
    for hosts in domains:
        usable = [h for h in hosts if room[h] and h not in barred]
        if sum(int(room[h]) for h in usable) >= problem.k:
            found.append(usable)
    return found


def free_on(problem: SubsetChoice, hosts: Iterable[int]) -> list[int]:
    """Free GPUs of some hosts, by global number."""
    there = set(hosts)
    of = problem.cluster.host_of.tolist()
    return [gpu for gpu in problem.state.free if of[gpu] in there]


def kernel_tables(problem: SubsetChoice) -> CountTables | None:
    """The tables, if kernels over them can judge this problem's choices."""
    return None if problem.contention.fill == "exact" else problem.tables


class Remembering(BandwidthModel):
    """A model that is asked for every set once; for searches without tables."""

    def __init__(self, model: BandwidthModel) -> None:
        self.model, self.cluster = model, model.cluster
        self.op, self.payload = model.op, model.payload
        self.intra_monotone = model.intra_monotone
        self._known: dict[bytes, int] = {}

    def predict(self, selection: Selection) -> IntArray:
        """What the model says."""
        if len(self._known) + len(selection) > MOST_REMEMBERED:
            self._known.clear()
        keys = [row.tobytes() for row in np.packbits(selection, axis=1)]
        new = {key: i for i, key in enumerate(keys) if key not in self._known}
        if new:
            values = self.model.predict(selection[list(new.values())]).tolist()
            self._known.update(zip(new, values, strict=True))
        return np.array([self._known[key] for key in keys], np.int64)

    def tables(self, which: Which = "value") -> CountTables | None:
        """Those of the model."""
        return self.model.tables(which)


class Judge:
    """Values of sets of GPUs by the definition, for any model: milliseconds, not nanoseconds."""

    def __init__(self, problem: SubsetChoice) -> None:
        self.problem = problem
        self.model = Remembering(problem.judged_by)
        self._best: dict[tuple[int, int], tuple[int, ...]] = {}
        self._contended = not problem.contention.skip_idle or any(problem.demands)

    def value(self, gpus: Sequence[int]) -> int:
        """B(S) beside the running jobs; -1 if the model does not know it."""
        problem = self.problem
        try:
            return share(self.model, problem.state, gpus, problem.demands, problem.contention).value
        except UnmeasuredPattern:
            return -1

    def values(self, sets: Sequence[Sequence[int]]) -> list[int]:
        """The same of several sets, whose standalone bandwidths are asked for all at once."""
        alone = self.standalone(sets)
        if self._contended:
            return [self.value(gpus) for gpus in sets]
        unit = self.problem.contention.unit
        return [value if value < 0 else value - value % unit for value in alone]

    def standalone(self, sets: Sequence[Sequence[int]]) -> list[int]:
        """B(S) of several sets alone; -1 if the model does not know it."""
        rows = np.zeros((len(sets), self.problem.cluster.n_gpus), np.bool_)
        for row, gpus in zip(rows, sets, strict=True):
            row[list(gpus)] = True
        try:
            found: list[int] = self.model.predict(rows).tolist()
            return found
        except UnmeasuredPattern:
            return [self._alone(row) for row in rows]

    def _alone(self, row: Selection) -> int:
        try:
            return int(self.model.predict(row[None])[0])
        except UnmeasuredPattern:
            return -1

    def best_of_host(self, host: int, count: int) -> tuple[int, ...]:
        """The fastest `count` free GPUs of a host by the model, of equals the lowest ids."""
        if (host, count) not in self._best:
            cluster = self.problem.cluster
            first, size = int(cluster.first[host]), int(cluster.sizes[host])
            free = [gpu for gpu in self.problem.state.free if first <= gpu < first + size]
            if size > MOST_BY_SUBSET:
                local = trays_first([gpu - first for gpu in free], count, cluster.type(host).tray)
                best = tuple(first + i for i in local)
            else:
                sets = list(combinations(free, count))
                values = self.standalone(sets) if len(sets) > 1 else [0]
                best = sets[int(np.argmax(values))]
            self._best[host, count] = best
        return self._best[host, count]
