"""Serving of slimmable networks: which server, width and batch every request gets.

Scenarios `reference`, `arrivals`, `read_arrivals`; routers and `simulate`; `plan_instances`;
`check_log`; `pareto`. With the extra ``serving``: `SlimResNet`, `train_slim`, `Executor`,
`profile`, `train_router`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optsched.problems.routing.accuracy import additive, calibrated, nearest
    from optsched.problems.routing.log import Log, Summary
    from optsched.problems.routing.plan import Plan
    from optsched.serving.batch_report import explain
    from optsched.serving.check import check_log
    from optsched.serving.core import Settings
    from optsched.serving.front import Point, front_of, hypervolume, pareto
    from optsched.serving.metrics import telemetry
    from optsched.serving.routers import (
        JSED,
        Backlog,
        Decision,
        Fluid,
        InfeasibleRoute,
        MarginalCost,
        PowerOfTwo,
        Random,
        RandomWidth,
        RoundRobin,
        Router,
        Static,
        pareto_tuples,
    )
    from optsched.serving.scenario import arrivals, network_mmac, read_arrivals, reference
    from optsched.serving.simulator import Run, simulate
    from optsched.serving.view import View
    from optsched_solvers.routing_models import best_plan as plan_instances

_HOME = {
    "check": ("check_log",),
    "core": ("Settings",),
    "batch_report": ("explain",),
    "front": ("Point", "front_of", "hypervolume", "pareto"),
    "routers": (
        "JSED", "Backlog", "Decision", "Fluid", "InfeasibleRoute", "MarginalCost", "PowerOfTwo",
        "Random", "RandomWidth", "RoundRobin", "Router", "Static", "pareto_tuples",
    ),
    "scenario": ("arrivals", "network_mmac", "read_arrivals", "reference"),
    "simulator": ("Run", "simulate"),
    "metrics": ("telemetry",),
    "view": ("View",),
}  # fmt: skip
_OTHER = {
    "Log": "optsched.problems.routing.log", "Summary": "optsched.problems.routing.log",
    "Plan": "optsched.problems.routing.plan",
    **dict.fromkeys(("additive", "calibrated", "nearest"), "optsched.problems.routing.accuracy"),
}  # fmt: skip
_PLACE = {name: f"optsched.serving.{home}" for home, names in _HOME.items() for name in names}
_PLACE |= _OTHER

__all__ = [
    "JSED", "Backlog", "Decision", "Fluid", "InfeasibleRoute", "Log", "MarginalCost", "Plan",
    "Point", "PowerOfTwo", "Random", "RandomWidth", "RoundRobin", "Router", "Run", "Settings",
    "Static", "Summary", "View", "additive", "arrivals", "calibrated", "check_log", "explain",
    "front_of", "hypervolume", "nearest", "network_mmac", "pareto", "pareto_tuples",
    "plan_instances", "read_arrivals", "reference", "simulate", "telemetry",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Load public names on first use."""
    if name == "plan_instances":
        value = import_module("optsched_solvers.routing_models").best_plan
    elif name in _PLACE:
        value = getattr(import_module(_PLACE[name]), name)
    else:
        raise AttributeError(f"module 'optsched.serving' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
