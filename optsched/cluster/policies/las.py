"""Least attained service: Tiresias with two-dimensional attained service and discrete queues."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np

from optsched.cluster.metrics import PER_SECOND
from optsched.cluster.policies.gangs import checked_gang, gangs_in_view
from optsched.cluster.policies.preemptive_walk import walk_in_order
from optsched.cluster.policy import Decision
from optsched.errors import InputError
from optsched.io.values import format_value, integer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optsched.cluster.log import Log
    from optsched.cluster.nodes import Nodes
    from optsched.cluster.policy import ClusterView
    from optsched.cluster.settings import Settings
    from optsched.cluster.workload import Workload
    from optsched.model.schedule import IntArray

_ROUND: Final = 60
_THRESHOLD: Final = 18_000
"""Seconds."""


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

    def twin(self, workload: Workload, nodes: Nodes, settings: Settings) -> Log | None:
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
