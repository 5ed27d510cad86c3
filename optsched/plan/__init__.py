"""Decide what starts on a live cluster, when the other jobs start, and what to move.

Examples
--------
>>> from optsched import bandwidth, plan
>>> state = bandwidth.ClusterState.idle(bandwidth.synthetic.cluster("nvswitch", 2))
>>> snapshot = plan.ClusterSnapshot(state, [plan.PlanJob(name="a", gpus=8, level="host")])
>>> plan.plan(snapshot).starts["a"]
(0, 1, 2, 3, 4, 5, 6, 7)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optsched.plan.array_request import ArrayRequest, PlannedArray, planned_arrays
    from optsched.plan.arrays import explain_arrays, order_arrays, schedule_of
    from optsched.plan.changes import Change
    from optsched.plan.clearing import MovePlan, alternatives, clear, defragment
    from optsched.plan.expected import PastJobs, past_jobs
    from optsched.plan.live import from_kubernetes, from_run, from_slurm
    from optsched.plan.planner import Verdict
    from optsched.plan.snapshot import ClusterSnapshot, PlanJob
    from optsched.plan.starts import Plan, plan

_MODULE_OF = {
    "Change": "changes", "Verdict": "planner",
    **dict.fromkeys(("ArrayRequest", "PlannedArray", "planned_arrays"), "array_request"),
    **dict.fromkeys(("explain_arrays", "order_arrays", "schedule_of"), "arrays"),
    **dict.fromkeys(("MovePlan", "alternatives", "clear", "defragment"), "clearing"),
    **dict.fromkeys(("PastJobs", "past_jobs"), "expected"),
    **dict.fromkeys(("from_kubernetes", "from_run", "from_slurm"), "live"),
    **dict.fromkeys(("ClusterSnapshot", "PlanJob"), "snapshot"),
    **dict.fromkeys(("Plan", "plan"), "starts"),
}  # fmt: skip

__all__ = [
    "ArrayRequest", "Change", "ClusterSnapshot", "MovePlan", "PastJobs", "Plan", "PlanJob",
    "PlannedArray", "Verdict", "alternatives", "clear", "defragment", "explain_arrays",
    "from_kubernetes", "from_run", "from_slurm", "order_arrays", "past_jobs", "plan",
    "planned_arrays", "schedule_of",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Load public names on first use."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'optsched.plan' has no attribute {name!r}")
    value = getattr(import_module(f"optsched.plan.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
