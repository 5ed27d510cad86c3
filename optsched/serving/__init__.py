"""Serving of slimmable networks: which server, width and batch every request gets.

Scenarios, routers and `simulate`; `plan_instances`; `check_log`; `pareto`. With the extra
``serving``: `SlimResNet`, `train_slim`, `profile`, `Executor`, `train_router`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from optsched.problems.routing.accuracy import additive, calibrated, nearest
from optsched.problems.routing.log import Log, Summary, telemetry
from optsched.problems.routing.log_check import check_log
from optsched.problems.routing.log_explain import explain
from optsched.problems.routing.plan import Plan
from optsched.problems.routing.workload import arrivals, network_mmac, read_arrivals, reference
from optsched.serving.core import Settings
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
    View,
    pareto_tuples,
)
from optsched.serving.simulator import Run, simulate

_LATE = {
    "optsched.bench.routers": ("Point", "front_of", "pareto"),
    "optsched.serving.executor": ("Executor", "compare"),
    "optsched.serving.network": ("SlimResNet",),
    "optsched.serving.policy": ("Policy",),
    "optsched.serving.ppo": ("train_router",),
    "optsched.serving.profiler": ("Costs", "profile", "scenario"),
    "optsched.serving.training": (
        "cifar100", "digits", "load_network", "measure_accuracy", "save_network", "train_slim",
    ),
}  # fmt: skip

__all__ = [
    "JSED", "Backlog", "Decision", "Fluid", "InfeasibleRoute", "Log", "MarginalCost", "Plan",
    "PowerOfTwo", "Random", "RandomWidth", "RoundRobin", "Router", "Run", "Settings",
    "Static", "Summary", "View", "additive", "arrivals", "calibrated", "check_log", "explain",
    "nearest",
    "network_mmac", "pareto_tuples", "plan_instances", "read_arrivals", "reference",
    "simulate", "telemetry",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Load what needs torch or a solver, and what stands above, on first use."""
    if name == "plan_instances":
        return import_module("optsched_solvers.routing.plan").best_plan
    for home, names in _LATE.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module 'optsched.serving' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *(name for names in _LATE.values() for name in names)})
