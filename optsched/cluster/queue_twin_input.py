"""What compiled simulations of rigid jobs read, and whether they can simulate what is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from optsched.cluster.job_checks import MOST_GPUS
from optsched.errors import InputError
from optsched.io.values import integer

if TYPE_CHECKING:
    from optsched.cluster.nodes import Nodes
    from optsched.cluster.policy import ClusterView
    from optsched.cluster.settings import Settings
    from optsched.cluster.workload import Workload
    from optsched.model.schedule import IntArray

LUCID_NODE: Final = 8
"""GPUs of every node of Lucid's simulator."""


LATEST: Final = 2**52
"""Beyond this the generic engine watches the clock."""


class Columns(NamedTuple):
    """Rigid jobs; one value per job, times in the workload's unit."""

    submit: IntArray
    gang: IntArray
    rate: IntArray
    """Work per unit of time at that size."""
    duration: IntArray
    """Time at that size, alone."""
    estimate: IntArray
    """The same as it is believed."""


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


def columns(
    workload: Workload, nodes: Nodes, settings: Settings, gang: int | None = None
) -> Columns | None:
    """Columns of the jobs, or None if only the generic engine can simulate this.

    Raises
    ------
    InputError
        ``timing="lucid"`` is asked with what Lucid's simulator does not have.
    """
    lucid = settings.timing == "lucid"
    total = sum(nodes.gpus)
    limit = total if gang is None else min(gang, total)
    size, rate = gangs(workload.size_ptr, workload.size, workload.rate, limit)
    if lucid:
        _refuse(workload, nodes, settings, size, total)
    if not len(size) or settings.contention is not None or settings.changes:
        return None
    if any(group.max_concurrent is not None for group in workload.groups):
        return None
    if size.min() < 1 or size.max() > total or workload.work.min() < 1:
        return None
    duration = -(-workload.work // rate)
    # one after another all jobs would be done by then
    if float(workload.submit[-1]) + duration.sum(dtype=np.float64) > LATEST:
        return None
    same = workload.believed is workload.work
    estimate = duration if same else -(-np.maximum(workload.believed, 1) // rate)
    return Columns(*(np.ascontiguousarray(a) for a in
                     (workload.submit, size, rate, duration, estimate)))  # fmt: skip


def _refuse(
    workload: Workload, nodes: Nodes, settings: Settings, size: IntArray, total: int
) -> None:
    """What Lucid's simulator does not have."""
    way = 'use timing="event"'
    for node, gpus in enumerate(nodes.gpus):
        if gpus != LUCID_NODE:
            raise InputError(
                f'timing: "lucid" wants nodes of {LUCID_NODE} GPUs, node {node} has {gpus}; {way}'
            )
    for name, wrong in (("changes", settings.changes), ("round", settings.round)):
        if wrong:
            raise InputError(f'{name}: timing="lucid" does not have it; leave it out or {way}')
    if settings.contention is not None:
        raise InputError(f'contention: timing="lucid" does not have it; leave it out or {way}')
    if any(group.max_concurrent is not None for group in workload.groups):
        raise InputError(f'max_concurrent: timing="lucid" does not have it; {way}')
    for what, bad in (("GPUs", size < 1), ("work", workload.work < 1)):
        if bad.any():
            name = workload.names[int(np.argmax(bad))]
            raise InputError(f'job {name!r:.60}: timing="lucid" wants 1 {what} or more; {way}')
    if (size > total).any():
        worst = int(np.argmax(size > total))
        raise InputError(
            f"job {workload.names[worst]!r:.60}: {int(size[worst])} GPUs are more than the "
            f"cluster's {total}; give more nodes"
        )
