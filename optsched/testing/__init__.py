"""Tests for authors of solvers: `check_solver`, the pytest class `SolverTests`, oracles.

Examples
--------
>>> from optsched.testing import best_makespan
>>> best_makespan(optsched.JobShop([[(0, 3), (1, 2)], [(1, 4), (0, 1)]]).graph())
6
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optsched.arraypipe.train_alone import NotIdentical, Trained, differences, train_alone
    from optsched.testing.brute_force import best_makespan
    from optsched.testing.solver_checks import SolverTests, check_solver

_MODULES = {
    "NotIdentical": "optsched.arraypipe.train_alone",
    "SolverTests": "optsched.testing.solver_checks",
    "best_makespan": "optsched.testing.brute_force",
    "check_solver": "optsched.testing.solver_checks",
    "Trained": "optsched.arraypipe.train_alone",
    "differences": "optsched.arraypipe.train_alone",
    "train_alone": "optsched.arraypipe.train_alone",
}

__all__ = [
    "NotIdentical", "SolverTests", "Trained", "best_makespan", "check_solver",
    "differences", "train_alone",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a name on first use: the training oracle needs torch, the solver checks do not."""
    if name not in _MODULES:
        raise AttributeError(f"module 'optsched.testing' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
