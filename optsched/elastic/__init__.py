"""Elastic training: uncertainty, uneven data shares, and jobs that share a pool of workers.

Formulas and `MicroController` need NumPy only, the exact roundings load their compiled kernels on
first use; the rest needs the extra ``torch``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from optsched.elastic import equations as equations
    from optsched.elastic.job import Call as Call
    from optsched.elastic.job import TrainingJob as TrainingJob
    from optsched.elastic.job import read_jobs as read_jobs
    from optsched.elastic.meter import EntropyMeter as EntropyMeter
    from optsched.elastic.meter import Uncertainty as Uncertainty
    from optsched.elastic.micro import MicroController as MicroController
    from optsched.elastic.micro import MicroStep as MicroStep
    from optsched.elastic.runner import JobStatus as JobStatus
    from optsched.elastic.runner import LiveRun as LiveRun
    from optsched.elastic.runner import Replay as Replay
    from optsched.elastic.runner import Status as Status
    from optsched.elastic.runner import run as run
    from optsched.elastic.sampling import StepPlan as StepPlan
    from optsched.elastic.sampling import UnevenDistributedSampler as UnevenDistributedSampler
    from optsched.elastic.sampling import VariableBatchLoader as VariableBatchLoader
    from optsched.elastic.training import read_checkpoint as read_checkpoint

_HOME: Final = {
    "job": ("Call", "TrainingJob", "read_jobs"),
    "meter": ("EntropyMeter", "Uncertainty"),
    "micro": ("MicroController", "MicroStep"),
    "runner": ("JobStatus", "LiveRun", "Replay", "Status", "run"),
    "sampling": ("StepPlan", "UnevenDistributedSampler", "VariableBatchLoader"),
    "training": ("read_checkpoint",),
}
_MODULE: Final = {name: module for module, names in _HOME.items() for name in names}

_TORCH: Final = ("meter", "sampling", "training")

__all__ = ["equations", *(name for name, home in _MODULE.items() if home not in _TORCH)]


def __getattr__(name: str) -> Any:
    """Load public names on first use."""
    if name == "equations":
        return import_module("optsched.elastic.equations")
    if name not in _MODULE:
        raise AttributeError(f"module 'optsched.elastic' has no attribute {name!r}")
    value = getattr(import_module(f"optsched.elastic.{_MODULE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(["equations", *_MODULE])
