"""Where running jobs are, and what a model of contention has to say of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from optsched.errors import InputError
from optsched.io.values import format_value

if TYPE_CHECKING:
    import numpy.typing as npt

    from optsched.cluster.workload.workload import Workload
    from optsched.model.schedule import IntArray

    FloatArray = npt.NDArray[np.float64]

MOST_SPEED: Final = 2.0
"""Relative to running alone; above 1 it is an error of measurement."""


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
    joined: npt.NDArray[np.bool_]
    """Whether the job was put on the GPUs of its partner (else the partner on its)."""
    workload: Workload


class Contention(Protocol):
    """A model of contention; asked anew whenever jobs came, went or moved."""

    def factors(self, placement: Placement) -> FloatArray:
        """Speed of every row relative to its speed alone, in (0, 2]; a pure function."""
        ...


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
