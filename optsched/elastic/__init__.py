"""Elastic training jobs: the uncertainty signal, the micro-level controller, uneven data shares.

Formulas and controller need NumPy only, the exact roundings load their compiled kernels on first
use. With the extra ``torch``: `EntropyMeter`; `StepPlan`, `UnevenDistributedSampler`,
`VariableBatchLoader`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from optsched.elastic import equations
    from optsched.elastic.meter import EntropyMeter as EntropyMeter
    from optsched.elastic.meter import Uncertainty as Uncertainty
    from optsched.elastic.micro import MicroController, MicroStep
    from optsched.elastic.sampling import StepPlan as StepPlan
    from optsched.elastic.sampling import UnevenDistributedSampler as UnevenDistributedSampler
    from optsched.elastic.sampling import VariableBatchLoader as VariableBatchLoader

_HOME: Final = {
    "EntropyMeter": "meter", "MicroController": "micro", "MicroStep": "micro",
    "StepPlan": "sampling", "Uncertainty": "meter", "UnevenDistributedSampler": "sampling",
    "VariableBatchLoader": "sampling",
}  # fmt: skip

__all__ = ["MicroController", "MicroStep", "equations"]


def __getattr__(name: str) -> Any:
    """Load public names on first use."""
    if name == "equations":
        return import_module("optsched.elastic.equations")
    if name not in _HOME:
        raise AttributeError(f"module 'optsched.elastic' has no attribute {name!r}")
    value = getattr(import_module(f"optsched.elastic.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_HOME})
