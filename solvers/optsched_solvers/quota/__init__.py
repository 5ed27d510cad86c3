"""GPU quotas on bare arrays: exact allocation in microseconds, no Python objects inside.

Public, and the only part of the solvers that `optsched.cluster` and `optsched.elastic` import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from optsched_solvers.quota import placement
    from optsched_solvers.quota.admission import admit
    from optsched_solvers.quota.apportionment import continuous_shares, proportional
    from optsched_solvers.quota.certificate import Certificate
    from optsched_solvers.quota.concave import concave_sum
    from optsched_solvers.quota.finish import makespan
    from optsched_solvers.quota.levels import max_min, max_min_table
    from optsched_solvers.quota.multiple_choice import HardChoice, choice, hull_bound, hull_greedy
    from optsched_solvers.quota.placement import best_fit, fgd, place_quotas, whole_nodes, worst_fit

_HOME: Final = {
    "Certificate": "certificate",
    "HardChoice": "multiple_choice",
    "admit": "admission",
    "best_fit": "placement",
    "choice": "multiple_choice",
    "concave_sum": "concave",
    "continuous_shares": "apportionment",
    "fgd": "placement",
    "hull_bound": "multiple_choice",
    "hull_greedy": "multiple_choice",
    "makespan": "finish",
    "max_min": "levels",
    "max_min_table": "levels",
    "place_quotas": "placement",
    "proportional": "apportionment",
    "whole_nodes": "placement",
    "worst_fit": "placement",
}
"""Module of every name; no module has a public name, or importing it would hide the function."""

__all__ = [
    "Certificate", "HardChoice", "admit", "best_fit", "choice", "concave_sum",
    "continuous_shares", "fgd", "hull_bound", "hull_greedy", "makespan", "max_min",
    "max_min_table", "place_quotas", "placement", "proportional", "whole_nodes", "worst_fit",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Compile on first use."""
    if name == "placement":
        return import_module("optsched_solvers.quota.placement")
    if name not in _HOME:
        raise AttributeError(f"module 'optsched_solvers.quota' has no attribute {name!r}")
    value = getattr(import_module(f"optsched_solvers.quota.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
