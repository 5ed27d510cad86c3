"""Elastic training: uncertainty, uneven data shares, and jobs that share a pool of workers.

Formulas and `MicroController` need NumPy only, the exact roundings load their compiled kernels on
first use; the rest needs the extra ``torch``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from optsched.elastic import equations

if TYPE_CHECKING:
    from optsched.elastic.job import Call, TrainingJob, read_jobs
    from optsched.elastic.meter import EntropyMeter as EntropyMeter
    from optsched.elastic.meter import Uncertainty as Uncertainty
    from optsched.elastic.micro import MicroController, MicroStep
    from optsched.elastic.runner import LiveRun, Replay, Status, run
    from optsched.elastic.sampling import StepPlan as StepPlan
    from optsched.elastic.sampling import UnevenDistributedSampler as UnevenDistributedSampler
    from optsched.elastic.sampling import VariableBatchLoader as VariableBatchLoader
    from optsched.elastic.training import read_checkpoint as read_checkpoint

_HOME: Final = {
    "Call": "job", "TrainingJob": "job", "read_jobs": "job", "EntropyMeter": "meter",
    "Uncertainty": "meter", "MicroController": "micro", "MicroStep": "micro",
    "LiveRun": "runner", "Replay": "runner", "Status": "runner",
    "run": "runner", "StepPlan": "sampling", "UnevenDistributedSampler": "sampling",
    "VariableBatchLoader": "sampling", "read_checkpoint": "training",
}  # fmt: skip

# without those that need torch, so that * can be imported
__all__ = ["Call", "LiveRun", "MicroController", "MicroStep", "Replay", "Status", "TrainingJob",
           "equations", "read_jobs", "run"]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Load public names on first use."""
    if name not in _HOME:
        raise AttributeError(f"module 'optsched.elastic' has no attribute {name!r}")
    value = getattr(import_module(f"optsched.elastic.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(["equations", *_HOME])
