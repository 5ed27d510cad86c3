"""The executor: train a job array by its schedule, every job to the bits it would reach alone."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from optsched.errors import MissingExtra

if TYPE_CHECKING:
    from optsched.arraypipe.advice import Advice, advise
    from optsched.arraypipe.callbacks import Callback, CsvLog
    from optsched.arraypipe.checkpoint.weights import read_weights
    from optsched.arraypipe.job import Job, JobFailed
    from optsched.arraypipe.options import RunConfig
    from optsched.arraypipe.plan.plan import ExecutionPlan, compile_plan, random_schedule
    from optsched.arraypipe.profile import Profile
    from optsched.arraypipe.report import Report
    from optsched.arraypipe.sweep import ArraySweep, SweepResult
    from optsched.arraypipe.trainer import ArrayTrainer, RunResult

_MODULES = {
    "Advice": "advice", "ArraySweep": "sweep", "ArrayTrainer": "trainer",
    "Callback": "callbacks", "CsvLog": "callbacks", "ExecutionPlan": "plan.plan", "Job": "job",
    "JobFailed": "job", "Profile": "profile", "Report": "report",
    "RunConfig": "options", "RunResult": "trainer",
    "SweepResult": "sweep", "advise": "advice",
    "compile_plan": "plan.plan", "random_schedule": "plan.plan",
    "read_weights": "checkpoint.weights",
}  # fmt: skip

__all__ = [
    "Advice", "ArraySweep", "ArrayTrainer", "Callback", "CsvLog", "ExecutionPlan", "Job",
    "JobFailed", "Profile", "Report", "RunConfig", "RunResult", "SweepResult",
    "advise", "compile_plan", "random_schedule", "read_weights",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Load public names on first use; raise `MissingExtra` without torch."""
    if name not in _MODULES:
        raise AttributeError(f"module 'optsched.arraypipe' has no attribute {name!r}")
    try:
        value = getattr(import_module(f"optsched.arraypipe.{_MODULES[name]}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torch":
            raise
        raise MissingExtra("the executor", "torch") from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
