"""Pictures of schedules, benchmarks and simulations; numpy and matplotlib are loaded on first use.

Functions `gantt`, `gpu_map`, `jct_cdf`, `jct_decomposition`, `utilisation_over_time`, `pareto`;
modules `html` and `simulation`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optsched.plots.cluster_map import gpu_map
    from optsched.plots.front import pareto
    from optsched.plots.gantt_chart import gantt
    from optsched.plots.policies import jct_cdf, jct_decomposition, utilisation_over_time

_HOME = {
    "gantt": "gantt_chart", "gpu_map": "cluster_map", "pareto": "front", "jct_cdf": "policies",
    "jct_decomposition": "policies", "utilisation_over_time": "policies",
}  # fmt: skip

__all__ = ["gantt", "gpu_map", "jct_cdf", "jct_decomposition", "pareto", "utilisation_over_time"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'optsched.plots' has no attribute {name!r}")
    return getattr(import_module(f"optsched.plots.{_HOME[name]}"), name)
