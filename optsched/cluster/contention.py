"""How running jobs slow each other (and themselves) down: factors on their speed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from optsched.cluster.world.packing_table import PackingTable
from optsched.cluster.world.placement import Contention, Placement, rates
from optsched.errors import InputError
from optsched.io.values import format_value, number

if TYPE_CHECKING:
    from optsched.cluster.world.bandwidth_contention import BandwidthContention
    from optsched.cluster.world.placement import FloatArray

__all__ = [
    "BandwidthContention", "Both", "Contention", "NodeSpan", "PackingTable", "Placement", "rates",
]  # fmt: skip


class NodeSpan:
    """Every node beyond the first lengthens a job's step: factor 1 / (1 + penalty (nodes - 1)).

    Parameters
    ----------
    penalty
        Share of a step that one more node adds, >= 0.
    """

    def __init__(self, penalty: float) -> None:
        self.penalty = number("penalty", penalty)

    def factors(self, placement: Placement) -> FloatArray:
        """By the number of nodes of every row."""
        extra = np.maximum(np.diff(placement.node_ptr) - 1, 0)
        return np.asarray(1.0 / (1.0 + self.penalty * extra), np.float64)

    def __repr__(self) -> str:
        return f"NodeSpan({self.penalty!r})"


class Both:
    """The product of several models' factors."""

    def __init__(self, *models: Contention) -> None:
        for model in models:
            if not callable(getattr(model, "factors", None)):
                raise InputError(f"contention: {format_value(model)} has no method `factors`")
        self.models = models

    def factors(self, placement: Placement) -> FloatArray:
        """One after the other."""
        found = np.ones(len(placement.job))
        for model in self.models:
            found = found * model.factors(placement)
        return found


def __getattr__(name: str) -> Any:
    """Load what needs bandwidth models on first use."""
    if name == "BandwidthContention":
        from optsched.cluster.world.bandwidth_contention import BandwidthContention

        return BandwidthContention
    raise AttributeError(f"module 'optsched.cluster.contention' has no attribute {name!r}")
