"""Decisions of policies that walk all jobs in an order with a counter of GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from optsched.cluster.policy import Decision

if TYPE_CHECKING:
    from optsched.cluster.policy import ClusterView
    from optsched.model.schedule import IntArray


def walk_in_order(
    view: ClusterView, size: IntArray, order: IntArray, wake_at: int | None = None
) -> Decision:
    """Select the jobs that fit a counter that starts at all GPUs; others do not run.

    Parameters
    ----------
    view
        The cluster.
    size
        GPUs of every active job.
    order
        Positions of all active jobs.
    wake_at
        See `Decision`.

    Notes
    -----
    The counter starts at the *total*, so a job ahead in the order takes the GPUs of running jobs
    behind it, which are preempted; one that does not fit is passed over. Running jobs that must
    not be preempted are selected before all others. Zero-slot tasks run at once.
    """
    zero_slot = np.diff(view.size_ptr) == 0
    quota = np.where(zero_slot, -1, 0)
    kept = view.running & ~view.preemptible & ~zero_slot
    quota[kept] = view.gpus[kept]
    # GPUs held on nodes that take no more work are of use to their holders only
    stranded = _stranded(view)
    movable = view.gpus - stranded
    need = size - stranded
    counter = int(view.free.sum() + movable[view.running & ~kept].sum())
    for i in order.tolist():
        if quota[i] == 0 and need[i] <= counter:
            quota[i] = size[i]
            counter -= int(need[i])
    return Decision(quota, order=order, wake_at=wake_at, best_effort=bool(zero_slot.any()))


def _stranded(view: ClusterView) -> IntArray:
    """GPUs that every job holds on drained nodes."""
    row = np.repeat(np.arange(len(view.job)), np.diff(view.held_ptr))
    drained = view.capacity[view.held_node] == 0
    return np.bincount(row[drained], view.held_count[drained], len(view.job)).astype(np.int64)
