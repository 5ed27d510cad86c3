"""Clusters, bandwidths of sets of GPUs, and the exact choice of the best set.

Examples
--------
>>> from optsched.bandwidth import BottleneckBandwidth, ClusterState, synthetic
>>> cluster = synthetic.cluster("nvswitch", 2)
>>> len(ClusterState.idle(cluster).free)
16
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optsched.bandwidth.measure import synthetic
    from optsched.bandwidth.measure.planner import plan_measurements
    from optsched.bandwidth.models.bottleneck import BottleneckBandwidth
    from optsched.bandwidth.models.contention import Share
    from optsched.bandwidth.models.measured import MeasuredBandwidth
    from optsched.bandwidth.models.measurements import (
        Measurement,
        MeasurementTable,
        MixedMeasurements,
    )
    from optsched.bandwidth.models.model import BandwidthModel, CountModel, UnmeasuredPattern
    from optsched.bandwidth.models.model_document import read_model, write_model
    from optsched.bandwidth.models.surrogate import HierarchicalTransformer
    from optsched.bandwidth.search.dispatcher import Dispatcher
    from optsched.bandwidth.topology import rates
    from optsched.bandwidth.topology.cluster import Cluster, Host, HostType
    from optsched.bandwidth.topology.intra import IntraTable
    from optsched.bandwidth.topology.policy import Policy
    from optsched.bandwidth.topology.state import ClusterState, Job

_MODULE_OF = {
    name: module
    for module, names in {
        "measure": "synthetic",
        "measure.planner": "plan_measurements",
        "models.bottleneck": "BottleneckBandwidth",
        "models.contention": "Share",
        "models.measured": "MeasuredBandwidth",
        "models.measurements": "Measurement MeasurementTable MixedMeasurements",
        "models.model": "BandwidthModel CountModel UnmeasuredPattern",
        "models.model_document": "read_model write_model",
        "models.surrogate": "HierarchicalTransformer",
        "search.dispatcher": "Dispatcher",
        "topology": "rates",
        "topology.cluster": "Cluster Host HostType",
        "topology.intra": "IntraTable",
        "topology.policy": "Policy",
        "topology.state": "ClusterState Job",
    }.items()
    for name in names.split()
}

__all__ = [
    "BandwidthModel", "BottleneckBandwidth", "Cluster", "ClusterState",
    "CountModel", "Dispatcher", "HierarchicalTransformer", "Host", "HostType",
    "IntraTable", "Job", "MeasuredBandwidth", "Measurement", "MeasurementTable",
    "MixedMeasurements", "Policy", "Share", "UnmeasuredPattern",
    "plan_measurements", "rates", "read_model",
    "synthetic", "write_model",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Load public names on first use: numba and torch are heavy."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'optsched.bandwidth' has no attribute {name!r}")
    path = f"optsched.bandwidth.{_MODULE_OF[name]}"
    module = import_module(path)
    value = getattr(module, name) if hasattr(module, name) else import_module(f"{path}.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
