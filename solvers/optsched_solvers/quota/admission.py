"""Which jobs get their minimum at all: the step before shares that serve everybody admitted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from optsched.errors import InputError
from optsched.kernels.compile import INT, INTS, READ, entry
from optsched_solvers.quota.inputs import gpus, integers

if TYPE_CHECKING:
    import numpy.typing as npt


def admit(order: Any, minimum: Any, budget: int) -> npt.NDArray[np.bool_]:
    """First fit: in the given order every job whose minimum fits what is left is admitted.

    A job that does not fit is passed over, and smaller ones behind it may still be admitted. A job
    that `order` leaves out is not admitted.

    Parameters
    ----------
    order
        Job ids, each at most once; shape (at most jobs,).
    minimum
        Whole GPUs a job, shape (jobs,).
    budget
        GPUs to share, at most 2**30.

    Returns
    -------
    bool array, shape (jobs,)

    Raises
    ------
    InputError
        A value is of the wrong type or shape or negative, or an id is unknown or named twice.
    """
    budget = gpus(budget)
    lo = integers("minimum", minimum)
    ids = integers("order", order)
    for j in np.flatnonzero(lo < 0)[:1]:
        raise InputError(f"job {j}: minimum {lo[j]} is negative")
    admitted = np.zeros(len(lo), np.int64)
    at = _first_fit(ids, lo, budget, admitted)
    if at >= 0:
        j = int(ids[at])
        why = "named twice" if 0 <= j < len(lo) else f"unknown: there are jobs 0..{len(lo) - 1}"
        raise InputError(f"order: job {j} at place {at} is {why}")
    return admitted.astype(bool)


@entry(INT, READ, READ, INT, INTS)
def _first_fit(order, minimum, budget, admitted):  # type: ignore[no-untyped-def]
    """Mark the admitted with 1; the first wrong place of the order, or -1."""
    n = len(minimum)
    seen = np.zeros(n, np.uint8)
    for at in range(len(order)):
        j = order[at]
        if j < 0 or j >= n or seen[j] == 1:
            return at
        seen[j] = 1
        if minimum[j] <= budget:
            budget -= minimum[j]
            admitted[j] = 1
    return -1
