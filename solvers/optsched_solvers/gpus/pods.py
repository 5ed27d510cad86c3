"""`pods`: the exact choice of GPUs on a cluster of pods."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from optsched.bandwidth.contention import Contention
from optsched.bandwidth.pods import PodBandwidth
from optsched.model.schedule import Rows
from optsched.problems.gpus.problem import SubsetChoice
from optsched.solving.result import Result
from optsched.solving.solver import Support
from optsched_solvers._loading import load

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optsched.model.schedule import Problem
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor

WORK = 20_000_000
"""Steps of the search beside tenants, without a limit on iterations."""


class Pods:
    """Dynamic programming over windows of pods; beside tenants a search over sets of them.

    One iteration is one step of the search beside tenants; without tenants none is needed. Of
    equals the first window of pods and the lowest ids: what is left over is not weighed.
    """

    name = "pods"
    kinds = ("gpus",)
    options: Mapping[str, str] = MappingProxyType({})

    def supports(self, problem: Problem) -> Support:
        """One request without a policy, a `PodBandwidth`, contention as `Contention` has it."""
        if not isinstance(problem, SubsetChoice):
            return Support(False, "it only chooses GPUs (SubsetChoice)")
        if len(problem.requests) != 1:
            return Support(False, "it takes one request at a time")
        if not isinstance(problem.model, PodBandwidth):
            return Support(False, "the model is no PodBandwidth")
        if problem.is_robust or problem.on_unmeasured != "predict":
            return Support(False, "it believes what the model predicts")
        if not problem.policy.is_free:
            return Support(False, "policies are not kept across pods")
        if any(problem.demands) and problem.contention != Contention():
            return Support(False, "contention other than Contention() is not searched across pods")
        if not problem.contention.skip_idle or problem.contention.whole:
            return Support(False, "contention other than Contention() is not searched across pods")
        return Support(True)

    def solve(self, problem: Problem, limits: Limits, monitor: Monitor) -> Result:
        """Search; the bound is proved in any case."""
        assert isinstance(problem, SubsetChoice) and isinstance(problem.model, PodBandwidth)
        beside = ("pod_entries", "pod_sets", "pod_tenants") if any(problem.demands) else ()
        if not load(monitor, *(f"optsched.bandwidth.{name}" for name in ("pod_search", *beside))):
            return Result("unknown")
        from optsched.bandwidth.pod_search import choose_pods

        work = WORK if limits.iterations is None else limits.iterations
        found = choose_pods(problem.model, problem.state, problem.k, problem.demands, work)
        monitor.incumbent(Rows.of([found.gpus]), -found.value, self.name)
        monitor.bound(-found.upper_bound, self.name)
        return Result("unknown")
