"""Solutions of disjunctive graphs: orders of one iteration, or of a cycle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from optsched.model.schedule import Csr, IntArray


@dataclass(frozen=True, eq=False, slots=True)
class Orders:
    """Orders of one iteration, where the solver also chose which jobs recompute."""

    sequences: Csr
    """One order of operations per resource."""
    recompute: tuple[bool, ...] | None = None
    """Which jobs recompute; None where that was not to be chosen."""


@dataclass(frozen=True, eq=False, slots=True)
class PeriodicOrders:
    """Orders of a cycle, each repeated for ever."""

    sequences: Csr
    """One order of operations per resource."""
    offset: IntArray
    """Cycles by which the iteration of every operation is late, shape (n_operations,)."""
    recompute: tuple[bool, ...] | None = None
    """Which jobs recompute; None where that was not to be chosen."""


Solution: TypeAlias = "Csr | Orders | PeriodicOrders"
"""Solution type of graph problems; orders of one iteration alone are a `Csr`."""
