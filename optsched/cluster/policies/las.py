"""Least attained service: Tiresias with two-dimensional attained service and discrete queues."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from optsched.cluster.job_checks import integer, told
from optsched.cluster.policies.preemptive_walk import walk_in_order
from optsched.cluster.policy import Decision
from optsched.cluster.queue_twin_input import checked_gang, gangs_in_view
from optsched.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.cluster.log import Log
    from optsched.cluster.nodes import Nodes
    from optsched.cluster.policy import ClusterView
    from optsched.cluster.settings import Settings
    from optsched.cluster.workload import Workload
    from optsched.schedule import IntArray


class Las:
    """2D-LAS of Tiresias (Gu et al., NSDI 2019): queues by GPU-time received, FIFO inside.

    Parameters
    ----------
    thresholds
        GPU-time, in the workload's unit, beyond which a job is in the next queue; ascending.
    round
        Decisions are made at multiples of this time; 0: at every event.
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
        self, *, thresholds: Sequence[int] = (18_000,), round: int = 60, gang: int | None = None
    ) -> None:
        self.thresholds = _checked_thresholds(thresholds)
        self.round = integer("round", round)
        self.gang = checked_gang(gang)

    def decide(self, view: ClusterView) -> Decision:
        """Walk all jobs, if it is time for a round."""
        every = max(self.round, 1)
        if view.time % every:
            zero_slot = np.diff(view.size_ptr) == 0
            kept = np.where(view.running, view.gpus, 0)
            quota = np.where(zero_slot, -1, kept)
            return Decision(
                quota, wake_at=_round_from(view.time, every), best_effort=bool(zero_slot.any())
            )
        size, _ = gangs_in_view(view, self.gang)
        queue = np.searchsorted(self.thresholds, view.attained, side="left")
        chosen = walk_in_order(view, size, np.argsort(queue, kind="stable"))
        return Decision(
            chosen.quota, order=chosen.order, best_effort=chosen.best_effort,
            wake_at=self._next_change(view, chosen, queue),
        )  # fmt: skip

    def _next_change(self, view: ClusterView, chosen: Decision, queue: IntArray) -> int | None:
        """The first round at which a job that runs now will be in another queue."""
        moving = (chosen.quota > 0) & (queue < len(self.thresholds))
        if not moving.any():
            return None
        gap = np.array(self.thresholds)[queue[moving]] - view.attained[moving]
        passed = int((gap // chosen.quota[moving]).min()) + 1
        return _round_from(view.time + passed, max(self.round, 1))

    def twin(self, workload: Workload, nodes: Nodes, settings: Settings) -> Log | None:
        """The whole simulation in compiled code."""
        from optsched.cluster.las_twin import las_twin

        return las_twin(
            workload, nodes, settings, thresholds=self.thresholds, every=max(self.round, 1),
            gang=self.gang,
        )  # fmt: skip


def _checked_thresholds(thresholds: Sequence[int]) -> tuple[int, ...]:
    """The option ``thresholds``."""
    if isinstance(thresholds, (str, bytes)) or not hasattr(thresholds, "__iter__"):
        raise InputError(
            f"thresholds: expected ascending integers such as (18000,), got {told(thresholds)}"
        )
    found: list[int] = []
    for value in thresholds:
        found.append(integer("thresholds", value, found[-1] + 1 if found else 0))
    return tuple(found)


def _round_from(time: int, every: int) -> int:
    """The first round at or after a time."""
    return -(-time // every) * every
