"""`pods`: the exact choice of GPUs on a cluster of pods."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from optsched.bandwidth.models.pods import PodBandwidth
from optsched.problems.gpus.problem import GpuPlacement
from optsched.solving.result import Result
from optsched.solving.solver import Support
from optsched_solvers._loading import load
from optsched_solvers.gpus.counts import search_large

if TYPE_CHECKING:
    from collections.abc import Mapping

    from optsched.model.schedule import Problem
    from optsched.solving.limits import Limits
    from optsched.solving.monitor import Monitor


class Pods:
    """Dynamic programming over windows of pods; beside tenants a search over sets of them.

    Where that does not suffice, or under a policy, `LargeSearch` goes on with a proven bound. Of
    equals the first window of pods and the lowest ids: what is left over is not weighed.
    """

    name = "pods"
    kinds = ("gpus",)
    options: Mapping[str, str] = MappingProxyType({})

    def supports(self, problem: Problem) -> Support:
        """One request and a `PodBandwidth`; joint allocations by counts."""
        if not isinstance(problem, GpuPlacement):
            return Support(False, "it only chooses GPUs (GpuPlacement)")
        if len(problem.requests) != 1:
            return Support(False, "it takes one request at a time")
        if not isinstance(problem.model, PodBandwidth):
            return Support(False, "the model is no PodBandwidth")
        if problem.is_robust or problem.on_unmeasured != "predict":
            return Support(False, "it believes what the model predicts")
        if problem.contention.fill == "exact":
            return Support(
                False, "joint allocations with their exact GPUs are not functions of counts"
            )
        return Support(True)

    def solve(self, problem: Problem, limits: Limits, monitor: Monitor) -> Result:
        """Search; the bound is proved in any case."""
        assert isinstance(problem, GpuPlacement) and isinstance(problem.model, PodBandwidth)
        modules = ["flat", "pod_search"]
        modules += ["pod_entries", "pod_sets", "pod_tenants"] if any(problem.demands) else []
        if not load(monitor, *(f"optsched.bandwidth.search.{name}" for name in modules)):
            return Result("unknown")
        return search_large(problem, limits, monitor, self.name)
