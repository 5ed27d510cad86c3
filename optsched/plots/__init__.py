"""Pictures of schedules, benchmarks and simulations; matplotlib is loaded on first use.

Functions `bench_report`, `gantt`, `gpu_map`, `pareto`, `simulation_report`; module `html`.

Examples
--------
>>> from optsched import plots
>>> shop = optsched.JobShop([[(0, 3), (1, 2)], [(1, 4), (0, 1)]])
>>> plots.gantt(optsched.solve(shop).schedule, "plan.svg")  # doctest: +SKIP
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optsched.plots.benchmark import bench_report
    from optsched.plots.cluster_map import gpu_map
    from optsched.plots.front import pareto
    from optsched.plots.gantt_chart import gantt
    from optsched.plots.simulation import simulation_report

_MODULES = {
    "bench_report": "benchmark", "gantt": "gantt_chart", "gpu_map": "cluster_map",
    "pareto": "front", "simulation_report": "simulation",
}  # fmt: skip

__all__ = ["bench_report", "gantt", "gpu_map", "pareto", "simulation_report"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'optsched.plots' has no attribute {name!r}")
    return getattr(import_module(f"optsched.plots.{_MODULES[name]}"), name)
