"""GPU quotas on bare arrays: exact allocation in microseconds, no Python objects inside.

Public, and the only part of the solvers that `optsched.cluster` and `optsched.elastic` import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from optsched_solvers.quota.arrays import Certificate
    from optsched_solvers.quota.multiple_choice import choice
    from optsched_solvers.quota.threshold import (
        admit,
        concave_sum,
        continuous_shares,
        makespan,
        max_min,
        max_min_table,
        proportional,
    )

_HOME: Final = {"Certificate": "arrays", "choice": "multiple_choice"}
"""Modules of names that are not in `threshold`."""

__all__ = [
    "Certificate", "admit", "choice", "concave_sum", "continuous_shares", "makespan", "max_min",
    "max_min_table", "proportional",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Compile on first use."""
    if name not in __all__:
        raise AttributeError(f"module 'optsched_solvers.quota' has no attribute {name!r}")
    home = _HOME.get(name, "threshold")
    globals()[name] = value = getattr(import_module(f"optsched_solvers.quota.{home}"), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
