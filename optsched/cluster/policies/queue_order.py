"""Decisions of policies that start pending jobs in one order and preempt nobody."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final, Literal

import numpy as np

from optsched.cluster.policy import Decision
from optsched.cluster.queue_twin_input import checked_gang, gangs_in_view
from optsched.io.values import one_of

if TYPE_CHECKING:
    from optsched.cluster.log import Log
    from optsched.cluster.nodes import Nodes
    from optsched.cluster.policy import ClusterView
    from optsched.cluster.settings import Settings
    from optsched.cluster.workload import Workload
    from optsched.model.schedule import IntArray

Backfill = Literal["none", "first_fit", "easy"]
BACKFILLS: Final = ("none", "first_fit", "easy")


class Queue:
    """What `Fifo` and `Sjf` share: the options, and the whole simulation in compiled code."""

    clairvoyant: bool = False
    options: ClassVar[tuple[str, ...]] = ("backfill", "gang")
    shortest: ClassVar[bool]
    """Whether pending jobs are ordered by estimated duration, else by arrival."""

    def __init__(self, *, backfill: Backfill = "none", gang: int | None = None) -> None:
        self.backfill = checked_backfill(backfill)
        self.gang = checked_gang(gang)

    def twin(self, workload: Workload, nodes: Nodes, settings: Settings) -> Log | None:
        """The whole simulation in compiled code."""
        from optsched.cluster.queue_twin import queue_twin

        return queue_twin(
            workload, nodes, settings,
            shortest=self.shortest, gang=self.gang, backfill=self.backfill,
        )  # fmt: skip


def checked_backfill(backfill: Backfill) -> Backfill:
    """The option ``backfill``."""
    one_of("backfill", backfill, BACKFILLS)
    return backfill


def estimates(view: ClusterView, rate: IntArray) -> IntArray:
    """Time to completion at the job's size, as it is believed."""
    return -(-view.remaining // rate)


def in_order(
    view: ClusterView, first: IntArray | None, gang: int | None, backfill: str
) -> Decision:
    """Start pending jobs in order while they fit.

    Parameters
    ----------
    view
        The cluster.
    first
        What pending jobs are ordered by, ties by arrival; None: by arrival.
    gang
        The size option of rigid policies, see `gangs_in_view`.
    backfill
        What happens behind the first that does not fit: nothing, whoever fits starts, or whoever
        fits and does not delay the first one by the estimates starts (EASY: Lifka, JSSPP 1995).
    """
    size, rate = gangs_in_view(view, gang)
    zero_slot = np.diff(view.size_ptr) == 0
    quota = np.where(view.running, view.gpus, 0)
    quota[zero_slot] = -1
    pending = np.flatnonzero(~view.running & ~zero_slot)
    if first is not None:
        pending = pending[np.argsort(first[pending], kind="stable")]
    free = int(view.free.sum())
    started = len(pending)
    fits = np.cumsum(size[pending]) <= free
    if not fits.all():
        started = int(np.argmin(fits))
    quota[pending[:started]] = size[pending[:started]]
    free -= int(size[pending[:started]].sum())
    if started < len(pending) and backfill != "none":
        rest = pending[started:]
        time = estimates(view, rate)
        shadow, extra = (None, 0)
        if backfill == "easy":
            runs = quota > 0
            shadow, extra = reservation(size[rest[0]], free, time[runs], quota[runs])
        for i in rest[1:].tolist() if backfill == "easy" else rest.tolist():
            if size[i] > free:
                continue
            if shadow is not None and time[i] > shadow:
                if size[i] > extra:
                    continue
                extra -= int(size[i])
            quota[i] = size[i]
            free -= int(size[i])
            if free == 0:
                break
    return Decision(quota, order=pending, best_effort=bool(zero_slot.any()))


def reservation(need: int, free: int, time: IntArray, gpus: IntArray) -> tuple[int | None, int]:
    """When the first job that does not fit will start, and what it will leave free then.

    Parameters
    ----------
    need, free
        GPUs that it wants, and that are free now.
    time, gpus
        Time to completion and size of running jobs.

    Returns
    -------
    tuple
        Time from now and GPUs; (None, 0) if it will never fit.
    """
    order = np.argsort(time, kind="stable")
    there = free + np.cumsum(gpus[order])
    enough = there >= need
    if not enough.any():
        return None, 0
    shadow = int(time[order[int(np.argmax(enough))]])
    return shadow, free + int(gpus[time <= shadow].sum()) - int(need)
