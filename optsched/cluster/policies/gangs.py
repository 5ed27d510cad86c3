"""At which size a rigid policy runs an elastic job."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from optsched.cluster.workload.speedup import MOST_GPUS
from optsched.io.values import integer

if TYPE_CHECKING:
    from optsched.cluster.world.policy import ClusterView
    from optsched.model.schedule import IntArray


def gangs(
    ptr: IntArray, size: IntArray, rate: IntArray, limit: int | IntArray
) -> tuple[IntArray, IntArray]:
    """The size at which a rigid policy runs every job, and its rate.

    Parameters
    ----------
    ptr, size, rate
        Allowed sizes, ascending, in CSR form; an empty row is a zero-slot task.
    limit
        The largest allowed size up to this (one number, or one per job) is taken; if all are
        larger, the smallest.

    Returns
    -------
    tuple of IntArray, shape (jobs,)
        0 GPUs for an empty row.
    """
    rows = np.diff(ptr)
    if len(rows) == len(size) and (rows == 1).all():
        return size, rate
    most = limit if isinstance(limit, int) else np.repeat(limit, rows)
    within = np.concatenate(([0], np.cumsum(size <= most)))
    at = ptr[:-1] + np.maximum(within[ptr[1:]] - within[ptr[:-1]] - 1, 0)
    if not len(size):
        return np.zeros(len(rows), np.int64), np.ones(len(rows), np.int64)
    at = np.minimum(at, len(size) - 1)
    return np.where(rows > 0, size[at], 0), np.where(rows > 0, rate[at], 1)


def gangs_in_view(view: ClusterView, gang: int | None) -> tuple[IntArray, IntArray]:
    """Size and rate of every active job; a running one stays at its size."""
    limit = int(view.capacity.sum())
    limit = limit if gang is None else min(gang, limit)
    each = np.where(view.running, view.gpus, limit)
    return gangs(view.size_ptr, view.size, view.rate, each)


def checked_gang(gang: int | None) -> int | None:
    """The option ``gang`` of rigid policies."""
    return None if gang is None else integer("gang", gang, 1, MOST_GPUS)
