"""File formats, one module each (loaded on use): `standard`, `taillard`, `perfetto`, ..."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_MODULES = (
    "arraypipe", "bandwidth_json", "cluster_json", "decide_json", "dispatch_json", "domain_labels",
    "jobshop_json", "kubernetes", "measurements_csv", "metrics_json",
    "model_json", "nccl_tests", "nvidia_topo", "perfetto", "pipelining_csv", "quota_json",
    "read_problem", "slurm_topology", "standard", "state_json", "taillard",
    "trace_csv",
)  # fmt: skip

__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"optsched.formats.{name}")
    raise AttributeError(f"module 'optsched.formats' has no attribute {name!r}")
