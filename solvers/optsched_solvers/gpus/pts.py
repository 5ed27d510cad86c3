"""`pts`: BandPilot's pruning of GPUs one by one (arXiv 2506.15595, 4.3)."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from optsched.bandwidth.placement.problem import GpuPlacement, GpuSets
from optsched.solving.result import Result
from optsched_solvers.gpus.judge import (
    RULES,
    UNKNOWN,
    free_on,
    grounds,
    judge_of,
    supported,
    usable,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optsched.model.schedule import Problem
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor
    from optsched.solving.solver import Support


class Pts:
    """Pruned tree search: from a large set remove the GPU that is missed least, until k are left.

    It starts from the free GPUs of the host with k or more whose bandwidth B is highest, else from
    all free ones. Each step evaluates every set with one GPU less under contention and keeps the
    best; of equals the lowest id goes. From n GPUs these are (n (n + 1) - k (k + 1)) / 2
    evaluations; one iteration is one of them. Sets that are not measured are worse than all others.

    Models without tables, and joint allocations with their exact GPUs, are judged in plain Python:
    the same picks, thousands of times slower. It obeys `required`, `exclude`, `apart`. It
    proves nothing. Stopped early it has no answer, so a limit of iterations is not heeded.
    """

    name = "pts"
    kinds = ("gpus",)
    options: Mapping[str, str] = MappingProxyType({})

    def runs_inline(self, problem: Problem) -> bool:
        """With tables by counts, which leave no model to be asked."""
        return isinstance(problem, GpuPlacement) and problem.tables is not None

    def supports(self, problem: Problem) -> Support:
        """One request, no rules but `required`, `exclude` and `apart`."""
        return supported(problem, ("required", *RULES))

    def solve(self, problem: Problem, limits: Limits, monitor: Monitor) -> Result:
        """Prune once in every domain that the policy allows."""
        assert isinstance(problem, GpuPlacement)
        judge = judge_of(problem)
        for hosts in grounds(problem):
            enough = [h for h in hosts if usable(problem).room[h] >= problem.k]
            begin = [free_on(problem, [h]) for h in enough] or [free_on(problem, hosts)]
            values = judge.standalone(begin) if len(begin) > 1 else [0]
            value, gpus = judge.pruned(begin[values.index(max(values))], monitor)
            if value >= 0:
                monitor.incumbent(GpuSets.of([gpus]), -value, self.name)
            if monitor.should_stop():
                return Result("unknown")
        return Result("unknown", reason="" if monitor.objective is not None else UNKNOWN)
