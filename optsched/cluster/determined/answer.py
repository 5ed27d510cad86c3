"""What Determined's schedulers answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Decision:
    """Who starts where, and who is to give its slots back.

    Slots come free only when a released task has stopped: nothing in `start` waits for that.
    """

    start: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Task -> {agent: slots}, in the order of the decision.

    They fit together: each on the cluster as the earlier ones leave it, with nothing released yet.
    """
    release: tuple[str, ...] = ()
    """Running tasks to be preempted, in the order of the decision."""
    backfilled: tuple[str, ...] = ()
    """Those of `start` that pass a task of a better priority that does not fit."""
    postponed: tuple[str, ...] = ()
    """Tasks that the scheduler meant to start, but that no longer fit when their turn came.

    Determined's resource pool looks for agents a second time, in order; what fits nowhere then
    waits for the next decision.
    """

    def __bool__(self) -> bool:
        return bool(self.start or self.release)
