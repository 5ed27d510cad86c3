"""`eha`: BandPilot's search over even spreads on the fewest hosts (arXiv 2506.15595, 4.3)."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import numpy as np

from optsched.bandwidth.ask import gpus_of, jobs_of
from optsched.io.values import integer
from optsched.model.schedule import Rows
from optsched.problems.gpus.problem import SubsetChoice
from optsched.solving.result import Result
from optsched.solving.solver import Support
from optsched_solvers._loading import load
from optsched_solvers.gpus.ground import UNKNOWN, Judge, grounds, kernel_tables, supported

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from optsched.bandwidth.tables import CountTables
    from optsched.model.schedule import IntArray, Problem
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor

MAX_CANDIDATES: Final = 200
MOST_CANDIDATES: Final = 100_000
MOST_HOSTS: Final = 4096
_MOST_NUMBERS: Final = 10_000_000  # in the array of candidates


class Eha:
    """Equilibrium heuristic: one host if one suffices, else even counts on the fewest hosts.

    1. If hosts have k free GPUs, the best k of each are compared, and nothing else is.
    2. Else k is spread evenly over every set of m hosts with room, m being the fewest that have;
       a host too small gives all it has. On every host the fastest free GPUs are taken. The first
       of the best in the order of (hosts, counts) wins.

    One iteration is one candidate evaluated; not their limit is heeded, but `max_candidates`.
    Models without tables, and joint allocations with their exact GPUs, are judged in plain Python:
    the same picks, thousands of times slower. Of a policy it obeys `required` and `exclude`. It
    proves nothing.
    """

    name = "eha"
    kinds = ("gpus",)
    options: Mapping[str, str] = MappingProxyType(
        {"max_candidates": f"most spreads over several hosts (default {MAX_CANDIDATES})"}
    )

    def runs_inline(self, problem: Problem) -> bool:
        """With tables by counts, which leave no model to be asked."""
        return isinstance(problem, SubsetChoice) and problem.tables is not None

    def supports(self, problem: Problem) -> Support:
        """One request of up to 4,096 hosts, no rules but `required` and `exclude`."""
        support = supported(problem, ("required", "exclude"))
        if support and problem.cluster.n_hosts > MOST_HOSTS:  # type: ignore[attr-defined]
            return Support(False, f"it takes up to {MOST_HOSTS} hosts")
        return support

    def solve(self, problem: Problem, limits: Limits, monitor: Monitor) -> Result:
        """Compare all candidates."""
        assert isinstance(problem, SubsetChoice)
        most = checked_candidates(limits)
        if not load(monitor, "gpus.host_sets", "gpus.search:first_best", "gpus.value:best_mask"):
            return Result("unknown")
        tables = kernel_tables(problem)
        judge, reason = Judge(problem) if tables is None else None, UNKNOWN
        for hosts in grounds(problem):
            if monitor.should_stop():
                reason = ""
                break
            for m, limit in ((1, len(hosts)), (0, most)):
                some, counts = _listed(problem, hosts, m, limit)
                monitor.advance(len(some))
                if tables is not None:
                    value, gpus = _by_tables(problem, tables, some, counts)
                else:
                    value, gpus = _by_model(judge, some, counts, monitor)  # type: ignore[arg-type]
                if value >= 0:
                    monitor.incumbent(Rows.of([gpus]), -value, self.name)
                    break
        return Result("unknown", reason="" if monitor.objective is not None else reason)


def checked_candidates(limits: Limits) -> int:
    """The option `max_candidates`."""
    most = limits.options.get("max_candidates", MAX_CANDIDATES)
    return integer("options.max_candidates", most, 1, MOST_CANDIDATES)


def _listed(
    problem: SubsetChoice, hosts: list[int], m: int, most: int
) -> tuple[IntArray, IntArray]:
    """Candidates on m hosts, by global number, with counts; m = 0: the fewest, several."""
    from optsched_solvers.gpus.host_sets import MOST_ALONE, candidates, fewest, previous_alike

    state, k = problem.state, problem.k
    room = state.room[hosts]
    if m == 1:  # every host that suffices is looked at
        some = np.array(hosts, np.int64)[room >= k].reshape(-1, 1)
        return some, np.full_like(some, k)
    m = max(2, fewest(room, k))
    cluster, held = problem.cluster, state.held
    tabled = problem.tables is not None
    kinds: list[Hashable] = list(hosts)
    if len(hosts) > MOST_ALONE:
        kinds = [
            (
                cluster.type_of[h], int(state.masks[h]), tuple(held[:, h].tolist()),
                () if tabled else cluster.hosts[h].domains,
            )
            for h in hosts
        ]  # fmt: skip
    most = max(1, min(most, _MOST_NUMBERS // m))
    at, counts = candidates(room, previous_alike(kinds), k, m, most)
    return np.array(hosts, np.int64)[at], counts


def _by_tables(
    problem: SubsetChoice, tables: CountTables, hosts: IntArray, counts: IntArray
) -> tuple[int, tuple[int, ...]]:
    """The first best candidate by the kernel; -1 if none is measured."""
    from optsched_solvers.gpus.search import first_best
    from optsched_solvers.gpus.value import best_mask, rule_of

    state = problem.state
    if not len(hosts):
        return -1, ()
    jobs = jobs_of(state.held, problem.demands, problem.contention)
    rule = rule_of(problem.contention, len(jobs) // (problem.cluster.n_hosts + 1))
    out, words = np.zeros(1, np.int64), tables.words
    m = hosts.shape[1]
    row = first_best(words, rule, jobs, state.masks, hosts.reshape(-1), counts.reshape(-1), m, out)
    if row < 0:
        return -1, ()
    parts = [
        (h, int(best_mask(words, h, int(state.masks[h]), c)))
        for h, c in zip(hosts[row].tolist(), counts[row].tolist(), strict=True)
    ]
    return int(out[0]), gpus_of(state, parts)


def _by_model(
    judge: Judge, hosts: IntArray, counts: IntArray, monitor: Monitor
) -> tuple[int, tuple[int, ...]]:
    """The same in plain Python for any model; candidates that time does not allow are left out."""
    best: tuple[int, tuple[int, ...]] = -1, ()
    for some, much in zip(hosts.tolist(), counts.tolist(), strict=True):
        if best[0] >= 0 and monitor.should_stop():
            break
        gpus = tuple(
            gpu for h, c in zip(some, much, strict=True) for gpu in judge.best_of_host(h, c)
        )
        value = judge.value(gpus)
        if value > best[0]:
            best = value, gpus
    return best
