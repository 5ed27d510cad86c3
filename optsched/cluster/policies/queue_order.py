"""First in first out, and shortest job first: pending jobs start in one order, nobody stops."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final, Literal

import numpy as np

from optsched.cluster.policies.gangs import checked_gang, gangs_in_view
from optsched.cluster.world.policy import Decision
from optsched.errors import InputError
from optsched.io.values import one_of

if TYPE_CHECKING:
    from optsched.cluster.workload.nodes import Nodes
    from optsched.cluster.workload.workload import Workload
    from optsched.cluster.world.log import Log
    from optsched.cluster.world.policy import ClusterView
    from optsched.cluster.world.settings import Settings
    from optsched.model.schedule import IntArray

Backfill = Literal["none", "first_fit", "easy"]
BACKFILLS: Final = ("none", "first_fit", "easy")


class Queue:
    """What `Fifo` and `Sjf` share: the options, and the whole simulation in compiled code."""

    name: ClassVar[str]

    clairvoyant: bool = False
    options: ClassVar[tuple[str, ...]] = ("backfill", "gang")
    shortest: ClassVar[bool]
    """Whether pending jobs are ordered by estimated duration, else by arrival."""

    def __init__(self, *, backfill: Backfill = "none", gang: int | None = None) -> None:
        self.backfill = one_of("backfill", backfill, BACKFILLS)
        self.gang = checked_gang(gang)

    def compiled(self, workload: Workload, nodes: Nodes, settings: Settings) -> Log | None:
        """The whole simulation in compiled code."""
        from optsched.cluster.policies.rigid import simulate_in_order

        if settings.timing == "lucid" and self.backfill != "none":
            raise InputError(
                'backfill: timing="lucid" stops at the first job that does not fit; '
                'take backfill="none" or timing="event"'
            )
        key, backfill = ("estimate" if self.shortest else "arrival"), BACKFILLS.index(self.backfill)
        return simulate_in_order(workload, nodes, settings, self.gang, key, backfill, self.name)


class Fifo(Queue):
    """Jobs start in order of arrival, at one size, and run to their ends.

    Parameters
    ----------
    backfill
        ``"none"``: nobody passes the first job that does not fit; ``"first_fit"``: whoever fits
        starts; ``"easy"``: whoever fits and, by the estimates, does not delay that first job.
    gang
        Elastic jobs run on their largest allowed size up to this; None: their largest.

    Raises
    ------
    InputError
        An option is wrong.
    """

    name: ClassVar[str] = "fifo"
    shortest: ClassVar[bool] = False

    def decide(self, view: ClusterView) -> Decision:
        """Start what may start."""
        return in_order(view, None, self.gang, self.backfill)


class Sjf(Queue):
    """Pending jobs start in order of estimated duration, at one size, and run to their ends.

    Parameters
    ----------
    backfill, gang
        As for `Fifo`.

    Raises
    ------
    InputError
        An option is wrong.
    """

    name: ClassVar[str] = "sjf"
    shortest: ClassVar[bool] = True

    def decide(self, view: ClusterView) -> Decision:
        """Start what may start."""
        _, rate = gangs_in_view(view, self.gang)
        return in_order(view, estimates(view, rate), self.gang, self.backfill)


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
