"""The executor: train a job array by its schedule, every job to the bits it would reach alone."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from optsched.errors import MissingExtra

if TYPE_CHECKING:
    from optsched.arraypipe.advice import Advice, advise
    from optsched.arraypipe.callbacks import Callback
    from optsched.arraypipe.checkpoint.weights import read_weights
    from optsched.arraypipe.demo import DemoResult, run_demo
    from optsched.arraypipe.job import Job, JobFailed
    from optsched.arraypipe.plan.orders import random_schedule
    from optsched.arraypipe.plan.plan import ExecutionPlan, compile
    from optsched.arraypipe.profile.document import Profile
    from optsched.arraypipe.report.report import Report
    from optsched.arraypipe.sweep.sweep import ArraySweep, SweepResult
    from optsched.arraypipe.trainer import ArrayTrainer, RunConfig
    from optsched.arraypipe.training_run import RunResult

_HOME = {
    "Advice": "advice", "ArraySweep": "sweep.sweep", "ArrayTrainer": "trainer",
    "Callback": "callbacks", "DemoResult": "demo", "ExecutionPlan": "plan.plan", "Job": "job",
    "JobFailed": "job", "Profile": "profile.document", "Report": "report.report",
    "RunConfig": "trainer", "RunResult": "training_run",
    "SweepResult": "sweep.sweep", "advise": "advice",
    "compile": "plan.plan",
    "random_schedule": "plan.orders", "read_weights": "checkpoint.weights",
    "run_demo": "demo",
}  # fmt: skip

__all__ = [
    "Advice", "ArraySweep", "ArrayTrainer", "Callback", "DemoResult", "ExecutionPlan", "Job",
    "JobFailed", "Profile", "Report", "RunConfig", "RunResult", "SweepResult",
    "advise", "compile", "random_schedule", "read_weights", "run_demo",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Load public names on first use; those that need torch say so when it is missing."""
    if name not in _HOME:
        raise AttributeError(f"module 'optsched.arraypipe' has no attribute {name!r}")
    try:
        value = getattr(import_module(f"optsched.arraypipe.{_HOME[name]}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torch":
            raise
        raise MissingExtra("the executor", "torch") from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
