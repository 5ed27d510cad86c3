"""What BandPilot's searches share: which problems they take, where they look, how they evaluate."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Final

import numpy as np

from optsched.bandwidth.models.contention import share
from optsched.bandwidth.models.model import BandwidthModel, UnmeasuredPattern
from optsched.bandwidth.placement.problem import GpuPlacement
from optsched.bandwidth.search.ask import trays_first
from optsched.bandwidth.topology.intra import MOST_BY_SUBSET
from optsched.bandwidth.topology.policy import Policy
from optsched.solving.solver import Support

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from optsched.bandwidth.models.model import Selection, Which
    from optsched.bandwidth.models.tables import CountTables
    from optsched.bandwidth.topology.state import ClusterState
    from optsched.model.schedule import IntArray, Problem
    from optsched.solving.monitor import Monitor

UNKNOWN: Final = "no candidate of this search has a known bandwidth"
"""Why there is no answer, if not for a limit."""

RULES: Final = ("exclude", "apart", "apart_level")
"""Of a policy, which leave fewer free GPUs."""

MOST_REMEMBERED: Final = 50_000
"""Bandwidths that a search without tables keeps; then it forgets them all."""

_CHUNK: Final = 3_000_000  # steps of the kernel between two looks at the limits, some 10 ms

Found = tuple[int, tuple[int, ...]]  # value, -1 if it is not known, and GPUs


def supported(problem: Problem, rules: Sequence[str], *, measured: bool = True) -> Support:
    """Whether a search takes a problem that obeys only these rules of a policy.

    `measured`: whether it can keep to what is measured.
    """
    if not isinstance(problem, GpuPlacement):
        return Support(False, "it only chooses GPUs (GpuPlacement)")
    if len(problem.requests) != 1:
        return Support(False, "it takes one request at a time")
    if problem.on_unmeasured == "measured":
        if not measured:
            return Support(False, 'it does not ask what is measured (on_unmeasured="measured")')
        if problem.tables is None:
            return Support(False, "the model has no tables that tell what is measured")
    free, policy = Policy(), problem.policy
    for rule in Policy.__dataclass_fields__:
        if rule not in rules and getattr(policy, rule) != getattr(free, rule):
            return Support(False, f"it cannot obey the policy's {rule}")
    return Support(True)


def grounds(problem: GpuPlacement) -> list[list[int]]:
    """Sets of hosts with enough free GPUs in which a choice obeys the `RULES`."""
    cluster, policy, room = problem.cluster, problem.policy, usable(problem).room
    domains: Iterable[Sequence[int]] = [range(cluster.n_hosts)]
    if (level := policy.level(cluster)) is not None:
        domains = cluster.domains(level).values()
    found = []
    for hosts in domains:
        able = [h for h in hosts if room[h]]
        if sum(int(room[h]) for h in able) >= problem.k:
            found.append(able)
    return found


def usable(problem: GpuPlacement) -> ClusterState:
    """The state with the free GPUs that `exclude` and `apart` leave."""
    return problem.policy.usable(problem.state)


def free_on(problem: GpuPlacement, hosts: Iterable[int]) -> list[int]:
    """Free GPUs of some hosts, by global number."""
    there = set(hosts)
    of = problem.cluster.host_of.tolist()
    return [gpu for gpu in usable(problem).free if of[gpu] in there]


def judge_of(problem: GpuPlacement) -> Judge:
    """By tables and kernels where they can judge this problem's choices, else by its model."""
    return Judge(problem)


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
    """Values by the definition, for any model: milliseconds, not nanoseconds."""

    def __init__(self, problem: GpuPlacement) -> None:
        self.problem, self.model = problem, Remembering(problem.judged_by)
        self._contended = any(problem.demands)
        self._best: dict[tuple[int, int], tuple[int, ...]] = {}

    def value(self, gpus: Sequence[int]) -> int:
        """B(S) beside the running jobs; -1 if the model does not know it."""
        problem = self.problem
        try:
            return share(self.model, problem.state, gpus, problem.demands).value
        except UnmeasuredPattern:
            return -1

    def values(self, sets: Sequence[Sequence[int]]) -> list[int]:
        """The same of several sets, whose standalone bandwidths are asked for all at once."""
        alone = self.standalone(sets)
        if self._contended:
            return [self.value(gpus) for gpus in sets]
        return alone

    def standalone(self, sets: Sequence[Sequence[int]]) -> list[int]:
        """B(S) of several sets alone; -1 if the model does not know it."""
        rows = np.zeros((len(sets), self.problem.cluster.n_gpus), np.bool_)
        for row, gpus in zip(rows, sets, strict=True):
            row[list(gpus)] = True
        return self._predicted(rows)

    def _predicted(self, rows: Selection) -> list[int]:
        """What the model says; one by one if it does not know them all."""
        try:
            found: list[int] = self.model.predict(rows).tolist()
            return found
        except UnmeasuredPattern:
            return [-1] if len(rows) == 1 else [self._predicted(row[None])[0] for row in rows]

    def best_of_host(self, host: int, count: int) -> tuple[int, ...]:
        """The fastest `count` free GPUs of a host by the model, of equals the lowest ids."""
        if (host, count) not in self._best:
            cluster, free = self.problem.cluster, free_on(self.problem, [host])
            first = int(cluster.first[host])
            if cluster.sizes[host] > MOST_BY_SUBSET:
                local = trays_first([gpu - first for gpu in free], count, cluster.type(host).tray)
                best = tuple(first + i for i in local)
            else:
                sets = list(combinations(free, count))
                values = self.standalone(sets) if len(sets) > 1 else [0]
                best = sets[int(np.argmax(values))]
            self._best[host, count] = best
        return self._best[host, count]

    def first_best(self, hosts: IntArray, counts: IntArray, monitor: Monitor) -> Found:
        """The first best of rows of counts, on every host the fastest free GPUs."""
        best: Found = -1, ()
        for some, much in zip(hosts.tolist(), counts.tolist(), strict=True):
            if best[0] >= 0 and monitor.should_stop():
                break
            gpus = tuple(
                gpu for h, c in zip(some, much, strict=True) for gpu in self.best_of_host(h, c)
            )
            value = self.value(gpus)
            if value > best[0]:
                best = value, gpus
        return best

    def pruned(self, begin: list[int], monitor: Monitor) -> Found:
        """Remove GPU by GPU that without which most is left, from all free ones of some hosts."""
        chosen = list(begin)
        while len(chosen) > self.problem.k:
            if monitor.should_stop():
                return -1, ()
            sets = [chosen[:i] + chosen[i + 1 :] for i in range(len(chosen))]
            values = self.values(sets)
            monitor.advance(len(sets))
            chosen = sets[values.index(max(values))]
        return self.value(chosen), tuple(chosen)
