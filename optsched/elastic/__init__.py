"""Elastic training: uncertainty, uneven data shares, and jobs that share a pool of workers.

`MicroController` needs NumPy only and loads its compiled kernels on first use; training needs the
extra ``torch``.

Examples
--------
>>> from optsched import elastic
>>> controller = elastic.MicroController(budget=64, batch_bounds=(2, 64), samples=1000)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from optsched.elastic.checkpoint import read_checkpoint as read_checkpoint
    from optsched.elastic.door import OpenPool
    from optsched.elastic.job import Call, TrainingJob, read_jobs
    from optsched.elastic.meter import EntropyMeter as EntropyMeter
    from optsched.elastic.meter import Uncertainty as Uncertainty
    from optsched.elastic.micro import MicroController, MicroStep
    from optsched.elastic.runner import LiveRun, Status, run
    from optsched.elastic.sampling import StepPlan as StepPlan
    from optsched.elastic.sampling import VariableBatchLoader as VariableBatchLoader

_MODULES: Final = {
    "checkpoint": ("read_checkpoint",), "door": ("OpenPool",),
    "job": ("Call", "TrainingJob", "read_jobs"),
    "meter": ("EntropyMeter", "Uncertainty"), "micro": ("MicroController", "MicroStep"),
    "runner": ("LiveRun", "Status", "run"), "sampling": ("StepPlan", "VariableBatchLoader"),
}  # fmt: skip
_PLACES: Final = {name: module for module, names in _MODULES.items() for name in names}

# without names that need torch, so that * can be imported
__all__ = ["Call", "LiveRun", "MicroController", "MicroStep", "OpenPool", "Status", "TrainingJob",
           "read_jobs", "run"]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Load public names on first use."""
    if name not in _PLACES:
        raise AttributeError(f"module 'optsched.elastic' has no attribute {name!r}")
    value = getattr(import_module(f"optsched.elastic.{_PLACES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(_PLACES)
