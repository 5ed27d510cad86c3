"""Simulate a cluster: jobs, nodes, policies, and what became of them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# it shares its name with its module: bound here, before anyone imports the module
from optsched.cluster.simulate import simulate

if TYPE_CHECKING:
    from optsched.cluster import determined, policies
    from optsched.cluster.expected import ExpectedStart, expected_starts
    from optsched.cluster.results.metrics import Metrics
    from optsched.cluster.results.run import Run
    from optsched.cluster.workload.curve import Curve
    from optsched.cluster.workload.job import WORK, Job
    from optsched.cluster.workload.nodes import NodeChange, NodeFailures, Nodes
    from optsched.cluster.workload.speedup import Amdahl, Linear, Speedup, Table
    from optsched.cluster.workload.synthetic import entropy_workload, synthetic
    from optsched.cluster.workload.trace import read_trace, write_trace
    from optsched.cluster.workload.workload import Group, Workload
    from optsched.cluster.world.compiled import Choice, RulePolicy, compiled
    from optsched.cluster.world.errors import PolicyError, Stalled
    from optsched.cluster.world.log import Log
    from optsched.cluster.world.packing_table import PackingTable
    from optsched.cluster.world.policy import ClusterView, Decision, Policy
    from optsched.cluster.world.reasons import Reason, Why
    from optsched.cluster.world.settings import Settings
    from optsched.cluster.world.start import Start, Stay, read_start

_HOME = {
    name: module
    for module, names in {
        "optsched.cluster.workload.speedup": "Amdahl Linear Speedup Table",
        "optsched.cluster.workload.curve": "Curve",
        "optsched.cluster.workload.job": "Job WORK",
        "optsched.cluster.workload.nodes": "NodeChange NodeFailures Nodes",
        "optsched.cluster.workload.workload": "Group Workload",
        "optsched.cluster.workload.synthetic": "entropy_workload synthetic",
        "optsched.cluster.world.compiled": "Choice RulePolicy compiled",
        "optsched.cluster.world.packing_table": "PackingTable",
        "optsched.cluster.world.errors": "PolicyError Stalled",
        "optsched.cluster.world.log": "Log",
        "optsched.cluster.world.policy": "ClusterView Decision Policy",
        "optsched.cluster.world.settings": "Settings",
        "optsched.cluster.world.start": "Start Stay read_start",
        "optsched.cluster.expected": "ExpectedStart expected_starts",
        "optsched.cluster.results.metrics": "Metrics",
        "optsched.cluster.results.run": "Run",
        "optsched.cluster.world.reasons": "Reason Why",
        "optsched.cluster.workload.trace": "read_trace write_trace",
    }.items()
    for name in names.split()
}

_MODULES = ("determined", "policies")

__all__ = [
    "WORK", "Amdahl", "Choice", "ClusterView", "Curve", "Decision", "ExpectedStart",
    "Group", "Job", "Linear", "Log", "Metrics", "NodeChange", "NodeFailures",
    "Nodes", "PackingTable", "Policy", "PolicyError", "Reason", "RulePolicy", "Run",
    "Settings", "Speedup", "Stalled", "Start", "Stay", "Table", "Why", "Workload", "compiled",
    "determined", "entropy_workload", "expected_starts", "policies", "read_start",
    "read_trace", "simulate", "synthetic", "write_trace",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Load public names on first use: numba is heavy."""
    if name in _MODULES:
        return import_module(f"optsched.cluster.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'optsched.cluster' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
