"""Simulate a cluster: jobs, nodes, policies, and what became of them.

Examples
--------
>>> from optsched import cluster
>>> queue = [cluster.Job(name=name, sizes=(8,), work=8 * 10**8) for name in ("a", "b")]
>>> jobs = cluster.Workload.of(queue, time_unit="s")
>>> cluster.simulate(jobs, "fifo", cluster.Nodes(1, gpus=8)).jct.tolist()
[100, 200]
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# it shares its name with its module: bound here, before anyone imports the module
from optsched.cluster.simulate import simulate

if TYPE_CHECKING:
    from optsched.cluster import determined, policies
    from optsched.cluster.expected import ExpectedStart, expected_starts
    from optsched.cluster.policies.packing_table import PackingTable
    from optsched.cluster.results.metrics import Metrics
    from optsched.cluster.results.run import Run
    from optsched.cluster.workload.job import WORK, Curve, Job
    from optsched.cluster.workload.nodes import NodeChange, NodeFailures, Nodes
    from optsched.cluster.workload.speedup import Amdahl, Linear, Speedup, Table
    from optsched.cluster.workload.synthetic import entropy_workload, synthetic
    from optsched.cluster.workload.trace import read_trace, write_trace
    from optsched.cluster.workload.workload import Group, Workload
    from optsched.cluster.world.compiled import Choice, RulePolicy, compiled
    from optsched.cluster.world.log import Log
    from optsched.cluster.world.policy import (
        ClusterView,
        Decision,
        Policy,
        PolicyError,
        Reason,
        Stalled,
        Why,
    )
    from optsched.cluster.world.settings import Settings
    from optsched.cluster.world.start import Start, Stay, read_start
    from optsched.kernels.compile import helper

_MODULE_OF = {
    name: f"optsched.{module}"
    for module, names in {
        "cluster.expected": "ExpectedStart expected_starts",
        "cluster.policies.packing_table": "PackingTable",
        "cluster.results.metrics": "Metrics",
        "cluster.results.run": "Run",
        "cluster.workload.job": "Curve Job WORK",
        "cluster.workload.nodes": "NodeChange NodeFailures Nodes",
        "cluster.workload.speedup": "Amdahl Linear Speedup Table",
        "cluster.workload.synthetic": "entropy_workload synthetic",
        "cluster.workload.trace": "read_trace write_trace",
        "cluster.workload.workload": "Group Workload",
        "cluster.world.compiled": "Choice RulePolicy compiled",
        "cluster.world.log": "Log",
        "cluster.world.policy": "ClusterView Decision Policy PolicyError Reason Stalled Why",
        "cluster.world.settings": "Settings",
        "cluster.world.start": "Start Stay read_start",
        "kernels.compile": "helper",
    }.items()
    for name in names.split()
}

_MODULES = ("determined", "policies")

__all__ = [
    "WORK", "Amdahl", "Choice", "ClusterView", "Curve", "Decision", "ExpectedStart",
    "Group", "Job", "Linear", "Log", "Metrics", "NodeChange", "NodeFailures",
    "Nodes", "PackingTable", "Policy", "PolicyError", "Reason", "RulePolicy", "Run",
    "Settings", "Speedup", "Stalled", "Start", "Stay", "Table", "Why", "Workload", "compiled",
    "determined", "entropy_workload", "expected_starts", "helper", "policies", "read_start",
    "read_trace", "simulate", "synthetic", "write_trace",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Load public names on first use: numba is heavy."""
    if name in _MODULES:
        return import_module(f"optsched.cluster.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'optsched.cluster' has no attribute {name!r}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
