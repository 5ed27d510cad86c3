"""Clusters, bandwidths of sets of GPUs, and the exact choice of the best set."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optsched.bandwidth import metrics, rates, samples, scenarios, synthetic
    from optsched.bandwidth.bottleneck import BottleneckBandwidth
    from optsched.bandwidth.cluster import Cluster, Host, HostType
    from optsched.bandwidth.contention import Contention, Share
    from optsched.bandwidth.dispatcher import Dispatcher
    from optsched.bandwidth.intra import IntraTable
    from optsched.bandwidth.measured import MeasuredBandwidth
    from optsched.bandwidth.measured_data import load_measured
    from optsched.bandwidth.measurements import (
        Measurement,
        MeasurementTable,
        MixedMeasurements,
    )
    from optsched.bandwidth.model import BandwidthModel, CountModel, UnmeasuredPattern
    from optsched.bandwidth.model_document import read_model, write_model
    from optsched.bandwidth.planner import plan_measurements
    from optsched.bandwidth.pods import PodBandwidth
    from optsched.bandwidth.policy import Policy
    from optsched.bandwidth.state import ClusterState, Job
    from optsched.bandwidth.surrogate import HierarchicalTransformer

_HOME = {
    "BandwidthModel": "model", "BottleneckBandwidth": "bottleneck", "Cluster": "cluster",
    "ClusterState": "state", "Contention": "contention", "CountModel": "model",
    "Dispatcher": "dispatcher", "HierarchicalTransformer": "surrogate", "Host": "cluster",
    "HostType": "cluster", "IntraTable": "intra", "Job": "state",
    "MeasuredBandwidth": "measured", "Measurement": "measurements",
    "MeasurementTable": "measurements", "MixedMeasurements": "measurements",
    "PodBandwidth": "pods", "Policy": "policy", "Share": "contention",
    "UnmeasuredPattern": "model", "load_measured": "measured_data",
    "plan_measurements": "planner", "read_model": "model_document",
    "write_model": "model_document",
}  # fmt: skip

_MODULES = ("metrics", "rates", "samples", "scenarios", "synthetic")

__all__ = [
    "BandwidthModel", "BottleneckBandwidth", "Cluster", "ClusterState", "Contention",
    "CountModel", "Dispatcher", "HierarchicalTransformer", "Host", "HostType",
    "IntraTable", "Job", "MeasuredBandwidth", "Measurement", "MeasurementTable",
    "MixedMeasurements", "PodBandwidth", "Policy", "Share", "UnmeasuredPattern",
    "load_measured", "metrics", "plan_measurements", "rates", "read_model", "samples",
    "scenarios", "synthetic", "write_model",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Load public names on first use: numba and torch are heavy."""
    if name in _MODULES:
        return import_module(f"optsched.bandwidth.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'optsched.bandwidth' has no attribute {name!r}")
    value = getattr(import_module(f"optsched.bandwidth.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
