"""Elastic training jobs: the uncertainty signal's formulas and the micro-level controller.

Needs NumPy only; the exact roundings load their compiled kernels on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from optsched.elastic import equations
    from optsched.elastic.micro import MicroController, MicroStep

_HOME: Final = {"MicroController": "micro", "MicroStep": "micro"}

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
    return sorted(__all__)
