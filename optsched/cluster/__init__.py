"""Simulate a cluster: jobs, nodes, policies, and what became of them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# these two share their names with their modules: bound here, before anyone imports the modules
from optsched.cluster.simulate import simulate
from optsched.cluster.synthetic import entropy_workload, synthetic

if TYPE_CHECKING:
    from optsched.cluster import contention, determined, policies
    from optsched.cluster.curve import Curve
    from optsched.cluster.errors import PolicyError, Stalled
    from optsched.cluster.job import Job
    from optsched.cluster.log import Log
    from optsched.cluster.metrics import Metrics
    from optsched.cluster.nodes import NodeChange, Nodes
    from optsched.cluster.policy import ClusterView, Decision, Policy
    from optsched.cluster.run import Run
    from optsched.cluster.settings import Settings
    from optsched.cluster.speedup import Amdahl, Goodput, Linear, Speedup, Table
    from optsched.cluster.workload import Group, Workload
    from optsched.formats.trace_csv import read_trace, write_trace

_HOME = {
    "Amdahl": "speedup", "ClusterView": "policy", "Curve": "curve", "Decision": "policy",
    "Goodput": "speedup", "Group": "workload", "Job": "job", "Linear": "speedup", "Log": "log",
    "Metrics": "metrics", "NodeChange": "nodes", "Nodes": "nodes", "Policy": "policy",
    "PolicyError": "errors", "Run": "run", "Settings": "settings", "Speedup": "speedup",
    "Stalled": "errors", "Table": "speedup", "Workload": "workload",
    "read_trace": "optsched.formats.trace_csv", "write_trace": "optsched.formats.trace_csv",
}  # fmt: skip

_MODULES = ("contention", "determined", "policies")

__all__ = [
    "Amdahl", "ClusterView", "Curve", "Decision", "Goodput", "Group", "Job", "Linear", "Log",
    "Metrics", "NodeChange", "Nodes", "Policy", "PolicyError", "Run", "Settings", "Speedup",
    "Stalled", "Table", "Workload", "contention", "determined", "entropy_workload", "policies",
    "read_trace", "simulate", "synthetic", "write_trace",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Load public names on first use: numba is heavy."""
    if name in _MODULES:
        return import_module(f"optsched.cluster.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'optsched.cluster' has no attribute {name!r}")
    home = _HOME[name]
    module = home if home.startswith("optsched.") else f"optsched.cluster.{home}"
    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
