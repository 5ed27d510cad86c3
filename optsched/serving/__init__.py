"""Serving of slimmable networks: server, width and batch of every request.

Scenarios, routers, `simulate` and `compare`; `plan_instances`; `check`. With the extra
``serving``: `SlimResNet`, `train_slim`, `profile`, `Executor`; with ``ppo``: `train_router`.

Examples
--------
>>> from optsched import serving
>>> scenario = serving.reference(rate=2500, burst=3, seconds=0.1, seed=1)
>>> run = serving.simulate(scenario, serving.MarginalCost())
>>> serving.check(scenario, run.log)
[]
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from optsched.serving.log import Log, Summary
from optsched.serving.log_check import check
from optsched.serving.plan import Plan, plan_instances
from optsched.serving.routers import (
    JSED,
    Backlog,
    Decision,
    InfeasibleRoute,
    MarginalCost,
    Policy,
    PowerOfTwo,
    Random,
    RandomWidth,
    RoundRobin,
    Router,
    Static,
    View,
    pareto_tuples,
)
from optsched.serving.scenario import Scenario, Settings
from optsched.serving.simulator import Point, Run, compare, front_of, simulate
from optsched.serving.tables import Contention, Link, Server, additive, nearest
from optsched.serving.workload import arrivals, network_mmac, read_arrivals, reference

_LATE = {
    "optsched.serving.executor": ("DeadlineMissed", "Executor", "RequestsLost"),
    "optsched.serving.live": ("Answer", "LiveServer", "Telemetry"),
    "optsched.serving.network": (
        "SlimResNet", "cifar100", "digits", "load_network", "measure_accuracy", "save_network",
        "train_slim",
    ),
    "optsched.serving.ppo": ("train_router",),
    "optsched.serving.profiler": ("Costs", "profile"),
}  # fmt: skip

__all__ = [
    "JSED", "Backlog", "Contention", "Decision", "InfeasibleRoute", "Link", "Log",
    "MarginalCost", "Plan", "Point", "Policy", "PowerOfTwo", "Random", "RandomWidth", "RoundRobin",
    "Router", "Run", "Scenario", "Server", "Settings", "Static", "Summary", "View", "additive",
    "arrivals", "check", "compare", "front_of", "nearest", "network_mmac",
    "pareto_tuples", "plan_instances", "read_arrivals", "reference", "simulate",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import names that need torch on first use."""
    for module, names in _LATE.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'optsched.serving' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *(name for names in _LATE.values() for name in names)})
