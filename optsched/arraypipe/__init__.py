"""The executor: train a job array by its schedule, every job to the bits it would reach alone."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from optsched.errors import MissingExtra

if TYPE_CHECKING:
    from optsched.arraypipe.advice import advise
    from optsched.arraypipe.advising.option import Advice
    from optsched.arraypipe.demo import DemoResult, run_demo
    from optsched.arraypipe.job import Job, JobFailed
    from optsched.arraypipe.plan import ExecutionPlan, compile
    from optsched.arraypipe.planning.orders import random_schedule
    from optsched.arraypipe.profiling.document import Profile
    from optsched.arraypipe.reporting.report import Report
    from optsched.arraypipe.run_result import RunResult
    from optsched.arraypipe.split import SplitPoint
    from optsched.arraypipe.sweep import ArraySweep, SweepResult
    from optsched.arraypipe.trainer import ArrayTrainer

_HOME = {
    "Advice": "advising.option", "ArraySweep": "sweep", "ArrayTrainer": "trainer",
    "DemoResult": "demo", "ExecutionPlan": "plan", "Job": "job", "JobFailed": "job",
    "Profile": "profiling.document", "Report": "reporting.report", "RunResult": "run_result",
    "SplitPoint": "split", "SweepResult": "sweep", "advise": "advice", "compile": "plan",
    "random_schedule": "planning.orders", "run_demo": "demo",
}  # fmt: skip

__all__ = [
    "Advice", "ArraySweep", "ArrayTrainer", "DemoResult", "ExecutionPlan", "Job", "JobFailed",
    "Profile", "Report", "RunResult", "SplitPoint", "SweepResult", "advise", "compile",
    "random_schedule", "run_demo",
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
