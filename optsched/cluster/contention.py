"""How running jobs slow each other (and themselves) down: factors on their speed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from optsched.cluster.packing_table import MOST_SPEED, PackingTable
from optsched.errors import InputError
from optsched.io.values import format_value, number

if TYPE_CHECKING:
    from optsched.cluster.contention_bandwidth import BandwidthContention
    from optsched.cluster.policy import BoolArray, FloatArray
    from optsched.cluster.workload import Workload
    from optsched.model.schedule import IntArray

__all__ = [
    "BandwidthContention", "Both", "Contention", "NodeSpan", "PackingTable", "Placement", "rates",
]  # fmt: skip


@dataclass(frozen=True, eq=False, kw_only=True)
class Placement:
    """Where everybody runs between two instants; rows are running jobs, ascending."""

    job: IntArray
    gpus: IntArray
    rate: IntArray
    """Speed without contention, in `WORK` parts of one GPU's."""
    node_ptr: IntArray
    node: IntArray
    count: IntArray
    """GPUs of row i by node: ``node_ptr[i]:node_ptr[i + 1]``, nodes ascending."""
    partner: IntArray
    """Row of the job that shares its GPUs; -1: none."""
    joined: BoolArray
    """Whether the job was put on the GPUs of its partner (else the partner on its)."""
    workload: Workload


class Contention(Protocol):
    """A model of contention; asked anew whenever jobs came, went or moved."""

    def factors(self, placement: Placement) -> FloatArray:
        """Speed of every row relative to its speed alone, in (0, 2]; a pure function."""
        ...


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


def rates(model: Contention, placement: Placement) -> IntArray:
    """Speeds under contention, rounded, at least 1.

    Raises
    ------
    InputError
        A factor that is not in (0, 2], with the job.
    """
    factors = np.asarray(model.factors(placement), np.float64)
    if factors.shape != placement.job.shape:
        raise InputError(
            f"contention: expected {len(placement.job)} factors, got the shape {factors.shape}"
        )
    bad = ~((factors > 0) & (factors <= MOST_SPEED))
    if bad.any():
        i = int(np.argmax(bad))
        name = placement.workload.names[int(placement.job[i])]
        raise InputError(
            f"contention: expected a factor in (0, 2] for job {format_value(name)}, got "
            f"{factors[i]}"
        )
    slowed = np.rint(placement.rate * factors).astype(np.int64)
    return np.asarray(np.maximum(slowed, 1), np.int64)


def __getattr__(name: str) -> Any:
    """Load what needs bandwidth models on first use."""
    if name == "BandwidthContention":
        from optsched.cluster.contention_bandwidth import BandwidthContention

        return BandwidthContention
    raise AttributeError(f"module 'optsched.cluster.contention' has no attribute {name!r}")
