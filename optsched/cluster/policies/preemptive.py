"""Least remaining time and least attained service: all jobs in an order, with a counter of GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np

from optsched.cluster.policies.gangs import checked_gang, gangs_in_view
from optsched.cluster.workload.job import PER_SECOND
from optsched.cluster.world.policy import Decision
from optsched.errors import InputError
from optsched.io.values import format_value, integer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.cluster.workload.nodes import Nodes
    from optsched.cluster.workload.workload import Workload
    from optsched.cluster.world.log import Log
    from optsched.cluster.world.policy import ClusterView
    from optsched.cluster.world.settings import Settings
    from optsched.model.schedule import IntArray

_ROUND: Final = 60
_THRESHOLD: Final = 18_000
"""Seconds."""


class Srtf:
    """All jobs by true remaining time, restarts included; who does not fit is preempted.

    Ties: pending jobs first, then by arrival.

    Parameters
    ----------
    gang
        As for `Fifo`.

    Notes
    -----
    It need not be asked when a running job overtakes a pending one: the running job was selected
    with the pending one ahead of it, so it still is, and the other still is not.
    """

    name: ClassVar[str] = "srtf"
    clairvoyant: bool = True
    options: ClassVar[tuple[str, ...]] = ("gang",)

    def __init__(self, *, gang: int | None = None) -> None:
        self.gang = checked_gang(gang)

    def decide(self, view: ClusterView) -> Decision:
        """Walk all jobs."""
        size, rate = gangs_in_view(view, self.gang)
        begun = view.starts > view.running
        served = np.where(view.running, view.time - view.entered, 0)
        owed = np.where(begun, np.maximum(view.restart_cost - served, 0), 0)
        left = -(-view.remaining // rate) + owed
        return walk_in_order(view, size, np.lexsort((view.running, left)))

    def compiled(self, workload: Workload, nodes: Nodes, settings: Settings) -> Log | None:
        """The whole simulation in compiled code."""
        from optsched.cluster.policies.rigid import simulate_walk

        return simulate_walk(workload, nodes, settings, self.gang, None, self.name)


class Las:
    """2D-LAS of Tiresias (Gu et al., NSDI 2019): queues by GPU-time received, FIFO inside.

    Parameters
    ----------
    thresholds
        GPU-time, in the workload's unit, beyond which a job is in the next queue; ascending. None:
        one, 18,000 s.
    round
        Decisions are made at multiples of this time, in the workload's unit; 0: at every event;
        None: 60 s.
    gang
        As for `Fifo`.

    Raises
    ------
    InputError
        An option is wrong.
    """

    name: ClassVar[str] = "las"
    clairvoyant: bool = False
    options: ClassVar[tuple[str, ...]] = ("gang", "round", "thresholds")

    def __init__(
        self,
        *,
        thresholds: Sequence[int] | None = None,
        round: int | None = None,
        gang: int | None = None,
    ) -> None:
        self.thresholds = None if thresholds is None else _checked_thresholds(thresholds)
        self.round = None if round is None else integer("round", round)
        self.gang = checked_gang(gang)

    def times(self, workload: Workload) -> tuple[tuple[int, ...], int]:
        """Thresholds and round (at least 1) in the unit of a workload."""
        second = PER_SECOND[workload.time_unit]
        thresholds = (_THRESHOLD * second,) if self.thresholds is None else self.thresholds
        every = _ROUND * second if self.round is None else self.round
        return thresholds, max(every, 1)

    def decide(self, view: ClusterView) -> Decision:
        """Walk all jobs, if it is time for a round."""
        thresholds, every = self.times(view.workload)
        if view.time % every:
            zero_slot = np.diff(view.size_ptr) == 0
            kept = np.where(view.running, view.gpus, 0)
            quota = np.where(zero_slot, -1, kept)
            return Decision(
                quota, wake_at=_round_from(view.time, every), best_effort=bool(zero_slot.any())
            )
        size, _ = gangs_in_view(view, self.gang)
        queue = np.searchsorted(thresholds, view.attained, side="left")
        chosen = walk_in_order(view, size, np.argsort(queue, kind="stable"))
        return Decision(
            chosen.quota, order=chosen.order, best_effort=chosen.best_effort,
            wake_at=_next_change(view, chosen, queue, thresholds, every),
        )  # fmt: skip

    def compiled(self, workload: Workload, nodes: Nodes, settings: Settings) -> Log | None:
        """The whole simulation in compiled code."""
        from optsched.cluster.policies.rigid import simulate_walk

        queues = self.times(workload)
        return simulate_walk(workload, nodes, settings, self.gang, queues, self.name)


def _checked_thresholds(thresholds: Sequence[int]) -> tuple[int, ...]:
    """The option ``thresholds``."""
    if isinstance(thresholds, (str, bytes)) or not hasattr(thresholds, "__iter__"):
        raise InputError(
            "thresholds: expected ascending integers such as (18000,), got "
            f"{format_value(thresholds)}"
        )
    found: list[int] = []
    for value in thresholds:
        found.append(integer("thresholds", value, found[-1] + 1 if found else 0))
    return tuple(found)


def _next_change(
    view: ClusterView, chosen: Decision, queue: IntArray, thresholds: tuple[int, ...], every: int
) -> int | None:
    """The first round at which a job that runs now will be in another queue."""
    moving = (chosen.quota > 0) & (queue < len(thresholds))
    if not moving.any():
        return None
    gap = np.array(thresholds)[queue[moving]] - view.attained[moving]
    passed = int((gap // chosen.quota[moving]).min()) + 1
    return _round_from(view.time + passed, every)


def _round_from(time: int, every: int) -> int:
    """The first round at or after a time."""
    return -(-time // every) * every


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
