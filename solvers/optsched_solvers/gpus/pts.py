"""`pts`: BandPilot's pruning of GPUs one by one (arXiv 2506.15595, 4.3)."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import numpy as np

from optsched.bandwidth.ask import gpus_of, jobs_of
from optsched.bandwidth.intra import MOST_BY_SUBSET
from optsched.errors import InputError
from optsched.model.schedule import Rows
from optsched.problems.gpus.problem import SubsetChoice
from optsched.solving.result import Result
from optsched_solvers._loading import load
from optsched_solvers.gpus.ground import (
    UNKNOWN,
    Judge,
    free_on,
    grounds,
    kernel_tables,
    supported,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optsched.bandwidth.tables import CountTables
    from optsched.model.schedule import Problem
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor
    from optsched.solving.solver import Support

STARTS: Final = ("hosts", "published")
_CHUNK: Final = 3_000_000  # steps of the kernel between two looks at the limits, some 10 ms


class Pts:
    """Pruned tree search: from a large set remove the GPU that is missed least, until k are left.

    It starts from the free GPUs of the host with k or more whose bandwidth B is highest, else from
    all free ones. Each step evaluates every set with one GPU less under contention and keeps the
    best; of equals the lowest id goes. From n GPUs these are (n (n + 1) - k (k + 1)) / 2
    evaluations; one iteration is one of them. Sets that are not measured are worse than all others.

    Models without tables, and joint allocations with their exact GPUs, are judged in plain Python:
    the same picks, thousands of times slower. Of a policy it obeys `required` and `exclude`. It
    proves nothing. Stopped early it has no answer, so a limit of iterations is not heeded.
    """

    name = "pts"
    kinds = ("gpus",)
    options: Mapping[str, str] = MappingProxyType(
        {
            "start": 'where pruning starts: "hosts" (default), or as "published": the best free '
            "aligned group of 4 GPUs (k <= 4) or of 8 (k <= 8), else all free GPUs"
        }
    )

    def runs_inline(self, problem: Problem) -> bool:
        """With tables by counts, which leave no model to be asked."""
        return isinstance(problem, SubsetChoice) and problem.tables is not None

    def supports(self, problem: Problem) -> Support:
        """One request, no rules but `required` and `exclude`."""
        return supported(problem, ("required", "exclude"))

    def solve(self, problem: Problem, limits: Limits, monitor: Monitor) -> Result:
        """Prune once in every domain that the policy allows."""
        assert isinstance(problem, SubsetChoice)
        start = checked_start(limits)
        if not load(monitor, "gpus.search:prune", "gpus.value:value_of"):
            return Result("unknown")
        judge, tables = Judge(problem), kernel_tables(problem)
        for hosts in grounds(problem):
            begin = _start(problem, judge, hosts, start)
            if tables is not None:
                value, gpus = _by_tables(problem, tables, begin, monitor)
            else:
                value, gpus = _by_model(problem, judge, begin, monitor)
            if value >= 0:
                monitor.incumbent(Rows.of([gpus]), -value, self.name)
            if monitor.should_stop():
                return Result("unknown")
        return Result("unknown", reason="" if monitor.objective is not None else UNKNOWN)


def checked_start(limits: Limits) -> str:
    """The option `start`."""
    start = limits.options.get("start", STARTS[0])
    if not isinstance(start, str) or start not in STARTS:
        raise InputError(f"options.start: expected hosts or published, got {start!r:.60}")
    return start


def _start(problem: SubsetChoice, judge: Judge, hosts: list[int], start: str) -> list[int]:
    """The GPUs to begin with, ascending."""
    free, k = free_on(problem, hosts), problem.k
    if start == "published":
        sets = _aligned(problem, free, 4 if k <= 4 else 8) if k <= 8 else []
    else:
        room = problem.state.room
        sets = [free_on(problem, [h]) for h in hosts if room[h] >= k]
    if len(sets) < 2:
        return sets[0] if sets else free
    values = judge.standalone(sets)
    return sets[values.index(max(values))]


def _aligned(problem: SubsetChoice, free: list[int], size: int) -> list[list[int]]:
    """Wholly free groups of a host's local ids size * i .. size * i + size - 1."""
    cluster = problem.cluster
    groups: dict[tuple[int, int], list[int]] = {}
    for gpu in free:
        h = int(cluster.host_of[gpu])
        groups.setdefault((h, (gpu - int(cluster.first[h])) // size), []).append(gpu)
    return [group for group in groups.values() if len(group) == size]


def _by_tables(
    problem: SubsetChoice, tables: CountTables, begin: list[int], monitor: Monitor
) -> tuple[int, tuple[int, ...]]:
    """Prune by the kernel; -1 if what is left is not measured, or time was over."""
    from optsched_solvers.gpus.search import prune
    from optsched_solvers.gpus.value import rule_of, value_of

    cluster, state, k = problem.cluster, problem.state, problem.k
    jobs = jobs_of(state.held, problem.demands, problem.contention)
    n_jobs = len(jobs) // (cluster.n_hosts + 1)
    rule, words = rule_of(problem.contention, n_jobs), tables.words
    ids = np.array(begin, np.int64)
    host = cluster.host_of[ids]
    bit = np.where(cluster.sizes[host] <= MOST_BY_SUBSET, 1, 0)
    bit = np.where(bit, 1 << np.minimum(ids - cluster.first[host], MOST_BY_SUBSET), 1)
    now = np.zeros(cluster.n_hosts, np.int64)
    np.add.at(now, host, bit)
    left, out = np.arange(len(ids)), np.array([len(ids), 0])
    used = len(np.unique(host))
    while out[0] > k:
        if out[0] < len(ids) and monitor.should_stop():
            return -1, ()
        step = max(1, _CHUNK // (used * cluster.n_hosts * (1 + n_jobs) + len(ids)))
        target = max(k, int(out[0]) - step)
        monitor.advance(prune(words, rule, jobs, host, bit, left, now, target, out))
    value = int(value_of(words, rule, jobs, now))
    masks = [(h, int(now[h])) for h in range(cluster.n_hosts) if now[h]]
    return value, gpus_of(state, masks)


def _by_model(
    problem: SubsetChoice, judge: Judge, begin: list[int], monitor: Monitor
) -> tuple[int, tuple[int, ...]]:
    """The same in plain Python for any model."""
    chosen = list(begin)
    while len(chosen) > problem.k:
        if monitor.should_stop():
            return -1, ()
        sets = [chosen[:i] + chosen[i + 1 :] for i in range(len(chosen))]
        values = judge.values(sets)
        monitor.advance(len(sets))
        chosen = sets[values.index(max(values))]
    return judge.value(chosen), tuple(chosen)
